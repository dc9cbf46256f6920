"""GGUF files that cannot be loaded."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.errors import ArgumentError
from etc_dist.models.gguf_file import GgufFile

gguf = pytest.importorskip("gguf")
SIZES = {
    "embedding_length": 64,
    "feed_forward_length": 64,
    "block_count": 1,
    "attention.head_count": 1,
    "context_length": 64,
    "vocab_size": 64,
}


LITTLE, BIG = gguf.GGUFEndian.LITTLE, gguf.GGUFEndian.BIG


def write(
    path, architecture="llama", tensors=None, metadata=None, order=LITTLE, **changes
):
    """metadata: by whole keys. changes: to SIZES, by keys of the architecture."""
    writer = gguf.GGUFWriter(path, architecture, False, order)
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
    own = {f"{architecture}.{name}": v for name, v in (SIZES | changes).items()}
    for name, value in (own | (metadata or {})).items():
        add[type(value)](name, value)
    norm = {"output_norm.weight": np.ones(64, np.float32)}
    for name, array in (tensors or norm).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def refusal(path):
    with pytest.raises(ArgumentError, match="the model cannot be loaded") as caught:
        file = GgufFile(path)
        file.weights(file.config(), "bfloat16")
    assert caught.value.where == str(path)
    return str(caught.value)


@pytest.mark.parametrize("size", [0, 4, 40, 400, -64])
def test_files_that_are_not_complete_are_refused_by_name(tmp_path, size):
    path = tmp_path / "model.gguf"
    write(path)
    path.write_bytes(path.read_bytes()[:size])
    assert "a complete GGUF file" in refusal(path)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "model.embed_tokens.weight: missing"),
        ({"architecture": "gpt2"}, "gpt2 of a GGUF file"),
        ({"order": BIG}, "the other byte order"),
        ({"block_count": 0}, "num_hidden_layers: an integer from 1"),
        ({"tensors": {"output_norm.weight": np.ones(64, "i4")}}, "weight: I32"),
        (
            {"tensors": {"output_norm.weight": np.full(64, np.nan, "f4")}},
            "model.norm.weight: numbers that are not finite",
        ),
        ({"tensors": {"rope_freqs.weight": np.zeros(32, "f4")}}, "factors of head_dim"),
        (
            {"tensors": {"rope_freqs.weight": np.ones(32, "f4")}}
            | {"rope.scaling.type": "linear"},
            "linear with rope_freqs.weight",
        ),
        ({"rope.dimension_count": 32}, "llama.rope.dimension_count = 32"),
        ({"attention.sliding_window": 16}, "llama.attention.sliding_window = 16"),
        ({"logit_scale": 0.5}, "llama.logit_scale = 0.5"),
    ],
)
def test_models_that_are_not_supported_are_refused(tmp_path, changes, text):
    write(tmp_path / "model.gguf", **changes)
    assert text in refusal(tmp_path / "model.gguf")


def test_texts_that_are_not_utf8_are_refused(tmp_path):
    path = tmp_path / "model.gguf"
    write(path, **{"rope.scaling.type": "linear"})
    path.write_bytes(path.read_bytes().replace(b"linear", b"\xff" * 6))
    assert "llama.rope.scaling.type: texts in UTF-8" in refusal(path)


@pytest.mark.parametrize(
    ("place", "words"),
    [(224, "a and b: tensors that overlap"), (260, "b: at 260 instead of a multiple")],
)
def test_tensors_at_wrong_places_are_refused(tmp_path, place, words):
    path = tmp_path / "model.gguf"
    write(path, tensors={name: np.ones(64, np.float32) for name in "ab"})
    text = path.read_bytes()
    second = text.rindex((256).to_bytes(8, "little"), 0, text.index(b"\0\0\x80?"))
    moved = place.to_bytes(8, "little")
    path.write_bytes(text[:second] + moved + text[second + 8 :] + bytes(32))
    assert words in refusal(path)


@pytest.mark.parametrize(("factor", "kind"), [(4.0, "linear"), (1.0, "default")])
def test_a_factor_of_rope_without_a_type_is_linear(tmp_path, factor, kind):
    path = tmp_path / "model.gguf"
    write(path, **{"rope.scaling.factor": factor})
    assert GgufFile(path).config().rope["rope_type"] == kind
