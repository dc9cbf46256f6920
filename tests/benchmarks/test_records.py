"""The records of the benchmarks have one schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import records
from tests.benchmarks.conftest import record


def test_record_survives_being_written_and_read(tmp_path: Path) -> None:
    values = vars(record())
    assert values["batch_ms"] is None
    records.append(values, tmp_path / "some.jsonl")
    (read,) = records.load(tmp_path)
    assert vars(read) == values


@pytest.mark.parametrize(
    ("changes", "text"),
    [({"error": None}, r"missing \['error'\]"), ({"x": 1}, r"unknown \['x'\]")],
)
def test_record_of_other_fields_is_refused_with_its_line(
    tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    values = {k: v for k, v in {**vars(record()), **changes}.items() if v is not None}
    (tmp_path / "some.jsonl").write_text(json.dumps(values) + "\n")
    with pytest.raises(ValueError, match=f"some.jsonl:1: .*{text}"):
        list(records.load(tmp_path))


def test_every_record_in_the_repository_fits_its_schema() -> None:
    assert {record.op for record in records.load()} <= set(records.KINDS)


def test_fields_that_are_explained_exist() -> None:
    kinds = records.KINDS.values()
    names = {name for kind in kinds for name in (*kind.required, *kind.defaults)}
    assert set(records.FIELDS) <= names


def test_commit_is_unknown_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BENCH_COMMIT", raising=False)
    monkeypatch.setenv("PATH", "")
    assert records.commit() == "unknown"
