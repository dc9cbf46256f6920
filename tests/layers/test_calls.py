"""Each layer on the world's ranks: close to fp32, the same bits, for any rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from etc_dist.layers.moe_few_tokens import FEW_TOKENS
from tests.conftest import first_always
from tests.layers.kinds import KINDS
from tests.layers.reference import ROUTINGS, TOLERANCE

pytestmark = pytest.mark.mpi

SCHEDULES = ("static", "dynamic")
MIXTURES = [kind for kind in KINDS if kind.startswith("moe")]
FP16 = {"dtype": "float16"}
LAYERS = ("mlp", "moe tensor-parallel", "moe expert-parallel")
RANKS = {1: pytest.mark.mpi(ranks=[1]), 2: pytest.mark.mpi(ranks=[2])}


def case(kind: str, *values: Any, marks: Iterable[Any] = ()) -> Any:
    """A case of a test, on the ranks of its kind."""
    return pytest.param(kind, *values, marks=[*marks, RANKS[KINDS[kind][3]]])


def cases(kinds: Iterable[str], exhaustive: str) -> list[Any]:
    """Cases of a test by kind, of which one is exhaustive: another takes its way."""
    marks = {exhaustive: [pytest.mark.exhaustive]}
    return [case(kind, marks=marks.get(kind, [])) for kind in kinds]


def experts(count: int, top_k: int, **options: Any) -> dict[str, Any]:
    return {"experts": count, "top_k": top_k, **options}


ALWAYS = {kind: 1 if kind == "moe packed" else 2 for kind in KINDS}
"""So many first shapes of a kind run without --all, too."""
# kind: (rows a rank, hidden, inner, options)
SHAPES: dict[str, list[tuple[int, int, int, dict[str, Any]]]] = {
    # One row a rank, tails of rows, hidden and inner, tiles with rows of two ranks.
    "mlp": [
        (40, 72, 520, {}),
        (2, 296, 136, FP16),
        (1, 8, 8, {}),
        (90, 264, 520, {}),
        (90, 264, 520, FP16),
        (5, 1032, 776, {}),
        (16, 520, 1032, FP16),
        (128, 264, 8, {}),
    ],
    # Less than a tile, whole tiles, and tails of rows a rank, hidden and inner.
    "mlp many rows": [
        (40, 72, 520, {}),
        (48, 296, 136, FP16),
        (1, 8, 8, {}),
        (24, 256, 128, FP16),
        (256, 264, 8, {}),
        (264, 40, 136, {}),
        (48, 296, 136, {}),
    ],
    # One token, whole blocks and tiles and more; tails of hidden and inner, many
    # passes; numbers of experts that fill no group or word of 32; tiles of all rows
    # that they may have; tokens enough for the router to go by tiles, and to be counted
    # in more than one turn.
    "moe": [
        (75, 72, 40, experts(16, 4, dtype="float16", normalize=False)),
        (70, 40, 24, experts(136, 5)),
        (1, 8, 8, experts(8, 1)),
        (75, 72, 40, experts(16, 4, dtype="float16")),
        (75, 72, 40, experts(16, 4, normalize=False)),
        (31, 256, 128, experts(8, 2)),
        (9, 1288, 392, experts(40, 8)),
        (33, 1288, 136, experts(128, 8)),
        (256, 72, 264, experts(8, 8)),
        (301, 40, 24, experts(8, 3)),
        (600, 264, 56, experts(8, 1)),
        (1100, 136, 24, experts(128, 8)),
        (70, 40, 24, experts(24, 3)),
        (300, 40, 24, experts(128, 2)),
        (600, 40, 24, experts(136, 2)),
        (1100, 1032, 24, experts(8, 1)),
        (288, 328, 264, experts(8, 8)),
        (128, 328, 264, experts(8, 8)),
        (1024, 40, 24, experts(128, 8)),
        (2200, 328, 24, experts(136, 3)),
        (4260, 40, 24, experts(8, 1)),
    ],
    # Tails of steps and of pairs, more steps than one for each warp in either product,
    # numbers of experts that fill no word of 32 and no task of the router, as many
    # tokens as may be, more tiles of pairs a task than one round has, experts that are
    # picked before the first weights are prefetched and others that are picked after.
    "moe few tokens": [
        (2, 264, 40, experts(24, 3, dtype="float16")),
        (3, 40, 24, experts(256, 16)),
        (1, 8, 8, experts(8, 1)),
        (1, 1288, 72, experts(8, 8, normalize=False)),
        (3, 40, 24, experts(136, 16, dtype="float16", normalize=False)),
        (FEW_TOKENS, 24, 16, experts(256, 4)),
        (1, 40, 1288, experts(16, 2)),
        (1, 40, 1288, experts(16, 8)),
        (FEW_TOKENS, 8, 776, experts(8, 8)),
    ],
}
# One token a rank, whole blocks and tiles and more; tails of hidden and inner.
SHAPES["moe tensor-parallel"] = SHAPES["moe expert-parallel"] = [
    (269, 40, 64, experts(16, 3)),
    (43, 72, 192, experts(16, 4, dtype="float16", schedule="dynamic")),
    (1, 8, 64, experts(8, 1)),
    (31, 256, 128, experts(8, 2)),
    (33, 328, 64, experts(128, 8)),
    (160, 72, 320, experts(8, 8)),
    (530, 264, 64, experts(40, 1)),
]
# Rows are copied as for the layer above, so that one shape is enough without --all.
SHAPES["moe packed"] = [
    *SHAPES["moe expert-parallel"][1:],
    (269, 40, 64, experts(16, 3)),
]


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        case(*case_parameters.values, marks=case_parameters.marks)
        for kind in KINDS
        for case_parameters in first_always(
            [(kind, shape) for shape in SHAPES[kind]], ALWAYS[kind]
        )
    ],
    ids=str,
)
def test_layer_comes_close_to_fp32(kind, shape, make, arrays):
    rows, hidden, inner, options = shape
    layer = make(kind, hidden, inner, **options)
    x, out, answer = layer.rows(rows)
    assert layer.layer(x, out) is out
    layer.layer.synchronize()
    answer.check(arrays.get(out), layer.dtype)
    if out.size > 1000:
        assert answer.error(arrays.get(out)) < 2 * TOLERANCE[layer.dtype]
    assert layer.program == KINDS[kind][2]


# kind: rows a rank, hidden, inner, options
REPEATED = {
    "mlp": (70, 520, 264, {}),
    "mlp many rows": (300, 264, 200, {}),
    "moe": (75, 72, 40, experts(16, 4)),
    "moe few tokens": (FEW_TOKENS, 520, 264, experts(16, 4)),
    "moe tensor-parallel": (19, 72, 64, experts(8, 2)),
    "moe expert-parallel": (19, 72, 64, experts(8, 2)),
    "moe packed": (19, 72, 64, experts(8, 2)),
}


@pytest.mark.parametrize("kind", cases(KINDS, "moe packed"))
def test_both_schedules_and_repeats_give_the_same_bits(kind, make, arrays):
    rows, hidden, inner, options = REPEATED[kind]
    bits = set()
    for schedule in SCHEDULES:
        layer = make(kind, hidden, inner, schedule=schedule, **options)
        x, out, answer = layer.rows(rows)
        for _ in range(2):
            out = arrays.poisoned(out.shape, layer.dtype)
            layer.layer(x, out)
            layer.layer.synchronize()
            bits.add(arrays.get(out).tobytes())
        is_static = kind == "moe few tokens"  # under any schedule
        assert layer.layer.program.plan.schedule == (
            "static" if is_static else schedule
        )
        answer.check(arrays.get(out))
    assert len(bits) == 1


@pytest.mark.parametrize("kind", [*LAYERS, "mlp many rows"])
def test_one_program_serves_any_number_of_rows(kind, make, arrays, compiled):
    layer = make(kind, 136, 64)
    num_compiled, most = len(compiled), 264 if "many" in kind else 128
    # Up and down again, without synchronising: buffers grow, and stay valid.
    calls = [layer.rows(count) for count in (3, 40, most, 40, 1)]
    for x, out, _ in calls:
        layer.layer(x, out)
        assert layer.program == KINDS[kind][2]
    layer.layer.synchronize()
    for _, out, answer in calls:
        answer.check(arrays.get(out))
    assert len(compiled) == num_compiled


@pytest.mark.parametrize(
    ("routing", "schedule"),
    first_always(zip(ROUTINGS, itertools.cycle(SCHEDULES), strict=False), 2),
)
@pytest.mark.parametrize("kind", cases(MIXTURES, "moe packed"))
def test_tokens_are_routed_to_any_experts(kind, routing, schedule, make, world, rng):
    tokens = {"moe": 290, "moe few tokens": FEW_TOKENS}.get(kind, 33)
    ids = ROUTINGS[routing](rng, tokens * world.size)
    for scheduled in SCHEDULES if kind == "moe" else [schedule]:
        layer = make(kind, 40, 64, top_k=ids.shape[1], schedule=scheduled)
        layer.check(tokens, ids)


@pytest.mark.mpi(ranks=[1, 2])
@pytest.mark.parametrize("kind", LAYERS)
def test_an_output_is_made_like_x(kind, make, arrays):
    layer = make(kind, 40, 64, dtype="float16")
    x, out, answer = layer.rows(16)
    y = layer.layer(x)
    layer.layer.synchronize()
    assert (type(y), y.dtype, y.shape) == (type(x), x.dtype, out.shape)
    answer.check(arrays.get(y), "float16")


@pytest.mark.parametrize("kind", LAYERS)
def test_weights_are_kept_by_reference(kind, make, arrays):
    layer = make(kind, 40, 64)
    x, out, answer = layer.rows(16)
    layer.weights[2][...] = 2 * layer.weights[2]
    layer.layer(x, out)
    layer.layer.synchronize()
    answer.check(arrays.get(out) / 2)


def test_layers_take_turns(make):
    for layer in [make(kind, 40, 64) for kind in (*LAYERS, "mlp")] * 2:
        layer.check(8)


@pytest.mark.parametrize("kind", LAYERS[1:])
def test_no_tokens_give_no_rows(kind, make, arrays, monkeypatch):
    layer = make(kind, 40, 64).layer
    monkeypatch.setattr(layer.program._executor, "launch", None)
    x = arrays.put_as(np.zeros((0, 40)), "bfloat16")
    y = layer(x)
    assert (type(y), y.dtype, y.shape) == (type(x), x.dtype, (0, 40))
    out = arrays.poisoned((0, 40), "bfloat16")
    assert layer(x, out) is out
