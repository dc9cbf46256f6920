"""The verifier, the CPU backend and the emulator agree on small random graphs, right
and broken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etc_dist.emulate import Emulator
from etc_dist.errors import (
    DeadlockError,
    EmulationError,
    GraphError,
    RaceError,
    WaitTimeoutError,
)
from etc_dist.ir import Graph, GraphFunction, graph_function, tile
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import SCHEDULES, schedule_dynamic, schedule_static
from etc_dist.verify.verify import verify
from tests.emulate.cases import copy_on

TILES = 2
WORKERS = 2


@dataclass(frozen=True)
class Step:
    """A call: box[i] of the next rank, or of this one, becomes the box before."""

    lane: str
    remote: bool
    waits: bool
    notifies: bool
    extra: int
    """How many notifications more are expected than made."""
    shift: int
    """Which tile's event is waited for, relative to the task's own."""


def rarely(value: Any, usual: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from([usual] * 9 + [value])


STEPS = st.builds(
    Step,
    lane=st.sampled_from(["tensor", "transfer"]),
    remote=st.booleans(),
    waits=rarely(False, True),
    notifies=rarely(False, True),
    extra=rarely(1, 0),
    shift=rarely(1, 0),
)


FUNCTIONS = {lane: copy_on(lane) for lane in ("tensor", "transfer")}


def graph_of(steps: list[Step], backwards: bool, world: int) -> GraphFunction:
    def chain(g: Graph) -> None:
        boxes = [g.input("x", (TILES,), "int32")]
        step_events = []
        for n, step in enumerate(steps):
            boxes.append(g.symmetric(f"box_{n}", (TILES,), "int32"))
            options = {"expects": 1 + step.extra, "cross_rank": True}
            step_events.append(g.events(f"done_{n}", (TILES,), **options))
        boxes.append(g.output("y", (TILES,), "int32"))
        (i,) = grid = g.grid(i=TILES)
        peer = (g.rank + 1) % g.world_size
        calls = list(enumerate([*steps, Step("tensor", False, True, True, 0, 0)]))
        for n, step in reversed(calls) if backwards else calls:
            before = steps[n - 1] if n else step
            waits = [step_events[n - 1][(i + before.shift) % TILES]] if n else []
            is_last = n == len(steps)
            box = boxes[n + 1].on(peer) if step.remote else boxes[n + 1]
            events = step_events[n] if not is_last else None
            if events is not None and step.remote:
                events = events.on(peer)
            g.call(
                FUNCTIONS[step.lane],
                grid,
                name=f"step_{n}",
                reads=[boxes[n][tile(i, 1)]],
                writes=[box[tile(i, 1)]],
                waits=waits if before.waits else [],
                notifies=[events[i]] if events is not None and step.notifies else [],
            )

    return graph_function(chain)(world)


def given_on(world: int, steps: list[Step]) -> tuple[list[Any], list[Any]]:
    """The inputs of all ranks, and the right outputs."""
    xs = [np.arange(2, dtype=np.int32) + 10 * r for r in range(world)]
    hops = sum(step.remote for step in steps)
    return [{"x": x} for x in xs], [xs[(r - hops) % world] for r in range(world)]


def results(plan: Any, steps: list[Step]) -> set[str]:
    """How runs in several orders end: "right", "wrong" or "deadlock"."""
    world = plan.graph.world_size
    inputs, right = given_on(world, steps)
    outcomes = set()
    for seed in range(4):
        try:
            run = simulate(
                plan, inputs, {}, seed=seed, workers=WORKERS, epochs=2, check=False
            )
        except DeadlockError:
            outcomes.add("deadlock")
            continue
        ys = [outputs["y"] for outputs in run.outputs]
        outcomes.add("right" if np.array_equal(ys, right) else "wrong")
    return outcomes


GRAPHS = {
    "steps": st.lists(STEPS, min_size=1, max_size=4),
    "backwards": rarely(True, False),
    "world": st.integers(1, 3),
}


@settings(max_examples=10 * settings().max_examples)
@given(**GRAPHS, schedule=st.sampled_from([schedule_static, schedule_dynamic]))
def test_runs_agree_with_the_proof(steps, backwards, world, schedule):
    plan = schedule(graph_of(steps, backwards, world))
    try:
        verify(plan, {}, WORKERS)
    except GraphError as error:
        if type(error) is DeadlockError:
            assert results(plan, steps) == {"deadlock"}
        elif type(error) is RaceError:
            assert "deadlock" not in results(plan, steps)
        return
    assert results(plan, steps) == {"right"}


@given(**GRAPHS, schedule=st.sampled_from(["static", "dynamic"]))
def test_the_emulator_agrees_with_the_proof(steps, backwards, world, schedule):
    graph = graph_of(steps, backwards, world)
    try:
        verify(SCHEDULES[schedule](graph), {}, WORKERS)
        failure = None
    except GraphError as error:
        failure = type(error)
    if failure not in (None, DeadlockError):
        return  # another order of events may hide a race
    inputs, right = given_on(world, steps)
    program = Emulator(graph, schedule=schedule, workers=WORKERS)
    for seed in range(2):
        if failure is None:
            ys = [
                outputs["y"] for outputs in program.run(inputs, {}, seed=seed, runs=2)
            ]
            np.testing.assert_array_equal(ys, right)
        else:
            with pytest.raises((EmulationError, WaitTimeoutError)):
                program.run(inputs, {}, seed=seed)
