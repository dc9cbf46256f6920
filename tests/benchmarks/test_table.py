"""The results are generated from the newest records."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.figures import draw_decode, draw_schedules
from benchmarks.records import RESULTS, ROOT, Record, append, load, now
from benchmarks.subjects.decode import vllm_steps
from benchmarks.table import (
    BOTH,
    DRAWN,
    decode_summary,
    main,
    rows_of,
    section,
    summary,
)
from benchmarks.tables import TABLES, newest
from tests.benchmarks.conftest import record

MARKED = "<!-- table: summary -->\n<!-- end -->\n"


def shown(title: str, *records: Record) -> list[str]:
    """The lines of the table whose title begins so."""
    (table,) = (table for table in TABLES if table.title.startswith(title))
    return table(records).splitlines()


def test_row_has_the_times_and_the_last_line_their_origin() -> None:
    lines = section("matmul_reduce_scatter", [record()]).splitlines()
    assert lines[3:] == [
        "| llama3-8b 4096x1792 | 8192 | 0.160 | 0.300 | 0.200 | 2.00 | 80% |",
        "",
        "8 x NVIDIA H200, bfloat16; 2026-01-02; commit 0123456789-dirty; errors up to "
        "2.4e-3; baseline: cuBLAS, NCCL.",
    ]


def test_newest_record_of_a_shape_counts_and_cpu_records_do_not() -> None:
    old, new, small = record(), record(date="2026-02-01"), record(M=4096)
    cpu = record(date="2027-01-01", backend="cpu")
    assert newest([new, old, small, cpu]) == [small, new]


def test_servers_are_compared_with_those_that_were_measured() -> None:
    alone, fields = record("serve"), {"baseline_token_ms": 3, "clients": 2}
    baselines = {f"baseline_{n}": 2 for n in ("first_token_ms", "tokens_per_s")}
    lines = shown("A server", alone, record("serve", **fields, **baselines))
    row = "| {} | {} | 1 | 1 | 1 | 1 | {} | 1.00 | 1.00 | {} | 1 | {} |"
    assert row.format(1, 1, "-", "-", "-")[4:] in lines[-2]
    assert row.format(1, 2, 2, "3.00", "0.50")[4:] in lines[-1]


def test_each_device_has_a_table_of_its_most_ranks() -> None:
    changes: list[dict[str, Any]] = [{}, {"world_size": 2, "M": 7}]
    changes.append({"device": "NVIDIA H100", "M": 9})
    text = section("matmul_reduce_scatter", [record(**c) for c in changes])
    assert "8 x NVIDIA H200" in text and "8 x NVIDIA H100" in text
    assert "| 9 |" in text and "| 7 |" not in text


def test_a_section_may_have_a_number_of_ranks() -> None:
    records = [record("mlp", M=8, world_size=n) for n in (1, 2, 4)]
    assert [r.world_size for r in rows_of("mlp 2", records)] == [2]
    assert [r.world_size for r in rows_of("mlp", records)] == [4]
    with pytest.raises(ValueError, match="no records of mlp 8"):
        rows_of("mlp 8", records)


def test_speed_ups_of_variants_are_columns_of_the_row() -> None:
    timed = {"date": "2026-01-01", "triton": "some", "triton_ms": 0.5}
    records = [record("moe"), record("moe", **timed)]
    assert "| 2.00 | 80% | 2.50 |" in section("moe", records)


def test_schedules_are_compared_at_the_newest_commit_that_measured_both() -> None:
    old, new, last = ({"commit": c, "date": f"2026-0{c}-01"} for c in "123")
    records = [record("moe", **last, ours_ms=9.0)]
    for commit, dynamic_ms in ((old, 0.1), (new, 0.16)):
        records.append(record("moe", **commit, ours_ms=0.2))
        records.append(record("moe", **commit, schedule="dynamic", ours_ms=dynamic_ms))
    assert section("moe", records).splitlines()[3].endswith("| 1.25 |")


def test_speed_up_with_uneven_experts_is_a_column() -> None:
    op = "moe_expert_parallel"
    records = [record(op, routing="uniform"), record(op, routing="zipf", speedup=1.9)]
    assert "| 2.00 | 80% | 1.90 |" in section(op, records)


def test_many_tokens_on_few_experts_are_a_table_of_their_own() -> None:
    uniform = record("moe", M=128)
    few = record("moe", M=128, routing="9 experts", ours_ms=0.24)
    assert rows_of("moe", [uniform, few]) == [uniform]
    assert shown("Many tokens", uniform) == []
    skewed = record("moe", M=128, routing="9 experts", triton_ms=9.0, batch_ms=9.0)
    mixed = [uniform, skewed, record("moe", schedule="dynamic", routing="zipf")]
    assert section("moe", mixed).count("9.0") == 0
    assert BOTH not in section("moe", mixed)
    assert "## The same bits" not in "".join(shown("The same bits", *mixed))
    (*_, last) = shown("Many tokens", uniform, few)
    assert "| 128 | 9 experts | 0.160 | 0.300 | 0.240 | 1.50 | static |" in last


def test_the_same_bits_have_their_cost() -> None:
    step = record("decode", batch=8, batch_ms=0.25)
    lines = shown("The same bits", record("mlp", batch_ms=0.3), step)
    assert [line.split(" | ")[2:6] for line in lines[5:7]] == [
        ["8", "0.200 ms", "0.250 ms", "x 1.25"],
        ["8192", "0.200 ms", "0.300 ms", "x 1.50"],
    ]


@pytest.mark.parametrize(
    ("title", "op", "changes", "row"),
    [
        (
            "Epilogues",
            "epilogue",
            {"M": 64, "store_ms": 0.1, "policy": "8 x 64", "of_store": 1.01},
            "| 64 | 4096x1792 | 0.1000 | 0.2000 | 1.010 | 8 x 64 |",
        ),
        ("Eight", "chain", {"policy": "8 x 64"}, "| 80% | 8 x 64 | static |"),
        (
            "Soak",
            "soak",
            {"mismatches": 3, "runs": 20, "hangs": 0},
            "| soak | NVIDIA H200 | 8 | 20 | 3 | 0 | 0123456789-dirty |",
        ),
        (
            "First token of a prompt",
            "prompt",
            {"world_size": 1, "ours_ms": 50.0, "baseline_ms": 60.0, "most_rows": 256},
            "| 1 rank | static | 512 | 256 | 50.0 ms | 60.000 | 1.20 |",
        ),
        (
            "Attention of 128",
            "attention",
            {"num_positions": 60000, "ours_ms": 0.08, "baseline_ms": 0.1},
            "| static | 60000 | 0.160 | 0.080 | 0.100 | 1.25 |",
        ),
        ("Compilation", "compile", {"device": "none", "build_ms": 1500}, "| 1.5 s |"),
    ],
)
def test_last_record_is_the_row_of_its_table(
    title: str, op: str, changes: dict[str, Any], row: str
) -> None:
    old = record(op, **{**changes, "date": "2025-01-01", "commit": "old"})
    lines = shown(title, record(op, **changes), old)
    assert len(lines) == 6 and row in lines[5] and "0123456789" in lines[5]
    assert shown(title) == []


def test_schedules_of_a_task_are_columns() -> None:
    times = {"static": 900, "dynamic": 2000}
    costs = [
        record("task_cost", lane="t", schedule=s, task_ns=n) for s, n in times.items()
    ]
    lines = shown("Cost of a task", *costs)
    assert lines[3] == "| lane | device | dynamic | static |"
    assert lines[5:] == ["| t | NVIDIA H200 | 2.00 us | 0.90 us |"]


def test_summary_has_the_mean_and_the_range_of_each_operation() -> None:
    lines = summary(list(load())).splitlines()
    assert lines[1] == "| operation | GPUs | sizes | speed-up | from, to |"
    assert len(lines) == 3 + len(DRAWN) + 3
    assert lines[3].startswith("| Matrix multiplication | 1 | 6")
    assert lines[-1].startswith("| Tensor-parallel mixture of experts | 4 | models, ")


def test_drawn_mixtures_replace_those_of_models_in_the_summary() -> None:
    changes = {"world_size": 1, "seed": "0123abcd"}
    draws = [
        record("random_mixture", model=f"draw {n}", speedup=2.0 + n, **changes)
        for n in range(2)
    ]
    results = [r for r in load() if r.op != "random_mixture"]
    text = summary([*results, *draws])
    assert "| Mixture of experts | 1 | 2 drawn | 2.45 | 2.00, 3.00 |" in text
    assert "| Expert-parallel mixture of experts | 4 | models, " in text


NAMES = "| llama3-8b | NVIDIA H200 | 8 ranks | static | 8 | 512 | "


def step(**changes: Any) -> Record:
    """A decode step on eight ranks."""
    return record("decode", **{"batch": 8, "steps": 9, **changes})


def test_last_decode_step_of_each_batch_is_shown() -> None:
    rows = shown("Decode step", step(), step(date="2025-01-01", ours_ms=9.0))
    assert rows[5] == NAMES + "0.160 | 0.200 | 80% | - | - | 0123456789-dirty |"
    assert decode_summary([step(world_size=1)]).splitlines()[-3:] == [
        "| model | context | GPU | batch 8 | vLLM | vLLM / ours |",
        "|---|--:|---|--:|--:|--:|",
        "| llama3-8b | 512 | NVIDIA H200 | 0.20 (0.16) | - | - |",
    ]
    assert not rows[6]
    assert shown("Decode step") == []


def test_steps_are_shown_beside_those_of_vllm(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {"baseline_ms": 0.24},
        {"baseline_ms": 0.25},
        {"baseline_ms": 9.0, "date": "2026-01-03"},
        {"baseline_ms": 9.0, "batch": 32, "device": "NVIDIA H100"},
    ]
    path, today = tmp_path / "vllm.jsonl", {"date": now(), "world_size": 1, "batch": 8}
    for change in changes:
        append(vars(record("decode_vllm", **{**today, **change})), path)
    assert vllm_steps(path, "NVIDIA H200") == {(1, "llama3-8b", 512, 8, None): 0.25}
    result = step(world_size=1, baseline_ms=0.25)
    assert " | 80% | 0.250 | 1.25 | " in shown("Decode step", result)[5]
    assert "| 0.20 (0.16) | 0.25 | 1.25 |" in decode_summary([result])


def test_several_steps_and_sampling_are_shown_against_their_baselines() -> None:
    calls = {"single_launches_ms": 0.21, "call_ms": 0.22, "single_calls_ms": 0.25}
    (*_, last) = shown("Several steps", step(), step(steps_per_launch=32, **calls))
    assert last == NAMES + "32 | 0.200 | 0.210 | 0.220 | 0.250 | 0123456789-dirty |"
    sampled = step(sampling="some", greedy_ms=0.19)
    (*_, last) = shown("Sampling", step(), sampled)
    assert last == NAMES + "0.200 | 0.190 | some | 0123456789-dirty |"


def test_steps_on_several_ranks_have_a_picture_of_their_own(tmp_path: Path) -> None:
    alone, on_ranks = step(world_size=1), step()
    pictures = ["(decode.png)", "(decode_ranks.png)"]
    for steps, counts in (
        ([alone], [1, 0]),
        ([on_ranks], [0, 1]),
        ([alone, on_ranks], [1, 1]),
    ):
        text = "".join(shown("Decode step", *steps))
        assert [text.count(picture) for picture in pictures] == counts
    draw_decode([alone, on_ranks], tmp_path / "some.png", on_ranks=True)
    assert (tmp_path / "some.png").read_bytes().startswith(b"\x89PNG")


def test_check_fails_until_the_results_are_written(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(RESULTS, tmp_path / "results")
    arguments = ["--root", str(tmp_path), "--results", str(tmp_path / "results")]
    assert main([*arguments, "--check"]) == 1
    assert main(arguments) == 0
    assert main([*arguments, "--check"]) == 0
    page = (tmp_path / "docs" / "results.md").read_text()
    assert page == (ROOT / "docs" / "results.md").read_text()


def test_operation_without_records_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text(MARKED)
    with pytest.raises(SystemExit):
        main(["--root", str(tmp_path), "--results", str(tmp_path)])
    assert "no records of random_matmul" in capsys.readouterr().err


def test_schedules_are_drawn(tmp_path: Path) -> None:
    draw_schedules(list(load()), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
