"""The choice of an all-reduce's algorithm, by a model of its time.

One exchange sends x to each rank: W - 1 times its bytes over NVLink, and one hop. Two
exchanges send 2 (W - 1) / W times its bytes, and take one hop more. No size is stored:
the choice is the smaller predicted time, so that both are equal where it changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from etc_dist.schedule.plan import Choice

ALGORITHMS = "one exchange", "two exchanges"
ONE_SHOT, TWO_SHOT = range(len(ALGORITHMS))
VECTOR_BYTES = 16
LEAST_PIECE, MOST_PIECE = 256, 2048
"""Vectors of a task: one of each thread; eight, which are in flight together."""


@dataclass(frozen=True)
class ExchangeConstants:
    """The constants of the model. Times are in microseconds. Those of the H200 are
    estimates: they are to be fitted to records."""

    start_us: float = 3.5
    """Launch, handshake, and the end of a run."""
    hop_us: float = 2.5
    """From the last store of a task to the first load of a peer's that waits for it."""
    link_bytes_per_us: float = 340_000
    """The rate at which a GPU sends over NVLink: 16 MB by two exchanges among four H200
    take at least 74 us."""
    memory_bytes_per_us: float = 2_500_000
    """The rate of a GPU's loads and stores of exchanged data."""


H200 = ExchangeConstants()


@dataclass(frozen=True)
class Exchange:
    """An all-reduce of `count` units of `vectors` vectors, which are not divided, among
    `ranks`, of which `local_ranks` are on each host."""

    count: int
    vectors: int
    ranks: int
    local_ranks: int

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
        hops, sent, moved = 1, peers * self.num_bytes, (self.ranks + 1) * self.num_bytes
        if algorithm == TWO_SHOT:
            hops, sent, moved = 2, 2 * peers * self.share_bytes, 4 * self.num_bytes
        link = sent / constants.link_bytes_per_us
        memory = moved / constants.memory_bytes_per_us
        return constants.start_us + hops * constants.hop_us + link + memory

    def symmetric_bytes(self, algorithm: int) -> int:
        """Symmetric memory of the exchanged data on each rank, on one host."""
        each = self.num_bytes if algorithm == ONE_SHOT else 2 * self.share_bytes
        return self.ranks * each

    @property
    def fastest(self) -> int:
        """The algorithm with the smallest predicted time, by its position."""
        if self.local_ranks < self.ranks:
            return TWO_SHOT
        return min(range(len(ALGORITHMS)), key=self.predicted_us)


def largest_sizes(exchange: Exchange) -> list[tuple[int, int]]:
    """(algorithm, count): the largest count up to that of `exchange` at which each
    algorithm is chosen. A size needs at most the memory of larger ones of its
    algorithm."""
    last, count = exchange.fastest, exchange.count
    sizes = [(last, count)]
    for algorithm in {*range(len(ALGORITHMS))} - {last}:
        low, high = 0, count
        while high - low > 1:
            middle = (low + high) // 2
            is_chosen = replace(exchange, count=middle).fastest == algorithm
            low, high = (middle, high) if is_chosen else (low, middle)
        # NOTE: where rows are not divided evenly, the choice may change several times.
        near = range(low, min(count, low + 2 * exchange.ranks) + 1)
        chosen = [n for n in near if n and replace(exchange, count=n).fastest != last]
        sizes += [(algorithm, max(chosen))] if chosen else []
    return sizes


def choose_algorithm(exchange: Exchange, workers: int) -> list[Choice]:
    """The algorithm, and the vectors of a task: enough tasks for all workers, where a
    thread has a vector."""
    chosen, ranks = exchange.fastest, exchange.ranks
    num_bytes = exchange.num_bytes if chosen == ONE_SHOT else exchange.share_bytes
    each = -(-num_bytes // (VECTOR_BYTES * workers))
    piece = min(max(each, LEAST_PIECE), MOST_PIECE)

    def reasons() -> Sequence[str]:
        if ranks == 1:
            return ["no exchange on one rank"]
        if exchange.local_ranks < ranks:
            return [f"{ALGORITHMS[TWO_SHOT]} on each host, and sums of hosts between"]
        name = ALGORITHMS[chosen]
        lines = [f"{name} of {exchange.num_bytes} bytes among {ranks} ranks"]
        for number, name in enumerate(ALGORITHMS):
            us = exchange.predicted_us(number)
            memory = exchange.symmetric_bytes(number)
            lines.append(
                f"  {name}: predicted {us:.1f} us, {memory} bytes of symmetric memory"
            )
        return lines

    return [
        Choice("algorithm", chosen, reasons),
        Choice("piece", piece, lambda: ["vectors of 16 bytes in a task"]),
    ]
