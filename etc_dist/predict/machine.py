"""The machine of a prediction. Times are in microseconds."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from etc_dist.errors import ArgumentError, expect_range
from etc_dist.ops.tuning import default_tuning
from etc_dist.settings import MAX_WORKERS

NEAR_GBS, NEAR_LATENCY_US = 340.0, 1.0
"""Over NVLink. Measured: the best rate of a GPU, while eight H200 send to each other.
Assumed: the latency."""
FAR_GBS, FAR_LATENCY_US, MESSAGE_US = 50.0, 3.0, 2.0
"""Of a network with 400 Gbit/s a GPU: assumed, not measured."""
LEAST_GBS, MOST = 1e-6, 1e9
"""Of a link: the limits of its bandwidth, and the largest number of any kind."""


@dataclass(frozen=True)
class Link:
    """A rank's messages are sent one after the other: each occupies the link for the
    longer of `message_us` and its bytes at `gbs` (1e9 bytes a second), and arrives
    `latency_us` later."""

    name: str
    gbs: float
    latency_us: float = 0.0
    message_us: float = 0.0

    def __post_init__(self) -> None:
        numbers = {f.name: getattr(self, f.name) for f in fields(self)[1:]}
        is_good = all(0 <= n <= MOST for n in numbers.values())
        if not is_good or self.gbs < LEAST_GBS:
            raise ArgumentError(
                f"the {self.name} link cannot be simulated",
                where=f"the {self.name} link of a prediction",
                wanted=f"a bandwidth of {LEAST_GBS:g} to {MOST:g} GB/s, a latency and "
                f"a cost of a message of 0 to {MOST:g} us",
                got=", ".join(f"{name} = {n:g}" for name, n in numbers.items()),
                fix="correct the numbers",
            )

    @property
    def bytes_per_us(self) -> float:
        """The bandwidth in bytes a microsecond."""
        return 1e3 * self.gbs

    def service_us(self, nbytes: float) -> float:
        """How long a message occupies the link."""
        return max(self.message_us, nbytes / self.bytes_per_us)


@dataclass(frozen=True)
class Machine:
    """The hardware of every rank. workers: of a rank. launch_us: the time of a run
    outside of its tasks; default: that of the model of an H200. poll_us: from a
    notification until a waiting task begins: assumed, not measured."""

    workers: int = 132
    near: Link = Link("near", NEAR_GBS, NEAR_LATENCY_US)
    far: Link = Link("far", FAR_GBS, FAR_LATENCY_US, MESSAGE_US)
    launch_us: float = field(default_factory=lambda: default_tuning().tiles.call_us)
    poll_us: float = 1.0

    def __post_init__(self) -> None:
        expect_range(self.workers, 1, MAX_WORKERS, "workers")
