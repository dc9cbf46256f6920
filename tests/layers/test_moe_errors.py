"""Mixtures of experts that do not fit: refused in words; the next call works."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from etc_dist.errors import ArgumentError, ScheduleError, WorldError
from etc_dist.layers.moe import MoE
from tests.layers.test_mlp_errors import refusal

pytestmark = pytest.mark.mpi

EXPERTS, HIDDEN, INNER = 8, 40, 24
SHAPES = {
    "router": (EXPERTS, HIDDEN),
    "gate_up": (EXPERTS, 2 * INNER, HIDDEN),
    "down": (EXPERTS, HIDDEN, INNER),
}
FITS = (
    r"wanted: router \[E, H\], gate_up \[E, 2 I, H\], down \[E, H, I\], of one dtype, "
    r"contiguous, on [^\n]*"
)


@pytest.fixture
def zeros(arrays):
    return lambda *shape, dtype="bfloat16": arrays.put_as(np.zeros(shape), dtype)


@pytest.fixture
def layer(make_moe):
    return make_moe(EXPERTS, HIDDEN, INNER, top_k=2)


@pytest.fixture
def works(layer, arrays):
    """Makes a good call and looks at its result."""

    def works():
        x, out, answer = layer.rows(8)
        layer.moe(x, out)
        layer.moe.synchronize()
        answer.check(arrays.get(out))

    return works


def weights(zeros: Any, dtypes: dict[str, str], **shapes: Any) -> list[Any]:
    """Weights that fit, but for these."""
    return [
        zeros(*shape, dtype=dtypes.get(name, "bfloat16"))
        for name, shape in {**SHAPES, **shapes}.items()
    ]


# name: the shape that is wrong, what the refusal says of it
WEIGHTS = {
    "gate_up is half": ({"gate_up": (8, 24, 40)}, r"got: .*gate_up \[8, 24, 40\]"),
    "gate_up is transposed": ({"gate_up": (8, 40, 48)}, r"gate_up \[8, 40, 48\]"),
    "down is transposed": ({"down": (8, 24, 40)}, r"down \[8, 24, 40\]"),
    "router is wider": ({"router": (8, 48)}, r"router \[8, 48\]"),
    "router has too many experts": ({"router": (16, 40)}, r"router \[16, 40\]"),
    "down has two axes": ({"down": (40, 24)}, r"down \[40, 24\]"),
    "there is no inner width": (
        {"gate_up": (8, 0, 40), "down": (8, 40, 0)},
        r"down \[8, 40, 0\]",
    ),
}


@pytest.mark.parametrize("what", WEIGHTS)
def test_weights_that_do_not_fit_are_refused(what, one_rank, zeros):
    shapes, words = WEIGHTS[what]
    with refusal(rf"{FITS}\n.*{words}"):
        MoE(*weights(zeros, {}, **shapes), top_k=2, world=one_rank)


def test_weights_that_are_not_contiguous_are_refused(one_rank, zeros):
    router, gate_up, _ = weights(zeros, {})
    with refusal(rf"{FITS}\n.*down .*, not contiguous"):
        MoE(router, gate_up, zeros(8, 24, 40).swapaxes(1, 2), top_k=2, world=one_rank)


def test_weights_of_two_dtypes_are_refused(one_rank, zeros):
    mixed = weights(zeros, {"router": "float32"})
    with refusal(rf"{FITS}\n.*router \[8, 40\] float32"):
        MoE(*mixed, top_k=2, world=one_rank)


@pytest.mark.parametrize("experts", [4, 12, 264])
def test_odd_numbers_of_experts_are_refused(experts, one_rank, zeros):
    shapes = {name: (experts, *shape[1:]) for name, shape in SHAPES.items()}
    words = rf"wanted: 8 to 256 experts, a multiple of 8\n.*got: +{experts} experts"
    with refusal(words):
        MoE(*weights(zeros, {}, **shapes), top_k=2, world=one_rank)


@pytest.mark.parametrize("top_k", [0, 9, True, 2.0, "2", None, np.array([2])])
def test_odd_choices_are_refused(top_k, one_rank, zeros):
    got = re.escape(repr(top_k))
    with refusal(rf"top_k: an integer, from 1 to 8\n.*got: +top_k = {got}"):
        MoE(*weights(zeros, {}), top_k=top_k, world=one_rank)


def test_more_choices_than_a_warp_holds_are_refused(one_rank, zeros):
    shapes = {name: (64, *shape[1:]) for name, shape in SHAPES.items()}
    with refusal(r"top_k: an integer, from 1 to 16\n.*got: +top_k = 17"):
        MoE(*weights(zeros, {}, **shapes), top_k=17, world=one_rank)


@pytest.mark.parametrize("dtype", ["float32", None])
def test_a_dtype_that_no_layer_has_is_refused(dtype, one_rank, zeros):
    gate_up = zeros(8, 48, 40, dtype=dtype) if dtype else None
    with refusal(f"dtype = '{dtype or ''}'"):
        MoE(gate_up, gate_up, gate_up, top_k=2, world=one_rank)


def test_what_is_no_array_is_refused(one_rank, zeros):
    _, gate_up, down = weights(zeros, {})
    with refusal("argument router is not an array"):
        MoE([[1.0]], gate_up, down, top_k=2, world=one_rank)


# name: shape and dtype of x, what the refusal says
ROWS = {
    "x is wider": ((8, HIDDEN + 8), "bfloat16", r"got: +x \[8, 48\]"),
    "x has one axis": ((HIDDEN,), "bfloat16", r"got: +x \[40\]"),
    "x has three axes": ((2, 4, HIDDEN), "bfloat16", r"got: +x \[2, 4, 40\]"),
    "x is float16": ((8, HIDDEN), "float16", r"got: +x \[8, 40\] float16"),
    "no tokens, wider": ((0, HIDDEN + 8), "bfloat16", r"got: +x \[0, 48\]"),
    "no tokens of float16": ((0, HIDDEN), "float16", r"got: +x \[0, 40\] float16"),
}


@pytest.mark.parametrize("what", ROWS)
def test_rows_that_do_not_fit_are_refused(what, layer, works, zeros):
    shape, dtype, words = ROWS[what]
    with refusal(rf"wanted: x \[M, 40\] bfloat16\n.*{words}"):
        layer.moe(zeros(*shape, dtype=dtype))
    works()


def test_an_output_that_does_not_fit_is_refused(layer, works, zeros):
    x = zeros(8, HIDDEN)
    for rows, out, words in (
        (x, zeros(9, HIDDEN), r"wanted: out \[8, 40\]\n"),
        (x, x, "out apart from x"),
        (x, layer.weights[0][:8], "out apart from router"),
        (x[:0], zeros(1, HIDDEN), r"wanted: out \[0, 40\] bfloat16\n"),
    ):
        with refusal(words):
            layer.moe(rows, out)
    works()


@pytest.mark.parametrize(
    "options",
    [
        {"tile_size": 16},
        {"top_k": 3},  # an argument of its own
        {"passes": -1},
        {"score_tasks": 0, "combined": 2.5, "block": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_options_that_are_no_sizes_are_refused(options, one_rank, zeros):
    got = ", ".join(f"{name} = {value!r}" for name, value in options.items())
    words = rf"wanted: whole numbers from 1 on, of passes, block, .*\n +got: +{got}\n"
    with refusal(words, ArgumentError):
        MoE(*weights(zeros, {}), top_k=2, world=one_rank, options=options)


@pytest.mark.parametrize("options", [3, [], "block"])
def test_options_that_are_no_mapping_are_refused(options, one_rank, zeros):
    with refusal(rf"got: +{re.escape(repr(options))}\n", ArgumentError):
        MoE(*weights(zeros, {}), top_k=2, world=one_rank, options=options)


@pytest.mark.parametrize("normalize", ["no", 1, np.ones(2, bool)])
def test_normalize_is_true_or_false(normalize, one_rank, zeros):
    got = re.escape(repr(normalize))
    with refusal(rf"normalize: True or False\n +got: +normalize = {got}"):
        MoE(*weights(zeros, {}), top_k=2, world=one_rank, normalize=normalize)


@pytest.mark.parametrize("number", [np.uint8, np.int64])
def test_numbers_may_be_those_of_an_array(number, make_moe):
    layer = make_moe(EXPERTS, HIDDEN, INNER, top_k=number(2), few_tokens=number(200))
    assert (layer.moe.top_k, type(layer.moe.top_k)) == (2, int)


def test_a_world_is_a_world(zeros):
    with refusal(r"None for the current one\n +got: +3\n", ArgumentError):
        MoE(*weights(zeros, {}), top_k=2, world=3)


@pytest.mark.parametrize("few", ["few", "3", True, 2.7, -1, None])
def test_few_tokens_that_are_no_number_make_no_layer(few, one_rank, zeros):
    with refusal(rf"few_tokens: an integer, from 0 on\n +got: +few_tokens = {few!r}"):
        MoE(*weights(zeros, {}), top_k=2, world=one_rank, few_tokens=few)


def test_an_unknown_schedule_is_refused(one_rank, zeros):
    with refusal("'sometime'", ScheduleError):
        MoE(*weights(zeros, {}), top_k=2, world=one_rank, schedule="sometime")


def test_a_closed_layer_says_so(layer, works, zeros):
    works()
    layer.moe.close()
    with refusal("the program is closed", WorldError):
        layer.moe(zeros(8, HIDDEN))
