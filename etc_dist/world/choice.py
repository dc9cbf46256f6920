"""The choice of the backend: a pure function of the reports of all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

from etc_dist.errors import ArgumentError, WorldError, expect_choice
from etc_dist.settings import Settings
from etc_dist.world.nvshmem import load_library
from etc_dist.world.rank_errors import by_rank, expect_alike

BACKENDS = ("auto", "cpu", "cuda")
RANK_LOCAL = {"cache", "timing", "host"}
"""Settings that may differ between ranks."""
_SHARING = "ETC_DIST_SHARE_GPU=1 lets ranks share a GPU"


@dataclass(frozen=True)
class Gpus:
    """The GPUs visible to one rank, in CUDA's order; empty if something is missing."""

    pci_ids: tuple[str, ...] = ()
    """PCI bus addresses: the same for a GPU on every rank of a host."""
    missing: str = ""
    """Why the rank cannot use a GPU; empty if it can."""


@dataclass(frozen=True)
class RankReport:
    """The report of one rank, from which the backend is chosen."""

    host: str
    node: int
    """The lowest rank on this host: equal exactly for ranks of one host."""
    local_rank: int
    settings: Settings
    gpus: Gpus
    torch_device: int | None = None
    """The CUDA device that the process uses already, in torch."""
    machine: str = ""
    """Equal exactly on ranks of one machine, on which hosts may be pretended."""

    @property
    def device(self) -> int:
        """The CUDA device for this rank.

        A single visible GPU is the launcher's choice for this rank
        (CUDA_VISIBLE_DEVICES); else ranks of a host take the GPUs in order, and with
        `share_gpu` in turn."""
        if self.torch_device is not None:
            return self.torch_device
        num_gpus = len(self.gpus.pci_ids)
        if num_gpus == 1:
            return 0
        return (
            self.local_rank % num_gpus if self.settings.share_gpu else self.local_rank
        )

    @property
    def gpu(self) -> tuple[str, str]:
        """Equal exactly for ranks that use the same GPU."""
        return self.machine, self.gpus.pci_ids[self.device]


@dataclass(frozen=True)
class BackendChoice:
    """The backend of all ranks, and the reason if it is not "cuda"."""

    backend: str
    reason: str = ""
    ranks_per_gpu: int = 1
    """The largest number of ranks that share one GPU."""


def choose(reports: Sequence[RankReport]) -> BackendChoice:
    """The backend for these ranks (reports by rank); the same answer on each.

    Raises ArgumentError for settings that are unknown or differ between ranks, and
    WorldError for "cuda" where a rank cannot use it."""
    backend = _common_backend(reports)
    if backend == "cpu":
        return BackendChoice("cpu", "requested")
    obstacles = find_obstacles(reports)
    if not obstacles:
        ranks_per_gpu = max(Counter(report.gpu for report in reports).values())
        return BackendChoice("cuda", ranks_per_gpu=ranks_per_gpu)
    if backend == "auto":
        return BackendChoice("cpu", "; ".join(dict.fromkeys(obstacles.values())))
    raise WorldError(
        'the backend "cuda" cannot be used',
        where="start of the world",
        wanted="a separate GPU, CuPy and NVSHMEM on every rank",
        got=by_rank(obstacles),
        fix="add what is missing (in the checkout of etc_dist, pip install -e "
        "'.[cu13]' brings CuPy and NVSHMEM), start as many ranks as there are GPUs, "
        "set ETC_DIST_SHARE_GPU=1 to test with ranks that share GPUs, or set "
        "ETC_DIST_BACKEND=cpu",
    )


def find_obstacles(reports: Sequence[RankReport]) -> dict[int, str]:
    """Why ranks cannot have a GPU, by rank; empty if all can. Each rank needs its own
    GPU unless `share_gpu` is set."""
    missing = {r: x.gpus.missing for r, x in enumerate(reports) if x.gpus.missing}
    if missing or reports[0].settings.share_gpu:
        return missing
    crowded = {
        rank: f"{_ranks_of(reports, report.node)} ranks on {report.host} and "
        f"{len(report.gpus.pci_ids)} visible GPUs; {_SHARING}"
        for rank, report in enumerate(reports)
        if report.device >= len(report.gpus.pci_ids)
    }
    if crowded:
        return crowded
    users = Counter(report.gpu for report in reports)
    return {
        rank: f"its only GPU on {report.host} (PCI {report.gpu[1]}) is another rank's "
        f"too; {_SHARING}"
        for rank, report in enumerate(reports)
        if users[report.gpu] > 1
    }


def _ranks_of(reports: Sequence[RankReport], node: int) -> int:
    return sum(report.node == node for report in reports)


def _common_backend(reports: Sequence[RankReport]) -> str:
    """The requested backend; ArgumentError unless the settings of all ranks agree."""
    first, *_ = every = [vars(report.settings) for report in reports]
    names = [f.name for f in fields(Settings) if f.name not in RANK_LOCAL]
    different = [name for name in names if any(s[name] != first[name] for s in every)]
    variables = ", ".join(f"ETC_DIST_{name.upper()}" for name in different)
    expect_alike(
        [", ".join(f"{name} = {s[name]!r}" for name in different) for s in every],
        f"settings of {', '.join(different)}",
        where="start of the world",
        fix=f"set {variables} to the same value on every rank",
        kind=ArgumentError,
    )
    backend = reports[0].settings.backend
    expect_choice(backend, BACKENDS, "backend")
    return backend


def find_gpus() -> Gpus:
    """Find CuPy, a driver, GPUs and NVSHMEM, in this order; never raises."""
    try:
        import cupy
    except Exception as fault:
        return Gpus(missing=f"CuPy cannot be imported ({_short(fault)})")
    try:
        runtime = cupy.cuda.runtime
        devices = range(runtime.getDeviceCount())
        pci_ids = tuple(str(runtime.deviceGetPCIBusId(device)) for device in devices)
    except cupy.cuda.runtime.CUDARuntimeError as fault:
        # "cudaErrorInsufficientDriver: and a long sentence": the name suffices.
        return Gpus(missing=f"no NVIDIA driver ({_short(fault).partition(':')[0]})")
    if not pci_ids:
        return Gpus(missing="no GPU is visible (see CUDA_VISIBLE_DEVICES)")
    try:
        load_library()
    except Exception as fault:
        return Gpus(missing=f"NVSHMEM's host library is not found ({_short(fault)})")
    return Gpus(pci_ids)


def _short(fault: Exception) -> str:
    text = str(fault).strip().splitlines()
    return text[0] if text else type(fault).__name__
