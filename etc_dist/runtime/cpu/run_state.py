"""The shared state of a run: status words, event counters, symmetric tensors.

A rank's block: its words, two event areas, its symmetric tensors.

NOTE: NumPy has no atomic addition, so every counter has one column per near rank:
only that rank writes it, and the value is the sum. This relies on the order of plain
stores on x86: data first, then the column. A rank counts what far ranks send in its
own column, once it has copied the data."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from etc_dist.ir.tensor import numpy_dtype
from etc_dist.runtime.cpu.far_run import FarRun, Put
from etc_dist.runtime.cpu.storage import Array, shape_of
from etc_dist.runtime.cpu.task import ArrayAccess, Element, Task
from etc_dist.runtime.cpu.workers import Memory
from etc_dist.runtime.memory_plan import Capacity, aligned, plan_memory
from etc_dist.schedule.plan import Plan
from etc_dist.world import SymmetricMemory, World

COUNTER = np.dtype(np.uint32)

# Words of a rank, each in a separate cache line. Only the rank writes them, except
# ABORT, which any rank may set.
STARTED, FINISHED, BEAT, ABORT = 0, 8, 16, 24
WORDS = 32
_WORDS_BYTES = WORDS * 8


class RunState(Memory):
    """One symmetric block, which grows when dims need more; implements `Memory`.

    Epoch e counts in event area e % 2. A rank clears its other area, for epoch e + 1,
    before it publishes its start of e: all notifications of e - 1 have arrived by then,
    and those of e + 1 come only after its start of e + 1."""

    def __init__(self, plan: Plan, world: World):
        self._plan, self._world = plan, world
        self._block: SymmetricMemory | None = None
        self._capacity = Capacity()
        self._words: dict[int, Array] = {}
        """Of near ranks."""
        self._offsets: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._symmetric: list[dict[str, Array]] = []
        self.own_arrays: dict[str, Array] = {}
        """This rank's arrays of the caller, and local tensors, by name."""
        self.epoch = 0
        self._hosts = world.hosts
        self._far = FarRun(world, self._arrive, self._end_near)

    # ----------------------------------------------------------- the life of a block

    def prepare(self, dims: Mapping[str, int], env: Mapping[str, Any]) -> None:
        """Lay out this shape, in a larger block if necessary.

        Collective, with the same dims on every rank; the last run has ended on all."""
        memory, graph = plan_memory(self._plan, dims), self._plan.graph
        if self._block is None or not self._capacity.holds(memory):
            self._allocate(self._capacity.grown(memory))
        assert self._block is not None
        self._offsets = {
            events.name: (memory.event_bases[events.name], shape_of(events, env))
            for events in graph.events
        }
        self._symmetric = []
        for peer in self._block.peers:
            arrays = {}
            # Flagged tensors are as others here: their events are counted.
            after = {n: memory.symmetric_bytes + at for n, at in memory.flagged.items()}
            for name, offset in {**memory.symmetric, **after}.items():
                tensor = graph.tensor(name)
                shape, dtype = shape_of(tensor, env), numpy_dtype(tensor.dtype)
                start = self._events_end + offset
                stop = start + prod(shape) * dtype.itemsize
                if peer is not None:
                    arrays[name] = peer[start:stop].view(dtype).reshape(shape)
            self._symmetric.append(arrays)

    def start(self) -> None:
        """Start the next epoch on this rank."""
        self.epoch += 1
        self._area(self._world.rank, self.epoch + 1)[:] = 0
        self._words[self._world.rank][STARTED] = self.epoch
        self._far.start(self.epoch)

    def reset(self) -> None:
        """Return to epoch 0 after a failed run. Every rank calls it, between runs and
        between two barriers of all ranks."""
        assert self._block is not None
        self._block.local[: self._events_end] = 0
        self.epoch = 0
        self._far.reset()

    def forget_arguments(self) -> None:
        """Keep only the local tensors: a program does not own its caller's arrays."""
        names = {t.name for t in self._plan.graph.tensors if t.kind == "local"}
        self.own_arrays = {
            name: a for name, a in self.own_arrays.items() if name in names
        }

    def free(self) -> None:
        """Free the block. Collective."""
        if self._block is not None:
            # No array over the block may outlive it.
            self._words, self._symmetric = {}, []
            self._block.free()
            self._block = None
            self._capacity = Capacity()

    # --------------------------------------------------------------- access by workers

    def array(self, name: str, rank: int) -> Array:
        shared = self._symmetric[rank].get(name)
        return self.own_arrays[name] if shared is None else shared

    def have(self, element: Element) -> int:
        area = self._area(element.rank, self.epoch)
        return int(area[self._cell(element)].sum())

    def counts(self, name: str, rank: int) -> Array:
        first, shape = self._offsets[name]
        cells = self._area(rank, self.epoch)[first : first + prod(shape)]
        sums: Array = cells.sum(axis=1).reshape(shape)
        return sums

    def notify(self, element: Element) -> None:
        area = self._area(element.rank, self.epoch)
        area[self._cell(element), self._hosts.local_rank] += 1

    def awaited(self, task: Task) -> set[int]:
        """Near ranks: a far one keeps messages until it has started their epoch."""
        return task.peers & set(self._hosts.near)

    def started(self, rank: int) -> int:
        return int(self._words[rank][STARTED])

    def is_far(self, rank: int) -> bool:
        return not self._hosts.is_near(rank)

    def far_put(self, access: ArrayAccess, data: Array, element: Element) -> None:
        self._far.put(access, data, element)

    def _arrive(self, put: Put) -> None:
        """Copy what a far rank has sent into this rank's memory, then notify."""
        view = self.array(put.name, self._world.rank)[(*put.index, ...)]
        view[...] = np.frombuffer(put.data, view.dtype).reshape(view.shape)
        self.notify(put.element)

    # ----------------------------------------------- the end of a run, on every rank

    def beat(self) -> None:
        """Publish that this rank makes progress."""
        self._words[self._world.rank][BEAT] += 1

    def beats(self) -> int:
        """A number that changes while any rank makes progress."""
        near = sum(int(words[BEAT]) for words in self._words.values())
        return near + self._far.beats(near, self._world.settings.wait_limit)

    def finish(self) -> None:
        """This rank has finished the epoch."""
        self._words[self._world.rank][FINISHED] = self.epoch

    def finished(self, rank: int) -> bool:
        """Whether `rank` has finished the epoch, or all of the host of a far rank."""
        if self.is_far(rank):
            return self._far.has_finished(self._hosts.host(rank))
        return int(self._words[rank][FINISHED]) >= self.epoch

    def all_finished(self) -> bool:
        """Whether all ranks have finished. Takes the messages of far ranks before."""
        self._far.receive()
        if not all(map(self.finished, self._hosts.near)):
            return False
        self._far.finish()
        return self._far.all_finished()

    def abort(self) -> None:
        """End the waits of all ranks, in this epoch only."""
        self._end_near()
        self._far.abort()

    def _end_near(self) -> None:
        for words in self._words.values():
            words[ABORT] = self.epoch

    @property
    def aborted(self) -> bool:
        """Whether this epoch was ended on any rank."""
        return int(self._words[self._world.rank][ABORT]) == self.epoch

    # ------------------------------------------------------------------------ layout

    @property
    def _area_bytes(self) -> int:
        return self._capacity.events * self._hosts.local_size * COUNTER.itemsize

    @property
    def _events_end(self) -> int:
        return aligned(_WORDS_BYTES + 2 * self._area_bytes)

    def _allocate(self, capacity: Capacity) -> None:
        if self._block is not None:
            self._world.barrier()
            self.free()
        self._capacity = capacity
        size = capacity.symmetric + capacity.flagged
        self._block = self._world.allocate(self._events_end + size)
        peers = self._block.peers
        self._words = {
            rank: peers[rank][:_WORDS_BYTES].view(np.int64) for rank in self._hosts.near
        }
        self.epoch = 0
        self._far.open(self._block.number)

    def _area(self, rank: int, epoch: int) -> Array:
        """[cells, near rank that notifies] of one of the two event areas on `rank`."""
        assert self._block is not None
        start = _WORDS_BYTES + epoch % 2 * self._area_bytes
        area: Array = self._block.peers[rank][start : start + self._area_bytes]
        return area.view(COUNTER).reshape(-1, self._hosts.local_size)

    def _cell(self, element: Element) -> int:
        first, shape = self._offsets[element.name]
        cell = 0
        for i, extent in zip(element.index, shape, strict=True):
            cell = cell * extent + i
        return first + cell
