"""The tensors of a safetensors file."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.errors import ArgumentError
from etc_dist.files import open_file
from etc_dist.ir.tensor import numpy_dtype

STORED = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
MAX_SIZE = 2**63
FIX = "load the complete files of one model, in bfloat16, float16 or float32"


def read_tensors(file: Path) -> list[tuple[str, Any]]:
    """The tensors with their names, mapped from disk.

    Raises ArgumentError for a damaged file. The tensors must fill it without gaps from
    the header to the end, each with the bytes of its dtype and shape."""
    try:
        with open_file(file) as content:
            data = np.memmap(content, np.uint8, "r")
        header, data = _split(data)
        entries = [(*_fields(name, given), name) for name, given in header.items()]
        tensors, at = [], 0
        for begin, end, shape, dtype, name in sorted(entries):
            size = prod(shape) * numpy_dtype(dtype).itemsize
            if (begin, end) != (at, at + size) or end > len(data):
                wanted = f"{at} to {at + size} of {len(data)} bytes"
                raise ValueError(f"{name}: bytes {begin} to {end} instead of {wanted}")
            part = np.asarray(data[begin:end]).view(numpy_dtype(dtype))
            tensors.append((name, part.reshape(shape)))
            at = end
        if at != len(data):
            raise ValueError(f"{len(data) - at} bytes after the last tensor")
    except (OSError, RecursionError, ValueError) as error:
        raise ArgumentError(
            "the model cannot be loaded",
            where=str(file),
            wanted="a complete safetensors file",
            got=f"{type(error).__name__}: {error}",
            fix=FIX,
        ) from error
    return tensors


def _split(data: Any) -> tuple[dict[str, Any], Any]:
    """The header and the bytes of the tensors."""
    end = 8 + int.from_bytes(data[:8].tobytes(), "little")
    if not 8 < end <= len(data):
        raise ValueError(f"a header that ends at {end} of {len(data)} bytes")
    header = json.loads(data[8:end].tobytes(), object_pairs_hook=_unique)
    if not isinstance(header, dict):
        raise ValueError("a header that is not a JSON object")
    header.pop("__metadata__", None)
    return header, data[end:]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name more than once in the header")
    return found


def _fields(name: str, given: Any) -> tuple[int, int, list[int], str]:
    """The first byte of a tensor, its end, shape and dtype."""
    match given:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]}:
            sizes = [begin, end, *shape]
            if dtype in STORED and all(
                type(s) is int and 0 <= s < MAX_SIZE for s in sizes
            ):
                return begin, end, shape, STORED[dtype]
    raise ValueError(f"{name}: {str(given)[:120]}")
