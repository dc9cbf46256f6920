"""The number of workers of a program on a GPU.

Workers wait for each other, so the workers of all ranks that share a GPU must be
resident at the same time."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_uint, c_void_p

from etc_dist.errors import BuildError, WorldError


class _LaunchConfig(ctypes.Structure):
    """The driver's CUlaunchConfig, without attributes."""

    _fields_ = [
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("attribute_count", c_uint),
    ]


def resident_workers(
    name: str, *, multiprocessors: int, cluster: int, ranks: int, resident: int
) -> int:
    """Workers of each of `ranks` ranks that share a GPU: equal shares of the SMs, in
    whole clusters. WorldError if more than `resident` workers would be needed."""
    workers = multiprocessors // (cluster * ranks) * cluster
    if not workers or workers * ranks > resident:
        raise WorldError(
            f"the workers of {name} cannot all be resident on the GPU",
            where=f"{name}, clusters of {cluster}, {ranks} ranks per GPU",
            wanted=f"{max(workers, cluster)} workers for each rank, "
            f"{max(workers, cluster) * ranks} in total",
            got=f"room for {resident} workers on {multiprocessors} SMs",
            fix="start fewer ranks per GPU, and free the GPU (nvidia-smi shows other "
            "processes, MIG and CUDA_MPS_ACTIVE_THREAD_PERCENTAGE limit the SMs)",
        )
    return workers


def most_resident(
    function: int, cluster: int, multiprocessors: int, threads: int, shared_bytes: int
) -> int:
    """Workers of a loaded kernel that the GPU can hold at once, by the driver."""
    driver = ctypes.CDLL("libcuda.so.1")
    found = c_int()
    if cluster == 1:
        # NOTE: workers are one per SM: the plan counts on their shared memory.
        call = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
        code = call(
            byref(found), c_void_p(function), threads, ctypes.c_size_t(shared_bytes)
        )
        resident = min(found.value, 1) * multiprocessors
    else:
        config = _LaunchConfig(
            grid=(multiprocessors // cluster * cluster, 1, 1),
            block=(threads, 1, 1),
            shared_bytes=shared_bytes,
        )
        call = driver.cuOccupancyMaxActiveClusters
        code = call(byref(found), c_void_p(function), byref(config))
        resident = found.value * cluster
    if code:
        raise BuildError(
            "the driver cannot compute how many workers fit the GPU",
            where=f"{call.__name__}, {threads} threads, {shared_bytes} bytes of shared "
            "memory",
            wanted="return code 0",
            got=f"return code {code}",
            fix="run `etc-dist doctor`",
        )
    return resident
