import time

import numpy as np
import pytest

from etc_dist.errors import ArgumentError
from etc_dist.world.agreement import Agreement, sign
from etc_dist.world.mpi import MpiTransport


def silent() -> str:
    raise AssertionError("no description is wanted when all ranks agree")


@pytest.mark.mpi
def test_match_call_returns_for_equal_signatures(world):
    for signature in (1, 2, 2, 1, (1 << 63) - 1, 0):
        world.match_call(signature, silent)


@pytest.mark.mpi(ranks=[1, 4])
def test_match_call_works_when_ranks_call_at_different_times(world):
    naps = np.random.default_rng(world.rank).choice([0, 0, 0, 2e-4, 2e-2], size=40)
    for call_idx, nap in enumerate(naps):
        time.sleep(nap)
        world.match_call(sign(f"call {call_idx}"), silent)


@pytest.mark.mpi(ranks=[2])
def test_match_call_returns_after_all_ranks_have_called(world):
    late = world.size - 1
    if world.rank == late:
        time.sleep(0.2)
    came = time.monotonic()
    world.match_call(5, silent)
    end = time.monotonic()
    assert end >= max(world.gather(came))


@pytest.mark.mpi(ranks=[1, 2, 4])
def test_all_ranks_follow_the_choice_of_the_first(world):
    texts = "none", "some", "all"
    for choice in (0, 2, 0, 1, 1, 0):
        own_choice = choice if world.rank == 0 else 2
        assert world.follow_first(texts, own_choice) == choice
        world.match_call(choice, silent)


@pytest.mark.mpi(ranks=[1, 2, 4])
def test_all_ranks_get_the_largest_of_their_numbers(world):
    for first in (0, 3, 3, (1 << 28) - 5, 0):
        assert world.largest(6, first + world.rank, silent) == first + world.size - 1
        assert world.largest(6, first, silent) == first
        world.match_call(6, silent)


@pytest.mark.mpi(ranks=[1, 4])
def test_gather_gives_each_ranks_object_in_rank_order(world):
    value = {"rank": world.rank, "bytes": b"x" * (100_000 * world.rank)}
    values = world.gather(value)
    assert [answer["rank"] for answer in values] == list(range(world.size))
    assert len(values[-1]["bytes"]) == 100_000 * (world.size - 1)


@pytest.mark.mpi(ranks=[1, 4])
def test_agree_gives_each_ranks_result_in_rank_order(world):
    assert world.agree(lambda: world.rank**2) == [r**2 for r in range(world.size)]
    assert world.agree_done(lambda: "of no interest") is None


@pytest.mark.mpi(ranks=[2])
def test_calls_of_a_world_that_starts_are_compared_by_messages(world):
    from mpi4py import MPI

    agreement = Agreement(MpiTransport(MPI, MPI.COMM_WORLD.Dup(), None), 10.0)
    agreement.match_call(7, silent)
    with pytest.raises(ArgumentError, match="rank 1: call 1"):
        agreement.match_call(7 + world.rank, lambda: f"call {world.rank}")
    assert agreement.agree(lambda: world.rank) == list(range(world.size))
