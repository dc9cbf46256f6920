"""The records of the benchmarks: one schema, and none that does not fit it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from benchmarks import records


def test_record_survives_being_written_and_read(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    record = records.parse(values)
    records.append(record, tmp_path / "some.jsonl")
    (read,) = records.load(tmp_path)
    assert asdict(read) == values


def test_record_of_a_layer_holds_the_two_operations_too(
    layer_values: dict[str, Any],
) -> None:
    record = records.parse(layer_values)
    assert isinstance(record, records.LayerRecord)
    assert record.two_ops_ms == 0.25
    del layer_values["two_ops_ms"]
    with pytest.raises(ValueError, match="two_ops_ms"):
        records.parse(layer_values)


def test_record_of_a_mixture_of_experts_may_name_a_triton_kernel(
    moe_values: dict[str, Any],
) -> None:
    record = records.parse(moe_values)
    assert isinstance(record, records.MoERecord)
    assert (record.triton, record.triton_ms, record.triton_error) == (None,) * 3
    beside = {"triton": "vLLM 1.2.3", "triton_ms": 0.25, "triton_error": 0.005}
    assert asdict(records.parse({**moe_values, **beside})).items() >= beside.items()
    with pytest.raises(ValueError, match=r"missing nothing, unknown \['trito'\]"):
        records.parse({**moe_values, "trito": "vLLM 1.2.3"})


def test_record_with_a_field_missing_is_refused_with_its_line(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    del values["error"]
    (tmp_path / "some.jsonl").write_text(json.dumps(values) + "\n")
    with pytest.raises(ValueError, match=r"some.jsonl:1: missing \['error'\]"):
        list(records.load(tmp_path))


def test_every_record_in_the_repository_fits_its_schema() -> None:
    for record in records.load():
        assert record.op in records.KINDS


def test_readme_names_every_field_of_a_record() -> None:
    text = (records.ROOT / "benchmarks" / "README.md").read_text()
    named = set(re.findall(r"`(\w+)`", text.partition("## A record")[2]))
    for kind in (records.LayerRecord, records.MoERecord, records.MoEParallelRecord):
        assert {field.name for field in fields(kind)} <= named


def test_commit_is_taken_from_the_environment_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BENCH_COMMIT", "abc")
    assert records.commit() == "abc"


def test_commit_is_unknown_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BENCH_COMMIT", raising=False)
    monkeypatch.setenv("PATH", "")
    assert records.commit() == "unknown"
