"""The tables of the texts are made from the newest records."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.records import FusedRecord, LayerRecord
from benchmarks.table import main, newest, render, table

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
    (folder / "layers.md").write_text("<!-- table: mlp 4 -->\nold\n<!-- end -->\n")
    assert run(folder) == 1
    assert "old" in (folder / "layers.md").read_text()
    assert "old" not in (folder / "README.md").read_text()
