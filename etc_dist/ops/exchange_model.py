"""The choice of an all-reduce's algorithm, by a model of its time.

One exchange sends x to each rank: W - 1 times its bytes over NVLink, and one hop. Of
flagged words it sends twice the bytes, for a shorter hop, and without the handshake.
Two exchanges send 2 (W - 1) / W times its bytes, and take one hop more. No size is
stored: the choice is the smallest predicted time, so that both are equal where it
changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from etc_dist.functions.sum_ranks import added_at_once
from etc_dist.schedule.plan import Choice

ALGORITHMS = (
    "one exchange",
    "two exchanges",
    "one exchange of flagged words",
    "one exchange of tiles",
)
"""The last one is of a matmul's result, by its epilogues."""
ONE_SHOT, TWO_SHOT, FLAGGED, TILES = range(len(ALGORITHMS))
VECTOR_BYTES = 16
PIECES = LEAST_PIECE, MOST_PIECE = 256, 2048
"""Vectors of a task: one of each thread; eight, which are in flight together."""
WARP_PIECES = 64, 512
"""The same of a task of a warp: the fewest that are worth a notification, and the most
that a worker's two warps should have in flight while tiles are computed."""

WARPS = 10
"""Of a worker that add tiles which are stored on all ranks, once there are no others to
compute."""


SENT_BYTES_PER_US, LEAST_EARLY_US = 170_000, 3.0
"""What the two warps of each worker send while a matmul runs, and add, estimated from
traces; and the time on the links that is worth it."""


@dataclass(frozen=True)
class ExchangeConstants:
    """The constants of the model. Times are in microseconds. Those of the H200 are
    fitted to 24 all-reduces of drawn sizes on two, by the mean square of logarithms,
    but for `hop_us`, `flag_hop_us` and the rate of the links, of which only sums could
    be fitted."""

    start_us: float = 8.7
    """Launch, handshake, and the end of a run."""
    hop_us: float = 2.5
    """From the last store of a task to the first load of a peer's that waits for it.
    Estimated."""
    handshake_us: float = 2.4
    """The part of `start_us` that flagged words need not wait for."""
    flag_hop_us: float = 1.5
    """From the store of a flagged word to its load by a peer. Estimated."""
    link_bytes_per_us: float = 340_000
    """The rate at which a GPU sends over NVLink: the best that was measured between
    eight H200, see benchmarks/README.md."""
    memory_bytes_per_us: float = 3_770_000
    """The rate of a GPU's loads and stores of exchanged data."""


H200 = ExchangeConstants()


@dataclass(frozen=True)
class AllReduceSizes:
    """An all-reduce of `count` units of `vectors` vectors, which are not divided, among
    `ranks`, of which `local_ranks` are on each host. has_flags: also by flagged words.
    of_tiles: one exchange is of tiles of a matmul, where that is possible."""

    count: int
    vectors: int
    ranks: int
    local_ranks: int
    has_flags: bool = False
    of_tiles: bool = False

    @property
    def one_shot(self) -> int:
        """The algorithm of one exchange."""
        is_near = 1 < self.ranks == self.local_ranks
        return TILES if self.of_tiles and is_near else ONE_SHOT

    @property
    def num_bytes(self) -> int:
        """Of x."""
        return self.count * self.vectors * VECTOR_BYTES

    @property
    def share_bytes(self) -> int:
        """The part of x that a rank adds, where there are two exchanges."""
        return -(-self.count // self.local_ranks) * self.vectors * VECTOR_BYTES

    def predicted_us(
        self, algorithm: int, constants: ExchangeConstants = H200
    ) -> float:
        """Microseconds, on one host."""
        peers = self.ranks - 1
        start, hops = constants.start_us, constants.hop_us
        num_sent, moved = peers * self.num_bytes, (self.ranks + 1) * self.num_bytes
        if algorithm == TWO_SHOT:
            hops *= 2
            num_sent, moved = 2 * peers * self.share_bytes, 4 * self.num_bytes
        if algorithm == FLAGGED:
            start, hops = start - constants.handshake_us, constants.flag_hop_us
            num_sent, moved = 2 * num_sent, 2 * moved
        link = num_sent / constants.link_bytes_per_us
        memory = moved / constants.memory_bytes_per_us
        return start + hops + link + memory

    def added_vectors(self, workers: int, waves: float) -> int:
        """The vectors that a warp adds of tiles which are stored on all ranks: as few
        as it loads at once, if there are enough warps for those of the last wave."""
        least = added_at_once(self.ranks) * 2 // VECTOR_BYTES
        last_bytes = self.num_bytes / max(waves, 1.0)
        return max(least, math.ceil(last_bytes / (VECTOR_BYTES * WARPS * workers)))

    def early_share(self, matmul_us: float, waves: float) -> float:
        """The share of a matmul's result that is sent while later tiles are computed,
        not by epilogues, which wait for the links: of all but the last wave, what can
        be sent before the end."""
        sent_bytes, before = (self.ranks - 1) * self.num_bytes, 1 - 1 / max(waves, 1.0)
        share = min(before, SENT_BYTES_PER_US * matmul_us * before / sent_bytes)
        is_worth = share * sent_bytes > LEAST_EARLY_US * H200.link_bytes_per_us
        return share if is_worth else 0.0

    def symmetric_bytes(self, algorithm: int) -> int:
        """Symmetric memory of the exchanged data on each rank, on one host."""
        if algorithm != TWO_SHOT:
            return self.ranks * self.num_bytes * (4 if algorithm == FLAGGED else 1)
        own_bytes = self.num_bytes if self.one_shot == TILES else 0
        shares_bytes = self.ranks * self.share_bytes
        # Shares of rows are gathered without those after the last one.
        gathered_bytes = shares_bytes if self.vectors == 1 else self.num_bytes
        return own_bytes + shares_bytes + gathered_bytes

    @property
    def algorithms(self) -> Sequence[int]:
        """Those that can be chosen on one host: two exchanges where each rank has a
        share, so that all ranks wait for each other, see `verify/flagged_words.py`."""
        two_shot = [TWO_SHOT] * (self.count >= self.ranks)
        return [self.one_shot, *two_shot, *([FLAGGED] * self.has_flags)]

    @property
    def fastest(self) -> int:
        """The algorithm with the smallest predicted time, by its position."""
        if self.local_ranks < self.ranks:
            return TWO_SHOT
        return min(self.algorithms, key=self.predicted_us)


def largest_sizes(exchange: AllReduceSizes) -> list[tuple[int, int]]:
    """(algorithm, count): the largest count up to that of `exchange` at which each
    algorithm is chosen. A size needs at most the memory of larger ones of its
    algorithm."""
    last, count = exchange.fastest, exchange.count
    sizes = [(last, count)]
    # The order of their sizes, from the smallest ones.
    order = [FLAGGED, exchange.one_shot, TWO_SHOT]
    for size_idx, algorithm in enumerate(order[: order.index(last)]):
        low, high = 0, count
        while high - low > 1:
            middle = (low + high) // 2
            fastest = replace(exchange, count=middle).fastest
            is_low = order.index(fastest) <= size_idx
            low, high = (middle, high) if is_low else (low, middle)
        # NOTE: where rows are not divided evenly, the choice may change several times.
        near = range(1, min(count, low + 2 * exchange.ranks) + 1)[-4 * exchange.ranks :]
        counts = [n for n in near if replace(exchange, count=n).fastest == algorithm]
        sizes += [(algorithm, max(counts))] if counts else []
    return sizes


def choose_algorithm(
    exchange: AllReduceSizes,
    workers: int,
    pieces: tuple[int, int] = PIECES,
    waves: float = 1.0,
) -> list[Choice]:
    """The algorithm, and the vectors of a task: enough tasks for all workers, or warps,
    within the limits `pieces`. waves: those of the matmul before."""
    fastest, ranks = exchange.fastest, exchange.ranks
    num_bytes = exchange.share_bytes if fastest == TWO_SHOT else exchange.num_bytes
    piece = -(-num_bytes // (VECTOR_BYTES * workers))
    if fastest == TILES:
        piece = exchange.added_vectors(workers, waves)
    elif fastest != FLAGGED:
        piece = min(max(piece, pieces[0]), pieces[1])
        if exchange.vectors > 1:  # pieces of rows, of equal size
            piece = -(-exchange.vectors // -(-exchange.vectors // piece))

    def reasons() -> Sequence[str]:
        if ranks == 1:
            return ["no exchange on one rank"]
        if exchange.local_ranks < ranks:
            return [f"{ALGORITHMS[TWO_SHOT]} on each host, and sums of hosts between"]
        name = ALGORITHMS[fastest]
        lines = [f"{name} of {exchange.num_bytes} bytes among {ranks} ranks"]
        for number in exchange.algorithms:
            name = ALGORITHMS[number]
            us = exchange.predicted_us(number)
            memory = exchange.symmetric_bytes(number)
            lines.append(
                f"  {name}: predicted {us:.1f} us, {memory} bytes of symmetric memory"
            )
        return lines

    return [
        Choice("algorithm", fastest, reasons),
        Choice("piece", piece, lambda: ["vectors of 16 bytes in a task"]),
    ]
