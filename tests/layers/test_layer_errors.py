"""Layers and calls that do not fit are refused on every rank, and the next call works:
one test a rule, for either layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import pytest

from etc_dist import World
from etc_dist.errors import (
    ArgumentError,
    CpuOnlyWarning,
    EtcDistError,
    ScheduleError,
    WorldError,
)
from etc_dist.functions.activation import Activation
from etc_dist.functions.router import Router
from etc_dist.layers.mlp import MLP
from etc_dist.layers.moe import MoE
from tests.graphs.mixtures import moe_few_tokens_graph, moe_graph
from tests.layers.kinds import DenseRows
from tests.ops.rank_errors import of_rank_zero

HIDDEN, INNER = 40, 24
SHAPES = {
    MLP: {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)},
    MoE: {
        "router": (8, HIDDEN),
        "gate_up": (8, 2 * INNER, HIDDEN),
        "down": (8, HIDDEN, INNER),
    },
}
OPTIONS: dict[Any, dict[str, Any]] = {MLP: {}, MoE: {"top_k": 2}}
LAYERS = pytest.mark.parametrize("layer", SHAPES, ids=lambda layer: layer.__name__)


@contextmanager
def refusal(words: str, error: type[Exception] = ArgumentError) -> Iterator[None]:
    """The block must raise `error` with these words."""
    with pytest.raises(error) as caught:
        yield
    text = str(caught.value)
    assert re.search(words, text) or re.search(words, of_rank_zero(text))


@pytest.fixture(scope="module")
def before(world, arrays) -> Iterator[DenseRows]:
    """A layer that was there before."""
    rows = DenseRows(world, arrays, 0, HIDDEN, INNER)
    yield rows
    rows.layer.close()


@pytest.fixture
def build(zeros, world, before) -> Iterator[Callable[..., Any]]:
    """Makes a layer of weights that fit, but for these: of another shape, or another
    array. Afterwards, calls of a layer that was there before work."""
    layers: list[Any] = []

    def build(layer: Any, weights: dict[str, Any] | None = None, **options: Any) -> Any:
        shapes = {**SHAPES[layer], **(weights or {})}
        arrays = [zeros(*w) if isinstance(w, tuple) else w for w in shapes.values()]
        options = {**OPTIONS[layer], "world": world, **options}
        layers.append(layer(*arrays, **options))
        return layers[-1]

    yield build
    before.check(8)
    for layer in layers:
        layer.close()


def of_experts(count: int) -> dict[str, Any]:
    return {name: (count, *shape[1:]) for name, shape in SHAPES[MoE].items()}


def all_of(layer: Any, dtype: str) -> Callable[[Any], dict[str, Any]]:
    return lambda zeros: {n: zeros(*s, dtype=dtype) for n, s in SHAPES[layer].items()}


def turned(layer: Any) -> Callable[[Any], dict[str, Any]]:
    *first, rows, columns = SHAPES[layer]["down"]
    return lambda zeros: {"down": zeros(*first, columns, rows).swapaxes(-1, -2)}


# layer, weights that do not fit and options, words of the error
LAYER_TABLE: dict[str, tuple[Any, ...]] = {
    "other width": (MLP, {"up": (16, 40)}, r"up \[.*24, .*40\] .*got: +up \[16, 40\]"),
    "transposed": (MLP, {"down": (24, 40)}, r"\[.*40, .*24\] .*got: +down \[24, 40\]"),
    "one axis": (MLP, {"gate": (40,)}, r"gate \[inner, hidden\].*got: .*gate \[40\]"),
    "empty": (
        *(MLP, {"gate": (0, 40), "up": (0, 40), "down": (40, 0)}),
        r"gate without an axis of length 0.*got: +gate \[0, 40\]",
    ),
    "half": (
        MoE,
        {"gate_up": (8, 24, 40)},
        r"\[.*8, .*40, .*12\].*got: .*\[8, 40, 24\]",
    ),
    "transposed experts": (MoE, {"down": (8, 24, 40)}, r"down \[8, 24, 40\]"),
    "wider router": (MoE, {"router": (8, 48)}, r"gate_up \[.*8, .*48, .*48\].*got:"),
    "router of more": (MoE, {"router": (16, 40)}, r"gate_up \[.*16, .*48, .*40\]"),
    "two axes": (MoE, {"down": (40, 24)}, r"got: .*down \[40, 24\]"),
    "no width": (
        *(MoE, {"gate_up": (8, 0, 40), "down": (8, 40, 0)}, r"down \[8, 40, 0\]"),
    ),
    **{
        f"{name} of {layer.__name__}": (layer, weights, words, *kind)
        for layer in SHAPES
        for name, weights, words, *kind in (
            (
                "layout",
                turned(layer),
                r"down .* contiguous, on.*: +down .*, (not|tran)",
            ),
            (
                "dtype of one",
                lambda zeros, at=layer: {"down": all_of(at, "float16")(zeros)["down"]},
                r"wanted: down .* bfloat16.*\n +got: +down .* float16",
            ),
            (
                *("dtype", all_of(layer, "float32")),
                r"of bfloat16 or float16\n +got: +\w+ .* float32",
            ),
            (
                "list",
                {"down": [[1.0]]},
                "down expects a NumPy, .*, got list",
                TypeError,
            ),
            ("schedule", {"schedule": "eager"}, r": 'static'.*'eager'", ScheduleError),
        )
    },
    **{
        f"{count} experts": (
            *(MoE, of_experts(count)),
            rf"experts: an integer from 1 to 512\n.*got: +experts = {count}",
        )
        for count in (513,)
    },
    "no choice": (MoE, {"top_k": 0}, "top_k: an integer from 1 to 8"),
    "9 of 8": (MoE, {"top_k": 9}, "top_k: an integer from 1 to 8"),
    "17 choices": (
        *(MoE, of_experts(64) | {"top_k": 17}),
        r"top_k: an integer from 1 to 16\n.*got: +top_k = 17",
    ),
    "normalize": (MoE, {"normalize": 1}, "normalize expects a bool, got in", TypeError),
    "normalize of a router": (
        *(MoE, {"top_k": Router(2, normalize=False), "normalize": True}),
        "wanted: normalize as a field of the Router",
    ),
    "no such score": (MoE, {"top_k": Router(2, score="tanh")}, "unknown score"),
    "no correction": (
        *(MoE, {"top_k": Router(2, has_correction=True)}),
        "wanted: correction, as the router says",
    ),
    "half of an expert": (
        *(MoE, {"shared": np.zeros((2, 2))[:1]}),
        "wanted: shared: a pair of arrays",
    ),
    "biases in one array": (
        *(MoE, {"expert_biases": np.zeros((2, 2))}),
        "wanted: expert_biases: a pair of arrays.*got: +ndarray",
    ),
    "one of two biases": (
        *(MoE, {"expert_biases": (np.zeros((2, 2)), None)}),
        r"wanted: expert_biases: a pair.*got: +\(ndarray, NoneType\)",
    ),
    "a gate without an expert": (MoE, {"shared_gate": np.zeros(40)}, "a pair of arr"),
    "a shared expert of another width": (
        MoE,
        lambda zeros: {"shared": (zeros(8, HIDDEN + 8), zeros(HIDDEN, 4))},
        r"shared_gate_up .*hidden = 40.*got: +shared_gate_up .8, 48",
    ),
    "no activation": (
        *(MoE, {"activation": "gelu"}, "activation expects an Activation, got str"),
        TypeError,
    ),
    "no such activation": (MoE, {"activation": Activation("relu")}, "unknown function"),
    "few_tokens": (MoE, {"few_tokens": -1}, "few_tokens: an integer from 0 on"),
    "parallel": (MoE, {"parallel": "data"}, "'tensor' or 'expert'"),
}


@pytest.mark.mpi(ranks=[1])
@pytest.mark.parametrize("what", LAYER_TABLE)
def test_weights_and_options_that_do_not_fit_are_refused(what, build, zeros):
    layer, change, words, *kind = LAYER_TABLE[what]
    change = change(zeros) if callable(change) else change
    weights = {n: w for n, w in change.items() if n in SHAPES[layer]}
    options = {n: w for n, w in change.items() if n not in SHAPES[layer]}
    with refusal("(?s)" + words, *kind):
        build(layer, weights, **options)


@pytest.mark.mpi(ranks=[1])
@pytest.mark.parametrize("widths", [(INNER + 4, HIDDEN), (INNER, 36)])
def test_widths_that_bulk_copies_do_not_support_are_refused_on_gpus(
    widths, build, world
):
    shapes = {"gate": widths, "up": widths, "down": widths[::-1]}
    if world.backend == "cuda":
        with refusal(r"wanted: \w+ with 16-byte aligned rows"):
            build(MLP, shapes)
    else:
        with pytest.warns(CpuOnlyWarning, match=r"wanted: .* rows of a multiple"):
            build(MLP, shapes)


@pytest.mark.mpi(ranks=[1])
@pytest.mark.parametrize("number", [np.uint8, np.int64])
def test_numbers_may_be_those_of_an_array(number, build):
    layer = build(MoE, top_k=number(2), few_tokens=number(200))
    top_k = layer.mixture.router.top_k
    assert (top_k, type(top_k)) == (2, int)


def test_a_graph_that_is_parallel_in_an_unknown_way_is_refused():
    with pytest.raises(ArgumentError, match="unknown parallel"):
        moe_graph(2, experts=8, top_k=2, parallel="data")


def test_biases_of_experts_are_refused_for_few_tokens():
    with pytest.raises(ArgumentError, match="has no biases of experts"):
        moe_few_tokens_graph(1, experts=8, top_k=2, has_biases=True)


# ------------------------------------------------------------------------ the calls

# shape and dtype of x, words of the error
ROWS = {
    "wider": ((8, HIDDEN + 8), "bfloat16", r"x \[8, 48\]"),
    "one axis": ((HIDDEN,), "bfloat16", r"x \[40\]"),
    "three axes": ((2, 4, HIDDEN), "bfloat16", r"x \[2, 4, 40\]"),
    "float16": ((8, HIDDEN), "float16", r"x \[8, 40\] float16"),
    "wider of none": ((0, HIDDEN + 8), "bfloat16", r"x \[0, 48\]"),
    "float16 of none": ((0, HIDDEN), "float16", r"x \[0, 40\]"),
}


@pytest.mark.mpi(ranks=[1])
@pytest.mark.parametrize("what", ROWS)
@LAYERS
def test_rows_that_do_not_fit_are_refused(layer, what, build, zeros):
    shape, dtype, words = ROWS[what]
    with refusal(r"wanted: x (\[|without).*\n.*got: +" + words):
        build(layer)(zeros(*shape, dtype=dtype))


@pytest.mark.mpi(ranks=[1])
def test_an_output_that_does_not_fit_is_refused(build, zeros, world):
    mlp, moe = build(MLP), build(MoE)
    x, all_x = zeros(8, HIDDEN), zeros(8 * world.size, HIDDEN)
    for layer, rows, out, words in (
        (mlp, x, zeros(9, HIDDEN), r"wanted: out \[.*8, .*40\]"),
        (moe, all_x, zeros(9, HIDDEN), r"wanted: out \[.*8, .*40\]"),
        (moe, x[:0], zeros(1, HIDDEN), r"wanted: out \[.*0, .*40\] bfloat16"),
        (mlp, x, x, "out apart from x"),
        (moe, all_x, all_x[:8], "out apart from x"),
        (mlp, x, mlp.weights[0][:8], "out apart from gate"),
        (moe, all_x, moe.weights[0][:8], "out apart from router"),
    ):
        with refusal(words):
            layer(rows, out)


@pytest.mark.mpi(ranks=[1])
@LAYERS
def test_a_closed_layer_is_named_in_the_error(layer, build, zeros, world):
    closed = build(layer)
    closed.close()
    with refusal("the program is closed", WorldError):
        closed(zeros(8 * world.size, HIDDEN))


# ------------------------------------------------------------------- the other ranks


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("bad_rank", [0, 1])
@LAYERS
def test_what_does_not_fit_on_one_rank_is_refused_on_all(
    layer, bad_rank, build, zeros, world
):
    is_bad = world.rank == bad_rank
    with refusal(rf"where: +rank {bad_rank}: "):
        build(layer, {"down": (40, 16)} if is_bad else {})
    called = build(layer)
    with refusal(rf"where: +rank {bad_rank}: "):
        called(zeros(8 * world.size, HIDDEN + 8 * is_bad))


@pytest.mark.mpi(ranks=[2])
def test_ranks_with_other_shapes_are_named(build, zeros, world):
    called = build(MLP)
    with refusal(r"rank 1: .*mlp_tiles_graph\(rows=16, hidden=40, inner=24, "):
        called(zeros(16 if world.rank == 1 else 8, HIDDEN))
    inner = 32 if world.rank == 1 else 24
    uneven = build(MLP, {"gate": (inner, 40), "up": (inner, 40), "down": (40, inner)})
    with refusal(r"rank 1: .*mlp_tiles_graph\(rows=8, hidden=40, inner=32, "):
        uneven(zeros(8, HIDDEN))


# layer, an option that rank 1 alone has, or the dtype of its weights
OTHERS = [
    (MLP, "schedule", "dynamic"),
    (MLP, "dtype", "float16"),
    (MoE, "top_k", 3),
    (MoE, "normalize", False),
    (MoE, "schedule", "dynamic"),
]


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize(("layer", "name", "value"), OTHERS, ids=str)
def test_ranks_with_other_options_make_no_layer(
    layer, name, value, build, zeros, world, compiled
):
    words = rf"the ranks do not make the same call[^$]*rank 1: {layer.__name__}"
    options = {name: value} if world.rank == 1 else {}
    weights = all_of(layer, options.pop("dtype", "bfloat16"))(zeros)
    with refusal(rf"{words}\(.*{name}={value}"):
        build(layer, weights, **options)
    assert compiled == []


# ------------------------------------------------------------ experts over many ranks


@pytest.mark.mpi(ranks=[2])
def test_shares_of_the_other_way_are_refused(build, world):
    n = world.size
    with refusal(
        rf"wanted: gate_up \[.* = {8 // n}, .* 40\] [^$]*gate_up \[8, 48, 40\]"
    ):
        build(MoE, parallel="expert")
    shares = {"gate_up": (8 // n, 48, 40), "down": (8 // n, 40, 24)}
    with refusal(
        rf"wanted: gate_up \[.* = 8, .* = 48, .*\] [^$]*gate_up \[{8 // n}, 48, 40\]"
    ):
        build(MoE, shares, parallel="tensor")


@pytest.mark.mpi(ranks=[2])
def test_other_ways_on_other_ranks_are_refused(build, world):
    n = world.size
    way = ("tensor", "expert")[world.rank % 2]
    shares = {"gate_up": (8 // n, 48, 40), "down": (8 // n, 40, 24)}
    with refusal(r"ranks? 1.*: MoE\(.*parallel=expert"):
        build(MoE, shares if way == "expert" else {}, parallel=way)


@pytest.mark.mpi(ranks=[2])
def test_tokens_that_cannot_be_split_evenly_are_refused(build, zeros, world):
    with refusal(rf"wanted: x \[{world.size} \* shard, 40\].*\n.*x \[9, 40\]"):
        build(MoE)(zeros(9, HIDDEN))


@pytest.mark.mpi(ranks=[2])
def test_a_rank_alone_with_other_or_no_tokens_is_refused(build, zeros, world):
    n, moe = world.size, build(MoE)
    moe(zeros(3 * n, HIDDEN), zeros(3, HIDDEN))
    with refusal("the ranks do not make the same call"):
        moe(zeros((8 + world.rank) * n, HIDDEN))
    with refusal("of no rows"):
        moe(zeros(0 if world.rank == 0 else 3 * n, HIDDEN))
    moe(zeros(3 * n, HIDDEN), zeros(3, HIDDEN))
    moe.synchronize()


class ThreeRanks(World):
    """Rank 1 of three, for a layer that is refused."""

    def __init__(self) -> None:
        self.rank, self.size = 1, 3
        self.backend = self.device = "cpu"

    def refuse(self, error: EtcDistError) -> NoReturn:
        raise error


def test_experts_that_cannot_be_split_evenly_are_refused():
    arrays = [np.zeros(s, "float16") for s in ((8, 40), (2, 128, 40), (2, 40, 64))]
    with pytest.raises(ArgumentError) as caught:
        MoE(*arrays, top_k=2, parallel="expert", world=ThreeRanks())
    assert "router [3 * experts, hidden]" in caught.value.wanted
    assert "router [8, 40]" in caught.value.got
