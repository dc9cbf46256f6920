"""Layers and calls that do not fit: refused on every rank; the next call works."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from etc_dist.errors import ArgumentError, EtcDistError, ScheduleError, WorldError
from etc_dist.layers.mlp import MLP

pytestmark = pytest.mark.mpi

HIDDEN, INNER = 40, 24
SECONDS = 5.0
"""How long a refusal may take: far less than any time limit of the world."""
FITS = r"wanted: x \[M, H\], gate \[I, H\], up \[I, H\], down \[H, I\], of one dtype\n"
WEIGHTS_FIT = r"wanted: gate \[I, H\], up \[I, H\], down \[H, I\].*\n"


@contextmanager
def refusal(words: str, error: type[EtcDistError] = ArgumentError) -> Iterator[None]:
    """What is done inside must raise soon, with these words."""
    began = time.monotonic()
    with pytest.raises(error) as caught:
        yield
    # Ranks on GPUs differ in the device they name: then each line bears its rank.
    said = str(caught.value)
    assert re.search(words, said) or re.search(words, said.replace("rank 0: ", ""))
    assert time.monotonic() - began < SECONDS


@pytest.fixture
def layer(make):
    return make(HIDDEN, INNER)


@pytest.fixture
def works(layer, arrays):
    """Makes a good call and looks at its result."""

    def works():
        x, out, answer = layer.rows(8)
        layer.mlp(x, out)
        layer.mlp.synchronize()
        answer.check(arrays.get(out))

    return works


@pytest.fixture
def zeros(arrays):
    return lambda *shape, dtype="bfloat16": arrays.put_as(np.zeros(shape), dtype)


# name: which weight has which shape, what the refusal says
WEIGHTS = {
    "up is narrower": (1, (INNER - 8, HIDDEN), r".*up \[16, 40\]"),
    "up is transposed": (1, (HIDDEN, INNER), r".*up \[40, 24\]"),
    "down is as stored": (2, (INNER, HIDDEN), r".*down \[24, 40\]"),
    "gate has one axis": (0, (HIDDEN,), r".*gate \[40\]"),
}


@pytest.mark.parametrize("place, name", [(0, "gate"), (1, "up"), (2, "down")])
def test_weights_that_no_call_could_take_make_no_layer(
    place, name, layer, works, zeros, world
):
    weights = list(layer.weights)
    weights[place] = zeros(*weights[place].shape[::-1]).T
    with refusal(rf"not empty, contiguous, on .*\n.*{name} [^;]*, not contiguous"):
        MLP(*weights, world=world)
    works()


def test_empty_weights_make_no_layer(works, zeros, world):
    with refusal(WEIGHTS_FIT + r".*gate \[0, 40\]"):
        MLP(*(zeros(0, HIDDEN) for _ in range(2)), zeros(HIDDEN, 0), world=world)
    works()


SIZES = {
    "7": ({"tile_size": 7}, "tile_size is odd"),
    "16": ({"tile_size": 16}, "tile_size = 16, piece = "),
    "piece": ({"piece": (3, 5)}, r"piece = \(3, 5\)"),
}


@pytest.mark.parametrize("what", SIZES)
def test_tiles_that_cannot_be_cut_make_no_layer(what, layer, works, world):
    options, words = SIZES[what]
    with refusal(words):
        MLP(*layer.weights, world=world, options=options)
    works()


@pytest.mark.parametrize("what", WEIGHTS)
def test_weights_that_do_not_fit_make_no_layer(what, layer, works, zeros, world):
    place, shape, words = WEIGHTS[what]
    weights = list(layer.weights)
    weights[place] = zeros(*shape)
    with refusal(WEIGHTS_FIT + words):
        MLP(*weights, world=world)
    works()


def test_few_rows_that_are_no_number_make_no_layer(layer, works, world):
    with refusal("few_rows is no whole number"):
        MLP(*layer.weights, world=world, few_rows="few")
    works()


def test_packed_is_true_or_false(layer, works, world):
    with refusal("packed: True or False"):
        MLP(*layer.weights, world=world, packed="no")
    works()


@pytest.mark.parametrize("missing", [1, 2])
def test_a_weight_that_is_no_array_makes_no_layer(missing, layer, works, world):
    weights = list(layer.weights)
    weights[missing] = None
    with refusal(f"argument {('gate', 'up', 'down')[missing]} is not an array"):
        MLP(*weights, world=world)
    works()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_weights_that_do_not_fit_on_one_rank_make_no_layer_on_any(
    bad_rank, layer, works, zeros, world
):
    weights = list(layer.weights)
    if world.rank == bad_rank:
        weights[1] = zeros(INNER - 8, HIDDEN)
    with refusal(rf"where: +rank {bad_rank}: "):
        MLP(*weights, world=world)
    works()


@pytest.mark.parametrize(("inner", "hidden"), [(INNER + 4, HIDDEN), (INNER, 36)])
def test_widths_that_bulk_copies_cannot_take_make_no_layer_on_gpus(
    inner, hidden, works, zeros, world
):
    weights = zeros(inner, hidden), zeros(inner, hidden), zeros(hidden, inner)
    if world.backend == "cuda":
        with refusal(WEIGHTS_FIT + rf".*gate \[{inner}, {hidden}\]"):
            MLP(*weights, world=world)
    else:
        MLP(*weights, world=world).close()
    works()


# name: which weight has which dtype
DTYPES = {"up is float16": (1, "float16"), "down is float32": (2, "float32")}


@pytest.mark.parametrize("what", DTYPES)
def test_weights_of_another_dtype_make_no_layer(what, layer, works, zeros, world):
    place, dtype = DTYPES[what]
    weights = list(layer.weights)
    weights[place] = zeros(*weights[place].shape, dtype=dtype)
    words = rf".*{('gate', 'up', 'down')[place]} \[\d+, \d+\] {dtype}"
    with refusal(WEIGHTS_FIT + words):
        MLP(*weights, world=world)
    works()


# name: shape and dtype of x, what the refusal says
ROWS = {
    "x is wider": ((8, HIDDEN + 8), "bfloat16", FITS + r".*x \[8, 48\]"),
    "x has one axis": ((HIDDEN,), "bfloat16", FITS + r".*x \[40\]"),
    "x is float16": ((8, HIDDEN), "float16", r"got: +x \[8, 40\] float16"),
}


@pytest.mark.parametrize("what", ROWS)
def test_rows_that_do_not_fit_are_refused(what, layer, works, zeros):
    shape, dtype, words = ROWS[what]
    with refusal(words):
        layer.mlp(zeros(*shape, dtype=dtype))
    works()


def test_an_output_that_does_not_fit_is_refused(layer, works, zeros):
    x = zeros(8, HIDDEN)
    for out, words in (
        (zeros(9, HIDDEN), r"wanted: out \[8, 40\]\n"),
        (x, "out apart from x"),
        (layer.weights[0][:8], "out apart from gate"),
    ):
        with refusal(words):
            layer.mlp(x, out)
    works()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("what", ROWS)
def test_what_does_not_fit_on_one_rank_is_refused_on_all(
    what, bad_rank, layer, works, zeros, world
):
    works()
    shape, dtype, _ = ROWS[what]
    bad = world.rank == bad_rank
    x = zeros(*shape, dtype=dtype) if bad else zeros(8, HIDDEN)
    with refusal(rf"where: +rank {bad_rank}: "):
        layer.mlp(x)
    works()


@pytest.mark.mpi(min_size=2)
def test_ranks_with_other_shapes_are_named(layer, works, zeros, world):
    with refusal(r"rank 1: .*mlp_graph\(rows=16, hidden=40, inner=24\)"):
        layer.mlp(zeros(16 if world.rank == 1 else 8, HIDDEN))
    works()


@pytest.mark.mpi(min_size=2)
def test_ranks_with_other_shares_are_named(works, zeros, world):
    inner = INNER + 8 if world.rank == 1 else INNER
    shapes = ((inner, HIDDEN), (inner, HIDDEN), (HIDDEN, inner))
    uneven = MLP(*(zeros(*shape) for shape in shapes), world=world)
    with refusal(r"rank 1: .*mlp_few_rows_graph\(rows=8, hidden=40, inner=32\)"):
        uneven(zeros(8, HIDDEN))
    uneven.close()
    works()


@pytest.mark.mpi(min_size=2)
def test_ranks_with_other_dtypes_make_no_layer(works, zeros, world):
    dtype = "float16" if world.rank == 1 else "bfloat16"
    shapes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    with refusal("rank 1: MLP\\(dtype=float16, "):
        MLP(*(zeros(*shape, dtype=dtype) for shape in shapes), world=world)
    works()


# An option that rank 1 alone has.
OPTIONS = {
    "few_rows=0": {"few_rows": 0},
    "packed=False": {"packed": False},
    "schedule=dynamic": {"schedule": "dynamic"},
    "tile_size=16": {"options": {"tile_size": 16}},
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("got", OPTIONS)
def test_ranks_with_other_options_make_no_layer(got, layer, works, world, compiled):
    works()
    compiled.clear()
    with refusal(rf"the ranks do not make the same call[^$]*rank 1: MLP\(.*{got}"):
        MLP(*layer.weights, world=world, **(OPTIONS[got] if world.rank == 1 else {}))
    assert compiled == []
    works()


@pytest.mark.parametrize(
    ("gate", "words"), [("float32", "got: +dtype = 'float32'\n"), (None, "dtype = ''")]
)
def test_a_dtype_that_no_layer_has_is_refused(gate, words, zeros, world, works):
    weight = None if gate is None else zeros(INNER, HIDDEN, dtype=gate)
    with refusal(words):
        MLP(weight, weight, weight, world=world)
    works()


def test_an_unknown_schedule_is_refused(make):
    with refusal(r"wanted: 'static'.*\n.*'eager'", ScheduleError):
        make(HIDDEN, INNER, schedule="eager")


def test_a_closed_layer_says_so(layer, works, zeros):
    works()
    layer.mlp.close()
    with refusal("the program is closed", WorldError):
        layer.mlp(zeros(8, HIDDEN))
