import contextlib
import traceback

import pytest

from etc_dist.errors import ArgumentError, EtcDistError, GraphError, WorldError
from etc_dist.settings import Settings
from etc_dist.world import start


def is_usable(world) -> bool:
    world.barrier()
    return world.gather(world.rank) == list(range(world.size))


def shown_once(error: EtcDistError) -> bool:
    """Whether a traceback shows no other error with these words."""
    return "".join(traceback.format_exception(error)).count(error.what) == 1


@pytest.fixture
def doomed():
    """A separate world, for a test that breaks it."""
    from mpi4py import MPI

    new_world = start(Settings(backend="cpu", world_limit=0.5))
    yield new_world
    MPI.COMM_WORLD.Barrier()
    with contextlib.suppress(WorldError):
        new_world.close()


@pytest.mark.mpi(ranks=[2, 4])
def test_mismatch_raises_on_all_ranks_and_names_the_calls(world):
    is_odd = world.rank == 1
    with pytest.raises(ArgumentError) as caught:
        world.match_call(
            11 if is_odd else 12, lambda: "matmul [8]" if is_odd else "matmul [4]"
        )
    assert caught.value.what == "the ranks do not make the same call"
    ranks = [rank for rank in range(world.size) if rank != 1]
    name = "rank 0" if ranks == [0] else f"ranks {', '.join(map(str, ranks))}"
    assert caught.value.got.split("\n" + " " * 10) == [
        f"{name}: matmul [4]",
        "rank 1: matmul [8]",
    ]
    assert is_usable(world)


@pytest.mark.mpi(ranks=[2, 4])
@pytest.mark.parametrize("choice", [0, 1])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_choice_is_not_followed_by_another_call(world, choice, rank):
    def call() -> None:
        if world.rank == rank:
            world.match_call(7, lambda: "matmul")
        else:
            world.follow_first(("none", "some"), choice)

    with pytest.raises(ArgumentError, match=f"rank {rank}: matmul"):
        call()
    assert is_usable(world)


@pytest.mark.mpi(ranks=[2])
def test_a_largest_number_is_that_of_one_call(world):
    """Its bits are not taken for those of another number or another call."""
    signature = (7 + world.rank) << 28
    with pytest.raises(ArgumentError, match="do not make the same call") as caught:
        world.largest(signature, 1 - world.rank, lambda: f"matmul {world.rank}")
    assert "rank 1: matmul 1" in caught.value.got
    number = 1 << 28 if world.rank == 1 else 3
    with pytest.raises(ArgumentError, match="a rank passes too many rows") as caught:
        world.largest(7, number, lambda: "moe")
    assert (caught.value.where, caught.value.got) == ("rank 1: moe", "268435456")
    assert is_usable(world)


@pytest.mark.mpi(ranks=[2])
def test_mismatch_with_equal_words_shows_signatures(world):
    with pytest.raises(ArgumentError, match=r"rank 1: add \(signature 0x15\)"):
        world.match_call(0x14 + world.rank, lambda: "add")
    assert is_usable(world)


@pytest.mark.mpi(ranks=[2])
def test_fault_in_a_description_reaches_the_peers_as_text(world):
    def describe() -> str:
        return "add" if world.rank else str(1 / 0)

    with pytest.raises(ArgumentError, match=r"rank 0: \(no description: ZeroDiv"):
        world.match_call(1 + world.rank, describe)
    assert is_usable(world)


@pytest.mark.mpi(ranks=[2])
def test_refusal_of_one_rank_raises_its_class_on_all(world):
    refusal = GraphError(
        "x is bad", where="add", wanted="[4]", got="[3]", fix="pass [4]"
    )
    with pytest.raises(GraphError) as caught:
        if world.rank == 1:
            world.refuse(refusal)
        world.match_call(3, lambda: "add")
    assert str(caught.value) == (
        "x is bad\n  where:  rank 1: add\n  wanted: [4]\n  got:    [3]\n"
        "  to do:  pass [4]"
    )
    assert shown_once(caught.value)
    assert is_usable(world)


@pytest.mark.mpi(ranks=[4])
def test_refusals_of_all_ranks_are_listed_by_rank(world):
    got = f"[{min(world.rank, 1)}]"
    refusal = GraphError("x is bad", where="add", wanted="[4]", got=got, fix="pass [4]")
    with pytest.raises(GraphError) as caught:
        world.refuse(refusal)
    assert (caught.value.what, caught.value.where) == ("x is bad", "add")
    first, second = caught.value.got.split("\n" + " " * 10)
    assert first == "rank 0: [0]" and second.endswith(": [1]")
    assert is_usable(world)


def fail_on_rank_1(world, fault):
    """A step that raises `fault` on rank 1."""

    def step() -> None:
        if world.rank == 1:
            raise fault

    return step


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("agree", ["agree", "agree_done"])
def test_step_that_fails_on_one_rank_raises_on_all(world, agree):
    refusal = GraphError(
        "x is bad", where="add", wanted="[4]", got="[3]", fix="pass [4]"
    )
    with pytest.raises(GraphError, match="rank 1: add") as caught:
        getattr(world, agree)(fail_on_rank_1(world, refusal))
    assert shown_once(caught.value)
    fault = OSError("no such file")
    with pytest.raises(WorldError, match="OSError: no such file") as caught:
        getattr(world, agree)(fail_on_rank_1(world, fault))
    assert caught.value.where == f"rank 1: world.{agree}"
    assert caught.value.__cause__ is (fault if world.rank == 1 else None)
    assert is_usable(world)


@pytest.mark.mpi
def test_result_that_cannot_be_pickled_is_a_fault_of_the_step(world):
    with pytest.raises(WorldError, match="a step that all ranks take failed"):
        world.agree(lambda: lambda: None)
    assert is_usable(world)


@pytest.mark.mpi(ranks=[2])
def test_rank_that_does_not_call_is_named_and_breaks_the_world(doomed):
    from mpi4py import MPI

    late = doomed.size - 1
    if doomed.rank != late:
        with pytest.raises(WorldError) as caught:
            doomed.match_call(1, lambda: "add")
        assert caught.value.got == f"rank {late} did not take part"
        assert caught.value.wanted == "every rank within 0.5 s"
        with pytest.raises(
            WorldError, match=f"broken: .*rank {late} did not take part"
        ):
            doomed.barrier()
    MPI.COMM_WORLD.Barrier()
    if doomed.rank == late:
        with pytest.raises(WorldError, match="left the world: an earlier call there"):
            doomed.match_call(1, lambda: "add")
    assert doomed.broken


@pytest.mark.mpi(ranks=[2])
def test_gather_returns_the_other_values_when_a_rank_is_silent(doomed):
    silent = doomed.size - 1
    if doomed.rank != silent:
        expected = [rank if rank != silent else None for rank in range(doomed.size)]
        assert doomed.gather(doomed.rank) == expected
        with pytest.raises(WorldError, match=f"rank {silent} did not take part"):
            doomed.gather(0)
