"""The picture of the schedules is drawn from the records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plot import main, panels
from benchmarks.records import FusedRecord, LayerRecord, MoERecord


def test_operations_with_a_dynamic_record_have_a_panel(
    values: dict[str, Any], layer_values: dict[str, Any], moe_values: dict[str, Any]
) -> None:
    dynamic = {"schedule": "dynamic"}
    layers = [LayerRecord(**layer_values), LayerRecord(**{**layer_values, **dynamic})]
    alone = LayerRecord(**{**layer_values, "world_size": 2})
    many, one = (MoERecord(**{**moe_values, **dynamic, "M": n}) for n in (128, 1))
    other = FusedRecord(**{**values, **dynamic})
    assert panels([*layers, alone, many, other, one]) == [[one, many], layers]


def test_picture_is_written(tmp_path: Path, moe_values: dict[str, Any]) -> None:
    records = [
        {**moe_values, "M": tokens, "schedule": schedule}
        for tokens in (1, 16)
        for schedule in ("static", "dynamic")
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "moe.jsonl").write_text(lines)
    path = tmp_path / "schedules.png"
    assert main(["--results", str(tmp_path), "--path", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_nothing_is_written_where_no_schedule_is_dynamic(
    tmp_path: Path, moe_values: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "moe.jsonl").write_text(json.dumps(moe_values) + "\n")
    path = tmp_path / "schedules.png"
    assert main(["--results", str(tmp_path), "--path", str(path)]) == 1
    assert "no records of a dynamic schedule" in capsys.readouterr().err
    assert not path.exists()
