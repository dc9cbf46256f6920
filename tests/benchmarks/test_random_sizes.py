"""Random sizes follow from the commit, and their ratios have gates."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.protocol import measure_times
from benchmarks.random_sizes import (
    LEAST,
    SIZES,
    draws,
    newest_draws,
    seed_of,
    summary,
    tables,
)
from benchmarks.records import Record
from benchmarks.subjects.all_reduce import all_reduce_draws, norm_draws
from tests.benchmarks.conftest import record


def test_seeds_follow_from_commit_operation_and_number() -> None:
    assert seed_of("a", "random_mlp", 1) == "e6ee18ad"  # of sha256("arandom_mlp1")
    assert seed_of("a-dirty", "random_mlp", 1) == "e6ee18ad"
    keys = ("b", "random_mlp", 1), ("a", "random_matmul", 1), ("a", "random_mlp", 2)
    assert len({seed_of(*key) for key in keys} | {"e6ee18ad"}) == 4


@pytest.mark.parametrize("op", SIZES)
@pytest.mark.parametrize("ranks", [1, 8])
def test_draws_are_within_the_limits(op: str, ranks: int, seed: int) -> None:
    sizes = replace(SIZES[op], count=400, narrow=100)
    drawn = list(draws(sizes, f"{seed % 2**32:08x}", ranks))
    least, most = sizes.rows
    for draw in drawn:
        assert draw.n % 64 == draw.k % 64 == 0
        assert draw.n <= 20480 and draw.k <= 16640 and least <= draw.rows <= most
        assert draw.n * draw.k <= 2e8 and ranks * draw.rows * draw.n * draw.k <= 1.2e11
        assert (min(draw.n, draw.k) < LEAST) == (draw.number >= 400)
        assert max(draw.n, draw.k) >= LEAST
    few = sum(draw.rows**2 <= least * most for draw in drawn[:400])
    assert 150 < few < 250  # as many below the geometric mean as above
    shares = [draw.variant for draw in drawn[:400]]
    assert all(shares.count(draw) % 100 == 0 for draw in shares)


def test_the_same_seed_gives_the_same_draws() -> None:
    sizes = SIZES["random_matmul"]
    first, second = draws(sizes, "0123abcd"), draws(sizes, "0123abce")
    assert list(first) == list(draws(sizes, "0123abcd")) != list(second)


def matmul(number: int, **changes: Any) -> Record:
    fields = {"N": 4096, "K": 4096, "M": 200, "baseline_ms": 0.05, "seed": "0123abcd"}
    return record("random_matmul", **{**fields, "model": f"draw {number}", **changes})


def met(op: str, records: list[Record]) -> dict[str, str]:
    return {row["number"]: row["met"] for row in summary(op, records)}


@pytest.mark.parametrize(
    ("speedups", "changes", "number", "text"),
    [
        ([1.0, 0.97], {}, "M 32 to 1,550: geometric mean", "yes"),
        ([1.0, 0.95], {}, "M 32 to 1,550: geometric mean", "no"),
        ([1.02], {"M": 31}, "M below 32: geometric mean", "no"),
        ([0.99], {"M": 1551}, "M above 1,550: geometric mean", "yes"),
        ([1.0] * 11 + [0.84], {}, "below 0.85", "yes"),
        ([1.0] * 10 + [0.84], {}, "below 0.85", "no"),
        ([1.0] * 99 + [0.74], {}, "below 0.75", "no"),
        ([0.84], {"N": 704}, "N or K below 768: least", "no"),
    ],
)
def test_gates_are_met_or_not(
    speedups: list[float], changes: dict[str, Any], number: str, text: str
) -> None:
    records = [matmul(n, speedup=s, **changes) for n, s in enumerate(speedups)]
    assert met("random_matmul", records)[number] == text


def test_short_calls_and_few_rows_have_no_gate_of_long_ones() -> None:
    slow = {"speedup": 0.79}
    records = [matmul(0, baseline_ms=0.03, **slow), matmul(1, M=127, **slow)]
    assert not any("30 us" in number for number in met("random_matmul", records))
    long = met("random_matmul", [*records, matmul(2, **slow)])
    assert long["cuBLAS above 30 us, M from 128 on: below 0.80"] == "no"


def test_the_regret_has_gates() -> None:
    records = [matmul(n, regret=0.0, speedup=1.0) for n in range(11)]
    records.append(matmul(11, regret=0.2, speedup=1.0))
    rows = {row["number"]: row for row in summary("random_matmul", records)}
    assert rows["regret: mean"]["value"] == "1.7%"
    assert rows["regret: above 8 %"]["met"] == rows["regret: mean"]["met"] == "yes"
    assert met("random_matmul", records[1:])["regret: above 8 %"] == "no"


def test_rows_of_a_rank_select_the_gate_of_a_collective() -> None:
    few = record("random_all_gather", world_size=4, M=4 * 128, speedup=0.95)
    many = record("random_all_gather", world_size=4, M=4 * 129, speedup=1.15)
    numbers = met("random_all_gather", [few, many])
    assert list(numbers.values()) == ["yes", "yes", "no", "yes"]


def test_the_page_has_the_draws_of_the_newest_commit() -> None:
    old = matmul(0, commit="old", date="2025-01-01", speedup=0.5)
    first, again = matmul(0, speedup=0.6), matmul(0, date="2026-02-01", speedup=1.0)
    assert newest_draws([again, old, first]) == [again]
    text = tables([old, first, again, matmul(1, backend="cpu")])
    assert "| least | 1 | 1.000 | - | - |" in text
    assert (
        "8 x NVIDIA H200; 2026-02-01; commit 0123456789-dirty; seeds 0123abcd" in text
    )
    assert tables([]) == ""


def test_other_data_is_read_before_each_timed_call() -> None:
    steps: list[str] = []
    gpu: Any = SimpleNamespace(
        evict=lambda: steps.append("evict"),
        time=lambda call: steps.append("time") or 1.0,
        synchronize=lambda: None,
        world=SimpleNamespace(gather=lambda value: [value]),
    )
    times = measure_times(gpu, {"ours": lambda: None}, 2, is_cold=True)
    assert times == {"ours": [1.0, 1.0]} and steps == ["evict", "time"] * 2


def test_sums_are_drawn_within_the_limits(seed: int) -> None:
    drawn = [*all_reduce_draws(f"{seed % 2**32:08x}")]
    assert len(drawn) == 24 and all(draw.n % 8 == 0 for draw in drawn)
    num_bytes = [2 * draw.rows * draw.n for draw in drawn]
    # The rows and columns are rounded.
    assert min(num_bytes) > 1024 and max(num_bytes) < 100 << 20
    assert any(n < 2**17 for n in num_bytes) and any(n > 2**21 for n in num_bytes)
    for draw in norm_draws(f"{seed % 2**32:08x}"):
        assert 1 <= draw.rows <= 256 and 2048 <= draw.n <= 16384


def test_small_all_reduces_are_compared_with_nccl() -> None:
    few, many = (
        record("all_reduce", num_bytes=n, ours_ms=0.01, baselines_ms={"nccl": ms})
        for n, ms in ((4096, 0.02), (2**20, 0.01))
    )
    (row,) = (
        row for row in summary("all_reduce", [few, many]) if "NCCL" in row["number"]
    )
    assert (row["draws"], row["value"], row["met"]) == ("1", "2.000", "yes")


@pytest.mark.parametrize(
    ("changes", "number", "text"),
    [
        ({"N": 8000, "K": 8000, "speedup": 1.66}, "64M on: geometric mean", "yes"),
        ({"N": 8000, "K": 8000, "speedup": 1.54}, "64M on: least", "no"),
        ({"N": 4096, "K": 4096, "ours_ms": 0.0103}, "5.5 us", "yes"),  # of 9.4 us
        ({"N": 4096, "K": 4096, "ours_ms": 0.0104}, "5.5 us", "no"),
    ],
)
def test_float8_weights_have_gates_by_size(
    changes: dict[str, Any], number: str, text: str
) -> None:
    gates = met("matmul_float8", [record("matmul_float8", **changes)])
    (value,) = (gates[gate] for gate in gates if number in gate)
    assert value == text and len(gates) == (2 if changes["N"] == 8000 else 1)


def test_float8_mixtures_have_a_gate_for_the_named_one() -> None:
    op = "mixture_float8"
    rows = [
        record(op, model=name, speedup=speedup)
        for name, speedup in (
            ("qwen3-30b-a3b", 1.36),
            ("draw 0", 1.5),
            ("draw 1", 1.6),
        )
    ]
    assert list(met(op, rows).values()) == ["yes", "no", "-"]


def test_float8_activations_are_compared_with_the_scaled_product_of_torch() -> None:
    op = "matmul_float8_activations"
    absent = record(op, speedup=1.5, ours_ms=0.1)
    slower = record(op, speedup=1.5, ours_ms=0.1, scaled_mm_ms=0.094)
    assert list(met(op, [absent]).values()) == ["yes", "-"]
    assert list(met(op, [absent, slower]).values()) == ["yes", "-", "no", "-"]


def test_the_page_has_no_named_sizes() -> None:
    assert tables([record("matmul_float8", seed=None)]) == ""
    assert "float8" in tables([record("matmul_float8", seed="0123abcd")])
