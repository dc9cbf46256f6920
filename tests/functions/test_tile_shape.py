"""The shapes of tiles: those that there are, their widths, and the sizes of stages."""

from __future__ import annotations

import pytest

from etc_dist.errors import ArgumentError
from etc_dist.functions.tile_shape import TileShape, shapes_for
from etc_dist.ops.tile_model import FAMILY


@pytest.mark.parametrize(
    "shape",
    [
        (64, 128),
        (256, 128),
        (128, 272),
        (128, 120),
        (128, 8),
        (72, 64, True),
        (4, 64, True),
        (8, 0, True),
        (8, 72, True),
        (8, 144, True),
        (88, 128, True),
        (144, 64, True),
        (272, 128, True),
        (128, 128, False, True),
        (144, 128, True, True),
    ],
)
def test_shapes_that_gpus_do_not_have_are_refused(shape):
    rows, columns, *options = shape
    kinds = dict(zip(("swapped", "scaled"), options, strict=False))
    with pytest.raises(ArgumentError, match="GPUs have no tiles of") as caught:
        TileShape(rows, columns, **kinds)
    assert caught.value.got.startswith(f"{shape[0]} x {shape[1]}")


FEW, HALVES = (TileShape(64, c, swapped=True) for c in (64, 128))
TALL, ROWS = TileShape(144, 128, swapped=True), TileShape(128, 160)


@pytest.mark.parametrize(
    ("shape", "gated", "w_layout", "columns"),
    [
        (FEW, False, "nk", {8, 16, 24, 32, 40, 48, 56, 64}),
        (FEW, True, "nk", {64}),
        (FEW, False, "kn", {64}),
        (HALVES, False, "nk", {80, 96, 112, 128}),
        (HALVES, True, "nk", {80, 96, 112, 128}),
        (HALVES, False, "kn", {128}),
        (TALL, False, "nk", {128}),
        (ROWS, False, "nk", {160}),
    ],
)
def test_few_rows_may_have_fewer_columns(shape, gated, w_layout, columns):
    options = {"gated": gated, "w_layout": w_layout}
    served_columns = {c for c in range(4, 264, 4) if shape.serves_columns(c, **options)}
    assert served_columns == columns


def test_tiles_are_gated_if_half_of_the_columns_are_eights():
    assert (
        TileShape(128, 112).may_be_gated and TileShape(8, 64, swapped=True).may_be_gated
    )
    assert not TileShape(8, 56, swapped=True).may_be_gated


def test_a_stage_holds_what_both_operands_need():
    shape = TileShape(16, 64, swapped=True)
    assert shape.depth == 256
    assert shape.stage_bytes == (16 + 64) * 256 * 2


def test_layouts_of_weights_are_those_of_shapes():
    assert shapes_for("nk", FAMILY) == [*FAMILY]
    with pytest.raises(ArgumentError, match="unknown w_layout"):
        shapes_for("nn", FAMILY)
