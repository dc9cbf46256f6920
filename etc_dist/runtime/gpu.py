"""The GPU backend: one launch of the persistent kernel on every rank.

A program owns, per rank: symmetric blocks (head, event counters, symmetric tensors)
with a control block and local scratch each, and a status word in pinned memory that
the host can read at any time. No call copies, resets or synchronises anything."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from etc_dist.cache import Recent
from etc_dist.codegen import Source
from etc_dist.codegen.cuda import QUIET
from etc_dist.codegen.layout import CONTROL, TRACE_RECORD, TRACE_WARPS
from etc_dist.codegen.names import address_name
from etc_dist.errors import BuildError, WorldError
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.runtime.argument_block import Places, bind, fill
from etc_dist.runtime.arrays import Array
from etc_dist.runtime.build import Cubin
from etc_dist.runtime.device_faults import Record, decode
from etc_dist.runtime.last_run import Executor
from etc_dist.runtime.memory_plan import Capacity, plan_memory
from etc_dist.runtime.occupancy import most_resident, resident_workers
from etc_dist.runtime.program_memory import ProgramMemory
from etc_dist.runtime.stream import order_of
from etc_dist.runtime.tensor_map import encode
from etc_dist.runtime.trace import Trace
from etc_dist.runtime.waiting import failed, wait_for_call, wait_until
from etc_dist.schedule import Plan
from etc_dist.world.gpu_memory import library

if TYPE_CHECKING:
    from etc_dist.world import World

WORKER_THREADS = 384
MAX_DYNAMIC_SHARED_BYTES = 8
"""The driver's number of this function attribute."""
MOST_SHAPES = 4096
"""The number of recent shapes that are kept; fewer runs are ever in flight."""
MOST_TEMPLATES = 256
"""The number of argument blocks that are kept, one for each shape."""
TRACE_CAPACITY = 2048
"""Records of each warp in one traced run."""


Template = tuple[int, np.ndarray[Any, Any]]
"""A shape's number, and the argument block of its runs without the arrays."""


@dataclass(frozen=True)
class Launch:
    """A prepared run: the argument block for given arrays and dims. Valid until the
    program's memory moves (`generation`)."""

    arguments: np.ndarray[Any, Any]
    address: np.ndarray[Any, Any]
    """The address of `arguments`."""
    parameters: int
    """The address of `address`, an argument of the driver's launch."""
    dims: Mapping[str, int]
    shape: int
    """The number of `dims` in the device's fault records."""
    generation: int


class GpuExecutor(Executor):
    """Runs a plan's compiled program on this rank's GPU."""

    def __init__(self, plan: Plan, world: World, source: Source, cubin: Cubin):
        import cupy

        self.plan, self.world, self.source = plan, world, source
        self._cupy = cupy
        self._module, self._function = _load(cupy, source, cubin)
        self._quiet = self._module.get_function(QUIET) if source.has_far else None
        self._is_known = False  # to NVSHMEM
        self._shared = source.shared_bytes
        count = int(cupy.cuda.Device().attributes["MultiProcessorCount"])
        self.workers = resident_workers(
            plan.graph.name,
            multiprocessors=count,
            ranks=world.ranks_per_gpu,
            resident=most_resident(
                self._function.ptr, count, WORKER_THREADS, self._shared
            ),
        )
        pinned = cupy.cuda.alloc_pinned_memory(64)
        self._status = np.frombuffer(pinned, np.uint32, 1)
        self._status[0] = 0
        self._status_pinned = pinned
        self._trace_capacity = TRACE_CAPACITY if source.traced else 0
        num_records = self.workers * TRACE_WARPS * self._trace_capacity
        self._trace = cupy.zeros(max(1, num_records) * TRACE_RECORD.itemsize, np.uint8)
        self._memory = ProgramMemory(world)
        self._dims: Mapping[str, int] = {}
        self._numbers = itertools.count()
        self._shapes: Recent[int, Mapping[str, int]] = Recent(MOST_SHAPES)
        self._templates: Recent[tuple[int, ...], Template] = Recent(MOST_TEMPLATES)
        self._order = order_of(world)
        self._stream: Any = None

    def grow(self, *shapes: Mapping[str, int]) -> None:
        if self._quiet is not None and not self._is_known:
            self.world.agree_done(self._begin_far)
        demand = Capacity()
        for dims in shapes:
            demand = demand.grown(plan_memory(self.plan, dims))
        self.finish()
        self.world.barrier()
        self._templates.clear()
        self._memory.grow(demand, self._make_own)

    def _begin_far(self) -> None:
        """Let the kernel call NVSHMEM. NOTE: not before all ranks have compiled it: one
        that is refused is unloaded without `close`."""
        library().init_module(self._module.ptr)
        self._is_known = True

    def prepare(
        self, arrays: Mapping[str, Array], dims: Mapping[str, int]
    ) -> Launch | None:
        """The argument block of a run. None if the program must `grow` for it, which is
        alike on all ranks. Local."""
        latest = self._memory.latest
        if latest is None or not latest.capacity.holds(plan_memory(self.plan, dims)):
            return None
        shape, template = self._template(dims)
        arguments = template.copy()
        pointers = {name: array.pointer for name, array in arrays.items()}
        rank = self.world.rank
        bind(arguments, self.plan, self.source, pointers, dims, rank, encode)
        address = np.array([arguments.ctypes.data], np.uintp)
        generation = self._memory.generation
        return Launch(arguments, address, address.ctypes.data, dims, shape, generation)

    def is_current(self, launch: Launch) -> bool:
        memory = self._memory
        return launch.generation == memory.generation and memory.latest is not None

    def launch(self, launch: Launch, stream: Any = None) -> None:
        """Enqueue the run on `stream` or on CuPy's current one, after all earlier runs
        of this world on any stream."""
        try:
            current = stream
            if stream is None:
                current = self._cupy.cuda.get_current_stream()
            if current.is_capturing():
                assert self._memory.latest is not None
                self._memory.latest.is_captured = True
                self._enqueue(launch, current)
            else:
                self._order.enter(current)
                self._enqueue(launch, current)
                self._order.leave(current)
                self._stream = current
        except Exception as error:
            raise self._break_world("a run was not launched", error) from error

    def _enqueue(self, launch: Launch, stream: Any) -> None:
        self._dims = launch.dims
        self._shapes.put(launch.shape, launch.dims)
        # NOTE: the driver call itself; CuPy's wrapper takes microseconds, and unpacked
        # tuples would take a third of one.
        self._cupy.cuda.driver.launchKernel(
            self._function.ptr,
            self.workers,
            1,
            1,
            WORKER_THREADS,
            1,
            1,
            self._shared,
            stream.ptr,
            launch.parameters,
            0,
        )

    @cached_property
    def _gpu(self) -> str:
        return f"GPU {self.world.device} of rank {self.world.rank}"

    def _break_world(self, step: str, error: Exception) -> WorldError:
        """The error for a failed GPU. Leaves the world: peers cannot run without it."""
        fault = failed(self._gpu, step, error)
        self.world.leave(fault.what)
        return fault

    def failure(self) -> list[Record] | None:
        """This rank's fault records, if a run on it has been ended, else None."""
        if not self._status[0]:
            return None
        self.finish()  # the status is set before all workers have ended
        records: list[Record] = []
        for memory in self._memory:
            control = memory.control.get().view(CONTROL)[0]
            dims = self._shapes.get(int(control["shape"]))
            # There are no dims for a replay of a graph that was captured long ago.
            if control["faults"] and dims is not None:
                rank = self.world.rank
                records += decode(self.plan, control, dims, rank, self.workers)
        return records

    def loaded(
        self, launch: Launch, names: Sequence[str]
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Copies of these inputs, states and local tensors after a run."""
        runtime, arrays = self._cupy.cuda.runtime, {}
        env = self.plan.graph.environment(launch.dims, self.world.rank)
        for name in names:
            tensor = self.plan.graph.tensor(name)
            shape = [int(n.evaluate(env)) for n in tensor.shape]
            array = np.empty(shape, numpy_dtype(tensor.dtype))
            place = int(launch.arguments[address_name(name)])
            to_host = runtime.memcpyDeviceToHost
            runtime.memcpy(array.ctypes.data, place, array.nbytes, to_host)
            arrays[name] = array
        return arrays

    def reset(self) -> None:
        """Clear the state of a failed run and restart at epoch 1. All ranks call it
        between two barriers, with no run in flight."""
        if self._quiet is not None and self._memory.latest is not None:
            # Messages of a failed run may still be on their way.
            self._quiet((1,), (1,), ())
            self.finish()
            self.world.barrier()
        self._status[0] = 0
        for memory in self._memory:
            memory.control.set(_first_control())
            memory.block.local[: memory.capacity.tensors_offset].fill(0)
        self.finish()

    @property
    def is_captured(self) -> bool:
        return self._memory.is_captured

    def show(self) -> str:
        return self._memory.show()

    def recover(self) -> None:
        self.finish()
        self._order.forget()
        self.reset()

    def synchronize(self) -> None:
        """Wait for the last run, on the stream that it was launched on."""
        stream = self._stream
        if stream is not None:
            self._wait(wait_until, partial(self._order.is_done, stream))

    def finish(self) -> None:
        """Wait for all work of this GPU, replayed graphs included."""

        def finish_device() -> None:
            with self._cupy.cuda.Device(self.world.device):
                self._cupy.cuda.runtime.deviceSynchronize()

        self._wait(wait_for_call, finish_device)

    def _wait(self, wait: Callable[[Any, float, str], None], what: Any) -> None:
        try:
            wait(what, self.world.settings.world_limit, self._gpu)
        except WorldError as error:
            self.world.leave(error.what)
            raise
        except Exception as error:
            raise self._break_world("its work did not end", error) from error

    def trace(self) -> Trace:
        """The timeline of the last run on this rank (needs settings.trace)."""
        self.finish()
        records = self._trace.get().view(TRACE_RECORD)
        per_warp = records.reshape(self.workers, TRACE_WARPS, -1)
        return Trace.from_gpu(self.plan, self._dims, self.world.rank, per_warp)

    def close(self) -> None:
        """Free the memory. Collective, idempotent; does nothing on a broken world."""
        if self.world.broken:
            return
        if list(self._memory):
            self.finish()
        self._memory.close()
        if self._is_known:
            library().end_module(self._module.ptr)
            self._is_known = False

    def symmetric(self, name: str) -> Any:
        latest = self._memory.latest
        assert latest is not None
        memory = plan_memory(self.plan, self._dims)
        start = latest.capacity.tensors_offset + memory.symmetric[name]
        tensor = self.plan.graph.tensor(name)
        env = self.plan.graph.environment(self._dims, self.world.rank)
        return latest.block.local[start : start + tensor.nbytes(env)]

    def _template(self, dims: Mapping[str, int]) -> Template:
        key = tuple(dims.values())
        template = self._templates.get(key)
        if template is None:
            # NOTE: numbers are not reused, as older launches may still run.
            number = next(self._numbers)
            template = number, self._fill(dims, number)
            self._templates.put(key, template)
        return template

    def _make_own(self, capacity: Capacity) -> tuple[Any, Any]:
        """A control block, and local scratch."""
        empty = self._cupy.empty
        control = empty(CONTROL.itemsize, np.uint8)
        control.set(_first_control())
        local = empty(max(16, capacity.local), np.uint8)
        self.finish()
        return control, local

    def _fill(self, dims: Mapping[str, int], number: int) -> np.ndarray[Any, Any]:
        latest = self._memory.latest
        assert latest is not None
        places = Places(
            peers=latest.block.addresses,
            control=latest.control.data.ptr,
            status=self._status_pinned.ptr,
            local=latest.local.data.ptr,
            wait_limit=int(self.world.settings.wait_limit * 1e9),
            trace=self._trace.data.ptr,
            trace_capacity=self._trace_capacity,
        )
        return fill(
            self.plan,
            self.source,
            dims,
            self.world.rank,
            latest.capacity,
            places,
            self.workers,
            number,
        )


def _first_control() -> np.ndarray[Any, Any]:
    """The bytes of a control block before the first run."""
    control = np.zeros(1, CONTROL)
    control["epoch"] = 1
    return control.view(np.uint8)


def _load(cupy: Any, source: Source, cubin: Cubin) -> tuple[Any, Any]:
    """The module, and the kernel as CuPy's Function, which keeps it loaded."""
    try:
        # From memory, so that the verified bytes are loaded.
        module = cupy.cuda.Module()
        module.load(cubin.code)
        function = module.get_function(source.entry)
        cupy.cuda.driver.funcSetAttribute(
            function.ptr, MAX_DYNAMIC_SHARED_BYTES, source.shared_bytes
        )
        return module, function
    except Exception as error:
        raise BuildError(
            "the compiled program does not load",
            where=source.title,
            wanted="an sm_90 GPU (H100, H200) and a driver for CUDA 12.8 or newer",
            got=str(error),
            fix="run `etc-dist doctor`",
            source=source.text,
        ) from error
