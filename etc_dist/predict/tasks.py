"""The tasks of one rank at given dims, and what each of them sends and waits for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from etc_dist.errors import ArgumentError
from etc_dist.ir.call import Call
from etc_dist.ir.dims import checked_dims
from etc_dist.ir.event import EventRef
from etc_dist.ir.expr import Expr
from etc_dist.ir.tensor import Region
from etc_dist.schedule.plan import QUEUE, Lane, Plan

Array = npt.NDArray[np.int64]

MOST_TASKS = 2_000_000
"""Of a call on a rank: as many are simulated in minutes."""
OWN, NEAR, FAR = range(3)
"""Where a task writes: on its rank, on a near rank, on a rank of another host."""


@dataclass(frozen=True)
class CallTasks:
    """The tasks of a call on rank 0, in the call's order. All but `call` and `lane` are
    arrays over the tasks, or lists of pairs of arrays.

    unit: its number in the lane. target: OWN, NEAR or FAR. nbytes: what it sends to the
    target. idle: it writes nothing. read_bytes: of a task that is not idle, on average.
    due_us: not before. waits, notifies: (task, element of rank 0). mirrored: (task,
    element of rank 0) where this task of another rank notifies rank 0."""

    call: Call
    lane: Lane
    unit: Array
    target: Array
    nbytes: Array
    idle: npt.NDArray[np.bool_]
    read_bytes: float
    due_us: npt.NDArray[Any]
    waits: tuple[Array, Array]
    notifies: tuple[Array, Array]
    mirrored: tuple[Array, Array]

    @property
    def count(self) -> int:
        return len(self.unit)

    def by_task(self, pairs: tuple[Array, Array]) -> list[list[int]]:
        """The elements of each task."""
        found: list[list[int]] = [[] for _ in range(self.count)]
        for task, element in zip(*(each.tolist() for each in pairs), strict=True):
            found[task].append(element)
        return found


@dataclass(frozen=True)
class RankTasks:
    """The tasks of rank 0. expected: the notifications that each element needs.
    partners: the far ranks that it sends to."""

    plan: Plan
    dims: Mapping[str, int]
    calls: tuple[CallTasks, ...]
    expected: Array
    partners: int

    @property
    def hosts(self) -> int:
        return self.plan.graph.world_size // self.plan.graph.local_size

    def sent_bytes(self, target: int) -> int:
        """The bytes that the rank sends to near ranks, or to far ones."""
        return sum(int(c.nbytes[c.target == target].sum()) for c in self.calls)


def rank_tasks(plan: Plan, dims: Mapping[str, int]) -> RankTasks:
    """The tasks of rank 0 of a static plan. ArgumentError for dims that do not fit, for
    tasks that depend on data, and if ranks have different numbers of tasks."""
    graph, dims = plan.graph, checked_dims(plan.graph, dims)
    _refuse_data(plan)
    reader = _Reader(plan, dims)
    lanes = {call.name: lane for lane in plan.lanes for call in lane.calls}
    calls = tuple(reader.read(call, lanes[call.name]) for call in graph.calls)
    return RankTasks(plan, dims, calls, reader.expected(), len(reader.partners))


class _Reader:
    """Evaluates the expressions of a plan."""

    def __init__(self, plan: Plan, dims: Mapping[str, int]):
        self.graph, self.dims = plan.graph, dims
        self.ranks = range(self.graph.world_size)
        self.envs = [self.graph.environment(dims, rank) for rank in self.ranks]
        self.first: dict[str, int] = {}
        self.partners: set[int] = set()
        total = 0
        for event in self.graph.events:
            self.first[event.name] = total
            total += prod(int(n.evaluate(self.envs[0])) for n in event.shape)

    def expected(self) -> Array:
        parts = [np.zeros(0, np.int64)]
        for event in self.graph.events:
            shape = tuple(int(n.evaluate(self.envs[0])) for n in event.shape)
            at = np.unravel_index(np.arange(prod(shape)), shape) if shape else ()
            parts.append(_values(event.expected(at, self.envs[0]), prod(shape)))
        return np.concatenate(parts)

    def read(self, call: Call, lane: Lane) -> CallTasks:
        env = self.envs[0]
        count = self._count(call)
        t = np.arange(count)
        inner = {**env, **call.coordinates(t, env)}
        unit, _ = lane.place(call, t, env)
        unit = lane.position(call, unit, env)
        target, nbytes, idle = self._writes(call, inner, count)
        return CallTasks(
            call,
            lane,
            _values(unit, count),
            target,
            nbytes,
            idle,
            self._read_bytes(call, inner, ~idle),
            t * (int(call.pace.evaluate(env)) / 1e3),
            _pairs(self._elements(ref, inner, t) for ref in call.waits),
            _pairs(
                self._elements(ref, inner, self._to(ref, inner, t, rank=0))
                for ref in call.notifies
            ),
            _pairs(self._mirrored(call, t)),
        )

    def _count(self, call: Call) -> int:
        counts = [int(call.tasks.evaluate(env)) for env in self.envs]
        if len(set(counts)) > 1:
            raise ArgumentError(
                f"the run of {self.graph.name} cannot be predicted",
                where=f"call {call.name}",
                wanted="as many tasks on each rank: one rank stands for all",
                got=f"{min(counts)} to {max(counts)} tasks",
                fix="choose dims for which ranks do the same work",
            )
        if counts[0] > MOST_TASKS:
            raise ArgumentError(
                f"the run of {self.graph.name} cannot be predicted",
                where=f"call {call.name}",
                wanted=f"at most {MOST_TASKS} tasks of a call on a rank",
                got=f"{counts[0]} tasks",
                fix="choose smaller dims, or fewer hosts",
            )
        return counts[0]

    def _writes(
        self, call: Call, env: dict[str, Any], count: int
    ) -> tuple[Array, Array, npt.NDArray[np.bool_]]:
        """By task: the target, the bytes for it, and whether it writes nothing."""
        rank, nbytes, every = (np.zeros(count, np.int64) for _ in range(3))
        for ref in call.notifies:
            if ref.rank is not None:
                rank = np.maximum(rank, self._rank(ref.guarded(ref.rank), env, count))
        for region in call.writes:
            size = _nbytes(region, env, count)
            every += size
            if region.rank is not None:
                rank = self._rank(region.rank, env, count)
                nbytes += np.where(rank != 0, size, 0)
        far = rank >= self.graph.local_size
        self.partners |= set(rank[far].tolist())
        target = np.where(far, FAR, np.where(rank != 0, NEAR, OWN))
        return target, nbytes, (every == 0) & bool(call.writes)

    def _read_bytes(
        self, call: Call, env: dict[str, Any], runs: npt.NDArray[np.bool_]
    ) -> float:
        every = sum(
            _nbytes(region, env, len(runs))[runs].sum() for region in call.reads
        )
        return float(every) / max(1, int(runs.sum()))

    def _rank(self, expr: Expr, env: dict[str, Any], count: int) -> Array:
        return _values(expr.evaluate(env), count)

    def _to(self, ref: EventRef, env: dict[str, Any], t: Array, *, rank: int) -> Array:
        """The tasks of `rank` whose notification `ref` goes to rank 0."""
        if ref.rank is None:
            return t if rank == 0 else t[:0]
        return np.flatnonzero(self._rank(ref.guarded(ref.rank), env, len(t)) == 0)

    def _mirrored(self, call: Call, t: Array) -> Iterator[tuple[Array, Array]]:
        if all(ref.rank is None for ref in call.notifies):
            return
        for rank in self.ranks[1:]:
            env = self.envs[rank]
            inner = {**env, **call.coordinates(t, env)}
            for ref in call.notifies:
                chosen = self._to(ref, inner, t, rank=rank)
                if chosen.size:
                    yield self._elements(ref, inner, chosen)

    def _elements(
        self, ref: EventRef, env: dict[str, Any], t: Array
    ) -> tuple[Array, Array]:
        """Those of the tasks `t` for which `ref` names an element, and that element.
        All elements are of the rank 0, where shapes are those of any rank."""

        def value_of(expr: Expr) -> Array:
            value = np.asarray(expr.evaluate(env), np.int64)
            return value[t] if value.ndim else np.full(len(t), value)

        t = t[value_of(ref.holds) != 0]
        element = np.zeros(len(t), np.int64)
        for part, extent in zip(ref.index, ref.events.shape, strict=True):
            value = value_of(ref.guarded(part))
            element = element * int(extent.evaluate(self.envs[0])) + value
        return t, element + self.first[ref.events.name]


def _values(value: Any, count: int) -> Array:
    return np.broadcast_to(np.asarray(value, np.int64), (count,))


def _nbytes(region: Region, env: dict[str, Any], count: int) -> Array:
    size = np.full(count, region.tensor.itemsize, np.int64)
    for low, high in region.bounds(env):
        size = size * np.maximum(0, high - low)
    return size


def _pairs(found: Iterator[tuple[Array, Array]]) -> tuple[Array, Array]:
    none = np.zeros(0, np.int64)
    tasks, elements = zip((none, none), *found, strict=True)
    return np.concatenate(tasks), np.concatenate(elements)


def _refuse_data(plan: Plan) -> None:
    loaded = [call.name for call in plan.graph.calls if call.is_loaded]
    queued = [lane.name for lane in plan.lanes if lane.policy == QUEUE]
    if loaded or queued:
        got = f"loads in {', '.join(loaded)}" if loaded else "a dynamic schedule"
        raise ArgumentError(
            f"the run of {plan.graph.name} cannot be predicted",
            where=f"graph {plan.graph.name}",
            wanted="a static schedule, and tasks that depend on no data",
            got=got,
            fix="predict one of the collectives or the MLP, statically scheduled",
        )
