"""Keys of a GGUF file that change a model in a way that is not implemented, or whose
values are damaged."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.errors import ArgumentError
from etc_dist.models.gguf_file import GgufFile
from etc_dist.models.gguf_keys import FIELDS, NEUTRAL, OWN_SIZES
from tests.models.test_gguf_file_errors import write
from tests.models.test_gguf_keys import EXPERTS, config_of


def refusal(folder, **changes):
    with pytest.raises(ArgumentError, match="the model cannot be loaded") as caught:
        config_of(folder, **changes)
    assert caught.value.where == str(folder / "model.gguf")
    return str(caught.value)


@pytest.mark.parametrize("value", [3, "a text", [0, 0], float("nan")], ids=str)
def test_values_that_are_not_neutral_are_all_named(tmp_path, value):
    names = {*NEUTRAL, *OWN_SIZES, "unknown", "rope.dimension_sections"}
    text = refusal(tmp_path, **dict.fromkeys(names, value))
    assert all(f"llama.{name} = " in text for name in names)


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_damaged_values_are_refused(tmp_path, name):
    is_of_experts = name.startswith("expert_")
    own = EXPERTS | {"architecture": "qwen3moe"} if is_of_experts else {}
    for value in ("a text", [1, 2], -1, float("nan")):
        refusal(tmp_path, **own | {name: value})


@pytest.mark.parametrize("name", ["rope.scaling.type", "rope.scaling.factor"])
@pytest.mark.parametrize("value", [[1.0, 2.0], "yarn", -1.0])
def test_damaged_scalings_are_refused(tmp_path, name, value):
    refusal(tmp_path, **{"rope.scaling.type": "linear", name: value})


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({"general.type": "adapter"}, "general.type = 'adapter'"),
        ({"general.architecture": ["llama"]}, "['llama'] of a GGUF file"),
        ({"general.architecture": 3}, "3 of a GGUF file"),
        ({"tokenizer.ggml.tokens": 3}, "tokenizer.ggml.tokens: a list of texts"),
        ({"tokenizer.ggml.tokens": [3]}, "tokenizer.ggml.tokens: a list of texts"),
        ({"tokenizer.ggml.eos_token_id": "a"}, "eos_token_id: the id of a token"),
        ({"tokenizer.ggml.eot_token_id": [3]}, "eot_token_id: the id of a token"),
    ],
)
def test_damaged_values_of_the_file_are_refused(tmp_path, metadata, text):
    assert text in refusal(tmp_path, metadata=metadata)


def test_layers_with_different_numbers_are_refused(tmp_path):
    name = "attention.head_count_kv"
    text = refusal(tmp_path, block_count=2, **{name: [4, 2]})
    assert f"llama.{name}: one number for all layers" in text


def test_a_file_without_keys_is_refused(tmp_path):
    tensors = {"output_norm.weight": np.ones(64, np.float32)}
    write(tmp_path / "model.gguf", "", tensors)
    with pytest.raises(ArgumentError, match=" of a GGUF file"):
        GgufFile(tmp_path / "model.gguf").config()
