"""The arrays of one rank; on GPUs also the unfused steps and timing."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np

from etc_dist.functions.scaled_weights import BLOCK, E4M3
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.ops.operation import Operation
from etc_dist.program import symmetric_bytes
from etc_dist.runtime.stream import stream_for
from etc_dist.world import World

Call = Callable[[], Any]
SLEEP_NS = 2_000_000
"""Device sleep before a timed call: hides launch latency and lets the GPU cool."""
WARM_UP = 4
"""Calls before the timed ones."""
REPEATS = 9
"""Of which the fastest is a device's rate."""
MEMORY_BYTES_PER_S = 4.3e12
"""An H200's highest rate of reads from its memory (nominally 4.8 TB/s)."""
FLOP_PER_S = 780e12
"""Its tensor cores' highest rate in bfloat16 (nominally 989 TFLOP/s)."""
DTYPES: Mapping[str, Any] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
}

NAN_CODE = 0x7F
"""The code of float8 of what is not a number, without its sign."""
NUMBERS = np.arange(256).astype(np.uint8).view(numpy_dtype(E4M3)).astype(np.float32)
"""Of the codes of float8."""
SWIGLU = """
struct alignas(16) Eight { T of[8]; };
const long long row = i / width, column = i - row * width;
const Eight* line = reinterpret_cast<const Eight*>(&gate_up[0]) + row * 2 * width;
const Eight gate = line[column], up = line[column + width];
Eight y;
for (int j = 0; j < 8; ++j) {
    const float g = static_cast<float>(gate.of[j]);
    y.of[j] = static_cast<T>(g / (1 + expf(-g)) * static_cast<float>(up.of[j]));
}
reinterpret_cast<Eight*>(&out[0])[i] = y;
"""
MARK = "if (a != b) flags[number] = 1;"


def roofline_ms(moved: float, flops: float, rates: tuple[float, float]) -> float:
    """The longer time: moving bytes, or computing. rates: as `Gpu.rates`."""
    bytes_per_s, flop_per_s = rates
    return 1e3 * max(moved / bytes_per_s, flops / flop_per_s)


class Device:
    """One rank's arrays. `xp` is the array library: NumPy here, CuPy on GPUs.

    The CPU backend checks results and measures nothing."""

    xp: Any = np

    def __init__(self, world: World):
        self.world = world

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self.xp.empty(shape, DTYPES[dtype])

    def random(
        self, shape: tuple[int, ...], dtype: str, name: str, deviation: float = 0.1
    ) -> Any:
        """Normal numbers, different for each name."""
        array = self.normal(self.xp.empty(shape, np.float32), seed_of(name))
        array *= np.float32(deviation)
        return array.astype(DTYPES[dtype], copy=False)

    def random_codes(self, shape: tuple[int, int], name: str) -> Any:
        """Codes of float8 as uint8: all numbers about equally often, no NaN."""
        # The last bits of random numbers.
        drawn = self.random(shape, "float32", name).view(np.uint8)[:, ::4]
        codes = self.xp.ascontiguousarray(drawn)
        codes -= (codes & NAN_CODE == NAN_CODE).astype(np.uint8)
        return codes

    def transposed(self, array: Any) -> Any:
        """A transposed view of new memory, with the elements of a 16-bit matrix."""
        # NOTE: CuPy copies no strided arrays of bfloat16: take the bits.
        bits = self.xp.ascontiguousarray(array.view(np.uint16).T)
        return bits.view(array.dtype).T

    def poison(self, array: Any) -> None:
        """Fill with 0xFF bytes: NaN in every floating dtype."""
        array.view(np.uint8).fill(0xFF)

    def differs(self, a: Any, b: Any) -> Any:
        """Whether any bit of two 16-bit arrays differs: a bool on the device."""
        return (a.view(np.uint16) != b.view(np.uint16)).any()

    def mark(self, flags: Any, number: int, a: Any, b: Any) -> None:
        """flags[number] = 1 if a bit of two 16-bit arrays differs, without waiting for
        the device or allocating its memory. flags: int8."""
        flags[number] |= self.differs(a, b)

    def relative_error(self, outs: Sequence[Any], references: Sequence[Any]) -> float:
        """The relative Frobenius norm over all arrays and ranks against fp32
        references; NaN if any element is. Collective."""
        squares = np.zeros(2)
        for out, reference in zip(outs, references, strict=True):
            for sum_idx, array in enumerate((wide(out) - reference, reference)):
                squares[sum_idx] += float((array * array).sum(dtype=np.float64))
        error, norm = np.sum(cast(list[Any], self.world.gather(squares)), axis=0)
        return float(np.sqrt(error / norm))

    def normal(self, array: Any, seed: int) -> Any:
        """Fill an fp32 array with normal numbers of deviation 1, and return it."""
        np.random.default_rng(seed).standard_normal(dtype=np.float32, out=array)
        return array

    def on_host(self, array: Any) -> Any:
        """A copy of an array in NumPy."""
        return np.array(array)

    def release(self) -> None:
        """Give memory that is not in use back to the device."""

    def synchronize(self) -> None:
        """Wait for the device; a call on the CPU backend has ended when it returns."""

    def host_us(self, call: Call, rounds: int, calls: int, waits: bool = False) -> Any:
        """Microseconds of a call by the host's clock, the slowest rank's, of each
        round of `calls` in a row. waits: for the device at the end of a round."""
        times = []
        for _ in range(rounds):
            self.synchronize()
            self.world.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            if waits:
                self.synchronize()
            times.append((time.perf_counter() - start) / calls * 1e6)
        return np.max(cast(list[Any], self.world.gather(times)), axis=0)

    def poison_staging(self, operation: Operation) -> None:
        """Fill the symmetric tensors of the operation's last shape with 0xFF bytes; the
        CPU backend does so before every run."""


class Gpu(Device):
    """This rank's GPU: CuPy arrays, cuBLAS and NCCL, on CuPy's current stream."""

    def __init__(self, world: World):
        # NOTE: NCCL, CuPy and torch.compile read these at their first use.
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        os.environ["CUPY_TF32"] = "0"
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no processes for one kernel
        import cupy
        from cupy.cuda import nccl

        super().__init__(world)
        self.xp, self._nccl = cupy, nccl
        self._id = int(cupy.cuda.Device().id)
        self.torch = find_torch(self._id)
        code = (Path(__file__).parent / "device.cu").read_text()
        self._sleep = cupy.RawKernel(code, "sleep_ns")
        self._normal = cupy.RawKernel(code, "normal")
        self._read = cupy.RawKernel(code, "read_all")
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
        """A barrier of the ranks in stream order: a tiny all-reduce."""
        return self._all_reduce(*self.xp.zeros((2, 8), np.float32))

    def normal(self, array: Any, seed: int) -> Any:
        arguments = (array, np.uint64(array.size), np.uint64(seed))
        self._normal((-(-array.size // 256),), (256,), arguments)
        return array

    def matmul(self, x: Any, w: Any, out: Any) -> Call:
        """out = x @ w.T"""
        if self.torch is None:
            return lambda: self.xp.matmul(x, w.T, out=out)
        a, b, c = map(self.as_torch, (x, w.T, out))
        return lambda: self.torch.matmul(a, b, out=c)

    @cached_property
    def _mark(self) -> Any:
        return self.xp.ElementwiseKernel(
            "uint16 a, uint16 b, int64 number", "raw int8 flags", MARK, "mark"
        )

    def mark(self, flags: Any, number: int, a: Any, b: Any) -> None:
        self._mark(a.view(np.uint16), b.view(np.uint16), number, flags)

    @cached_property
    def _swiglu(self) -> Any:
        # NOTE: one kernel, 8 elements per thread: PyTorch needs two, which would slow
        # the baseline down.
        return self.xp.ElementwiseKernel(
            "raw T gate_up, int64 width", "raw T out", SWIGLU, "swiglu"
        )

    def swiglu(self, gate_up: Any, out: Any) -> Call:
        """out [m, n] = silu(left half) * right half of gate_up [m, 2n]."""
        width, size = out.shape[1] // 8, out.size // 8
        return partial(self._swiglu, gate_up, width, out, size=size)

    def compiled_swiglu(self, gate_and_up: Any, out: Any) -> Call:
        """`swiglu` by torch.compile, for these sizes."""
        torch = self.torch
        torch.compiler.reset()  # NOTE: it compiles only for a few sizes

        def swiglu(gate_and_up: Any, out: Any) -> None:
            gate, up = gate_and_up.chunk(2, dim=1)
            out.copy_(torch.nn.functional.silu(gate) * up)

        compiled = torch.compile(swiglu, fullgraph=True, dynamic=False)
        return partial(compiled, self.as_torch(gate_and_up), self.as_torch(out))

    def reduce_scatter(self, source: Any, out: Any) -> Call:
        """out = this rank's rows of the sum over ranks of source."""
        a, b, dtype = source.data.ptr, out.data.ptr, self._nccl_dtype(source)
        add, stream = self._nccl.NCCL_SUM, self._stream()
        return lambda: self._comm.reduceScatter(a, b, out.size, dtype, add, stream)

    def all_gather(self, source: Any, out: Any) -> Call:
        """out = the rows of all ranks' source, in rank order."""
        a, b, dtype = source.data.ptr, out.data.ptr, self._nccl_dtype(source)
        stream = self._stream()
        return lambda: self._comm.allGather(a, b, source.size, dtype, stream)

    def all_reduces(self, dtype: str) -> tuple[str, ...]:
        """The names of the all-reduces of other libraries. Torch's have no float16."""
        has_own = self.torch is not None and dtype == "bfloat16"
        return ("nccl", *(("one_shot", "two_shot") if has_own else ()))

    def all_reduce_of(
        self, name: str, shape: tuple[int, ...], dtype: str
    ) -> tuple[Any, Callable[[Any], Call]]:
        """Memory for this rank's part, and for an output the call of one of
        `all_reduces`, which fills it with the sum over ranks. Collective.

        The two-shot one of torch 2.11 also overwrites a share of the rank's part by
        the sum, so that it must be filled anew before each call."""
        if name == "nccl":
            source = self.empty(shape, dtype)
            return source, partial(self._nccl_all_reduce, source)
        memory = import_module("torch.distributed._symmetric_memory")
        kind = getattr(self.torch, dtype)
        tensor = memory.empty(shape, dtype=kind, device=f"cuda:{self._id}")
        memory.rendezvous(tensor, self._torch_group)
        ops = self.torch.ops.symm_mem
        operation = getattr(ops, f"{name}_all_reduce_out")

        def call_for(out: Any) -> Call:
            result = self.as_torch(out)
            return lambda: operation(tensor, "sum", self._torch_group, result)

        return self.from_torch(tensor), call_for

    def _nccl_all_reduce(self, source: Any, out: Any) -> Call:
        """out = the sum over ranks of source, on the stream of the call."""
        a, b, dtype = source.data.ptr, out.data.ptr, self._nccl_dtype(source)
        add, size = self._nccl.NCCL_SUM, source.size
        return lambda: self._comm.allReduce(a, b, size, dtype, add, self._stream())

    @cached_property
    def _torch_group(self) -> str:
        """The name of a process group of torch over all ranks. Collective."""
        dist = import_module("torch.distributed")
        self.torch.cuda.set_device(self._id)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = self.world.gather(free.getsockname()[1])[0]
        place = f"tcp://127.0.0.1:{port}"
        rank, size = self.world.rank, self.world.size
        dist.init_process_group("nccl", init_method=place, rank=rank, world_size=size)
        return str(dist.group.WORLD.group_name)

    def compiled_add_norm(
        self, x: Any, residual: Any, gain: Any, eps: float, out: Any
    ) -> Call:
        """out [m, n] = RMSNorm of x + residual by torch.compile, for these sizes; it
        stores the sum, too."""
        torch = self.torch
        torch.compiler.reset()  # NOTE: it compiles only for a few sizes
        total = self.empty(x.shape, x.dtype.name)

        def add_norm(x: Any, residual: Any, gain: Any, out: Any, total: Any) -> None:
            total.copy_(x + residual)
            wide = total.float()
            scale = torch.rsqrt(wide.square().mean(1, keepdim=True) + eps)
            out.copy_(wide * scale * gain)

        compiled = torch.compile(add_norm, fullgraph=True, dynamic=False)
        arrays = map(self.as_torch, (x, residual, gain, out, total))
        return partial(compiled, *arrays)

    def all_to_all(
        self,
        source: Any,
        out: Any,
        num_sent: Sequence[int],
        num_received: Sequence[int],
    ) -> Call:
        """Rows of source to each rank, by rank, and rows of out from each rank."""
        stream, dtype = self._stream(), self._nccl_dtype(source)
        width = source.size // max(1, len(source))

        def call() -> None:
            self._nccl.groupStart()
            for array, counts, move in (
                (source, num_sent, self._comm.send),
                (out, num_received, self._comm.recv),
            ):
                place = array.data.ptr
                for peer_rank, count in enumerate(counts):
                    if count:
                        move(place, count * width, dtype, peer_rank, stream)
                    place += count * width * array.itemsize
            self._nccl.groupEnd()

        return call

    def from_torch(self, tensor: Any) -> Any:
        """The memory of a contiguous torch tensor as a CuPy array."""
        assert tensor.is_contiguous()
        name = str(tensor.dtype).removeprefix("torch.")
        memory = self.xp.cuda.MemoryPointer(
            self.xp.cuda.UnownedMemory(tensor.data_ptr(), tensor.nbytes, tensor), 0
        )
        dtype = DTYPES.get(name, name)
        return self.xp.ndarray(tuple(tensor.shape), dtype, memory)

    def time(self, call: Call) -> float:
        """Milliseconds of one call; all ranks start together."""
        self.world.barrier()
        self._sleep((1,), (1,), (np.uint64(SLEEP_NS),))
        self._meet()
        self._start.record()
        call()
        self._end.record()
        self._end.synchronize()
        return float(self.xp.cuda.get_elapsed_time(self._start, self._end))

    def on_host(self, array: Any) -> Any:
        return self.xp.asnumpy(array)

    def release(self) -> None:
        self.xp.get_default_memory_pool().free_all_blocks()
        if self.torch is not None:
            self.torch.cuda.empty_cache()

    def synchronize(self) -> None:
        self.xp.cuda.runtime.deviceSynchronize()

    @cached_property
    def _other_data(self) -> tuple[Any, Any]:
        """1 GiB, and room for the largest numbers of its rows."""
        rows = self.xp.ones((1 << 14, 1 << 14), np.uint32)
        return rows, self.xp.empty(len(rows), np.uint32)

    def evict(self) -> None:
        """Read 1 GiB, so that the L2 cache has no operand of the next call."""
        rows, largest = self._other_data
        rows.max(axis=1, out=largest)

    def poison_staging(self, operation: Operation) -> None:
        program = operation.program
        for tensor in program.plan.graph.tensors:
            # NOTE: the epochs of flagged words are kept.
            if tensor.kind == "symmetric" and not tensor.flagged:
                symmetric_bytes(program, tensor.name).fill(0xFF)

    def libraries(self) -> Mapping[str, Callable[[Any], Any]]:
        """Array libraries, each with the conversion of a CuPy array to it."""
        libraries: dict[str, Callable[[Any], Any]] = {"cupy": lambda array: array}
        if self.torch is not None:
            libraries["torch"] = self.as_torch
        return libraries

    def as_torch(self, array: Any) -> Any:
        """The same memory as a torch tensor: a contiguous array or its transpose."""
        if not array.flags.c_contiguous:
            return self.as_torch(array.T).t()
        # NOTE: `__cuda_array_interface__` has no bfloat16: pass the bits.
        bits = array.view({1: np.uint8, 2: np.int16, 4: np.int32}[array.itemsize])
        tensor = self.torch.as_tensor(bits, device=f"cuda:{self._id}")
        assert tensor.data_ptr() == array.data.ptr, "torch copied a CuPy array"
        return tensor.view(getattr(self.torch, array.dtype.name))

    @cached_property
    def machine(self) -> dict[str, Any]:
        """device, driver and cuda, for the records."""
        cuda = self.xp.cuda.runtime
        runtime = cuda.runtimeGetVersion()
        return {
            "device": cuda.getDeviceProperties(self._id)["name"].decode(),
            "driver": driver_version(),
            "cuda": f"{runtime // 1000}.{runtime % 1000 // 10}",
        }

    def baseline(self) -> str:
        """The libraries of the unfused steps and their versions."""
        number = self._nccl.get_version()
        version = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
        library = "cupy" if self.torch is None else "torch"
        library_version = import_module(library).__version__
        return f"cuBLAS by {library} {library_version}, NCCL {version} without NVLS"

    @cached_property
    def rates(self) -> tuple[float, float]:
        """Bytes a second of its memory and FLOP a second of its tensor cores that a
        limit assumes: for an H200 as measured once, else 94 % of reading a gigabyte and
        the best of cuBLAS, measured now."""
        if "H200" in self.machine["device"]:
            return MEMORY_BYTES_PER_S, FLOP_PER_S
        data, sink = self.xp.empty(1 << 28, np.float32), self.xp.zeros(1, np.uint32)
        read = [
            self.time(
                lambda: self._read((1056,), (256,), (data, np.uint64(1 << 26), sink))
            )
            for _ in range(REPEATS)
        ]
        x, w, y = (self.random((8192, 8192), "bfloat16", name) for name in "xwy")
        multiply = self.matmul(x, w, y)
        multiplied = [self.time(multiply) for _ in range(REPEATS)]
        return 0.94 * (1 << 30) / min(read) * 1e3, 2 * 8192**3 / min(multiplied) * 1e3

    def _all_reduce(self, source: Any, out: Any) -> Call:
        a, b, dtype = source.data.ptr, out.data.ptr, self._nccl_dtype(source)
        add, stream = self._nccl.NCCL_SUM, self._stream()
        return lambda: self._comm.allReduce(a, b, source.size, dtype, add, stream)

    def _stream(self) -> int:
        return int(self.xp.cuda.get_current_stream().ptr)

    def _nccl_dtype(self, array: Any) -> int:
        return int(getattr(self._nccl, f"NCCL_{array.dtype.name.upper()}"))


def wide(array: Any) -> Any:
    return array.astype(np.float32)


def dequantized(xp: Any, codes: Any, scales: Any) -> Any:
    """A weight of float8 codes and scales of blocks in fp32, of NumPy or CuPy."""
    dense = xp.asarray(NUMBERS)[codes.view(np.uint8)]
    rows, columns = dense.shape
    dense *= scales.repeat(BLOCK, 0)[:rows].repeat(BLOCK, 1)[:, :columns]
    return dense


def seed_of(name: str) -> int:
    return zlib.crc32(name.encode())


def open_device(world: World) -> Device:
    """This rank's device on the backend of `world`. Collective."""
    return Gpu(world) if world.backend == "cuda" else Device(world)


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


# ----------------------------------------------------------------------- CUDA graphs


@dataclass(frozen=True)
class Replay:
    """A CUDA graph, and the captured call, which owns the memory of its kernels."""

    launch: Call
    call: Call

    def __call__(self) -> None:
        self.launch()


def captured(gpu: Gpu, call: Call) -> Call:
    """A call of torch's, replayed."""
    torch = gpu.torch
    stream = torch.cuda.Stream()
    gpu.synchronize()
    with torch.cuda.stream(stream), as_current(stream):
        for _ in range(WARM_UP):
            call()
    gpu.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream), as_current(stream):
        call()
    gpu.synchronize()
    return Replay(graph.replay, call)


def captured_ours(gpu: Gpu, call: Callable[..., Any]) -> Call:
    """A call of ours, which was called before, replayed."""
    stream = gpu.xp.cuda.Stream(non_blocking=True)
    gpu.synchronize()
    with stream:
        stream.begin_capture()
        call(stream=stream)
        graph = stream.end_capture()
    gpu.synchronize()
    return Replay(graph.launch, call)


def as_current(stream: Any) -> Any:
    """torch's stream as a CuPy stream, which is the current one inside of `with`."""
    return stream_for("cuda", stream, None)
