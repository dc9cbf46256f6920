"""The tables of the texts are made from the newest records."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.records import (
    FusedRecord,
    LayerRecord,
    MoEParallelRecord,
    MoERecord,
)
from benchmarks.table import main, newest, render, section, table

MARKED = "Before\n<!-- table: matmul_reduce_scatter 8 -->\nold\n<!-- end -->\nAfter\n"


Make = Callable[..., FusedRecord]


@pytest.fixture
def record(values: dict[str, Any]) -> Make:
    """Makes a record that differs from the usual one in some fields."""
    return lambda **changes: FusedRecord(**{**values, **changes})


@pytest.fixture
def folder(tmp_path: Path, values: dict[str, Any]) -> Path:
    """A README with one table, and its record."""
    (tmp_path / "README.md").write_text(MARKED)
    (tmp_path / "some.jsonl").write_text(json.dumps(values) + "\n")
    return tmp_path


def run(folder: Path, *options: str) -> int:
    texts = map(str, sorted(folder.glob("*.md")))
    return main([*options, "--results", str(folder), "--texts", *texts])


def test_rows_show_times_and_the_last_line_the_geometric_mean(record: Make) -> None:
    other = record(model="llama3-70b", N=8192, speedup=0.5, of_limit=0.2)
    lines = table([record(), other]).splitlines()
    row = "| llama3-8b (4096 x 1792) | 0.160 | 0.300 | 0.200 | 2.00 | 80% | 2.35e-3 |"
    assert row in lines
    assert "| geometric mean | | | | 1.00 | 40% | |" in lines
    assert lines[-1] == (
        "NVIDIA H200; 2026-01-02; commit 0123456789-dirty; baseline: cuBLAS, NCCL."
    )


def test_table_of_a_layer_has_a_column_for_the_two_operations(
    layer_values: dict[str, Any],
) -> None:
    lines = table([LayerRecord(**layer_values)]).splitlines()
    assert (
        "| model (hidden x inner) | limit | cuBLAS + NCCL | two operations | ours "
        "| speed-up | % of limit | error |"
    ) in lines
    assert "|---|--:|--:|--:|--:|--:|--:|--:|" in lines
    row = "| llama3-8b (4096 x 1792) | 0.160 | 0.300 | 0.250 | 0.200 | 2.00 | 80% | "
    assert f"{row}2.35e-3 |" in lines
    assert "| geometric mean | | | | | 2.00 | 80% | |" in lines


def test_newest_record_of_a_shape_counts_and_cpu_records_do_not(record: Make) -> None:
    old, new = record(), record(date="2026-02-01T00:00:00+00:00")
    small = record(M=4096)
    cpu = record(date="2027-01-01T00:00:00+00:00", backend="cpu")
    assert newest([new, old, small, cpu]) == [small, new]


def test_each_schedule_of_a_shape_counts_and_a_table_has_the_static_one(
    record: Make,
) -> None:
    records = newest([record(), record(schedule="dynamic", speedup=9.0)])
    assert [r.schedule for r in records] == ["dynamic", "static"]
    text = section("matmul_reduce_scatter 8", records)
    assert "| 2.00 | 80% |" in text and "9.00" not in text


@pytest.fixture
def experts(moe_values: dict[str, Any]) -> list[FusedRecord]:
    """Two models; one of them at two numbers of tokens, with both schedules at one."""
    changes: list[dict[str, Any]] = [
        {"ours_ms": 0.1, "speedup": 3.0},
        {"ours_ms": 0.08, "speedup": 3.75, "of_limit": 0.9, "schedule": "dynamic"},
        {"M": 1},
        {"model": "mixtral-8x7b", "N": 4096, "experts": 8, "schedule": "dynamic"},
    ]
    return newest(MoERecord(**{**moe_values, **change}) for change in changes)


def test_a_mixture_of_experts_has_a_table_a_model_with_both_schedules(
    experts: list[FusedRecord],
) -> None:
    first, second = section("moe 1", experts).split("\n\nmixtral-8x7b: ")
    lines = first.splitlines()
    assert lines[1] == (
        "qwen3-30b-a3b: hidden 2048, inner 768, 128 experts, 8 a token; 1 rank, "
        "bfloat16; milliseconds. Speed-up and % of roofline: static / dynamic, each "
        "within its own run."
    )
    assert lines[3:7] == [
        "| tokens | roofline | baseline | ours, static | ours, dynamic | speed-up "
        "| % of roofline | error |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
        "| 1 | 0.160 | 0.300 | 0.200 | - | 2.00 / - | 80% / - | 2.35e-3 |",
        "| 128 | 0.160 | 0.300 | 0.100 | 0.080 | 3.00 / 3.75 | 80% / 90% | 2.35e-3 |",
    ]
    row = "| 128 | 0.160 | 0.300 | - | 0.200 | - / 2.00 | - / 80% | 2.35e-3 |"
    assert row in second.splitlines()
    assert "baseline: torch." in second


def test_a_triton_kernel_stands_beside_ours_of_the_same_run(
    moe_values: dict[str, Any],
) -> None:
    beside = {"triton": "vLLM 1.2.3", "triton_ms": 0.25, "triton_error": 0.005}
    other = {**moe_values, **beside, "date": "2025-12-31T00:00:00+00:00"}
    newer = MoERecord(**{**moe_values, "ours_ms": 0.1})
    lines = section("triton moe 1", [MoERecord(**other), newer]).splitlines()
    assert lines[5].startswith("| qwen3-30b-a3b | 128 | 0.250 | 0.200 | 1.25 |")
    assert lines[7].endswith("baseline: torch. Triton: vLLM 1.2.3.")
    assert section("moe 1", [MoERecord(**other), newer]).count("| 0.100 |") == 1


def test_over_ranks_each_routing_has_its_rows(moe_values: dict[str, Any]) -> None:
    alone = ("ours_eager_ms", "baseline_eager_ms")
    values = {k: v for k, v in moe_values.items() if k not in alone} | {
        "op": "moe_expert_parallel",
        "world_size": 4,
        "baselines_ms": {"gathered": 0.3, "all_to_all": 0.5},
    }
    routings = ("zipf", "uniform")
    some = [MoEParallelRecord(**{**values, "routing": r}) for r in routings]
    lines = section("moe_expert_parallel 4", newest(some)).splitlines()
    assert lines[3:7] == [
        "| routing | M | limit | all_to_all | gathered | ours | speed-up | % of limit "
        "| error |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
        "| uniform | 128 | 0.160 | 0.500 | 0.300 | 0.200 | 2.00 | 80% | 2.35e-3 |",
        "| zipf | 128 | 0.160 | 0.500 | 0.300 | 0.200 | 2.00 | 80% | 2.35e-3 |",
    ]


def test_schedules_are_compared_where_both_were_measured(
    experts: list[FusedRecord], layer_values: dict[str, Any]
) -> None:
    lines = section("schedules moe 1", experts).splitlines()
    assert lines[3:7] == [
        "| model | tokens | static | dynamic | dynamic by static |",
        "|---|--:|--:|--:|--:|",
        "| qwen3-30b-a3b | 128 | 3.00 | 3.75 | 1.25 |",
        "| geometric mean | | 3.00 | 3.75 | 1.25 |",
    ]
    static = LayerRecord(**layer_values)
    dynamic = LayerRecord(**{**layer_values, "schedule": "dynamic", "speedup": 1.0})
    text = section("schedules mlp 4", newest([static, dynamic]))
    assert "| model | M | static | dynamic | dynamic by static |" in text
    assert "| llama3-8b | 8192 | 2.00 | 1.00 | 0.50 |" in text


@pytest.mark.parametrize("name", ["moe 1", "schedules moe 1", "mlp 4", "moe 4"])
def test_what_was_never_measured_is_said_to_be_so(name: str, record: Make) -> None:
    assert section(name, [record()]) == "\nNot measured yet.\n\n"


@pytest.mark.parametrize("name", ["mo 1", "soak 8", "moe", "schedules", "moe x"])
def test_a_table_of_no_operation_is_refused(name: str, record: Make) -> None:
    with pytest.raises(ValueError, match=f"no records for the table '{name}'"):
        section(name, [record()])


def test_only_what_stands_between_the_markers_is_replaced(record: Make) -> None:
    text = render(MARKED, [record()])
    assert text.startswith(
        "Before\n<!-- table: matmul_reduce_scatter 8 -->\n\nM = 8192"
    )
    assert text.endswith("<!-- end -->\nAfter\n")
    assert "old" not in text
    assert render(text, [record()]) == text


def test_check_fails_until_the_table_is_written(folder: Path) -> None:
    assert run(folder, "--check") == 1
    assert (folder / "README.md").read_text() == MARKED
    assert run(folder) == 0
    assert run(folder, "--check") == 0


def test_table_without_records_is_refused_by_name(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "README.md").write_text(MARKED.replace(" 8 ", " 4 "))
    assert run(folder) == 1
    assert (
        "no records for the table 'matmul_reduce_scatter 4'" in capsys.readouterr().err
    )


def test_a_text_without_records_leaves_the_others_to_be_written(folder: Path) -> None:
    other = MARKED.replace(" 8 ", " 4 ")
    (folder / "layers.md").write_text(other)
    assert run(folder) == 1
    assert "old" in (folder / "layers.md").read_text()
    assert "old" not in (folder / "README.md").read_text()
