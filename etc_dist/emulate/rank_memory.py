"""The memory of all emulated ranks, and the argument blocks that point to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from etc_dist.codegen import Source
from etc_dist.codegen.layout import CONTROL, MAP_BYTES
from etc_dist.emulate.places import Place
from etc_dist.ir import TmaBox
from etc_dist.runtime.argument_block import Places, bind, fill
from etc_dist.runtime.memory_plan import Capacity, aligned, plan_memory
from etc_dist.runtime.tensor_map import axes_of
from etc_dist.schedule import Plan

Array = np.ndarray[Any, Any]
MAP = np.dtype(
    [
        ("pointer", "u8"),
        *((name, "u4") for name in ("itemsize", "axes")),
        *((name, "u4", 3) for name in ("extent", "side")),
        ("pitch", "u8", 3),
    ]
)
"""A tensor map, as `Map` of include/fibers.h."""
WAIT_LIMIT = 300
"""Milliseconds that a wait may last, in the time that scheduler.h counts: the longest
body of a decoder takes more than 100."""


class EmulatedMemory:
    """The memory of all ranks, shared by a program's runs at the same dims, by rank."""

    def __init__(
        self,
        plan: Plan,
        source: Source,
        dims: Sequence[Mapping[str, int]],
        workers: int,
    ):
        self._plan, self._source, self._dims = plan, source, dims
        ranks = range(plan.graph.world_size)
        self._capacity = capacity = Capacity().grown(plan_memory(plan, dims[0]))
        self.control = [np.zeros(1, CONTROL) for _ in ranks]
        for control in self.control:
            control["epoch"] = 1
        self._status = np.zeros(16, np.uint32)
        self._symmetric = [_bytes(capacity.block_bytes) for _ in ranks]
        self._local = [_bytes(capacity.local) for _ in ranks]
        self._scratch = [*self._local]
        self._scratch += [block[capacity.tensors_offset :] for block in self._symmetric]
        self.arrays: list[Array] = [*self.control, self._status, *self._symmetric]
        self.arrays += self._local
        near = plan.graph.local_size
        blocks = [block.ctypes.data for block in self._symmetric]
        self._arguments = [
            fill(
                plan,
                source,
                dims[rank],
                rank,
                capacity,
                Places(
                    peers=[
                        0 if plan.has_far and r // near != rank // near else address
                        for r, address in enumerate(blocks)
                    ],
                    control=self.control[rank].ctypes.data,
                    status=self._status.ctypes.data,
                    local=self._local[rank].ctypes.data,
                    wait_limit=WAIT_LIMIT * 1_000_000,
                ),
                workers,
            )
            for rank in ranks
        ]

    def begin(self) -> None:
        """Fill memory that runs must write before they read it with NaN."""
        for scratch in self._scratch:
            scratch[:] = 0xFF

    def places(self, rank: int, arrays: Mapping[str, Array]) -> Iterator[Place]:
        """The tensors of `rank` in memory, of which `arrays` are the caller's, and its
        other memory."""
        of = f"of rank {rank}"
        for name, array in arrays.items():
            yield Place(
                f"{name} {of}",
                array.ctypes.data,
                array.nbytes,
                array.shape,
                array.itemsize,
            )
        graph, dims = self._plan.graph, self._dims[rank]
        env, block = graph.environment(dims, rank), self._symmetric[rank]
        memory = plan_memory(self._plan, dims)
        tensors_address = block.ctypes.data + self._capacity.tensors_offset
        for begin, offsets in (
            (tensors_address, memory.symmetric),
            (self._local[rank].ctypes.data, memory.local),
        ):
            for name, offset in offsets.items():
                tensor = graph.tensor(name)
                shape = tuple(int(n.evaluate(env)) for n in tensor.shape)
                yield Place(
                    f"{name} {of}",
                    begin + offset,
                    tensor.nbytes(env),
                    shape,
                    tensor.itemsize,
                )
        yield Place(
            f"the events {of}", block.ctypes.data, tensors_address - block.ctypes.data
        )
        control = self.control[rank]
        yield Place(f"the control block {of}", control.ctypes.data, control.nbytes)

    def arguments(self, rank: int, arrays: Mapping[str, Array]) -> Array:
        """The argument block of `rank` for a run on these arrays."""
        block = self._arguments[rank].copy()
        pointers = {name: array.ctypes.data for name, array in arrays.items()}
        dims = self._dims[rank]
        bind(block, self._plan, self._source, pointers, dims, rank, _encode)
        return aligned_copy(np.frombuffer(block.tobytes(), np.uint8))


def aligned_copy(array: Array, unit: int = 1024) -> Array:
    """A contiguous copy whose address is a multiple of `unit`."""
    storage = np.zeros(aligned(array.nbytes, unit) + unit, np.uint8)
    start = -storage.ctypes.data % unit
    bytes_of_copy = storage[start : start + array.nbytes]
    copy = bytes_of_copy.view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _bytes(count: int) -> Array:
    return aligned_copy(np.zeros(max(count, 16), np.uint8))


def _encode(
    pointer: int, shape: Sequence[int], dtype: str, itemsize: int, box: TmaBox
) -> Array:
    tensor_map = np.zeros((), MAP)
    axes = axes_of(shape, itemsize, box)
    tensor_map["pointer"], tensor_map["itemsize"], tensor_map["axes"] = (
        pointer,
        itemsize,
        len(axes),
    )
    assert pointer % 16 == 0, "a tensor that bulk copies cannot read"
    for i, (extent, side, pitch) in enumerate(axes):
        assert side <= 256 and (i == 0 or pitch % 16 == 0), f"box {box} of {shape}"
        tensor_map["extent"][i], tensor_map["side"][i], tensor_map["pitch"][i] = (
            extent,
            side,
            pitch,
        )
    return np.frombuffer(tensor_map.tobytes().ljust(MAP_BYTES, b"\0"), np.uint8)
