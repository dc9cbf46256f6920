"""Which GPUs one rank can see, or what keeps it from using any."""

from __future__ import annotations

from dataclasses import dataclass

from etc_dist.world import nvshmem_library


@dataclass(frozen=True)
class Gpus:
    """The GPUs visible to one rank, in CUDA's order; none if something is missing."""

    pci_ids: tuple[str, ...] = ()
    """PCI bus addresses: one GPU bears the same on every rank of a host."""
    missing: str = ""
    """What to name in an error: empty exactly if a GPU can be used."""


def find() -> Gpus:
    """Look for CuPy, a driver, GPUs and NVSHMEM, in this order; never raises."""
    try:
        import cupy
    except Exception as fault:
        return Gpus(missing=f"CuPy cannot be imported ({_short(fault)})")
    try:
        runtime = cupy.cuda.runtime
        devices = range(runtime.getDeviceCount())
        pci_ids = tuple(str(runtime.deviceGetPCIBusId(device)) for device in devices)
    except cupy.cuda.runtime.CUDARuntimeError as fault:
        # "cudaErrorInsufficientDriver: and a long sentence": the name says it.
        return Gpus(missing=f"no NVIDIA driver ({_short(fault).partition(':')[0]})")
    if not pci_ids:
        return Gpus(missing="no GPU is visible (see CUDA_VISIBLE_DEVICES)")
    try:
        nvshmem_library.find()
    except Exception as fault:
        return Gpus(missing=f"NVSHMEM's host library is not found ({_short(fault)})")
    return Gpus(pci_ids)


def _short(fault: Exception) -> str:
    text = str(fault).strip().splitlines()
    return text[0] if text else type(fault).__name__
