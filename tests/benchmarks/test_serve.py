"""Streams of a server are read and checked, and their times follow from the pieces."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

import pytest

from benchmarks.serve_client import Stream, stream_of, times_of
from benchmarks.subjects import serve
from benchmarks.subjects.serve import most_added

LAST = "[DONE]"


def pieces_of(documents: list[Any], cut: int = 0) -> list[tuple[float, bytes]]:
    """An answer with a chunk for each document, which come a second after each other;
    of the second one, `cut` bytes come with the first."""
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    pieces = [head]
    for document in documents:
        text = document if isinstance(document, str) else json.dumps(document)
        data = f"data: {text}\n\n".encode()
        pieces.append(b"%x\r\n%s\r\n" % (len(data), data))
    first, next_piece, *later = pieces[1:]
    pieces = [head, first + next_piece[:cut], next_piece[cut:], *later, b"0\r\n\r\n"]
    return [(float(piece_idx), data) for piece_idx, data in enumerate(pieces)]


def part(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": finish}]}


USAGE = {"choices": [], "usage": {"completion_tokens": 2}}
WHOLE = [part("w1"), part(" w2", "length"), USAGE, LAST]


@pytest.mark.parametrize("cut", [0, 7, 30])
def test_a_token_has_the_time_of_the_piece_that_completes_it(cut: int) -> None:
    stream = stream_of(0.0, pieces_of(WHOLE, cut), 2)
    assert (stream.text, stream.faults) == ("w1 w2", [])
    assert stream.times == [1.0, 2.0]
    assert (stream.first_token_ms, stream.token_ms(2)) == (1000.0, 1000.0)


@pytest.mark.parametrize(
    ("documents", "fault"),
    [
        (WHOLE[:-1], "it has no end"),
        ([part("w1"), part(" w2"), USAGE, LAST], "finish_reason: wanted"),
        ([part("w1"), part("", "stop"), USAGE, LAST], "finish_reason: wanted"),
        ([part("w1"), part(" w2", "length"), LAST], "completion_tokens: wanted 2"),
        ([part("w1"), {"error": {"message": "a step"}}, LAST], "a step"),
    ],
)
def test_a_stream_that_ends_otherwise_has_faults(
    documents: list[Any], fault: str
) -> None:
    stream = stream_of(0.0, pieces_of(documents), 2)
    assert any(fault in text for text in stream.faults), stream.faults


def test_a_refusal_is_a_fault() -> None:
    stream = stream_of(0.0, [(1.0, b"HTTP/1.1 400 Bad Request\r\n\r\nwhy")], 2)
    assert "why" in stream.faults[0]


def test_steps_are_timed_while_all_streams_have_tokens() -> None:
    streams = [
        Stream(0.0, [1.0, 2.0, 3.0, 5.0], "", []),
        Stream(0.0, [2.0, 3.0, 4.0, 8.0], "", []),
    ]
    times = times_of(streams, 4)
    assert times["step_ms"] == 1000.0  # not the gap of 2 s, nor that of 4
    assert times["first_token_ms"] == 1500.0
    assert times["tokens_per_s"] == 1.0
    assert "step_ms" not in times_of([streams[0], Stream(0.0, [6.0, 7.0], "", [])], 4)


def test_numbers_of_clients_have_the_gate_of_the_next_larger_one() -> None:
    assert [most_added(n) for n in (1, 8, 64, 99)] == [1.05, 1.12, 1.15, 1.15]


def test_lacking_packages_are_named_before_a_model_is_written(monkeypatch) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: name == "starlette" or None)
    assert serve.refusal(Namespace(vllm=False)).endswith("not installed: uvicorn")
