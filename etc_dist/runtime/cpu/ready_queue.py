"""The queue of ready units of a lane on one rank.

It is not first-in-first-out: a worker takes a random ready unit, so that no program
relies on the order in which units become ready. Initial units are taken in order if any
of them waits, else at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import numpy as np

from etc_dist.ir.call import TASK, Call, row_major
from etc_dist.ir.event import EventRef
from etc_dist.runtime.cpu.storage import Array
from etc_dist.schedule.plan import Lane

Counts = Callable[[str], Array]
"""Event tensor name -> this rank's counters, in the tensor's shape."""


class ReadyQueue:
    """The units of a lane that no worker has taken. `env` has the values of the rank's
    symbols, and the arrays that expressions load from."""

    def __init__(
        self, lane: Lane, env: Mapping[str, Any], counts: Counts, chance: random.Random
    ):
        env = dict(env)
        self.num_left = int(lane.total.evaluate(env))
        """The number of units that are not taken, without those known to be surplus."""
        initial = range(int(lane.initial.evaluate(env)))
        self._ready = [] if lane.claimed_calls else list(initial)
        self._initial = iter(initial if lane.claimed_calls else ())
        self._chance, self._counts = chance, counts
        queued = filter(lane.queued, lane.calls)
        self._pending = [_Pending(lane, call, env, counts) for call in queued]

    def release(self) -> None:
        """Find the units that have become ready, or turned out to be surplus."""
        counts = cache(self._counts)  # many calls wait for the same events
        for pending in self._pending:
            self.num_left -= pending.drop(counts)
            self._ready += pending.release(counts)
        self._pending = [pending for pending in self._pending if pending.groups.size]

    def take(self) -> int | None:
        """The number of a unit in the lane, which is ready, or comes first in order;
        None if there is none."""
        following = next(self._initial, None)
        if following is not None:
            self.num_left -= 1
            return following
        if not self._ready:
            return None
        at = self._chance.randrange(len(self._ready))
        self._ready[at], self._ready[-1] = self._ready[-1], self._ready[at]
        self.num_left -= 1
        return self._ready.pop()

    def waiting(self) -> Iterator[tuple[Call, int]]:
        """The call and the first task of each group that is not ready."""
        for pending in self._pending:
            for group in pending.groups:
                yield pending.call, int(group) * pending.size


class _Pending:
    """The groups of a call that are not ready."""

    def __init__(self, lane: Lane, call: Call, env: dict[str, Any], counts: Counts):
        self.call, self._env, self._lane = call, env, lane
        self.size = int(lane.group_size(call).evaluate(env))
        self._first = int(lane.first_unit(call).evaluate(env))
        count = int(lane.groups(call).evaluate(env)) if self.size else 0
        self.groups = np.arange(count)
        gating = lane.gating(call)
        place = row_major(gating, TASK)
        inner = {**env, TASK.name: self.groups}
        inner |= {
            axis.symbol.name: np.broadcast_to(part.evaluate(inner), count)
            for axis, part in zip(gating, place, strict=True)
        }
        self._inner, self._gating = inner, gating
        # NOTE: waits depend on no other coordinates. A group with a division by zero
        # counts as ready: its tasks report it.
        with np.errstate(divide="ignore"):
            self._free = [
                _Wait.of(ref, inner, count, counts(ref.events.name).shape)
                for ref in call.free_waits
            ]
            self._loaded_refs = [
                (ref, _index(ref, inner, count)) for ref in call.loaded_waits
            ]

    def drop(self, counts: Counts) -> int:
        """Drop surplus groups whose first wait is met; the number of their units."""
        limited = self.call.limited
        if limited is None or not self.groups.size:
            return 0
        is_known = self._free[0].is_met(self.groups, counts)
        at = self._inner[limited.symbol.name][self.groups]
        surplus = is_known.copy()
        surplus[is_known] = at[is_known] >= self._counts_of(self.groups[is_known])
        self.groups = self.groups[~surplus]
        return int(surplus.sum()) * self.size

    def _counts_of(self, groups: Array) -> Array:
        """The count of the limited axis, of each group."""
        assert self.call.count is not None
        names = [axis.symbol.name for axis in self._gating]
        env = {**self._env, **{n: self._inner[n][groups] for n in names}}
        return np.broadcast_to(self.call.count.evaluate(env), groups.shape)

    def release(self, counts: Counts) -> list[int]:
        """The units of the groups that have become ready since the last call."""
        is_met: Array = np.ones(self.groups.size, np.bool_)
        for wait in self._free:
            is_met &= wait.is_met(self.groups, counts)
            if not is_met.any():
                return []
        for ref, index in self._loaded_refs:
            for at in np.flatnonzero(is_met):
                group = int(self.groups[at])
                is_met[at] = self._is_met(ref, group, index[:, group], counts)
        ready, self.groups = self.groups[is_met], self.groups[~is_met]
        first = (self._first + ready * self.size).tolist()
        return [*chain.from_iterable(range(at, at + self.size) for at in first)]

    def _is_met(self, ref: EventRef, group: int, index: Array, counts: Counts) -> bool:
        at = tuple(int(i) for i in index)
        try:
            want = ref.expects.evaluate(self._of_group(group))
            return bool(counts(ref.events.name)[at] >= want)
        except (ArithmeticError, IndexError):
            return True  # the task reports it, unless its condition does not hold

    def _of_group(self, group: int) -> dict[str, Any]:
        """The symbols' values, with the coordinates in the waits of a group."""
        names = [axis.symbol.name for axis in self._gating]
        return {**self._env, **{name: int(self._inner[name][group]) for name in names}}


@dataclass(frozen=True)
class _Wait:
    """A wait without loads, of all groups of a call."""

    name: str
    element: Array
    """Of the event tensor, in row-major order; 0 for a group outside of it."""
    want: Array
    """0 for a group outside of the tensor: its task reports it, unless its condition
    does not hold."""

    @classmethod
    def of(
        cls, ref: EventRef, env: dict[str, Any], count: int, shape: tuple[int, ...]
    ) -> _Wait:
        index = _index(ref, env, count)
        limits = np.array(shape, np.int64)[:, None]
        outside = ((index < 0) | (index >= limits)).any(axis=0)
        element = np.zeros(count, np.int64)
        for extent, part in zip(shape, index, strict=True):
            element = element * extent + part
        try:
            want = ref.expects.evaluate(env)
        except ArithmeticError:
            want = 0
        element, want = (np.where(outside, 0, part) for part in (element, want))
        return cls(ref.events.name, element, want)

    def is_met(self, groups: Array, counts: Counts) -> Array:
        have = counts(self.name).reshape(-1)
        if not have.size:
            return np.ones(groups.size, np.bool_)
        is_met: Array = have[self.element[groups]] >= self.want[groups]
        return is_met


def _index(ref: EventRef, env: dict[str, Any], count: int) -> Array:
    """The index of `ref` for each group: [axes, groups]."""
    index_rows = np.empty((len(ref.index), count), np.int64)
    for row, part in enumerate(ref.index):
        try:
            index_rows[row] = part.evaluate(env)
        except ArithmeticError:
            index_rows[row] = 0
    return index_rows
