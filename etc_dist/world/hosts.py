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
    The *partners* of a rank are the far ranks with its local rank.
    """

    rank: int
    count: int
    local_size: int

    @property
    def size(self) -> int:
        return self.count * self.local_size

    @property
    def own(self) -> int:
        """The number of this rank's host."""
        return self.host(self.rank)

    @property
    def local_rank(self) -> int:
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
        return rank // self.local_size

    def ranks(self, host: int) -> range:
        return range(host * self.local_size, (host + 1) * self.local_size)

    def is_near(self, rank: int) -> bool:
        return self.host(rank) == self.own


def arrange(rank: int, nodes: Sequence[int], names: Sequence[str]) -> Hosts:
    """The hosts of all ranks; `nodes`: by rank, the lowest rank on its host, `names`:
    the host's name. WorldError where they do not fit, alike on every rank."""
    counts = Counter(nodes)
    size = len(nodes)
    local_size = counts[0]
    got = by_rank(dict(enumerate(names)))
    if len(set(counts.values())) > 1:
        raise WorldError(
            "the hosts have different numbers of ranks",
            where="start of the world",
            wanted="as many ranks on every host",
            got=got,
            fix="start equal numbers on all hosts (launch/mpirun --per-host N)",
        )
    if list(nodes) != [r - r % local_size for r in range(size)]:
        raise WorldError(
            "the ranks of a host do not follow each other",
            where="start of the world",
            wanted=f"ranks 0 .. {local_size - 1} on the first host, and so on",
            got=got,
            fix="place ranks host by host (launch/mpirun --per-host N)",
        )
    if len(counts) > 1 and size > MOST_RANKS:
        raise WorldError(
            "the world has too many ranks",
            where="start of the world",
            wanted=f"at most {MOST_RANKS} ranks on several hosts",
            got=f"{size} ranks on {len(counts)} hosts",
            fix="start fewer ranks",
        )
    return Hosts(rank, len(counts), local_size)
