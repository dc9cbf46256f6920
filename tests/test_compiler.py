"""The compiler's one pass over its stages, and graphs that ranks do not share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest

import etc_dist
from etc_dist import World
from etc_dist.codegen import generate
from etc_dist.compiler import first_difference
from etc_dist.errors import EtcDistError, ScheduleError, WorldError
from etc_dist.ir import graph_function
from etc_dist.schedule import schedule_static
from examples.add_row_sum import add_row_sum
from tests.graphs.calls import whole
from tests.graphs.ring import ring

pytestmark = pytest.mark.mpi


@pytest.fixture
def brief(world) -> Iterator[World]:
    """A world with a short limit, for tests that may break it."""
    from mpi4py import MPI

    new_world = etc_dist.start(replace(world.settings, backend="cpu", world_limit=2.0))
    yield new_world
    if not any(MPI.COMM_WORLD.allgather(new_world.broken)):
        new_world.close()


def test_a_program_has_the_text_of_its_plan(world):
    program = etc_dist.compile(ring(world.size))
    assert program.world is world
    assert program.plan == schedule_static(ring(world.size))
    assert program.source == generate(program.plan).text
    program.close()


def test_timing_names_each_stage_in_order(world, monkeypatch, capsys):
    monkeypatch.setattr(world, "settings", replace(world.settings, timing=True))
    etc_dist.compile(ring(world.size), world).close()
    stages = re.findall(r"^etc_dist: (\w+) [\d.]+ ms$", capsys.readouterr().err, re.M)
    assert stages[:2] == ["schedule", "codegen"]
    assert stages[2:] == ([] if world.backend == "cpu" else ["build", "load"])


def test_a_graph_for_another_number_of_ranks_is_refused(world):
    with pytest.raises(ScheduleError) as caught:
        etc_dist.compile(ring(world.size + 1), world)
    assert caught.value.wanted == f"world_size={world.size}"
    assert caught.value.got == f"world_size={world.size + 1}"
    etc_dist.compile(ring(world.size), world).close()


def test_an_unknown_schedule_is_refused(world):
    with pytest.raises(ScheduleError) as caught:
        etc_dist.compile(ring(world.size), world, schedule="greedy")
    assert caught.value.wanted == "'static' or 'dynamic' or 'auto'"
    assert caught.value.got == "'greedy'"
    etc_dist.compile(ring(world.size), world).close()


def test_a_graph_without_calls_is_refused(world):
    empty = graph_function(lambda g: None)
    with pytest.raises(ScheduleError, match="has nothing to run"):
        etc_dist.compile(empty(world.size), world)


@pytest.mark.mpi(ranks=[2])
def test_ranks_with_different_graphs_are_refused(world):
    graphs = ring(world.size), ring(world.size, notifies=False)
    with pytest.raises(EtcDistError) as caught:
        etc_dist.compile(graphs[world.rank == 1], world)
    first, *_ = caught.value.got.splitlines()
    assert re.match(r"ranks? 0\b.*: call \w+: .*: notifies here\.on\(", first)
    assert "rank 1: call " in caught.value.got
    etc_dist.compile(graphs[0], world).close()


@pytest.mark.mpi(ranks=[1])
@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["graph a", "input x"], "input x"),
        (["graph a", "call c: f", "  reads x"], "call c: f: reads x"),
        (["graph a", "call c: f", "call d: f"], "call d: f"),
        (["graph a"], "nothing"),
    ],
)
def test_the_first_line_that_differs_is_shown_with_its_call(texts, expected):
    call = texts[1:2] if len(texts) > 2 else []
    lines = ["graph a", *call, "  other"] if call else ["graph a", "other"]
    assert first_difference([texts, lines])[0].endswith(expected)
    assert first_difference([lines, texts])[1].endswith(expected)


@pytest.mark.mpi(ranks=[2])
def test_ranks_with_different_numbers_of_workers_are_refused(brief):
    num_workers = 2 if brief.rank == 1 else 8
    brief.settings = replace(brief.settings, cpu_workers=num_workers)
    with pytest.raises(WorldError, match="different numbers of workers") as caught:
        etc_dist.compile(ring(brief.size), brief)
    assert caught.value.got.split() == ["rank", "0:", "8", "rank", "1:", "2"]
    assert not brief.broken


@pytest.mark.mpi(ranks=[2])
def test_ranks_with_different_schedules_are_refused(world):
    schedule = "dynamic" if world.rank == 1 else "static"
    with pytest.raises(WorldError, match="different schedules") as caught:
        etc_dist.compile(add_row_sum(world.size), world, schedule=schedule)
    assert "dynamic" in caught.value.got
    assert "static" in caught.value.got


def fill_with(value, text="y[...] = value"):
    """A graph whose body is `text`, with `value` enclosed or as a default."""
    names = {"device_function": etc_dist.device_function}
    exec(
        f"def make(value):\n @device_function(source='fill.cuh', reads=0, writes=1)\n"
        f" def fill(y):\n  {text}\n return fill",
        names,
    )

    return partial(whole, function=names["make"](value), y="1")


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize(
    "graphs",
    [(fill_with(1), fill_with(2)), (fill_with(1), fill_with(1, "y[...] = value + 1"))],
    ids=["enclosed value", "text"],
)
def test_ranks_with_different_bodies_are_refused(graphs, world):
    with pytest.raises(WorldError, match="different bodies of device functions"):
        etc_dist.compile(graphs[world.rank == 1](world.size), world)
    if world.backend == "cpu":  # there is no CUDA body
        etc_dist.compile(fill_with(1)(world.size), world).close()


@pytest.mark.mpi(ranks=[2])
def test_ranks_with_different_versions_are_refused(world, monkeypatch):
    with monkeypatch.context() as context:
        context.setattr(etc_dist, "__version__", f"9.{world.rank}")
        with pytest.raises(
            WorldError, match="different versions of etc_dist"
        ) as caught:
            etc_dist.compile(ring(world.size), world)
    assert caught.value.got.startswith("rank 0: etc_dist 9.0")
    etc_dist.compile(ring(world.size), world).close()


@pytest.mark.parametrize("schedule", ["static", "dynamic", "auto"])
def test_the_plan_names_its_schedule(schedule, world):
    plain = etc_dist.compile(add_row_sum(world.size), world, schedule=schedule)
    name = "dynamic" if schedule == "dynamic" else "static"
    assert plain.plan.schedule == name
    assert f"({name})" in plain.show()
    plain.close()


BAD_ALONE: dict[str, Callable[[World], object]] = {
    "world size": lambda w: etc_dist.compile(ring(w.size + 1), w),
    "schedule": lambda w: etc_dist.compile(ring(w.size), w, schedule="greedy"),
    "graph": lambda w: etc_dist.compile("ring", w),
    "trace": lambda w: etc_dist.AllGatherMatmul(world=w, trace="yes"),
}


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("what", BAD_ALONE)
def test_what_one_rank_alone_cannot_compile_is_refused_on_all(what, brief):
    def compile() -> object:
        if brief.rank == 1:
            return BAD_ALONE[what](brief)
        if what == "trace":
            return etc_dist.AllGatherMatmul(world=brief)
        return etc_dist.compile(ring(brief.size), brief)

    with pytest.raises(EtcDistError, match=r"'greedy'|world_size=|got str") as caught:
        compile()
    assert isinstance(caught.value, TypeError) == (what in ("graph", "trace"))
    assert not brief.broken
    etc_dist.compile(ring(brief.size), brief).close()
