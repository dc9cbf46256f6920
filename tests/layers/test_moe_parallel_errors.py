"""Mixtures of experts that do not fit their ranks: refused in words on all of them."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import pytest

from etc_dist import World
from etc_dist.errors import ArgumentError, EtcDistError
from etc_dist.layers.moe import MoE
from etc_dist.layers.moe_graph import moe_graph
from tests.layers.reference import draw_experts, own_experts
from tests.layers.test_mlp_errors import refusal

HIDDEN, INNER = 40, 64


@pytest.fixture
def zeros(arrays):
    return lambda *shape: arrays.put_as(np.zeros(shape), "bfloat16")


def weights(zeros: Any, experts: int, own: int, inner: int) -> list[Any]:
    """A rank's weights that have these numbers of all experts and of its own."""
    shapes = (experts, HIDDEN), (own, 2 * inner, HIDDEN), (own, HIDDEN, inner)
    return [zeros(*shape) for shape in shapes]


@pytest.mark.mpi
def test_an_unknown_way_is_refused(world, zeros):
    words = r"wanted: parallel in \('tensor', 'expert'\)\n.*got: +parallel = 'data'"
    with refusal(words):
        MoE(*weights(zeros, 8, 8, INNER), top_k=2, parallel="data", world=world)
    with refusal(words):
        MoE.from_torch(None, parallel="data", world=world)


def test_a_graph_of_an_unknown_way_is_refused():
    with pytest.raises(ArgumentError, match="parallel in 'data'"):
        moe_graph(2, experts=8, top_k=2, parallel="data")


@pytest.mark.mpi(min_size=2)
def test_whole_weights_are_refused_as_a_share(world, zeros):
    with refusal(
        rf"wanted: router \[E, H\], gate_up \[E / {world.size}, 2 I, H\], down "
        rf"\[E / {world.size}, H, I\], of one dtype, [^$]*.*gate_up \[8, 128, 40\]"
    ):
        MoE(*weights(zeros, 8, 8, INNER), top_k=2, parallel="expert", world=world)


@pytest.mark.mpi(min_size=2)
def test_a_share_of_the_experts_is_refused_as_one_of_their_width(world, zeros):
    own = weights(zeros, 8, 8 // world.size, INNER)
    with refusal(
        rf"wanted: router \[E, H\], gate_up \[E, 2 I / {world.size}, H\], down "
        rf"\[E, H, I / {world.size}\], of one dtype, [^$]*.*got: +router \[8, 40\]"
    ):
        MoE(*own, top_k=2, parallel="tensor", world=world)


@pytest.mark.mpi(min_size=2)
def test_tokens_that_cannot_be_split_evenly_are_refused(make_parallel, zeros, world):
    layer = make_parallel(8, HIDDEN, INNER, top_k=2)
    with refusal(rf"wanted: M a multiple of {world.size}\n.*got: +M = 9\n"):
        layer.moe(zeros(9, HIDDEN))
    x, out, _ = layer.rows(3)
    layer.moe(x, out)
    layer.moe.synchronize()


@pytest.mark.mpi(min_size=2)
def test_ranks_with_other_numbers_of_tokens_are_refused(make_parallel, zeros, world):
    layer = make_parallel(8, HIDDEN, INNER, top_k=2, parallel="expert")
    with refusal(""):
        layer.moe(zeros(8 + world.rank, HIDDEN))


@pytest.mark.mpi(min_size=2)
def test_other_ways_on_other_ranks_are_refused(world, zeros):
    way = ("tensor", "expert")[world.rank % 2]
    own = draw_experts(np.random.default_rng(0), 8, HIDDEN, INNER)
    share = own_experts(own, way, world.rank, world.size)
    with refusal(r"ranks? 1.*: MoE\(.*parallel=expert"):
        MoE(*share, top_k=2, parallel=way, world=world)


# An option that rank 1 alone has.
OPTIONS = {
    "top_k=3": {"top_k": 3},
    "normalize=False": {"normalize": False},
    "schedule=dynamic": {"schedule": "dynamic"},
    "block=4": {"options": {"block": 4}},
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("got", OPTIONS)
def test_ranks_with_other_options_make_no_layer(got, world, zeros, compiled):
    options = {"top_k": 2, **(OPTIONS[got] if world.rank == 1 else {})}
    with refusal(rf"the ranks do not make the same call[^$]*rank 1: MoE\(.*{got}"):
        MoE(*weights(zeros, 8, 8, INNER // world.size), world=world, **options)
    assert compiled == []


class ThreeRanks(World):
    """Rank 1 of three, as far as a layer that is refused needs it."""

    def __init__(self):
        self.rank, self.size, self.backend = 1, 3, "cpu"

    def refuse(self, error: EtcDistError) -> NoReturn:
        raise error


def test_experts_that_cannot_be_split_evenly_are_refused():
    own = [np.zeros(s, "float16") for s in ((8, 40), (2, 128, 40), (2, 40, 64))]
    with pytest.raises(ArgumentError) as caught:
        MoE(*own, top_k=2, parallel="expert", world=ThreeRanks())
    assert caught.value.wanted == "experts in a multiple of 3, the number of ranks"
    assert caught.value.got == "8 experts"


@pytest.mark.mpi(min_size=2)
def test_a_rank_alone_without_tokens_is_refused(world, zeros):
    own = weights(zeros, 8 * world.size, 8, INNER)
    moe = MoE(*own, top_k=2, parallel="expert", world=world)
    moe(zeros(3, HIDDEN), zeros(3, HIDDEN))
    with refusal("of no tokens"):
        moe(zeros(0 if world.rank == 0 else 3, HIDDEN))
    moe(zeros(3, HIDDEN), zeros(3, HIDDEN))
    moe.synchronize()
    moe.close()
