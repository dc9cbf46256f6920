"""The hosts of a world: which ranks map each other's memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from etc_dist.errors import WorldError
from etc_dist.world.rank_errors import by_rank

MOST_RANKS = 1024
"""The most ranks of a world over several hosts."""


@dataclass(frozen=True)
class Hosts:
    """`count` hosts of `local_size` ranks each: rank = host * local_size + local rank.

    Ranks of one host are *near*: they map each other's memory. All others are *far*.
    The *partners* of a rank are the far ranks with its local rank."""

    rank: int
    count: int
    local_size: int

    @property
    def size(self) -> int:
        """The number of all ranks."""
        return self.count * self.local_size

    @property
    def own(self) -> int:
        """The number of this rank's host."""
        return self.host(self.rank)

    @property
    def local_rank(self) -> int:
        """The number of this rank on its host."""
        return self.rank % self.local_size

    @property
    def near(self) -> range:
        """The ranks of this host, this one included."""
        return self.ranks(self.own)

    @property
    def partners(self) -> tuple[int, ...]:
        """The far ranks with this rank's local rank, one on each other host."""
        every = range(self.local_rank, self.size, self.local_size)
        return tuple(rank for rank in every if rank != self.rank)

    def host(self, rank: int) -> int:
        """The number of the host of `rank`."""
        return rank // self.local_size

    def ranks(self, host: int) -> range:
        """The ranks of a host."""
        return range(host * self.local_size, (host + 1) * self.local_size)

    def is_near(self, rank: int) -> bool:
        """Whether `rank` is on this host."""
        return self.host(rank) == self.own


def arrange(rank: int, nodes: Sequence[int], names: Sequence[str]) -> Hosts:
    """The hosts of all ranks; `nodes`: by rank, the lowest rank on its host, `names`:
    the host's name. WorldError where they do not fit, alike on every rank."""
    counts = Counter(nodes)
    num_ranks = len(nodes)
    local_size = counts[0]
    got = by_rank(dict(enumerate(names)))
    if len(set(counts.values())) > 1:
        what = "the hosts have different numbers of ranks"
        wanted = "as many ranks on every host"
    elif list(nodes) != [r - r % local_size for r in range(num_ranks)]:
        what = "the ranks of a host do not follow each other"
        wanted = f"ranks 0 .. {local_size - 1} on the first host, and so on"
    elif len(counts) > 1 and num_ranks > MOST_RANKS:
        what = "the world has too many ranks"
        wanted = f"at most {MOST_RANKS} ranks on several hosts"
        got = f"{num_ranks} ranks on {len(counts)} hosts"
    else:
        return Hosts(rank, len(counts), local_size)
    raise WorldError(
        what,
        where="start of the world",
        wanted=wanted,
        got=got,
        fix="start fewer ranks, or equal numbers on all hosts, placed host by host "
        "(launch/mpirun --per-host N)",
    )
