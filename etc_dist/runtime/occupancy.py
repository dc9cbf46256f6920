"""The number of workers of a program on a GPU.

Workers wait for each other, so the workers of all ranks that share a GPU must be
resident at the same time."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_void_p

from etc_dist.errors import BuildError, WorldError


def resident_workers(
    name: str, *, multiprocessors: int, ranks: int, resident: int
) -> int:
    """Workers of each of `ranks` ranks that share a GPU: equal shares of the SMs.
    WorldError if more than `resident` workers would be needed."""
    workers = multiprocessors // ranks
    if not workers or workers * ranks > resident:
        raise WorldError(
            f"the workers of {name} cannot all be resident on the GPU",
            where=f"{name}, {ranks} ranks per GPU",
            wanted=f"{max(workers, 1)} workers for each rank, "
            f"{max(workers, 1) * ranks} in total",
            got=f"room for {resident} workers on {multiprocessors} SMs",
            fix="start fewer ranks per GPU, and free the GPU (nvidia-smi shows other "
            "processes, MIG and CUDA_MPS_ACTIVE_THREAD_PERCENTAGE limit the SMs)",
        )
    return workers


def most_resident(
    function: int, multiprocessors: int, threads: int, shared_bytes: int
) -> int:
    """Workers of a loaded kernel that the GPU can hold at once, by the driver. Raises
    BuildError for an error of the driver."""
    driver = ctypes.CDLL("libcuda.so.1")
    num_blocks = c_int()
    # NOTE: workers are one per SM: the plan counts on their shared memory.
    call = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
    code = call(
        byref(num_blocks), c_void_p(function), threads, ctypes.c_size_t(shared_bytes)
    )
    if code:
        raise BuildError(
            "the driver cannot compute how many workers fit the GPU",
            where=f"{call.__name__}, {threads} threads, {shared_bytes} bytes of shared "
            "memory",
            wanted="return code 0",
            got=f"return code {code}",
            fix="run `etc-dist doctor`",
        )
    return min(num_blocks.value, 1) * multiprocessors
