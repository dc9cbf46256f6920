"""A GGUF model of one file, or of several parts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.models.gguf_reader import ALIGNMENT, GgufContent, read_gguf
from etc_dist.models.safetensors_file import listed, weights_error

NAME = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
OWN = NUMBER, COUNT, TENSORS, ALIGNMENT
"""The keys that a part has for itself."""
FIX = "give a complete GGUF file, or the folder of a Hugging Face model"
COMPLETE = "copy all parts of the model into one folder, with the names that they had"


def read_parts(path: Path) -> GgufContent:
    """The metadata of the first part, and the tensors of all parts. path: of any part,
    or of a model of one file.

    Raises ArgumentError for a file that is damaged or not complete, for parts that are
    missing, which it names, and for parts of different models."""
    content = _read(path)
    count = content.metadata.get(COUNT, 1)
    if type(count) is not int:
        raise weights_error(path, f"{COUNT}: an integer", repr(count)[:120], FIX)
    if count < 2:  # merged files have 0
        return content
    match = NAME.fullmatch(path.name)
    if match is None or match["count"] != f"{count:05}":
        wanted = f"a name that ends in -00001-of-{count:05}.gguf, as {COUNT} has it"
        raise weights_error(path, wanted, path.name, COMPLETE)
    numbers = range(1, count + 1)
    names = [f"{match['prefix']}-{n:05}-of-{count:05}.gguf" for n in numbers]
    missing = [name for name in names if not os.path.lexists(path.with_name(name))]
    if missing:
        got = f"missing: {listed(missing)}"
        raise weights_error(path, f"all {count} parts of the model", got, COMPLETE)
    parts = [_read(path.with_name(name)) for name in names]
    tensors = tuple(tensor for part in parts for tensor in part.tensors)
    for part_idx, part in enumerate(parts):
        _check(
            path.with_name(names[part_idx]), part.metadata, parts[0].metadata, part_idx
        )
    total = parts[0].metadata.get(TENSORS, len(tensors))
    if total != len(tensors) or len({tensor.name for tensor in tensors}) != total:
        wanted = f"{total} tensors of different names in all parts, as {TENSORS} has it"
        raise weights_error(path, wanted, f"{len(tensors)} tensors", COMPLETE)
    return GgufContent(parts[0].metadata, tensors)


def _read(path: Path) -> GgufContent:
    try:
        return read_gguf(path)
    except (OSError, ValueError) as error:
        raise weights_error(path, "a complete GGUF file", str(error), FIX) from error


def _check(
    path: Path, metadata: Mapping[str, Any], first: Mapping[str, Any], number: int
) -> None:
    """Compare the keys of a part with those of the first one."""
    own_values = {NUMBER: number, COUNT: first[COUNT]}
    shared = {name: value for name, value in metadata.items() if name not in OWN}
    for name, value in {**shared, **{n: metadata.get(n) for n in own_values}}.items():
        expected: Any = {**first, **own_values}.get(name)
        if not np.array_equal(value, expected):
            text = f"{name} = {expected!r}, as for part {number + 1} of this model"
            raise weights_error(path, text[:120], repr(value)[:120], COMPLETE)
