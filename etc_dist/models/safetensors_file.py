"""The tensors of a safetensors file."""

from __future__ import annotations

import mmap
from collections.abc import Collection
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.errors import ArgumentError
from etc_dist.files import open_file, parse_object
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.models.fields import refused

STORED = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
SCALED = {"F8_E4M3": "float8_e4m3fn"}
PACKED = {"U8": "uint8"}
MAX_SIZE = 2**63
MOST_LISTED = 4
"""Names in one error."""
MAX_HEADER = 100_000_000
"""Bytes of a header, as the package safetensors allows."""
FIX = (
    "load the complete files of one model, in bfloat16, float16 or float32, or float8 "
    "with a scale for each block"
)
DTYPES = f"tensors in {', '.join((*STORED.values(), *SCALED.values()))}"


def weights_error(path: Path, wanted: str, got: str, fix: str = FIX) -> ArgumentError:
    """The error for the file `path` with weights."""
    return refused(path, wanted=wanted, got=got, fix=fix)


def read_tensors(
    file: Path, names: Collection[str] | None = None, may_be_packed: bool = False
) -> list[tuple[str, Any]]:
    """The tensors with their names, mapped from disk. names: those to read; default:
    all. may_be_packed: some are bytes.

    Raises ArgumentError for a damaged file, for names that it lacks, and for tensors of
    other dtypes than those of STORED, SCALED and PACKED. All tensors must fill the file
    without gaps from the header to the end, each with the bytes of its dtype and shape.
    """
    dtype_names = {**STORED, **SCALED, **(PACKED if may_be_packed else {})}
    try:
        with open_file(file) as content:
            data = np.memmap(content, np.uint8, "r")
        header, data = _split(data)
        entries = [(*_fields(name, fields), name) for name, fields in header.items()]
        tensors, unread, at = [], [], 0
        for begin, end, shape, dtype, name in sorted(entries):
            numpy_name = dtype_names.get(dtype)
            size = end - begin
            if numpy_name is not None:
                size = prod(shape) * numpy_dtype(numpy_name).itemsize
            if (begin, end) != (at, at + size) or end > len(data):
                wanted = f"{at} to {at + size} of {len(data)} bytes"
                raise ValueError(f"{name}: bytes {begin} to {end} instead of {wanted}")
            at = end
            if names is not None and name not in names:
                continue
            if numpy_name is None:
                unread.append(f"{name}: {dtype}")
                continue
            part = np.asarray(data[begin:end]).view(numpy_dtype(numpy_name))
            tensors.append((name, part.reshape(shape)))
        if at != len(data):
            raise ValueError(f"{len(data) - at} bytes after the last tensor")
    except (OSError, ValueError) as error:
        got = f"{type(error).__name__}: {error}"
        raise weights_error(file, "a complete safetensors file", got) from error
    if unread:
        raise weights_error(file, DTYPES, listed(unread))
    missing = sorted(set(names or ()).difference(name for name, _ in tensors))
    if missing:
        wanted = "the tensors that the index has in this file"
        raise weights_error(file, wanted, f"none of {listed(missing)}")
    return tensors


def release(tensor: Any) -> None:
    """Give back the pages of the file that a tensor of `read_tensors` is mapped from,
    so that a process does not hold a copy of the files that it has read. They are read
    again where they are used again. Does nothing for other arrays."""
    owner = tensor
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, mmap.mmap):
        owner.madvise(mmap.MADV_DONTNEED)


def listed(texts: list[str], count: int | None = None) -> str:
    """The first texts, and how many more there are. count: of all, if `texts` are only
    the first ones."""
    first_texts = texts[:MOST_LISTED]
    num_more = (len(texts) if count is None else count) - len(first_texts)
    return "; ".join(first_texts) + (f"; and {num_more} more" if num_more else "")


def _split(data: Any) -> tuple[dict[str, Any], Any]:
    """The header and the bytes of the tensors."""
    end = 8 + int.from_bytes(data[:8].tobytes(), "little")
    if not 8 < end <= min(len(data), 8 + MAX_HEADER):
        limits = f"{len(data)} bytes, and at most {MAX_HEADER}"
        raise ValueError(f"a header that ends at {end} of {limits}")
    header = parse_object(data[8:end].tobytes())
    header.pop("__metadata__", None)
    return header, data[end:]


def _fields(name: str, fields: Any) -> tuple[int, int, list[int], str]:
    """The first byte of a tensor, its end, shape and dtype."""
    match fields:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]}:
            sizes = [begin, end, *shape]
            if all(type(s) is int and 0 <= s < MAX_SIZE for s in sizes):
                return begin, end, shape, dtype
    raise ValueError(f"{name}: {str(fields)[:120]}")
