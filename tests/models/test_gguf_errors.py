"""GGUF files that are damaged, or of models that are not implemented."""

from __future__ import annotations

import os
import struct

import numpy as np
import pytest

from etc_dist.errors import ArgumentError
from etc_dist.models import gguf_reader, load_tokenizer
from etc_dist.models.gguf_file import GgufFile
from etc_dist.models.gguf_keys import FIELDS, NEUTRAL, OWN_SIZES
from etc_dist.models.gguf_mixtures import PLAIN
from etc_dist.models.gguf_reader import read_gguf
from etc_dist.models.gguf_split import read_parts
from tests.models import gguf_bytes as made
from tests.models.gguf_bytes import array, gguf, tensor, text, write
from tests.models.test_gguf_keys import EXPERTS
from tests.models.test_gguf_split import PARTS, write_parts
from tests.models.test_tokenizer_gguf import written
from tests.refusals import refused

LOADED = "the model cannot be loaded|where: "
HEADS = {"attention.head_count": 4, "attention.key_length": 64}


def unread(path, words, read=None):
    """The file is refused, by its name."""

    def load():
        file = GgufFile(path)
        file.weights(file.config(), "bfloat16")

    refused(read or load, f"{LOADED}{path} wanted|{words}", ArgumentError)


@pytest.mark.parametrize("size", [0, 4, 40, 400, -64])
def test_files_that_are_not_complete_are_refused_by_name(tmp_path, size):
    path = tmp_path / "model.gguf"
    write(path)
    path.write_bytes(path.read_bytes()[:size])
    unread(path, "a complete GGUF file")


MODELS = {
    **{
        name: (changes, words)
        for name, changes, words in (
            ("no tensor", {}, "model.embed_tokens.weight: missing"),
            ("gpt2", {"architecture": "gpt2"}, "gpt2 of a GGUF file"),
            ("no architecture", {"architecture": ""}, " of a GGUF file"),
            ("byte order", {"is_big": True}, "the other byte order"),
            ("layers", {"block_count": 0}, "num_hidden_layers: an integer from 1"),
            (
                *("predicting", {"nextn_predict_layers": 1, "architecture": "glm4moe"}),
                "glm4moe.nextn_predict_layers: an integer below block_count",
            ),
            ("window", {"attention.sliding_window": 16}, "llama.attention.sliding_wi"),
            ("pairs", {"rope.dimension_count": 32}, "llama.rope.dimension_count = 32"),
            ("scale", {"logit_scale": 0.5}, "llama.logit_scale = 0.5"),
            (
                *("one layer", {"block_count": 2, "attention.head_count_kv": [4, 2]}),
                "llama.attention.head_count_kv: one number for all layers",
            ),
        )
    },
    **{
        f"tensors {words}": ({"tensors": {name: numbers}} | more, words)
        for name, numbers, more, words in (
            ("output_norm.weight", np.ones(64, "i4"), {}, "weight: I32"),
            (
                *("output_norm.weight", np.full(64, np.nan, "f4"), {}),
                "model.norm.weight: numbers that are not finite",
            ),
            ("rope_freqs.weight", np.zeros(32, "f4"), {}, "a factor of each"),
            (
                *("rope_freqs.weight", np.ones(32, "f4")),
                *({"rope.scaling.type": "linear"}, "linear with rope_freqs.weight"),
            ),
        )
    },
    **{
        f"{key} {value}": ({"metadata": {key: value}}, words)
        for key, value, words in (
            ("general.type", "adapter", "general.type = 'adapter'"),
            ("general.architecture", ["llama"], "['llama'] of a GGUF file"),
            ("general.architecture", 3, "3 of a GGUF file"),
            ("tokenizer.ggml.tokens", 3, "tokenizer.ggml.tokens: a list of texts"),
            ("tokenizer.ggml.tokens", [3], "tokenizer.ggml.tokens: a list of texts"),
            ("tokenizer.ggml.eos_token_id", "a", "eos_token_id: the id of a token"),
            ("tokenizer.ggml.eot_token_id", [3], "eot_token_id: the id of a token"),
        )
    },
    **{
        f"{key} {value}": (HEADS | more | {key: value}, "")
        for key in ("rope.scaling.type", "rope.scaling.factor", *sorted(FIELDS))
        for value in ("a text", [1.0, 2.0], -1, float("nan"))
        for more in (
            EXPERTS | {"architecture": "qwen3moe"}
            if key.startswith("expert_")
            else {"rope.scaling.type": "linear"},
        )
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_are_not_supported_are_refused(tmp_path, name):
    changes, words = MODELS[name]
    write(tmp_path / "model.gguf", **changes)
    unread(tmp_path / "model.gguf", words)


@pytest.mark.parametrize("value", [3, "a text", [0, 0], float("nan")], ids=str)
def test_values_that_are_not_neutral_are_all_named(tmp_path, value):
    names = {*NEUTRAL, *OWN_SIZES, *PLAIN, "unknown", "rope.dimension_sections"}
    write(tmp_path / "model.gguf", **HEADS, **dict.fromkeys(names, value))
    unread(tmp_path / "model.gguf", "|".join(f"llama.{name} = " for name in names))


def test_texts_that_are_not_utf8_are_refused(tmp_path):
    path = tmp_path / "model.gguf"
    write(path, **{"rope.scaling.type": "linear"})
    path.write_bytes(path.read_bytes().replace(b"linear", b"\xff" * 6))
    unread(path, "llama.rope.scaling.type: texts in UTF-8")


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
    unread(path, words)


@pytest.mark.parametrize(("factor", "kind"), [(4.0, "linear"), (1.0, "default")])
def test_a_factor_of_rope_without_a_type_is_linear(tmp_path, factor, kind):
    path = tmp_path / "model.gguf"
    write(path, **{"rope.scaling.factor": factor})
    assert GgufFile(path).config().rope["rope_type"] == kind


NUMBER = made.UINT32, struct.pack("<I", 7)
TEXTS = made.ARRAY, array(made.TEXT, [text("ab"), text("c")])
ROWS = tensor("rows", (2, 2))


def damaged(path, content, words=""):
    path.write_bytes(content)
    refused(lambda: read_gguf(path), words, ValueError)


def test_a_file_that_ends_early_is_refused_wherever_it_ends(tmp_path):
    whole = gguf({"a": NUMBER, "b": TEXTS, "c": (made.BOOL, b"\1")}, [ROWS], bytes(16))
    for size in range(len(whole)):
        damaged(tmp_path / "file", whole[:size])
    (tmp_path / "file").write_bytes(whole)
    assert len(read_gguf(tmp_path / "file").tensors) == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (gguf({}, magic=b"GGML"), "does not begin with GGUF"),
        (gguf({}, version=1), "GGUF version 1"),
        (gguf({"a": NUMBER}, num_keys=9), "9 keys at 24"),
        (gguf({}, [ROWS], bytes(16), num_tensors=9), "9 tensors at 24"),
        (gguf([("a", NUMBER), ("a", NUMBER)]), "a: more than once"),
        (gguf({b"\xff": NUMBER}), "the name of a key that is not UTF-8"),
        (gguf({"a": (13, b"\0")}), "a: a value of type 13"),
        (gguf({"a": (made.BOOL, b"\2")}), "a: 2 instead of true or false"),
        (
            gguf({"a": (made.ARRAY, array(made.TEXT, [text("b")], 9))}),
            "9 texts of a at",
        ),
        (
            gguf({"a": (made.ARRAY, array(made.UINT32, [b"1234"], 99))}),
            "99 numbers of a at",
        ),
        (
            gguf({"a": (made.ARRAY, array(made.ARRAY, [array(made.BOOL, [b"\1"])]))}),
            "a: an array of type 9",
        ),
        (
            gguf({"general.alignment": (made.UINT32, bytes(4))}),
            "instead of a power of 2",
        ),
        (
            gguf({"general.alignment": (made.TEXT, text("8"))}),
            "instead of a power of 2",
        ),
        (gguf({}, [tensor("b", (1,), axes=5)]), "5 axes instead of at most 4"),
        (gguf({}, [tensor("b", (1,), kind=77)]), "b: type 77, which is unknown"),
        (gguf({}, [tensor("b", (0, 2))]), "b: no numbers"),
        (
            gguf({}, [tensor("b", (33,), made.Q8_0)], bytes(99)),
            "rows of 33 instead of a",
        ),
        (gguf({}, [tensor("b", (5, 1))], bytes(16)), "b: bytes 96 to 116 of 112"),
        (gguf({}, [tensor("b", (2, 2), 0, 64)], bytes(16)), "b: bytes 160 to 176 of"),
        (gguf({}, [ROWS, ROWS], bytes(16)), "a tensor's name more than once"),
    ],
)
def test_damaged_headers_are_refused(tmp_path, content, reason):
    damaged(tmp_path / "file", content, reason)


def test_a_header_beyond_the_limit_is_not_read(tmp_path, monkeypatch):
    content = gguf({"a": TEXTS})
    monkeypatch.setattr(gguf_reader, "MOST_BYTES", 40)
    damaged(tmp_path / "file", content, "bytes at")


def test_a_fifo_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "model.gguf")
    unread(tmp_path / "model.gguf", "not a regular file")


ALIKE = "as for part 3"
OF_PARTS = {
    "missing": (
        lambda p: [q.unlink() for q in p[1:]],
        {},
        0,
        f"missing: {PARTS[1]}; {PARTS[2]}",
    ),
    "name": (
        lambda p: p[0].rename(p[0].with_name("model.gguf")),
        {},
        "model.gguf",
        "a name that ends in -00001-of-00003",
    ),
    "number": (None, {"split.no": 1}, 2, f"wanted: split.no = 2, {ALIKE}"),
    "count": (None, {"split.count": 4}, 2, f"wanted: split.count = 3, {ALIKE}"),
    "model": (
        None,
        {"general.name": "other"},
        2,
        f"wanted: general.name = 'm', {ALIKE}",
    ),
    "more": (None, {"general.more": 3}, 2, f"wanted: general.more = None, {ALIKE}"),
    "damaged": (
        lambda p: p[1].write_bytes(p[1].read_bytes()[:-8]),
        {},
        1,
        "wanted: a complete GGUF file",
    ),
    "tensors": (
        lambda p: write(
            p[2],
            tensors={"t1": np.ones(64, np.float32)},
            metadata={"split.no": 2, "split.count": 3, "split.tensors.count": 3}
            | {"general.name": "m"},
        ),
        {},
        0,
        "3 tensors of different names",
    ),
    "text": (
        lambda p: write(p[0].with_name("model.gguf"), metadata={"split.count": "2"}),
        {},
        "model.gguf",
        "wanted: split.count: an integer",
    ),
}


@pytest.mark.parametrize("name", OF_PARTS)
def test_parts_that_do_not_belong_together_are_refused(tmp_path, name):
    act, changes, where, words = OF_PARTS[name]
    write_parts(tmp_path, **changes)
    parts = [tmp_path / part for part in PARTS]
    if act is not None:
        act(parts)
    path = parts[where] if isinstance(where, int) else tmp_path / where
    first = parts[0] if isinstance(where, int) else path
    unread(path, words, lambda: read_parts(first))


NO_TOKENS = "tokenizer.ggml.tokens, one for each"
TOKENIZERS = [
    ({"tokens": ["a"], "eos_token_id": 9}, NO_TOKENS),
    ({"tokens": ["a"], "bos_token_id": 1}, NO_TOKENS),
    ({"tokens": ["a"], "bos_token_id": -1}, NO_TOKENS),
    ({"tokens": ["a"], "token_type": [1, 1]}, NO_TOKENS),
    ({"tokens": [1]}, NO_TOKENS),
    ({"add_space_prefix": True}, "add_space_prefix: False"),
    ({"add_sep_token": True}, "add_sep_token: False"),
    ({"add_bos_token": True}, "bos_token_id, since add_bos_token is true"),
    ({"add_bos_token": 1}, "add_bos_token: a value of type bool"),
    ({"eos_token_id": "e"}, "eos_token_id: a value of type int"),
    ({"tokens": "e"}, "tokens: a value of type list"),
    ({"merges": ["h x"]}, "merges: pairs of tokens"),
    ({"normalizer": "nfc"}, "no tokenizer.ggml.normalizer"),
]


@pytest.mark.parametrize(("metadata", "words"), TOKENIZERS, ids=str)
def test_tokenizers_that_are_damaged_or_not_implemented_are_refused(
    tmp_path, metadata, words
):
    path = written(tmp_path, **metadata)
    refused(lambda: load_tokenizer(path), words, ArgumentError)
