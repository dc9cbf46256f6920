"""Reads files from other sources: regular files only, of a limited size."""

from __future__ import annotations

import json
import os
import stat
from errno import EFBIG, EINVAL
from pathlib import Path
from typing import Any, BinaryIO

MOST_BYTES = 1 << 28
"""The size of a file that is read as a whole. The largest ones are tokenizers."""


def open_file(path: str | Path, flags: int = 0) -> BinaryIO:
    """A regular file, opened to read bytes. OSError for anything else, such as a FIFO,
    a device, a socket or a folder: at once, also where a plain `open` would wait.

    flags: more flags of `os.open`."""
    # NOTE: without O_NONBLOCK, opening a FIFO waits for a writer.
    flags |= os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    number = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(EINVAL, "not a regular file", str(path))
    return open(number, "rb")


def read_file(path: str | Path) -> bytes:
    """The content of a regular file. OSError for anything else, and for a file of more
    than MOST_BYTES."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST_BYTES:
            text = f"{size} bytes instead of at most {MOST_BYTES}"
            raise OSError(EFBIG, text, str(path))
        return file.read(size)


def read_object(path: str | Path) -> dict[str, Any]:
    """The object of a JSON file. OSError as for `read_file`, ValueError as for
    `parse_object`."""
    return parse_object(read_file(path))


def parse_object(content: bytes) -> dict[str, Any]:
    """The object of a JSON text; ValueError for anything else, and for a name with two
    values, of which other readers take the last one."""
    try:
        document = json.loads(content, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError("arrays or objects that are nested too deeply") from error
    if not isinstance(document, dict):
        raise ValueError(f"a JSON object expected, got {type(document).__name__}")
    return document


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        for name, value in pairs:
            if value != document[name]:
                raise ValueError(f"{name!r} has two values")
    return document
