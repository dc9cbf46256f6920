"""The records of the benchmarks have one schema."""

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
    records.append(records.parse(values), tmp_path / "some.jsonl")
    (read,) = records.load(tmp_path)
    assert asdict(read) == {"batch_ms": None, "batch_error": None, **values}


@pytest.mark.parametrize(
    ("changes", "text"),
    [({"error": None}, r"missing \['error'\]"), ({"x": 1}, r"unknown \['x'\]")],
)
def test_record_of_other_fields_is_refused_with_its_line(
    tmp_path: Path, values: dict[str, Any], changes: dict[str, Any], text: str
) -> None:
    found = {k: v for k, v in {**values, **changes}.items() if v is not None}
    (tmp_path / "some.jsonl").write_text(json.dumps(found) + "\n")
    with pytest.raises(ValueError, match=f"some.jsonl:1: .*{text}"):
        list(records.load(tmp_path))


def test_every_record_in_the_repository_fits_its_schema() -> None:
    assert {record.op for record in records.load()} <= set(records.KINDS)


def test_readme_names_every_field_of_a_record() -> None:
    text = (records.ROOT / "benchmarks" / "README.md").read_text()
    named = set(re.findall(r"`(\w+)`", text))
    for kind in (
        records.LayerRecord,
        records.MoERecord,
        records.MoEParallelRecord,
        records.DecodeRecord,
        records.DecodeVllmRecord,
    ):
        assert {field.name for field in fields(kind)} <= named


def test_commit_is_unknown_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BENCH_COMMIT", raising=False)
    monkeypatch.setenv("PATH", "")
    assert records.commit() == "unknown"
