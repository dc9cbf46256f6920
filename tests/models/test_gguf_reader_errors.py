"""GGUF files whose sizes do not fit the file."""

from __future__ import annotations

import os
import struct

import pytest

from etc_dist.errors import ArgumentError
from etc_dist.models import gguf_reader
from etc_dist.models.gguf_file import GgufFile
from etc_dist.models.gguf_reader import read_gguf
from tests.models.gguf_bytes import (
    ARRAY,
    BOOL,
    Q8_0,
    TEXT,
    UINT32,
    array,
    gguf,
    tensor,
    text,
)

NUMBER = UINT32, struct.pack("<I", 7)
TEXTS = ARRAY, array(TEXT, [text("ab"), text("c")])
ROWS = tensor("rows", (2, 2))


def refusal(path, content):
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_gguf(path)
    return str(caught.value)


def test_a_file_that_ends_early_is_refused_wherever_it_ends(tmp_path):
    whole = gguf({"a": NUMBER, "b": TEXTS, "c": (BOOL, b"\1")}, [ROWS], bytes(16))
    for size in range(len(whole)):
        refusal(tmp_path / "file", whole[:size])
    (tmp_path / "file").write_bytes(whole)
    assert len(read_gguf(tmp_path / "file").tensors) == 1


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (gguf({}, magic=b"GGML"), "does not begin with GGUF"),
        (gguf({}, version=1), "GGUF version 1"),
        (gguf({"a": NUMBER}, num_keys=9), "9 keys at 24"),
        (gguf({}, [ROWS], bytes(16), num_tensors=9), "9 tensors at 24"),
        (gguf([("a", NUMBER), ("a", NUMBER)]), "a: more than once"),
        (gguf({b"\xff": NUMBER}), "the name of a key that is not UTF-8"),
        (gguf({"a": (13, b"\0")}), "a: a value of type 13"),
        (gguf({"a": (BOOL, b"\2")}), "a: 2 instead of true or false"),
        (gguf({"a": (ARRAY, array(TEXT, [text("b")], 9))}), "9 texts of a at"),
        (gguf({"a": (ARRAY, array(UINT32, [b"1234"], 99))}), "99 numbers of a at"),
        (
            gguf({"a": (ARRAY, array(ARRAY, [array(BOOL, [b"\1"])]))}),
            "a: an array of type 9",
        ),
        (gguf({"general.alignment": (UINT32, bytes(4))}), "instead of a power of 2"),
        (gguf({"general.alignment": (TEXT, text("8"))}), "instead of a power of 2"),
        (gguf({}, [tensor("b", (1,), axes=5)]), "5 axes instead of at most 4"),
        (gguf({}, [tensor("b", (1,), kind=77)]), "b: type 77, which is unknown"),
        (gguf({}, [tensor("b", (0, 2))]), "b: no numbers"),
        (gguf({}, [tensor("b", (33,), Q8_0)], bytes(99)), "rows of 33 instead of a"),
        (gguf({}, [tensor("b", (5, 1))], bytes(16)), "b: bytes 96 to 116 of 112"),
        (gguf({}, [tensor("b", (2, 2), 0, 64)], bytes(16)), "b: bytes 160 to 176 of"),
        (gguf({}, [ROWS, ROWS], bytes(16)), "a tensor's name more than once"),
    ],
)
def test_damaged_headers_are_refused(tmp_path, content, got):
    assert got in refusal(tmp_path / "file", content)


def test_a_header_beyond_the_limit_is_not_read(tmp_path, monkeypatch):
    content = gguf({"a": TEXTS})
    monkeypatch.setattr(gguf_reader, "MOST_BYTES", 40)
    assert "bytes at" in refusal(tmp_path / "file", content)


def test_a_fifo_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(ArgumentError, match="not a regular file"):
        GgufFile(tmp_path / "model.gguf")
