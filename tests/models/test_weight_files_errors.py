"""Folders in which files of the model are missing, not known, or no files."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from etc_dist.errors import ArgumentError
from etc_dist.models import load_tokenizer
from etc_dist.models.loading import read_model
from etc_dist.models.part import WHOLE
from etc_dist.models.weight_files import INDEX, read_folder
from tests.models.references import save
from tests.models.small import make_model
from tests.models.test_tokenizer import made as make_tokenizer
from tests.models.test_weight_files import SHARDS, TENSORS, write, write_index
from tests.refusals import refused


def refusal(folder, where=""):
    with pytest.raises(ArgumentError, match="the model cannot be loaded") as caught:
        read_folder(folder)
    assert caught.value.where == str(folder / where)
    return f"{caught.value.wanted}; {caught.value.got}; {caught.value.fix}"


@pytest.mark.parametrize("has_index", [True, False])
def test_a_shard_that_is_missing_is_named(tmp_path, has_index):
    write(tmp_path, SHARDS[0], "ab")
    if has_index:
        write_index(tmp_path, {"a": SHARDS[0], "c": SHARDS[1]})
    assert f"all 2 files of the model; missing: {SHARDS[1]}" in refusal(tmp_path)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path):
    write(tmp_path, SHARDS[0], "ab")
    write_index(tmp_path, {"a": SHARDS[0], "c": SHARDS[0]})
    assert "the index has in this file; none of c" in refusal(tmp_path, SHARDS[0])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "JSONDecodeError"),
        ("{}", "KeyError: 'weight_map'"),
        ('{"weight_map": []}', "files of this folder"),
        ('{"weight_map": {}}', "files of this folder"),
        ('{"weight_map": {"a": 3}}', "a: 3"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "a: '../model.safetensors'"),
        ('{"weight_map": {"a": "/model.safetensors"}}', "a: '/model.safetensors'"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path, text, reason):
    write(tmp_path, "model.safetensors", TENSORS)
    (tmp_path / INDEX).write_text(text)
    assert reason in refusal(tmp_path, INDEX)


@pytest.mark.parametrize("make", [os.mkfifo, lambda p: os.symlink("gone", p)])
def test_an_index_that_cannot_be_read_is_not_absent(tmp_path, make):
    write(tmp_path, "model.safetensors", TENSORS)
    make(tmp_path / INDEX)
    refusal(tmp_path, INDEX)


def test_an_index_next_to_a_single_file_is_refused(tmp_path):
    write(tmp_path, "model.safetensors", "ab")
    write(tmp_path, SHARDS[0], "ab")
    write_index(tmp_path, dict.fromkeys("ab", SHARDS[0]))
    assert "both; remove the one that is not the model" in refusal(tmp_path)
    write_index(tmp_path, dict.fromkeys("ab", "model.safetensors"))
    assert len(read_folder(tmp_path)) == 2


def test_two_sets_of_shards_are_refused(tmp_path):
    write(tmp_path, SHARDS[0], "ab")
    write(tmp_path, "model-00001-of-00001.safetensors", "ab")
    text = "model-*-of-00001; model-*-of-00002"
    assert text in refusal(tmp_path)


@pytest.mark.parametrize("name", ["consolidated.safetensors", None])
def test_a_folder_without_files_of_the_model_is_refused(tmp_path, name):
    if name is not None:
        write(tmp_path, name, "ab")
    assert f"shards with {INDEX}; {name or 'none'}" in refusal(tmp_path)


@pytest.mark.parametrize("has_config", [True, False])
def test_an_adapter_without_its_model_is_named(tmp_path, has_config):
    save(tmp_path / "adapter_model.safetensors", {"lora_A": np.zeros(2)})
    (tmp_path / "adapter_config.json").write_text("{}")
    if has_config:
        assert "an adapter, with adapter_config.json" in refusal(tmp_path)
        return
    for read in (load_tokenizer, lambda path: read_model(path, "bfloat16")):
        with pytest.raises(ArgumentError, match="an adapter, with adapter_config.json"):
            read(tmp_path)


def test_a_tensor_of_another_dtype_is_named(tmp_path):
    write(tmp_path, "model.safetensors", "ab")
    content = (tmp_path / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["b"]["dtype"] = "I16"
    text = json.dumps(header).encode()
    whole = len(text).to_bytes(8, "little") + text + content[end:]
    (tmp_path / "model.safetensors").write_bytes(whole)
    requirement = "tensors in bfloat16, float16, float32, float8_e4m3fn; b: I16"
    assert requirement in refusal(tmp_path, "model.safetensors")
    write_index(tmp_path, {"a": "model.safetensors"})
    assert len(read_folder(tmp_path)) == 1


def read_all(folder):
    _, read_weights = read_model(folder, "bfloat16")
    load_tokenizer(folder)
    read_weights("bfloat16", WHOLE)


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
        *("added_tokens.json", "chat_template.jinja"),
    ],
)
def test_a_fifo_in_place_of_a_file_is_refused_by_name(tmp_path, rng, name):
    make_tokenizer(tmp_path)
    folder = make_model(tmp_path, rng)
    read_all(folder)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    words = f"where: {folder / name} wanted|not a regular file"
    refused(lambda: read_all(folder), words, ArgumentError)
