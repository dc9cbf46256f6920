"""GGUF files written byte by byte, and by the package gguf."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

UINT32, BOOL, TEXT, ARRAY, INT64 = 4, 7, 8, 9, 11
F32, Q8_0 = 0, 8


def text(value: str | bytes) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def array(kind: int, values: Sequence[bytes], count: int | None = None) -> bytes:
    """count: that of the file, if it is another one than that of `values`."""
    count = len(values) if count is None else count
    return struct.pack("<IQ", kind, count) + b"".join(values)


def tensor(
    name: str, shape: Sequence[int], kind: int = F32, offset: int = 0, axes: int = 0
) -> bytes:
    """shape: columns first. axes: of the file, if it has another number than shape."""
    sizes = struct.pack(f"<I{len(shape)}Q", axes or len(shape), *shape)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def gguf(
    metadata: Mapping[str, tuple[int, bytes]] | Sequence[tuple[str, tuple[int, bytes]]],
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    unit: int = 32,
    **changes: Any,
) -> bytes:
    """metadata: types and values by key. changes: to magic, version, num_tensors and
    num_keys of the file."""
    pairs = list(metadata.items() if isinstance(metadata, Mapping) else metadata)
    head = {"magic": b"GGUF", "version": 3}
    head |= {"num_tensors": len(tensors), "num_keys": len(pairs)}
    start = struct.pack("<4sIQQ", *(head | changes).values())
    keys = [text(n) + struct.pack("<I", kind) + value for n, (kind, value) in pairs]
    header = b"".join([start, *keys, *tensors])
    return header + bytes(-len(header) % unit) + data


SIZES = {
    "embedding_length": 64,
    "feed_forward_length": 64,
    "block_count": 1,
    "attention.head_count": 1,
    "context_length": 64,
    "vocab_size": 64,
}


def write(
    path, architecture="llama", tensors=None, metadata=None, is_big=False, **changes
):
    """A file of a small model, by the package gguf. metadata: by whole keys. changes:
    to SIZES, by keys of the architecture."""
    import gguf as package

    order = package.GGUFEndian.BIG if is_big else package.GGUFEndian.LITTLE
    writer = package.GGUFWriter(path, architecture, False, order)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    add = {
        bool: writer.add_bool,
        int: lambda name, n: (writer.add_uint32 if n >= 0 else writer.add_int32)(
            name, n
        ),
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    entries = {f"{architecture}.{name}": v for name, v in (SIZES | changes).items()}
    for name, value in (entries | (metadata or {})).items():
        add[type(value)](name, value)
    norm = {"output_norm.weight": np.ones(64, np.float32)}
    for name, array in (tensors or norm).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
