"""The safetensors files of a folder that are the model's."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etc_dist.files import read_object
from etc_dist.models.safetensors_file import listed, read_tensors, weights_error

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
ADAPTER = "adapter_config.json"
OTHERS = re.compile(r"(consolidated|adapter).*\.safetensors")
"""Files that are not the model: a copy in a format of Mistral's, and adapters."""
COMPLETE = "copy all files of the model into this folder"


def read_folder(folder: Path, may_be_packed: bool = False) -> list[tuple[str, Any]]:
    """The tensors of a model with their names, mapped from disk: those of the index, or
    without an index those of `model.safetensors`, of a complete set of shards, or of
    all files that are neither consolidated nor of an adapter. may_be_packed: some are
    bytes.

    Raises ArgumentError for files that are missing or cannot be read."""
    shards: Mapping[str, set[str] | None]
    if os.path.lexists(folder / INDEX):
        shards = _index(folder)
    else:
        shards = dict.fromkeys(_files(folder))
    return [
        tensor
        for file, names in shards.items()
        for tensor in read_tensors(folder / file, names, may_be_packed)
    ]


def refuse_adapter(folder: Path) -> None:
    """ArgumentError for the folder of an adapter."""
    if (folder / ADAPTER).exists():
        raise weights_error(
            folder,
            "a whole model, with config.json and its weights",
            f"an adapter, with {ADAPTER}",
            "merge it into its base model (merge_and_unload of peft), and save that",
        )


def _index(folder: Path) -> Mapping[str, set[str]]:
    """The names of the tensors in each file, by the index."""
    path = folder / INDEX
    try:
        places = read_object(path)["weight_map"]
    except (KeyError, OSError, ValueError) as error:
        got = f"{type(error).__name__}: {error}"
        raise weights_error(path, "a JSON object with weight_map", got) from error
    wanted = "weight_map: files of this folder by names of tensors"
    if not isinstance(places, dict) or not places:
        raise weights_error(path, wanted, repr(places)[:120])
    shards: dict[str, set[str]] = {}
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise weights_error(path, wanted, f"{name}: {file!r}"[:120])
        shards.setdefault(file, set()).add(name)
    _expect(folder, list(shards))
    if SINGLE not in shards and (folder / SINGLE).exists():
        wanted = f"the files of {INDEX}, or {SINGLE}"
        fix = "remove the one that is not the model"
        raise weights_error(folder, wanted, "both", fix)
    return shards


def _expect(folder: Path, names: list[str]) -> None:
    missing = [name for name in sorted(names) if not (folder / name).exists()]
    if missing:
        wanted = f"all {len(names)} files of the model"
        got = f"missing: {listed(missing)}"
        raise weights_error(folder, wanted, got, COMPLETE)


def _files(folder: Path) -> list[str]:
    """The names of the model's files, in a folder without an index."""
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    if SINGLE in present:
        return [SINGLE]
    matches = [match for name in present if (match := SHARD.fullmatch(name))]
    own_matches = [match for match in matches if not OTHERS.fullmatch(match[0])]
    sets = sorted({(match["prefix"], match["count"]) for match in own_matches})
    if len(sets) > 1:
        wanted = f"one set of shards, or {INDEX}"
        got = listed([f"{prefix}-*-of-{count}" for prefix, count in sets])
        raise weights_error(folder, wanted, got, "remove those of other models")
    for prefix, count in sets:
        numbers = range(1, int(count) + 1)
        names = [f"{prefix}-{n:05}-of-{count}.safetensors" for n in numbers]
        _expect(folder, names)
        return names
    names = [name for name in present if not OTHERS.fullmatch(name)]
    if not names:
        refuse_adapter(folder)
        got = listed(present) or "none"
        raise weights_error(folder, f"{SINGLE}, or shards with {INDEX}", got)
    return names
