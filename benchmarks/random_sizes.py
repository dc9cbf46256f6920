"""Sizes that nobody chose, since they follow from the commit, and the gates for the
ratios at them.

A seed is the first 8 hex digits of sha256(commit hash + op + "1"), "2" or "3". It gives
60 matmuls, 20 MLPs, or 24 of an operation on ranks. The rows of a rank are log-uniform
and not rounded. N and K are uniform multiples of 64, drawn again until N K and M N K
are within their limits. For an MLP they are its hidden size and a rank's inner size.

A seed also gives 4 matmuls that have gates of their own: N or K, either as often, is
below 768 and uniform; the other one and M are drawn as above. Matmuls by float8 weights
have one seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import groupby
from statistics import fmean, geometric_mean, median
from typing import Any, NamedTuple

import numpy as np

from benchmarks.records import Record
from benchmarks.tables import Row, by, latest, markdown

SEEDS = (1, 2, 3)
"""The numbers of the seeds of a commit."""
NAMED_MIXTURE = "qwen3-30b-a3b"
"""A mixture of named sizes, which `mixture_float8` measures in addition to drawn
ones."""
STEP, LEAST = 64, 768
"""N and K are multiples of STEP, from LEAST on."""
MOST_ELEMENTS, MOST_PRODUCTS = 2e8, 1.2e11
"""Of N K, and of M N K for the rows M of all ranks."""


class Variant(NamedTuple):
    """gated: of a matmul, N columns are gate and up, and the result has N / 2."""

    dtype: str = "bfloat16"
    w_layout: str = "nk"
    gated: bool = False


GATED, KN, FLOAT16 = (Variant(gated=True), Variant(w_layout="kn"), Variant("float16"))
PLAIN = Variant()


@dataclass(frozen=True)
class Sizes:
    """The sizes of an operation that a seed gives. rows: the range for a rank. narrow:
    further draws with N or K below LEAST. variants: they take turns."""

    count: int
    rows: tuple[int, int]
    variants: Sequence[Variant]
    narrow: int = 0
    most_n: int = 20480
    most_k: int = 16640

    @property
    def small(self) -> Sizes:
        """For the CPU backend."""
        most = LEAST + 2 * STEP
        return replace(self, rows=(1, 20), most_n=most, most_k=most)


ON_ONE, ON_RANKS = (1, 8192), (8, 3000)
OF_WEIGHTS = (KN, FLOAT16, PLAIN, PLAIN)
OF_MLPS = (FLOAT16, PLAIN, PLAIN, PLAIN)
SIZES: Mapping[str, Sizes] = {
    "random_matmul": Sizes(60, ON_ONE, (GATED, KN, FLOAT16, PLAIN), narrow=4),
    "random_mlp": Sizes(20, ON_ONE, OF_MLPS),
    "random_reduce_scatter": Sizes(24, ON_RANKS, OF_WEIGHTS),
    "random_all_gather": Sizes(24, ON_RANKS, OF_WEIGHTS),
    "random_mlp_ranks": Sizes(24, ON_RANKS, OF_MLPS),
    "matmul_float8": Sizes(24, (1, 64), (PLAIN,)),
    "matmul_float8_activations": Sizes(24, (1024, 8192), (PLAIN,)),
    "float8_all_gather": Sizes(24, (256, 2048), (PLAIN,)),
    "float8_reduce_scatter": Sizes(24, (256, 2048), (PLAIN,)),
    "mlp_float8": Sizes(12, (1, 32), (PLAIN,)),
}
"""By the kind of record. N and K of an MLP are hidden and inner size of a rank."""


@dataclass(frozen=True)
class Draw:
    """A shape. rows: of a rank."""

    seed: str
    number: int
    rows: int
    n: int
    k: int
    variant: Variant


def seed_of(commit: str, op: str, number: int) -> str:
    """8 hex digits that nobody chooses; of a commit with changes, those of its head."""
    head = commit.partition("-")[0]
    return sha256(f"{head}{op}{number}".encode()).hexdigest()[:8]


def draws(sizes: Sizes, seed: str, ranks: int = 1) -> Iterator[Draw]:
    """The shapes that a seed gives, narrow ones last."""
    rng = np.random.default_rng(int(seed, 16))
    for number in range(sizes.count + sizes.narrow):
        rows, n, k = _drawn(rng, sizes, ranks, is_narrow=number >= sizes.count)
        variant = sizes.variants[number % len(sizes.variants)]
        yield Draw(seed, number, rows, n, k, variant)


def _drawn(
    rng: np.random.Generator, sizes: Sizes, ranks: int, is_narrow: bool
) -> tuple[int, int, int]:
    """Rows, uniform in their logarithm, then N and K, uniform, until they are within
    the limits. is_narrow: N or K, either as often, is below LEAST."""
    rows = round(log_uniform(rng, *sizes.rows))
    while True:
        n, k = (_multiple(rng, LEAST, most) for most in (sizes.most_n, sizes.most_k))
        if is_narrow:
            narrow = _multiple(rng, STEP, LEAST - STEP)
            n, k = (narrow, k) if rng.integers(2) else (n, narrow)
        if n * k <= MOST_ELEMENTS and ranks * rows * n * k <= MOST_PRODUCTS:
            return rows, n, k


def log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def _multiple(rng: np.random.Generator, least: int, most: int) -> int:
    """A multiple of STEP, uniform from `least` to `most`."""
    return STEP * int(rng.integers(least // STEP, most // STEP + 1))


# -------------------------------------------------------------------------- gates


Where = Callable[[Record], Any]
Values = Sequence[float]


@dataclass(frozen=True)
class Gate:
    """A number of the draws that `where` selects, and its limit, if it has one."""

    title: str
    where: Where
    number: Callable[[Values], float]
    least: float | None = None
    most: Callable[[int], float] | None = None
    """For a number of draws."""
    form: str = ".3f"
    of: str | Callable[[Record], float] = "speedup"
    """A field of a record, or a number that follows from it."""

    def row(self, records: Sequence[Record]) -> Row | None:
        """The gate's row in the table; None without a draw."""
        of = self.of
        number_of = of if callable(of) else (lambda r: r.get(of))
        values = [number_of(r) for r in records if self.where(r)]
        if not values:
            return None
        number = self.number(values)
        limit, is_met = self.least, self.least is not None and number >= self.least
        if self.most is not None:
            limit = self.most(len(values))
            is_met = number <= limit
        row = {"number": self.title, "draws": f"{len(values)}"}
        row["value"] = format(number, self.form)
        row["gate"] = "-" if limit is None else format(limit, self.form)
        return row | {"met": "-" if limit is None else "yes" if is_met else "no"}


def _below(
    bound: float, where: Where, one_in: float = math.inf, title: str = ""
) -> Gate:
    """How many draws have a lower ratio: at most one in so many."""
    return Gate(
        f"{title}below {bound:.2f}",
        where,
        lambda values: sum(value < bound for value in values),
        most=lambda count: count // one_in,
        form=".0f",
    )


def _is_wide(r: Record) -> bool:
    return bool(min(r.N, r.K) >= LEAST)


def _rows(least: float, most: float) -> Where:
    """Wide draws with so many rows."""
    return lambda r: _is_wide(r) and least <= r.M <= most


def _is_long(r: Record) -> bool:
    """Whether the baseline takes more than 30 us for at least 128 rows."""
    return _is_wide(r) and r.M >= 128 and r.baseline_ms > 0.030


def _regret(
    title: str, number: Callable[[Values], float], most: float | None = None
) -> Gate:
    limit = None if most is None else (lambda count: most)
    where = _has_regret
    return Gate(f"regret: {title}", where, number, None, limit, ".1%", "regret")


def _has_regret(r: Record) -> bool:
    return _is_wide(r) and r.get("regret") is not None


def _on_ranks(mean: float) -> Sequence[Gate]:
    """mean: the gate with more than 128 rows a rank."""

    def few(r: Record) -> bool:
        return bool(r.M / r.world_size <= 128)

    def many(r: Record) -> bool:
        return not few(r)

    return [
        Gate("more than 128 rows a rank: geometric mean", many, geometric_mean, mean),
        Gate("more than 128 rows a rank: least", many, min, 1.0),
        Gate("at most 128 rows a rank: geometric mean", few, geometric_mean, 1.05),
        Gate("at most 128 rows a rank: least", few, min, 0.94),
    ]


def _always(r: Record) -> bool:
    return True


def _has_speedup(r: Record) -> bool:
    return r.speedup is not None


def _of_nccl(r: Record) -> float:
    """The ratio to NCCL's all-reduce."""
    return float(r.baselines_ms["nccl"] / r.ours_ms)


def _is_named(r: Record) -> bool:
    return bool(r.model == NAMED_MIXTURE)


def _is_drawn(r: Record) -> bool:
    return not _is_named(r)


def _has_many_weights(r: Record) -> bool:
    return bool(r.N * r.K >= MANY_WEIGHTS)


def _has_few_weights(r: Record) -> bool:
    return not _has_many_weights(r)


def _of_codes(r: Record) -> float:
    """The ratio to the time of a read of the codes."""
    return float(r.ours_ms / (r.N * r.K / READ_BYTES_PER_MS + CALL_MS))


def _has_scaled_mm(r: Record) -> bool:
    return r.get("scaled_mm_ms") is not None


def _of_scaled_mm(r: Record) -> float:
    """The ratio to torch's scaled product."""
    return float(r.scaled_mm_ms / r.ours_ms)


MANY_WEIGHTS = 64e6
READ_BYTES_PER_MS, CALL_MS = 4.3e9, 0.0055
"""Of an H200: its memory, and a short call."""
SCALED_MM = "torch's scaled product / ours: "
LONG = "cuBLAS above 30 us, M from 128 on: "
GATES: Mapping[str, Sequence[Gate]] = {
    "random_matmul": [
        Gate("M below 32: geometric mean", _rows(1, 31), geometric_mean, 1.03),
        Gate("M 32 to 1,550: geometric mean", _rows(32, 1550), geometric_mean, 0.98),
        Gate("M above 1,550: geometric mean", _rows(1551, 8192), geometric_mean, 0.98),
        Gate("least", _is_wide, min),
        _below(0.85, _is_wide, one_in=12),
        _below(0.75, _is_wide),
        _below(0.92, _is_long, one_in=20, title=LONG),
        _below(0.80, _is_long, title=LONG),
        Gate("N or K below 768: least", lambda r: not _is_wide(r), min, 0.85),
        _regret("mean", fmean, 0.03),
        _regret("median", median),
        _regret("worst", max),
        _regret("above 8 %", lambda values: fmean(v > 0.08 for v in values), 1 / 12),
    ],
    "random_mlp": [
        Gate("geometric mean", _is_wide, geometric_mean, 1.02),
        Gate("least", _is_wide, min, 0.90),
    ],
    "random_reduce_scatter": _on_ranks(1.2),
    "random_all_gather": _on_ranks(1.12),
    "random_mlp_ranks": _on_ranks(1.15),
    "all_reduce": [
        Gate("geometric mean", _always, geometric_mean, 1.05),
        Gate("least", _always, min, 0.95),
        Gate(
            "up to 256 KB, NCCL / ours: geometric mean",
            lambda r: r.num_bytes <= 256 << 10,
            geometric_mean,
            1.7,
            of=_of_nccl,
        ),
    ],
    "all_reduce_norm": [
        Gate("geometric mean", _always, geometric_mean, 1.35),
        Gate("least", _always, min, 1.1),
    ],
    "random_mixture": [
        Gate("geometric mean", _always, geometric_mean, 1.5),
        Gate("least", _always, min, 1.1),
    ],
    "random_decode": [
        Gate("vLLM / ours: geometric mean", _has_speedup, geometric_mean, 1.08),
        Gate("vLLM / ours: least", _has_speedup, min, 1.0),
        Gate("limit / ours: geometric mean", _always, geometric_mean, of="of_limit"),
    ],
    "matmul_all_reduce": [
        Gate("geometric mean", _always, geometric_mean, 1.15),
        Gate("least", _always, min, 0.97),
    ],
    "matmul_float8": [
        Gate(
            "N K from 64M on: geometric mean", _has_many_weights, geometric_mean, 1.65
        ),
        Gate("N K from 64M on: least", _has_many_weights, min, 1.55),
        Gate(
            "N K below 64M, ours / (codes at 4.3 TB/s + 5.5 us): most",
            _has_few_weights,
            max,
            most=lambda count: 1.1,
            of=_of_codes,
        ),
    ],
    **dict.fromkeys(
        ("float8_all_gather", "float8_reduce_scatter"),
        (
            Gate("geometric mean", _always, geometric_mean, 1.25),
            Gate("least", _always, min),
        ),
    ),
    "mixture_float8": [
        Gate("Qwen3-30B-A3B, one token", _is_named, min, 1.35),
        Gate("drawn, M 1 to 32: geometric mean", _is_drawn, geometric_mean, 1.6),
        Gate("drawn, M 1 to 32: least", _is_drawn, min),
    ],
    "mlp_float8": [
        Gate("M 1 to 32: geometric mean", _always, geometric_mean, 1.6),
        Gate("M 1 to 32: least", _always, min),
    ],
    "matmul_float8_activations": [
        Gate("geometric mean", _always, geometric_mean, 1.5),
        Gate("least", _always, min),
        *(
            Gate(SCALED_MM + title, _has_scaled_mm, number, least, of=_of_scaled_mm)
            for title, number, least in (
                ("geometric mean", geometric_mean, 0.95),
                ("least", min, None),
            )
        ),
    ],
}
"""By the kind of record: the numbers of its summary."""


def summary(op: str, records: Sequence[Record]) -> list[Row]:
    """A row for each number of the draws of an operation."""
    rows = [gate.row(records) for gate in GATES[op]]
    return [row for row in rows if row is not None]


TITLES = {
    "random_matmul": "Matrix multiplication against cuBLAS",
    "random_mlp": "MLP against torch (cuBLAS and compiled SwiGLU, in a CUDA graph)",
    "random_reduce_scatter": "GEMM + Reduce-Scatter against cuBLAS + NCCL",
    "random_all_gather": "AllGather + GEMM against cuBLAS + NCCL",
    "random_mlp_ranks": "MLP on several GPUs against cuBLAS + NCCL",
    "random_mixture": "Mixture of experts, drawn, against torch._grouped_mm",
    "random_decode": "Decode step, drawn, against vLLM",
    "all_reduce": "All-reduce against NCCL and torch's symmetric memory",
    "all_reduce_norm": "All-reduce, residual and RMSNorm against the same and a kernel",
    "matmul_all_reduce": "GEMM + All-Reduce against cuBLAS and the same",
    "matmul_float8": "Matrix multiplication by float8 weights against 16-bit weights",
    "matmul_float8_activations": "The same with activations in float8",
    "float8_all_gather": "AllGather + GEMM with activations in float8 against 16 bits",
    "float8_reduce_scatter": "GEMM + Reduce-Scatter with activations in float8 against "
    "16 bits",
    "mixture_float8": "Mixture of experts by float8 weights against 16-bit weights",
    "mlp_float8": "MLP by float8 weights against 16-bit weights",
}
PREFACE = """
## Random sizes

Nobody chose these sizes: they follow from the commit. Ratios are baseline / ours, all \
numbers of the newest commit that was measured. *Regret*: how much longer the chosen \
tiles take than the best ones whose prediction is within 1.5 times the best.
"""


def tables(records: Sequence[Record]) -> str:
    """The section of docs/results.md; "" without draws."""
    parts = []
    for op, title in TITLES.items():
        machine = by("device world_size")
        for _, some in groupby(sorted(drawn(records, op), key=machine), machine):
            draws_of_op = newest_draws(list(some))
            parts += [
                f"\n### {title}\n{markdown(summary(op, draws_of_op))}",
                origin(draws_of_op),
            ]
    return "".join([PREFACE, *parts]) if parts else ""


def drawn(records: Sequence[Record], op: str) -> list[Record]:
    """Those of an operation on GPUs at sizes that follow from a commit."""
    of_op = (r for r in records if r.op == op and r.seed)
    return [r for r in of_op if r.backend == "cuda"]


def newest(records: Sequence[Record], op: str) -> list[Record]:
    """The draws of an operation that were measured last. Raises ValueError without
    any."""
    if draws_of_op := drawn(records, op):
        return newest_draws(draws_of_op)
    raise ValueError(f"no records of {op}")


def newest_draws(records: Sequence[Record]) -> list[Record]:
    """The last record of each draw of the commit that was measured last."""
    commit = max(records, key=lambda r: str(r.date)).commit
    of_commit = (r for r in records if r.commit == commit)
    return latest(of_commit, by("seed model"))


def origin(shown_draws: Sequence[Record]) -> str:
    """The machine, the commit and the seeds of some draws."""
    last = max(shown_draws, key=lambda r: str(r.date))
    seeds = ", ".join(dict.fromkeys(r.seed for r in shown_draws))
    return (
        f"\n{last.world_size} x {last.device}; {last.date[:10]}; commit {last.code}; "
        f"seeds {seeds}; baseline: {last.baseline}.\n"
    )
