"""Where a program's tensors and counters lie, for given dims: pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from etc_dist.codegen.layout import ALIGNMENT, HEAD_BYTES
from etc_dist.ir import GraphFunction


@dataclass(frozen=True)
class MemoryPlan:
    """Offsets in the symmetric block and in local scratch, in bytes, and where each
    event tensor's counters begin. Needs of larger dims may be met by one block of the
    largest."""

    event_bases: Mapping[str, int]
    event_count: int
    symmetric: Mapping[str, int]
    symmetric_bytes: int
    local: Mapping[str, int]
    local_bytes: int


def plan_memory(graph: GraphFunction, dims: Mapping[str, int]) -> MemoryPlan:
    """The memory of `graph` at `dims`; symmetric offsets count from the first
    tensor."""
    env = graph.environment(dims, 0)
    bases, count = {}, 0
    for events in graph.events:
        bases[events.name] = count
        count += prod(int(s.evaluate(env)) for s in events.shape)
    offsets: dict[str, dict[str, int]] = {"symmetric": {}, "local": {}}
    ends = {"symmetric": 0, "local": 0}
    for tensor in graph.tensors:
        if tensor.kind in offsets:
            offsets[tensor.kind][tensor.name] = ends[tensor.kind]
            ends[tensor.kind] += aligned(tensor.nbytes(env))
    return MemoryPlan(
        bases,
        count,
        offsets["symmetric"],
        ends["symmetric"],
        offsets["local"],
        ends["local"],
    )


@dataclass(frozen=True)
class Capacity:
    """What a program has allocated: room for events, symmetric and local tensors."""

    events: int = 0
    symmetric: int = 0
    local: int = 0

    def holds(self, plan: MemoryPlan) -> bool:
        return (
            plan.event_count <= self.events
            and plan.symmetric_bytes <= self.symmetric
            and plan.local_bytes <= self.local
        )

    def grown(self, plan: MemoryPlan) -> Capacity:
        return Capacity(
            max(self.events, plan.event_count, 64),
            max(self.symmetric, plan.symmetric_bytes),
            max(self.local, plan.local_bytes),
        )

    @property
    def tensors_offset(self) -> int:
        """Where symmetric tensors begin: after the head and both event areas."""
        return aligned(HEAD_BYTES + 2 * 4 * self.events)

    @property
    def block_bytes(self) -> int:
        return self.tensors_offset + aligned(self.symmetric)


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
