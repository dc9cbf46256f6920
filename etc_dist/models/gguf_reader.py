"""The metadata and the tensors of one GGUF file. All counts, lengths and offsets are
compared with the size of the file before anything of this size is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.files import MOST_BYTES, open_file
from etc_dist.models.extras import extra_module

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {
    number: np.dtype(name).newbyteorder("<")
    for number, name in {
        0: "u1",
        1: "i1",
        2: "u2",
        3: "i2",
        4: "u4",
        5: "i4",
        6: "f4",
        7: "u1",
        10: "u8",
        11: "i8",
        12: "f8",
    }.items()
}
"""The types of numbers in the metadata."""
BOOL, TEXT, ARRAY = 7, 8, 9
MOST_AXES = 4
DEFAULT_ALIGNMENT = 32
ALIGNMENT = "general.alignment"
OTHER_ORDER = "a file for machines of the other byte order"


@dataclass(frozen=True)
class GgufTensor:
    """data: bytes [.., bytes of a row], mapped from disk. kind: a type of gguf."""

    name: str
    kind: Any
    data: Any


@dataclass(frozen=True)
class GgufContent:
    """metadata: numbers, texts, NumPy arrays of numbers, and lists of texts. A text
    that is not UTF-8 is bytes. tensors: in the order of the file's header."""

    metadata: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]


def read_gguf(path: Path) -> GgufContent:
    """The content of a GGUF file. OSError for a file that cannot be read, ValueError
    for one that is damaged or not complete."""
    with open_file(path) as file:
        data = np.memmap(file, np.uint8, "r")
    # NOTE: a header has no size of its own. Its lists take more memory than on disk.
    header = _Header(data[:MOST_BYTES].data)
    if header.take(4) != MAGIC:
        raise ValueError("a file that does not begin with GGUF")
    version = header.number(4)
    if version not in VERSIONS:
        is_swapped = version and version % 2**16 == 0
        raise ValueError(OTHER_ORDER if is_swapped else f"GGUF version {version}")
    num_tensors, num_keys = header.number(8), header.number(8)
    header.expect_count(num_keys, 13, "keys")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        name = header.name("key")
        if name in metadata:
            raise ValueError(f"{name}: more than once")
        metadata[name] = header.value(name)
    header.expect_count(num_tensors, 24, "tensors")
    infos = [header.tensor() for _ in range(num_tensors)]
    unit = metadata.get(ALIGNMENT, DEFAULT_ALIGNMENT)
    if type(unit) is not int or unit < 1 or unit & (unit - 1):
        raise ValueError(f"{ALIGNMENT}: {unit!r} instead of a power of 2")
    start = -(-header.at // unit) * unit
    return GgufContent(metadata, _mapped(infos, data, start, unit))


@dataclass(frozen=True)
class _Info:
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class _Header:
    """The first bytes of a file, read one after the other."""

    def __init__(self, content: memoryview) -> None:
        self._content, self.at = content, 0

    def take(self, size: int) -> bytes:
        """The next bytes; ValueError if there are not so many."""
        num_bytes = len(self._content) - self.at
        if size > num_bytes:
            raise ValueError(f"{size} bytes at {self.at}, where {num_bytes} are left")
        self.at += size
        return bytes(self._content[self.at - size : self.at])

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def expect_count(self, count: int, size: int, name: str) -> None:
        """ValueError if there is no space for `count` values of `size` bytes."""
        num_bytes = len(self._content) - self.at
        if count * size > num_bytes:
            raise ValueError(
                f"{count} {name} at {self.at}, where {num_bytes} bytes are left"
            )

    def text(self) -> str | bytes:
        content = self.take(self.number(8))
        try:
            return content.decode()
        except UnicodeDecodeError:
            return content

    def name(self, of: str) -> str:
        name = self.text()
        if isinstance(name, bytes):
            raise ValueError(f"the name of a {of} that is not UTF-8: {name[:40]!r}")
        return name

    def value(self, name: str) -> Any:
        """The value of a key."""
        kind = self.number(4)
        if kind == TEXT:
            return self.text()
        if kind in SCALARS:
            return self.numbers(kind, 1, name)[0].item()
        if kind != ARRAY:
            raise ValueError(f"{name}: a value of type {kind}")
        kind, count = self.number(4), self.number(8)
        if kind == TEXT:
            self.expect_count(count, 8, f"texts of {name}")
            return [self.text() for _ in range(count)]
        if kind not in SCALARS:
            raise ValueError(f"{name}: an array of type {kind}")
        return self.numbers(kind, count, name)

    def numbers(self, kind: int, count: int, name: str) -> Any:
        dtype = SCALARS[kind]
        self.expect_count(count, dtype.itemsize, f"numbers of {name}")
        numbers = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        if kind != BOOL:
            return numbers
        if (numbers > 1).any():
            raise ValueError(f"{name}: {numbers.max()} instead of true or false")
        return numbers.astype(np.bool_)

    def tensor(self) -> _Info:
        name = self.name("tensor")
        num_axes = self.number(4)
        if num_axes > MOST_AXES:
            raise ValueError(f"{name}: {num_axes} axes instead of at most {MOST_AXES}")
        shape = tuple(self.number(8) for _ in range(num_axes))
        return _Info(name, shape[::-1] or (1,), self.number(4), self.number(8))


def _mapped(
    infos: list[_Info], data: Any, start: int, unit: int
) -> tuple[GgufTensor, ...]:
    """The tensors, whose offsets count from `start`."""
    names = [info.name for info in infos]
    if len(set(names)) != len(names):
        raise ValueError("a tensor's name more than once")
    tensors, places = [], []
    for info in infos:
        kind, row_bytes = _row(info)
        size = prod(info.shape[:-1]) * row_bytes
        begin = start + info.offset
        if info.offset % unit:
            wanted = f"a multiple of {unit}"
            raise ValueError(f"{info.name}: at {info.offset} instead of {wanted}")
        if not size:
            raise ValueError(f"{info.name}: no numbers")
        if begin + size > len(data):
            places_of = f"bytes {begin} to {begin + size}"
            raise ValueError(f"{info.name}: {places_of} of {len(data)}")
        places.append((begin, begin + size, info.name))
        part = np.asarray(data[begin : begin + size])
        shape = (*info.shape[:-1], row_bytes)
        tensors.append(GgufTensor(info.name, kind, part.reshape(shape)))
    for (_, end, name), (begin, _, after) in pairwise(sorted(places)):
        if end > begin:
            raise ValueError(f"{name} and {after}: tensors that overlap")
    return tuple(tensors)


def _row(info: _Info) -> tuple[Any, int]:
    """The type of a tensor, and the bytes of one of its rows."""
    gguf = extra_module("gguf")
    try:
        kind = gguf.GGMLQuantizationType(info.kind)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    except (KeyError, ValueError):
        raise ValueError(f"{info.name}: type {info.kind}, which is unknown") from None
    if info.shape[-1] % block:
        wanted = f"a multiple of {block}, as {kind.name} needs"
        raise ValueError(f"{info.name}: rows of {info.shape[-1]} instead of {wanted}")
    return kind, info.shape[-1] // block * block_bytes
