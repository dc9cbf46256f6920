"""Where a benchmark runs: arrays, the unfused steps and the clock of one rank."""

from __future__ import annotations

import os
import platform
import subprocess
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from etc_dist.ops.operation import Operation
from etc_dist.world import World

Call = Callable[[], Any]
SLEEP_NS = 2_000_000
"""Device sleep before a timed call: hides the host's launches, lets the chip cool."""
DTYPES: Mapping[str, Any] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
}

SWIGLU = """
struct alignas(16) Eight { T of[8]; };
const long long row = i / width, column = i - row * width;
const Eight* line = reinterpret_cast<const Eight*>(&product[0]) + row * 2 * width;
const Eight gate = line[column], up = line[column + width];
Eight y;
for (int j = 0; j < 8; ++j) {
    const float g = static_cast<float>(gate.of[j]);
    y.of[j] = static_cast<T>(g / (1 + expf(-g)) * static_cast<float>(up.of[j]));
}
reinterpret_cast<Eight*>(&out[0])[i] = y;
"""


class Device(ABC):
    """One rank's arrays and clock. `xp` is the array library: CuPy or NumPy.

    The steps `matmul`, `swiglu`, `reduce_scatter` and `all_gather` are made ready once
    and called often; on a GPU, a call only enqueues them.
    """

    xp: Any
    world: World
    baseline_dtype: str | None
    """What the baseline computes in; None: the dtype of the inputs."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self.xp.empty(shape, DTYPES[dtype])

    def random(self, shape: tuple[int, ...], dtype: str, name: str) -> Any:
        """Normal numbers of deviation 0.1, other ones for each name and rank."""
        seed = zlib.crc32(f"{name} of rank {self.world.rank}".encode())
        return self.normal(shape, seed).astype(DTYPES[dtype])

    def convert(self, array: Any, dtype: str | None) -> Any:
        """`array` in another dtype; the same array where it has it already."""
        return array if dtype is None else array.astype(DTYPES[dtype], copy=False)

    def transpose(self, array: Any) -> Any:
        """A contiguous transposed copy."""
        bits = self.xp.ascontiguousarray(array.view(np.uint16).T)
        return bits.view(array.dtype)

    def poison(self, array: Any) -> None:
        """Fill with 0xFF bytes: NaN, whatever the floating dtype."""
        array.view(np.uint8).fill(0xFF)

    def differs(self, a: Any, b: Any) -> Any:
        """Whether any bit of two 16-bit arrays differs: a bool on the device."""
        return (a.view(np.uint16) != b.view(np.uint16)).any()

    def squares(self, array: Any, reference: Any) -> tuple[float, float]:
        """(squared error, squared norm) of an array against its fp32 reference."""
        error = array.astype(np.float32) - reference
        total = (error * error).sum(dtype=np.float64)
        return float(total), float((reference * reference).sum(dtype=np.float64))

    @abstractmethod
    def normal(self, shape: tuple[int, ...], seed: int) -> Any: ...

    @abstractmethod
    def matmul(self, x: Any, w: Any, out: Any) -> Call:
        """out = x @ w.T"""

    @abstractmethod
    def swiglu(self, product: Any, out: Any) -> Call:
        """out [m, n] = silu(left half) * right half of product [m, 2n]."""

    @abstractmethod
    def reduce_scatter(self, source: Any, out: Any) -> Call:
        """out = this rank's rows of the sum over ranks of source."""

    @abstractmethod
    def all_gather(self, source: Any, out: Any) -> Call:
        """out = the rows of all ranks' source, in rank order."""

    @abstractmethod
    def all_to_all(
        self, source: Any, out: Any, sent: Sequence[int], received: Sequence[int]
    ) -> Call:
        """Rows of source to each rank, by rank, and rows of out from each rank."""

    @abstractmethod
    def from_torch(self, tensor: Any) -> Any:
        """The memory of a contiguous torch tensor as an array of `xp`."""

    @abstractmethod
    def time(self, call: Call) -> float:
        """Milliseconds that one call takes, all ranks starting together."""

    @abstractmethod
    def synchronize(self) -> None: ...

    @abstractmethod
    def poison_staging(self, operation: Operation) -> None:
        """Fill the symmetric tensors of the operation's last shape with 0xFF bytes."""

    @abstractmethod
    def libraries(self) -> Mapping[str, Callable[[Any], Any]]:
        """Array libraries whose host cost is measured, each with a way to get there."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """device, driver, cuda and baseline, for the records."""


class Gpu(Device):
    """This rank's GPU: CuPy arrays, cuBLAS and NCCL, on CuPy's current stream."""

    baseline_dtype = None

    def __init__(self, world: World):
        # NOTE: NCCL and CuPy read these when they are first used.
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        os.environ["CUPY_TF32"] = "0"
        import cupy
        from cupy.cuda import nccl

        self.xp, self.world, self._nccl = cupy, world, nccl
        self._id = int(cupy.cuda.Device().id)
        self._torch = find_torch(self._id)
        code = (Path(__file__).parent / "device.cu").read_text()
        self._sleep = cupy.RawKernel(code, "sleep_ns")
        self._normal = cupy.RawKernel(code, "normal")
        self._start, self._end = cupy.cuda.Event(), cupy.cuda.Event()

    @cached_property
    def _comm(self) -> Any:
        """NCCL's communicator, made by the first step that needs it: NCCL refuses ranks
        that share a GPU."""
        world, nccl = self.world, self._nccl
        unique = world.gather(nccl.get_unique_id() if world.rank == 0 else None)[0]
        return nccl.NcclCommunicator(world.size, unique, world.rank)

    @cached_property
    def _meet(self) -> Call:
        """A barrier of the ranks in stream order: an all-reduce of next to nothing."""
        return self._all_reduce(*self.xp.zeros((2, 8), np.float32))

    def normal(self, shape: tuple[int, ...], seed: int) -> Any:
        array = self.xp.empty(shape, np.float32)
        arguments = (array, np.uint64(array.size), np.uint64(seed))
        self._normal((-(-array.size // 256),), (256,), arguments)
        return array

    def matmul(self, x: Any, w: Any, out: Any) -> Call:
        if self._torch is None:
            return lambda: self.xp.matmul(x, w.T, out=out)
        a, b, c = map(self.as_torch, (x, w.T, out))
        return lambda: self._torch.matmul(a, b, out=c)

    def swiglu(self, product: Any, out: Any) -> Call:
        # NOTE: one kernel, 8 elements a thread: PyTorch would take two, and leave the
        # baseline slower than it need be.
        kernel = self.xp.ElementwiseKernel(
            "raw T product, int64 width", "raw T out", SWIGLU, "swiglu"
        )
        eighths = out.size // 8
        return lambda: kernel(product, out.shape[1] // 8, out, size=eighths)

    def reduce_scatter(self, source: Any, out: Any) -> Call:
        a, b, dtype = source.data.ptr, out.data.ptr, self._nccl_dtype(source)
        add, stream = self._nccl.NCCL_SUM, self._stream()
        return lambda: self._comm.reduceScatter(a, b, out.size, dtype, add, stream)

    def all_gather(self, source: Any, out: Any) -> Call:
        a, b, dtype = source.data.ptr, out.data.ptr, self._nccl_dtype(source)
        stream = self._stream()
        return lambda: self._comm.allGather(a, b, source.size, dtype, stream)

    def all_to_all(
        self, source: Any, out: Any, sent: Sequence[int], received: Sequence[int]
    ) -> Call:
        stream, dtype = self._stream(), self._nccl_dtype(source)
        width = source.size // max(1, len(source))

        def call() -> None:
            self._nccl.groupStart()
            for array, counts, move in (
                (source, sent, self._comm.send),
                (out, received, self._comm.recv),
            ):
                place = array.data.ptr
                for peer, count in enumerate(counts):
                    if count:
                        move(place, count * width, dtype, peer, stream)
                    place += count * width * array.itemsize
            self._nccl.groupEnd()

        return call

    def from_torch(self, tensor: Any) -> Any:
        assert tensor.is_contiguous()
        name = str(tensor.dtype).removeprefix("torch.")
        place = tensor.data_ptr(), tensor.nbytes, tensor
        memory = self.xp.cuda.MemoryPointer(self.xp.cuda.UnownedMemory(*place), 0)
        dtype = DTYPES.get(name, name)
        return self.xp.ndarray(tuple(tensor.shape), dtype, memory)

    def time(self, call: Call) -> float:
        self.world.barrier()
        self._sleep((1,), (1,), (np.uint64(SLEEP_NS),))
        self._meet()
        self._start.record()
        call()
        self._end.record()
        self._end.synchronize()
        return float(self.xp.cuda.get_elapsed_time(self._start, self._end))

    def synchronize(self) -> None:
        self.xp.cuda.runtime.deviceSynchronize()

    def poison_staging(self, operation: Operation) -> None:
        program = operation.program
        for tensor in program.plan.graph.tensors:
            if tensor.kind == "symmetric":
                program.symmetric(tensor.name).fill(0xFF)

    def libraries(self) -> Mapping[str, Callable[[Any], Any]]:
        found: dict[str, Callable[[Any], Any]] = {"cupy": lambda array: array}
        if self._torch is not None:
            found["torch"] = self.as_torch
        return found

    def as_torch(self, array: Any) -> Any:
        """The same memory as a torch tensor; contiguous, or the transpose of such."""
        if not array.flags.c_contiguous:
            return self.as_torch(array.T).t()
        # NOTE: `__cuda_array_interface__` has no bfloat16, so the bits go over.
        bits = array.view(np.int16 if array.itemsize == 2 else np.int32)
        tensor = self._torch.as_tensor(bits, device=f"cuda:{self._id}")
        assert tensor.data_ptr() == array.data.ptr, "torch copied a CuPy array"
        return tensor.view(getattr(self._torch, array.dtype.name))

    def facts(self) -> dict[str, Any]:
        cuda = self.xp.cuda.runtime
        properties = cuda.getDeviceProperties(self._id)
        number = self._nccl.get_version()
        version = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
        library = "cupy" if self._torch is None else "torch"
        used = import_module(library).__version__
        runtime = cuda.runtimeGetVersion()
        return {
            "device": properties["name"].decode(),
            "driver": driver_version(),
            "cuda": f"{runtime // 1000}.{runtime % 1000 // 10}",
            "baseline": f"cuBLAS by {library} {used}, NCCL {version} without NVLS",
        }

    def _all_reduce(self, source: Any, out: Any) -> Call:
        a, b, dtype = source.data.ptr, out.data.ptr, self._nccl_dtype(source)
        add, stream = self._nccl.NCCL_SUM, self._stream()
        return lambda: self._comm.allReduce(a, b, source.size, dtype, add, stream)

    def _stream(self) -> int:
        return int(self.xp.cuda.get_current_stream().ptr)

    def _nccl_dtype(self, array: Any) -> int:
        return int(getattr(self._nccl, f"NCCL_{array.dtype.name.upper()}"))


class Cpu(Device):
    """This rank's share of the CPU: NumPy and MPI, in fp32. No performance path."""

    xp = np
    baseline_dtype = "float32"

    def __init__(self, world: World):
        from mpi4py import MPI

        self.world, self._mpi, self._comm = world, MPI, MPI.COMM_WORLD

    def normal(self, shape: tuple[int, ...], seed: int) -> Any:
        rng = np.random.default_rng(seed)
        return rng.standard_normal(shape, np.float32) * np.float32(0.1)

    def matmul(self, x: Any, w: Any, out: Any) -> Call:
        return lambda: np.matmul(x, w.T, out=out)

    def swiglu(self, product: Any, out: Any) -> Call:
        left, right = np.split(product, 2, axis=1)

        def call() -> None:
            gate = left.astype(np.float32)
            out[...] = gate / (1 + np.exp(-gate)) * right.astype(np.float32)

        return call

    def reduce_scatter(self, source: Any, out: Any) -> Call:
        return lambda: self._comm.Reduce_scatter_block(source, out, self._mpi.SUM)

    def all_gather(self, source: Any, out: Any) -> Call:
        return lambda: self._comm.Allgather(source, out)

    def all_to_all(
        self, source: Any, out: Any, sent: Sequence[int], received: Sequence[int]
    ) -> Call:
        width = source[:1].nbytes
        bytes_ = ([count * width for count in counts] for counts in (sent, received))
        pairs = zip((source, out), bytes_, strict=True)
        buffers = [[array.view(np.uint8), count] for array, count in pairs]
        return lambda: self._comm.Alltoallv(*buffers)

    def from_torch(self, tensor: Any) -> Any:
        # NumPy has no bfloat16: the bits will do where they are only moved.
        if tensor.dtype.itemsize == 2:
            tensor = tensor.view(import_module("torch").int16)
        return tensor.numpy()

    def time(self, call: Call) -> float:
        self.world.barrier()
        started = time.perf_counter()
        call()
        return (time.perf_counter() - started) * 1e3

    def synchronize(self) -> None:
        """Every call has ended when it returns."""

    def poison_staging(self, operation: Operation) -> None:
        """The CPU backend does so before every run."""

    def libraries(self) -> Mapping[str, Callable[[Any], Any]]:
        return {}

    def facts(self) -> dict[str, Any]:
        return {
            "device": platform.processor() or platform.machine(),
            "driver": "none",
            "cuda": "none",
            "baseline": f"numpy {np.__version__} and MPI, in fp32",
        }


def open_device(world: World) -> Device:
    """This rank's device on the backend of `world`. Collective."""
    return Gpu(world) if world.backend == "cuda" else Cpu(world)


def find_torch(device: int) -> Any:
    """torch bound to a CUDA device, with exact fp32; None where it is not installed."""
    try:
        torch = import_module("torch")
    except ImportError:
        return None
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("highest")
    return torch


def driver_version() -> str:
    """The NVIDIA driver's version, for example "580.159.03"."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        return text.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"
