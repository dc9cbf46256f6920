"""The results are generated from the newest records."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.decode import vllm_steps
from benchmarks.decode_tables import (
    decode_summary,
    decode_table,
    launches_table,
    sampling_table,
)
from benchmarks.plot import draw, draw_decode
from benchmarks.records import (
    ROOT,
    ChainRecord,
    DecodeRecord,
    DecodeVllmRecord,
    EpilogueRecord,
    FusedRecord,
    MoEParallelRecord,
    MoERecord,
    Record,
    SoakRecord,
    append,
    load,
    now,
)
from benchmarks.table import (
    batch_table,
    chain_table,
    epilogue_table,
    few_table,
    main,
    newest,
    rows_of,
    section,
    soak_table,
    summary,
)

MARKED = "<!-- table: summary -->\n<!-- end -->\n"
SOAK = ("world_size", "device", "driver", "cuda", "backend", "path", "commit", "date")
EXPERTS = {"experts": 128, "top_k": 8, "active_experts": 127.5}


def test_row_has_the_times_and_the_last_line_their_origin(
    values: dict[str, Any],
) -> None:
    lines = section("matmul_reduce_scatter", [FusedRecord(**values)]).splitlines()
    assert lines[3:] == [
        "| llama3-8b 4096x1792 | 8192 | 0.160 | 0.300 | 0.200 | 2.00 | 80% |",
        "",
        "8 x NVIDIA H200, bfloat16; 2026-01-02; commit 0123456789-dirty; errors up to "
        "2.4e-3; baseline: cuBLAS, NCCL.",
    ]


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


def test_each_device_has_a_table_of_its_most_ranks(values: dict[str, Any]) -> None:
    changes = [{}, {"world_size": 2, "M": 7}, {"device": "NVIDIA H100", "M": 9}]
    records = [FusedRecord(**{**values, **c}) for c in changes]
    text = section("matmul_reduce_scatter", records)
    assert "8 x NVIDIA H200" in text and "8 x NVIDIA H100" in text
    assert "| 9 |" in text and "| 7 |" not in text


def test_a_section_may_have_a_number_of_ranks(values: dict[str, Any]) -> None:
    sizes = {"op": "mlp", "M": 8}
    records = [FusedRecord(**{**values, **sizes, "world_size": n}) for n in (1, 2, 4)]
    assert [r.world_size for r in rows_of("mlp 2", records)] == [2]
    assert [r.world_size for r in rows_of("mlp", records)] == [4]
    with pytest.raises(ValueError, match="no records of mlp 8"):
        rows_of("mlp 8", records)


def test_speed_ups_of_variants_are_columns_of_the_row(values: dict[str, Any]) -> None:
    changes = {"op": "moe", "M": 8, "ours_eager_ms": 1.0, "baseline_eager_ms": 1.0}
    moe = {**values, **EXPERTS, **changes}
    timed = {"date": "2026-01-01", "triton": "some", "triton_ms": 0.5}
    dynamic = {"schedule": "dynamic", "speedup": 1.7}
    records = [MoERecord(**{**moe, **c}) for c in ({}, timed, dynamic)]
    assert "| 2.00 | 80% | 1.70 | 2.50 |" in section("moe", records)


def test_speed_up_with_uneven_experts_is_a_column(values: dict[str, Any]) -> None:
    moe = {**values, **EXPERTS, "op": "moe_expert_parallel", "baselines_ms": {"a": 0.3}}
    changes = [{"routing": "uniform"}, {"routing": "zipf", "speedup": 1.9}]
    records = [MoEParallelRecord(**{**moe, **c}) for c in changes]
    assert "| 2.00 | 80% | 1.90 |" in section("moe_expert_parallel", records)


def test_many_tokens_on_few_experts_are_a_table_of_their_own(
    values: dict[str, Any],
) -> None:
    values |= {**EXPERTS, "op": "moe", "world_size": 1, "M": 128}
    values |= {"ours_eager_ms": 0.2, "baseline_eager_ms": 0.3}
    uniform = MoERecord(**values)
    few = MoERecord(**values | {"routing": "9 experts", "ours_ms": 0.24})
    assert rows_of("moe", [uniform, few]) == [uniform]
    assert few_table([uniform]) == ""
    others = {"triton_ms": 9.0, "batch_ms": 9.0, "schedule": "static"}
    mixed = [uniform, MoERecord(**values | others | {"routing": "9 experts"})]
    mixed.append(MoERecord(**values | {"schedule": "dynamic", "routing": "zipf"}))
    assert section("moe", mixed).count("9.0") == 0
    assert "dynamic" not in section("moe", mixed)
    assert batch_table(mixed) == ""
    (*_, last) = few_table([uniform, few]).splitlines()
    assert "| 128 | 9 experts | 0.160 | 0.300 | 0.240 | 1.50 | static |" in last


def test_an_epilogue_is_shown_beside_the_plain_store(values: dict[str, Any]) -> None:
    kept = ("dtype", "schedule", "error", "bitwise_equal", "repeats", "protocol")
    of_one = {name: values[name] for name in (*SOAK, *kept)}
    of_one |= {"op": "epilogue", "model": "fp8", "M": 64, "N": 5120, "K": 25600}
    times = {"policy": "8 x 64", "ours_ms": 0.0707, "store_ms": 0.07, "of_store": 1.01}
    (*_, last) = epilogue_table([EpilogueRecord(**of_one, **times)]).splitlines()
    assert "| 64 | 5120x25600 | 0.0700 | 0.0707 | 1.010 | 8 x 64 |" in last
    assert epilogue_table([]) == ""


def test_a_chain_is_shown_with_its_tiles(values: dict[str, Any]) -> None:
    values |= {"op": "chain", "world_size": 1, "M": 8}
    old, new = (
        ChainRecord(**values, policy=policy) for policy in ("old tiles", "8 x 64")
    )
    (*_, last) = chain_table([old, new]).splitlines()
    assert last.startswith("| llama3-8b | NVIDIA H200 | 8 | 0.160 | 0.300 | 0.200 |")
    assert "| 80% | 8 x 64 | static |" in last
    assert chain_table([]) == "" and len(newest([old, new])) == 1


def test_summary_has_the_mean_and_the_range_of_each_operation() -> None:
    lines = summary(list(load())).splitlines()
    assert len(lines) == 11
    assert lines[1].endswith("| % of GEMMs | % of roofline |")
    assert lines[3].startswith("| GEMM + Reduce-Scatter | ")
    assert lines[3].endswith("% | - |")
    assert "| - | " in lines[10] and lines[10].endswith("% |")


def test_last_soak_of_each_kind_is_shown(values: dict[str, Any]) -> None:
    common = {key: values[key] for key in list(values) if key in SOAK}
    common |= {"op": "soak", "cases": 1, "hangs": 0, "seconds": 1.0, "error": None}
    last = {"date": "2026-02-01", "mismatches": 3, "runs": 20}
    soaks = [{**common, **last}, {**common, "mismatches": 0, "runs": 10}]
    rows = soak_table([SoakRecord(**s) for s in soaks]).splitlines()[5:]
    assert rows == ["| soak | NVIDIA H200 | 8 | 20 | 3 | 0 | 0123456789-dirty |"]


@pytest.fixture
def step(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record of a decode step on eight ranks."""
    step = {k: v for k, v in values.items() if k in DecodeRecord.__dataclass_fields__}
    of_decode = {"op": "decode", "batch": 8, "context": 512, "policy": "", "steps": 9}
    return step | of_decode | {"baseline_ms": None}


def test_last_decode_step_of_each_batch_is_shown(step: dict[str, Any]) -> None:
    old = {"date": "2025-01-01", "ours_ms": 9.0}
    rows = decode_table([DecodeRecord(**{**step, **c}) for c in ({}, old)]).splitlines()
    wanted = "| llama3-8b | NVIDIA H200 | 8 ranks | static | 8 | 512 | 0.160 | 0.200 | "
    assert rows[5] == wanted + "80% | - | - | 0123456789-dirty |"
    one = DecodeRecord(**{**step, "world_size": 1})
    assert decode_summary([one]).splitlines()[-3:] == [
        "| model | context | GPU | batch 8 | vLLM | vLLM / ours |",
        "|---|--:|---|--:|--:|--:|",
        "| llama3-8b | 512 | NVIDIA H200 | 0.20 (0.16) | - | - |",
    ]
    assert not rows[6]
    assert decode_table([]) == ""


def test_steps_are_shown_beside_those_of_vllm(
    step: dict[str, Any], tmp_path: Path
) -> None:
    vllm = {k: v for k, v in step.items() if k in DecodeVllmRecord.__dataclass_fields__}
    vllm |= {"op": "decode_vllm", "engine": "", "slopes_ms": [], "ready_s": 1.0}
    vllm |= {"date": now(), "world_size": 1, "baseline_ms": 0.24}
    changes: list[dict[str, Any]] = [
        {},
        {"baseline_ms": 0.25},
        {"baseline_ms": 9.0, "date": "2026-01-03T00:00:00+00:00"},
        {"baseline_ms": 9.0, "batch": 32, "device": "NVIDIA H100"},
    ]
    path = tmp_path / "vllm.jsonl"
    for change in changes:
        append(DecodeVllmRecord(**{**vllm, **change}), path)
    shape = 1, "llama3-8b", 512, 8
    assert vllm_steps(path, "NVIDIA H200") == {shape: 0.25}
    one = DecodeRecord(**{**step, "world_size": 1, "baseline_ms": 0.25})
    rows = decode_table([one]).splitlines()
    assert " | 80% | 0.250 | 1.25 | " in rows[5]
    assert "| 0.20 (0.16) | 0.25 | 1.25 |" in decode_summary([one])


def test_several_steps_and_sampling_are_shown_against_their_baselines(
    step: dict[str, Any],
) -> None:
    names = "| llama3-8b | NVIDIA H200 | 8 ranks | static | 8 | 512 | "
    calls = {"single_launches_ms": 0.21, "call_ms": 0.22, "single_calls_ms": 0.25}
    several = DecodeRecord(**{**step, "steps_per_launch": 32, **calls})
    (*_, last) = launches_table([DecodeRecord(**step), several]).splitlines()
    assert last == names + "32 | 0.200 | 0.210 | 0.220 | 0.250 | 0123456789-dirty |"
    sampled = DecodeRecord(**{**step, "sampling": "some", "greedy_ms": 0.19})
    (*_, last) = sampling_table([DecodeRecord(**step), sampled]).splitlines()
    assert last == names + "0.200 | 0.190 | some | 0123456789-dirty |"


def test_steps_on_several_ranks_have_a_picture_of_their_own(
    step: dict[str, Any], tmp_path: Path
) -> None:
    on_ranks = DecodeRecord(**step)
    one = DecodeRecord(**{**step, "world_size": 1})
    assert "(decode_ranks.png)" not in decode_table([one])
    assert "(decode.png)" not in decode_table([on_ranks])
    assert "(decode_ranks.png)" in decode_table([one, on_ranks])
    draw_decode([one, on_ranks], tmp_path / "some.png", on_ranks=True)
    assert (tmp_path / "some.png").read_bytes().startswith(b"\x89PNG")


def test_check_fails_until_the_results_are_written(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "README.md", tmp_path)
    arguments = ["--root", str(tmp_path)]
    assert main([*arguments, "--check"]) == 1
    assert main(arguments) == 0
    assert main([*arguments, "--check"]) == 0


def test_operation_without_records_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text(MARKED)
    with pytest.raises(SystemExit):
        main(["--root", str(tmp_path), "--results", str(tmp_path)])
    assert "no records of matmul_reduce_scatter" in capsys.readouterr().err


@pytest.mark.parametrize("picture", [draw, draw_decode])
def test_pictures_are_drawn(
    picture: Callable[[list[Record], Path], None], tmp_path: Path
) -> None:
    picture(list(load()), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
