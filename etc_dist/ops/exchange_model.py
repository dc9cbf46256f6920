"""The choice of an all-reduce's algorithm, by a model of its time.

One exchange sends x to each rank: W - 1 times its bytes over NVLink, and one hop. Two
exchanges send 2 (W - 1) / W times its bytes, and take one hop more. No size is stored:
the choice is the smaller predicted time, so that both are equal where it changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


def predicted_us(
    algorithm: int, num_bytes: int, ranks: int, constants: ExchangeConstants = H200
) -> float:
    """Microseconds of an all-reduce of `num_bytes` among `ranks` of a host."""
    if algorithm == ONE_SHOT:
        hops, sent, moved = 1, float(ranks - 1), float(ranks + 1)
    else:
        hops, sent, moved = 2, 2 * (ranks - 1) / ranks, 4.0
    link = num_bytes * sent / constants.link_bytes_per_us
    memory = num_bytes * moved / constants.memory_bytes_per_us
    return constants.start_us + hops * constants.hop_us + link + memory


def symmetric_bytes(algorithm: int, num_bytes: int, ranks: int) -> int:
    """Symmetric memory of the exchanged data on each rank, over one host."""
    return (ranks if algorithm == ONE_SHOT else 2) * num_bytes


def fastest(num_bytes: int, ranks: int, local_ranks: int) -> int:
    """The algorithm with the smallest predicted time, by its position."""
    if local_ranks < ranks:
        return TWO_SHOT
    times = [predicted_us(n, num_bytes, ranks) for n in range(len(ALGORITHMS))]
    return min(range(len(times)), key=times.__getitem__)


def largest_sizes(
    vectors: int, ranks: int, local_ranks: int
) -> Sequence[tuple[int, int]]:
    """(algorithm, vectors): the largest size of up to `vectors` at which each algorithm
    is chosen. A size needs at most the memory of larger ones of its algorithm."""
    last = fastest(vectors * VECTOR_BYTES, ranks, local_ranks)
    sizes = [(last, vectors)]
    low, high = 1, vectors
    if fastest(VECTOR_BYTES, ranks, local_ranks) == last:
        return sizes
    while high - low > 1:
        middle = (low + high) // 2
        is_last = fastest(middle * VECTOR_BYTES, ranks, local_ranks) == last
        low, high = (low, middle) if is_last else (middle, high)
    return [(fastest(low * VECTOR_BYTES, ranks, local_ranks), low), *sizes]


def choose_algorithm(
    vectors: int, ranks: int, local_ranks: int, workers: int
) -> list[Choice]:
    """The algorithm for `vectors` of eight elements, and the vectors of a task: enough
    tasks for all workers, where a thread has a vector."""
    num_bytes = vectors * VECTOR_BYTES
    chosen = fastest(num_bytes, ranks, local_ranks)
    shared = vectors if chosen == ONE_SHOT else -(-vectors // local_ranks)
    piece = min(max(-(-shared // workers), LEAST_PIECE), MOST_PIECE)

    def reasons() -> Sequence[str]:
        if ranks == 1:
            return ["a copy"]
        if local_ranks < ranks:
            return [f"{ALGORITHMS[TWO_SHOT]} on each host, and sums of hosts between"]
        lines = [f"{ALGORITHMS[chosen]} of {num_bytes} bytes among {ranks} ranks"]
        for number, name in enumerate(ALGORITHMS):
            us = predicted_us(number, num_bytes, ranks)
            memory = symmetric_bytes(number, num_bytes, ranks)
            lines.append(
                f"  {name}: predicted {us:.1f} us, {memory} bytes of symmetric memory"
            )
        return lines

    return [
        Choice("algorithm", chosen, reasons),
        Choice("piece", piece, lambda: ["vectors of 16 bytes in a task"]),
    ]
