"""Each started run is recorded."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import run
from benchmarks.harness import Result, Run, Subject, add_shapes, execute
from benchmarks.records import Record, read
from tests.benchmarks.conftest import record


def add_options(parser: ArgumentParser) -> None:
    add_shapes(parser, ["one"])


def subject(*results: Result | Exception) -> Subject:
    """Without ranks: yields these results, and raises these errors."""

    def measure(run: Run) -> Iterator[Result]:
        for result in results:
            if isinstance(result, Exception):
                raise result
            yield result

    title, op = "Some benchmark.", "first_token"
    return Subject(title, measure, add_options, op=op, has_world=False)


def values(**changes: Any) -> dict[str, Any]:
    fields = vars(record("first_token", **changes))
    return {
        k: v
        for k, v in fields.items()
        if k not in ("op", "run", "seed", "commit", "date")
    }


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("BENCH_COMMIT", "0123abc")
    return ["--record", str(tmp_path / "some.jsonl"), "--repeats", "2"]


def recorded(options: list[str]) -> list[Record]:
    return [*read(Path(options[1]))]


def test_a_run_is_recorded_from_its_start_to_its_end(options: list[str]) -> None:
    results = (values(), []), (values(model="other"), ["wrong bits"])
    assert execute(subject(*results), "some", options) == 1
    first, result, last = recorded(options)
    assert (first.state, last.state) == ("started", "ended")
    assert first.run == result.run == last.run
    assert first.subject == "some" and "--repeats 2" in first.options
    assert last.recorded == 1
    assert re.fullmatch("first_token other, .*: wrong bits", *last.failed)


def test_a_run_that_an_error_ends_is_recorded(options: list[str]) -> None:
    with pytest.raises(RuntimeError):
        execute(subject((values(), []), RuntimeError("out of GPUs")), "some", options)
    assert [r.get("state") for r in recorded(options)] == ["started", None, "ended"]
    assert recorded(options)[-1].failed == ["RuntimeError: out of GPUs"]


def test_an_unknown_subject_is_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run.main(["nothing"]) == 2
    assert (
        "matmul_all_reduce, matmul_float8, matmul_reduce_scatter"
        in capsys.readouterr().err
    )
