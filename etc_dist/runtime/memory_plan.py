"""The memory layout of a program at given dims."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod

from etc_dist.codegen.layout import ALIGNMENT, HEAD_BYTES, queue_words
from etc_dist.errors import ArgumentError
from etc_dist.schedule.plan import Plan

MOST_EVENTS = 2**31
"""The device has 32-bit numbers of events."""
FLAGGED = "flagged"
LINE = 32
"""Words of a 128-byte line: each part of a queue begins on a new line."""


@dataclass(frozen=True)
class MemoryPlan:
    """Offsets in the symmetric block and in local scratch, in bytes, and the first
    counter of each event tensor. After these, counted as events, come the queues of a
    dynamic plan, by the names of their arguments."""

    event_bases: Mapping[str, int]
    queue_bases: Mapping[str, int]
    event_count: int
    symmetric: Mapping[str, int]
    symmetric_bytes: int
    local: Mapping[str, int]
    local_bytes: int
    far_hosts: int = 0
    """The hosts, where ranks are far."""
    flagged: Mapping[str, int] = field(default_factory=dict)
    """Offsets of flagged tensors in each of their two areas."""
    flagged_bytes: int = 0


def plan_memory(plan: Plan, dims: Mapping[str, int]) -> MemoryPlan:
    """The memory of `plan` at `dims`; symmetric offsets: from the first tensor. Raises
    ArgumentError for more events than an index counts."""
    graph = plan.graph
    env = graph.environment(graph.alike(dims), 0)
    bases, count = {}, 0
    for events in graph.events:
        bases[events.name] = count
        count += prod(int(s.evaluate(env)) for s in events.shape)
    queues = {}
    for name, size in queue_words(plan):
        words = int(size.evaluate(env))
        queues[name] = aligned(count, LINE)
        count = aligned(queues[name] + words, LINE)
    if count >= MOST_EVENTS:
        raise ArgumentError(
            f"the event tensors of graph {graph.name} are too large",
            where=", ".join(f"{k}={v}" for k, v in dims.items()) or "no dims",
            wanted=f"fewer than {MOST_EVENTS} events and words of queues on a rank",
            got=str(count),
            fix="use larger tiles, so that there are fewer events",
        )
    offsets: dict[str, dict[str, int]] = {"symmetric": {}, "local": {}, FLAGGED: {}}
    ends = dict.fromkeys(offsets, 0)
    for tensor in graph.tensors:
        kind = FLAGGED if tensor.flagged else tensor.kind
        if kind in offsets:
            offsets[kind][tensor.name] = ends[kind]
            ends[kind] += aligned(tensor.nbytes(env) * (1 + tensor.flagged))
    return MemoryPlan(
        bases,
        queues,
        count,
        offsets["symmetric"],
        ends["symmetric"],
        offsets["local"],
        ends["local"],
        plan.far_hosts,
        offsets[FLAGGED],
        ends[FLAGGED],
    )


@dataclass(frozen=True)
class Capacity:
    """The allocated memory: event counters, bytes of symmetric and local tensors, and
    of each of the two areas of flagged tensors.

    NOTE: these areas have only flagged words, at the same offsets at all shapes. So the
    epoch of a word is never taken from other data, and an area that a run writes is not
    the one that peers may still read."""

    events: int = 0
    symmetric: int = 0
    local: int = 0
    far_hosts: int = 0
    """The hosts, where ranks are far: then each counter has a word for notifications of
    far ranks, and each host has a word."""
    flagged: int = 0

    def holds(self, plan: MemoryPlan) -> bool:
        """Whether it suffices for `plan`."""
        return (
            plan.event_count <= self.events
            and plan.symmetric_bytes <= self.symmetric
            and plan.local_bytes <= self.local
            and plan.flagged_bytes <= self.flagged
        )

    def grown(self, plan: MemoryPlan) -> Capacity:
        """A capacity that also holds `plan`."""
        return Capacity(
            max(self.events, plan.event_count, 64),
            max(self.symmetric, plan.symmetric_bytes),
            max(self.local, plan.local_bytes),
            plan.far_hosts,
            max(self.flagged, plan.flagged_bytes),
        )

    def joined(self, capacity: Capacity) -> Capacity:
        """A capacity that holds both."""
        return self._each(capacity, max)

    def doubled(self, demand: Capacity) -> Capacity:
        """A capacity that holds both, while this one is kept. Each part is twice this
        one's, if that is at most twice `demand`. So capacities grow geometrically, and
        the kept ones add up to at most twice the largest `demand`."""
        return self._each(demand, lambda a, b: max(a, b, 2 * min(a, b)))

    def _each(self, capacity: Capacity, merge: Callable[[int, int], int]) -> Capacity:
        return Capacity(
            merge(self.events, capacity.events),
            merge(self.symmetric, capacity.symmetric),
            merge(self.local, capacity.local),
            capacity.far_hosts,
            merge(self.flagged, capacity.flagged),
        )

    @property
    def flags_offset(self) -> int:
        """The offset of flagged tensors: after the head and both event areas."""
        size = 4 + 8 * (self.far_hosts > 0)
        return aligned(HEAD_BYTES + 2 * size * self.events + 8 * self.far_hosts)

    @property
    def tensors_offset(self) -> int:
        """The offset of other symmetric tensors: what comes before is clear at epoch
        1."""
        return self.flags_offset + 2 * aligned(self.flagged)

    @property
    def block_bytes(self) -> int:
        """Of the symmetric block."""
        return self.tensors_offset + aligned(self.symmetric)

    @property
    def nbytes(self) -> int:
        """Of a rank: the symmetric block and local scratch."""
        return self.block_bytes + self.local


def aligned(size: int, unit: int = ALIGNMENT) -> int:
    """`size`, rounded up to a multiple of `unit`."""
    return -(-size // unit) * unit
