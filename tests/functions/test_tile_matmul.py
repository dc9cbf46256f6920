"""Dense matrix multiplication on tiles of many shapes: the CUDA half, emulated."""

from __future__ import annotations

import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.tile_matmul import TileShape
from etc_dist.ops.matmul import matmul_graph
from etc_dist.ops.matmul_policy import SHAPES
from tests.emulate.cases import tiles


@pytest.fixture(scope="module")
def program() -> Emulator:
    return Emulator(matmul_graph(1), workers=4)


# Several tiles, of which the last ones end at the edges of M, N and K.
@pytest.mark.parametrize("shape", range(len(SHAPES)), ids=lambda n: str(SHAPES[n]))
@pytest.mark.parametrize(("m", "n", "k"), [(70, 328, 136)])
def test_each_shape_gives_x_times_w_transposed(shape, m, n, k, program):
    inputs, [answer], dims = tiles(m, n, k)
    [found] = program.run(inputs, {**dims, "shape": shape})
    answer.check(found["y"], "bfloat16")


def test_a_stage_holds_what_both_operands_need():
    shape = TileShape(16, 128, swapped=True)
    assert (shape.worker_rows, shape.worker_columns, shape.depth) == (16, 64, 256)
    assert shape.stage_bytes == (16 + 64) * 256 * 2
