"""The results are generated from the newest records."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.records import ROOT, FusedRecord, MoEParallelRecord, load
from benchmarks.table import cells, draw, main, newest, schedule_table, section

OTHER_TABLE = "<!-- table: matmul_reduce_scatter 3 -->\n<!-- end -->\n"


def test_rows_show_times_and_the_last_line_the_geometric_mean(
    values: dict[str, Any],
) -> None:
    other = {"model": "llama3-70b", "N": 8192, "speedup": 0.5, "of_limit": 0.2}
    records = [FusedRecord(**values), FusedRecord(**{**values, **other})]
    lines = section("matmul_reduce_scatter", 8, records).splitlines()
    row = "| llama3-8b (4096 x 1792) | 8192 | 0.160 | 0.300 | 0.200 | 2.00 | 80% | "
    assert f"{row}2.35e-3 |" in lines
    assert "| geometric mean | | | | | 1.00 | 40% | |" in lines
    assert lines[-1] == (
        "NVIDIA H200; 2026-01-02; commit 0123456789-dirty; baseline: cuBLAS, NCCL."
    )


def test_newest_record_of_a_shape_counts_and_cpu_records_do_not(
    values: dict[str, Any],
) -> None:
    old, new, cpu, small = (
        FusedRecord(**{**values, **changes})
        for changes in (
            {},
            {"date": "2026-02-01T00:00:00+00:00"},
            {"date": "2027-01-01T00:00:00+00:00", "backend": "cpu"},
            {"M": 4096},
        )
    )
    assert newest([new, old, small, cpu]) == [small, new]


def test_columns_of_baselines_are_named_after_them(values: dict[str, Any]) -> None:
    changes = {
        "op": "moe_expert_parallel",
        "experts": 128,
        "top_k": 8,
        "active_experts": 127.5,
        "routing": "zipf",
        "baselines_ms": {"gathered": 0.3, "all_to_all": 0.5},
    }
    row = cells(MoEParallelRecord(**{**values, **changes}))
    assert [row["routing"], row["gathered"], row["all_to_all"]] == [
        "zipf",
        "0.300",
        "0.500",
    ]


def test_schedules_are_compared_where_both_were_measured(
    values: dict[str, Any],
) -> None:
    changes = {"schedule": "dynamic", "speedup": 1.0}
    records = [FusedRecord(**{**values, **c}) for c in ({}, changes, {"M": 4096})]
    lines = schedule_table(newest(records)).splitlines()
    assert lines[5] == "| llama3-8b | 8192 | 2.00 | 1.00 | 0.50 |"
    assert lines[6] == "| geometric mean | | 2.00 | 1.00 | 0.50 |"


def test_check_fails_until_the_results_are_written(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "README.md", tmp_path)
    arguments = ["--root", str(tmp_path)]
    assert main([*arguments, "--check"]) == 1
    assert main(arguments) == 0
    assert main([*arguments, "--check"]) == 0


def test_table_without_records_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text(OTHER_TABLE)
    with pytest.raises(SystemExit):
        main(["--root", str(tmp_path)])
    assert (
        "no records for the table 'matmul_reduce_scatter 3'" in capsys.readouterr().err
    )


def test_picture_is_drawn(tmp_path: Path) -> None:
    draw(list(load()), tmp_path / "schedules.png")
    assert (tmp_path / "schedules.png").read_bytes().startswith(b"\x89PNG")
