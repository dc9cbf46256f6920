"""Which backend all ranks use: one pure function of what every rank reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from etc_dist.errors import ArgumentError, EtcDistError, WorldError
from etc_dist.world.faults import by_rank
from etc_dist.world.gpus import Gpus

BACKENDS = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Report:
    """What one rank knows before a backend is chosen."""

    host: str
    node: int
    """The lowest rank on this host: equal exactly for ranks of one host."""
    local_rank: int
    backend: str
    """As asked for in the settings."""
    symmetric_size: str
    gpus: Gpus

    @property
    def device(self) -> int:
        """The CUDA device for this rank.

        A single visible GPU is the launcher's choice for this rank
        (CUDA_VISIBLE_DEVICES); else ranks of a host take the GPUs in order.
        """
        return 0 if len(self.gpus.pci_ids) == 1 else self.local_rank


@dataclass(frozen=True)
class Choice:
    """The backend of all ranks, and why it is not "cuda" where it is not."""

    backend: str
    reason: str = ""


def choose(reports: Sequence[Report]) -> Choice:
    """The backend for these ranks (reports by rank); the same answer on each.

    Raises ArgumentError for settings that are unknown or differ between ranks, and
    WorldError for ranks on several hosts or for "cuda" where it cannot be had.
    """
    asked = _common(reports)
    if len({report.node for report in reports}) > 1:
        raise _several_hosts(reports)
    if asked == "cpu":
        return Choice("cpu", "asked for")
    obstacles = find_obstacles(reports)
    if not obstacles:
        return Choice("cuda")
    if asked == "auto":
        return Choice("cpu", "; ".join(dict.fromkeys(obstacles.values())))
    raise WorldError(
        'the backend "cuda" cannot be used',
        where="start of the world",
        wanted="one GPU of its own, CuPy and NVSHMEM on every rank",
        got=by_rank(obstacles),
        fix="add what is missing (in the checkout of etc_dist, pip install '.[cu13]' "
        "brings CuPy and NVSHMEM), start as many ranks as there are GPUs, or set "
        "ETC_DIST_BACKEND=cpu",
    )


def find_obstacles(reports: Sequence[Report]) -> dict[int, str]:
    """Why ranks cannot have a GPU of their own, by rank; empty if all can."""
    missing = {r: x.gpus.missing for r, x in enumerate(reports) if x.gpus.missing}
    if missing:
        return missing
    crowded = {
        rank: f"{_ranks_of(reports, report.node)} ranks on {report.host} and "
        f"{len(report.gpus.pci_ids)} visible GPUs"
        for rank, report in enumerate(reports)
        if report.device >= len(report.gpus.pci_ids)
    }
    if crowded:
        return crowded
    taken = [(report.node, report.gpus.pci_ids[report.device]) for report in reports]
    shared = Counter(taken)
    return {
        rank: f"its only GPU on {report.host} (PCI {gpu[1]}) is another rank's too"
        for rank, (report, gpu) in enumerate(zip(reports, taken, strict=True))
        if shared[gpu] > 1
    }


def _ranks_of(reports: Sequence[Report], node: int) -> int:
    return sum(report.node == node for report in reports)


def _common(reports: Sequence[Report]) -> str:
    """The one backend asked for; settings that must be alike are."""
    for setting in ("backend", "symmetric_size"):
        values = {rank: repr(getattr(r, setting)) for rank, r in enumerate(reports)}
        if len(set(values.values())) > 1:
            raise ArgumentError(
                f"the ranks have different settings of {setting}",
                where="start of the world",
                wanted="the same value on every rank",
                got=by_rank(values),
                fix=f"set ETC_DIST_{setting.upper()} alike on every rank",
            )
    asked = reports[0].backend
    if asked not in BACKENDS:
        raise ArgumentError(
            "an unknown backend was asked for",
            where="start of the world",
            wanted=" or ".join(f'"{name}"' for name in BACKENDS),
            got=repr(asked),
            fix="correct ETC_DIST_BACKEND or Settings.backend",
        )
    return asked


def _several_hosts(reports: Sequence[Report]) -> EtcDistError:
    return WorldError(
        "the ranks are on several hosts, which is not supported yet",
        where="start of the world",
        wanted="all ranks on one host",
        got=by_rank({rank: report.host for rank, report in enumerate(reports)}),
        fix="start all ranks on one host",
    )
