"""The files of a folder that are the model's."""

from __future__ import annotations

import json

import numpy as np
import pytest

from etc_dist.models.weight_files import INDEX, SINGLE, read_folder
from tests.models.references import save

TENSORS = {name: np.full(4, number) for number, name in enumerate("abcd")}
SHARDS = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
STALE = np.full(4, 99.0)


def write(folder, file, names, **more):
    save(folder / file, {n: TENSORS[n] for n in names} | more)


def write_index(folder, places):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def expect_tensors(folder):
    pairs = read_folder(folder)
    assert sorted(name for name, _ in pairs) == list(TENSORS)
    for name, array in pairs:
        np.testing.assert_array_equal(array.astype(np.float32), TENSORS[name])


def write_others(folder):
    """Files that are not the model's, with the names that they have in practice."""
    for file in ("consolidated", "consolidated-00001-of-00002", "adapter_model"):
        save(folder / f"{file}.safetensors", {"a": STALE, "other": STALE})
    (folder / "adapter_config.json").write_text("{}")


@pytest.mark.parametrize("has_index", [True, False])
def test_shards_are_read_without_other_files(tmp_path, has_index):
    write(tmp_path, SHARDS[0], "ab")
    write(tmp_path, SHARDS[1], "cd")
    write_others(tmp_path)
    if has_index:
        save(tmp_path / "model.fp16.safetensors", {"a": STALE})
        write_index(tmp_path, dict(zip("abcd", np.repeat(SHARDS, 2), strict=True)))
    expect_tensors(tmp_path)


def test_a_tensor_is_read_from_the_file_that_the_index_names(tmp_path):
    write(tmp_path, SHARDS[0], "ab", c=STALE, other=STALE)
    write(tmp_path, SHARDS[1], "cd", a=STALE)
    write_index(tmp_path, dict(zip("abcd", np.repeat(SHARDS, 2), strict=True)))
    expect_tensors(tmp_path)


def test_a_single_file_is_the_whole_model(tmp_path):
    write(tmp_path, SINGLE, "abcd")
    save(tmp_path / "model.fp16.safetensors", {"a": STALE})
    save(tmp_path / SHARDS[0], {"a": STALE})
    write_others(tmp_path)
    expect_tensors(tmp_path)


def test_files_of_other_names_are_read_together(tmp_path):
    write(tmp_path, "first.safetensors", "ab")
    write(tmp_path, "second.safetensors", "cd")
    write_others(tmp_path)
    expect_tensors(tmp_path)
