"""Tokenizers of GGUF files."""

from __future__ import annotations

import gguf
import pytest

from etc_dist.models import load_tokenizer
from etc_dist.models.gguf_file import GgufFile
from etc_dist.models.tokenizer_gguf import ENDS, HONOURED, NEUTRAL, PREFIX, UNUSED

TOKENS = ["h", "l", "o", "e", "hello", "he", "\u00c3\u00a9", "\u00c3", "\u00a9"]
NAMES = {"bos_token_id": 7, "eos_token_id": 8}


def written(folder, split="qwen2", merges=(), templates=None, **metadata):
    from tests.models.gguf_bytes import write

    entries = {"model": "gpt2", "pre": split, "tokens": TOKENS, **metadata}
    keys = {f"{PREFIX}{name}": value for name, value in entries.items()}
    if merges:
        keys[f"{PREFIX}merges"] = list(merges)
    write(folder / "model.gguf", metadata=keys | (templates or {}))
    return folder / "model.gguf"


@pytest.mark.parametrize(
    ("split", "text", "expected"),
    [
        ("llama-bpe", "hello", [4]),
        ("qwen2", "hello", [5, 1, 1, 2]),
        ("qwen2", "e\u0301", [6]),
    ],
)
def test_words_are_split_as_the_file_says(tmp_path, split, text, expected):
    path = written(tmp_path, split, ["h e", "\u00c3 \u00a9"])
    assert load_tokenizer(path).encode(text) == expected


@pytest.mark.parametrize(
    ("split", "metadata", "expected"),
    [
        ("qwen2", NAMES, [3]),
        ("qwen2", NAMES | {"add_bos_token": True}, [7, 3]),
        ("qwen2", NAMES | {"add_bos_token": True, "add_eos_token": True}, [7, 3, 8]),
        ("llama-bpe", NAMES, [7, 3]),
        ("llama-bpe", NAMES | {"add_bos_token": False}, [3]),
        ("llama-bpe", {}, [3]),
    ],
    ids=str,
)
def test_a_text_has_the_tokens_around_it_that_the_file_declares(
    tmp_path, split, metadata, expected
):
    tokenizer = load_tokenizer(written(tmp_path, split, **metadata))
    assert tokenizer.encode("e") == tokenizer.chat("e") == expected
    assert tokenizer.encode("e", add_special_tokens=False) == [3]


def test_templates_have_the_special_tokens_and_names_of_the_file(tmp_path):
    templates = {
        "tokenizer.chat_template": "{{ bos_token }}e{{ sep_token }}",
        "tokenizer.chat_template.tool_use": "{{ tools[0].name }}{{ mask_token }}",
        "tokenizer.chat_templates": ["tool_use"],
    }
    names = {"bos_token_id": 4, "seperator_token_id": 1, "mask_token_id": 2}
    types = [1, 3, 3, 1, 3]
    path = written(tmp_path, templates=templates, token_type=types, **names)
    tokenizer = load_tokenizer(path)
    assert tokenizer.chat("a") == [4, 3, 1]
    assert tokenizer.chat("a", tools=[{"name": "h"}]) == [0, 2]


def test_all_keys_of_the_format_are_known():
    keys = {v for k, v in vars(gguf.Keys.Tokenizer).items() if not k.startswith("_")}
    handled_keys = {f"{PREFIX}{name}" for name in (*HONOURED, *NEUTRAL, *ENDS)} | UNUSED
    templates = {"tokenizer.chat_template", "tokenizer.chat_template.{name}"}
    assert keys - handled_keys == templates


@pytest.mark.parametrize("name", sorted(ENDS))
def test_tokens_that_end_a_text_are_stop_tokens(tmp_path, name):
    path = written(tmp_path, eos_token_id=3, **{name: 5})
    assert GgufFile(path).config().stop_tokens == (3, 5)
