"""Drafts of tokens change no text, as the benchmark of them checks."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.subjects import speculation
from benchmarks.subjects.speculation import Text


@pytest.mark.parametrize("kind", ["repeats", "random"])
def test_ids_that_drafts_change_are_wrong(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = nullcontext(SimpleNamespace(program=None))
    texts = iter([Text([1, 2], 1.0, 2, 0, 0), Text([1, 3], 1.0, 2, 4, 0)])
    monkeypatch.setattr(speculation, "Model", lambda *_, **__: models)
    monkeypatch.setattr(speculation, "provenance", lambda program: {})
    monkeypatch.setattr(speculation, "generated", lambda *_: next(texts))
    options = SimpleNamespace(speculate=4, tokens=2, model="small")
    run: Any = SimpleNamespace(
        options=options, device=SimpleNamespace(world=None), shared={}, is_timed=False
    )
    config: Any = None
    _, wrong = speculation.benchmark(run, config, {}, kind)
    assert wrong == ["drafts change the ids"]
