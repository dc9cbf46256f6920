"""What the JSON files of a tokenizer declare: end tokens, special ones, templates."""

from __future__ import annotations

import json

import pytest
import tokenizers

from etc_dist.errors import ArgumentError
from etc_dist.models import load_tokenizer, read_config
from tests.models.small import CONFIG

WORDS = ["a", "b", "<s>", "</s>", "<im>", "<snd>", "<end>"]
SPECIAL = ["<s>", "</s>"]
LISTED = {"additional_special_tokens": ["<im>", "<snd>"]}


def write(folder, change=lambda tokens: None, **files):
    """files: objects or texts, by names without .json."""
    ids_of_words = {word: word_id for word_id, word in enumerate(WORDS)}
    tokens = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(ids_of_words, unk_token="a")
    )
    tokens.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokens.add_special_tokens(SPECIAL)
    change(tokens)
    (folder / "tokenizer.json").write_text(tokens.to_str())
    for name, value in ({"config": CONFIG} | files).items():
        text = value if isinstance(value, str) else json.dumps(value)
        (folder / f"{name}.json").write_text(text)
    return folder


DECODER = {"added_tokens_decoder": {"3": {"content": "</s>"}}}


@pytest.mark.parametrize(
    ("files", "stops"),
    [
        ({}, ()),
        ({"tokenizer_config": {"eos_token": "</s>"}}, (3,)),
        ({"tokenizer_config": {"eos_token": {"content": "<end>"}}}, (6,)),
        ({"tokenizer_config": DECODER | {"eos_token": "</s>"}}, (3,)),
        ({"special_tokens_map": {"eos_token": {"content": "</s>"}}}, (3,)),
        (
            {
                "config": CONFIG | {"eos_token_id": 1},
                "tokenizer_config": {"eos_token": "</s>"},
            },
            (1, 3),
        ),
        (
            {
                "config": CONFIG | {"eos_token_id": 1},
                "generation_config": {"eos_token_id": [0, 3]},
                "tokenizer_config": {"eos_token": "</s>"},
            },
            (0, 3),
        ),
        (
            {
                "tokenizer_config": {"eos_token": "</s>"},
                "special_tokens_map": {"eos_token": "<end>"},
            },
            (6,),
        ),
        (
            {
                "tokenizer_config": DECODER | {"eos_token": "</s>"},
                "special_tokens_map": {"eos_token": "<end>"},
            },
            (3,),
        ),
    ],
    ids=str,
)
def test_the_end_token_of_the_tokenizer_is_a_stop_token(tmp_path, files, stops):
    assert read_config(write(tmp_path, **files)).stop_tokens == stops


def test_an_end_token_without_an_id_is_not_needed_where_no_tokenizer_is(tmp_path):
    write(tmp_path, tokenizer_config={"eos_token": "</s>"})
    (tmp_path / "tokenizer.json").unlink()
    assert read_config(tmp_path).stop_tokens == ()


def test_an_end_token_may_have_a_score(tmp_path):
    model = {"vocab": [["a", 0.0], ["</s>", -1.5]]}
    text = json.dumps({"model": model, "added_tokens": []})
    write(tmp_path, tokenizer_config={"eos_token": "</s>"}, tokenizer=text)
    assert read_config(tmp_path).stop_tokens == (1,)


NAMES = "{{ bos_token }} {{ image_token }} {{ sound }}"


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"image_token": "<im>", **LISTED}},
        {
            "tokenizer_config": {
                "image_token": {"content": "<im>"},
                "model_specific_special_tokens": {"sound": "<snd>"},
            }
        },
        {"tokenizer_config": {"extra_special_tokens": {"sound": {"content": "<snd>"}}}},
        {"tokenizer_config": {"additional_special_tokens": {"sound": "<snd>"}}},
        {"special_tokens_map": {"image_token": "<im>", "sound": 3}},
        {
            "tokenizer_config": DECODER,
            "special_tokens_map": {"image_token": "<im>", "bos_token": "<end>"},
        },
    ],
    ids=str,
)
def test_templates_have_special_tokens_with_names_of_their_own(tmp_path, files):
    settings = files.get("tokenizer_config", {}) | {
        "chat_template": NAMES,
        "bos_token": "<s>",
    }
    write(tmp_path, **files | {"tokenizer_config": settings})
    text = str(files)
    is_named = "image_token" in text and DECODER not in files.values()
    ids = [2, *[4] * is_named, *[5] * ("'sound': '" in text or "'sound': {" in text)]
    assert load_tokenizer(tmp_path).chat("a") == ids


@pytest.mark.parametrize(
    "config", [{"image_token": "<im>"}, {"extra_special_tokens": ["<im>"]}, LISTED]
)
def test_declared_special_tokens_are_special_in_texts(tmp_path, config):
    tokenizer = load_tokenizer(write(tmp_path, tokenizer_config=config))
    assert tokenizer.encode("b<im>b") == [1, 4, 1]
    assert tokenizer.decode([1, 4]) == "b"


def test_lists_of_special_tokens_of_both_files_count(tmp_path):
    config = {"extra_special_tokens": ["<im>"]}
    older = {"extra_special_tokens": ["<snd>"]}
    write(tmp_path, tokenizer_config=config, special_tokens_map=older)
    assert load_tokenizer(tmp_path).encode("b<im>b<snd>b") == [1, 4, 1, 5, 1]


def test_a_declared_special_token_has_its_flags(tmp_path):
    config = {"extra_special_tokens": [{"content": "<im>", "single_word": True}]}
    tokenizer = load_tokenizer(write(tmp_path, tokenizer_config=config))
    assert tokenizer.encode("<im> b<im>") == [4, 0]  # b<im> is an unknown word


@pytest.mark.parametrize("has_end", [False, True])
def test_one_token_may_begin_and_end_texts(tmp_path, has_end):
    def change(tokens):
        tokens.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A <s>" if has_end else "<s> $A", special_tokens=[("<s>", 2)]
        )

    names = {"bos_token": "<s>", "eos_token": "<s>"}
    flags = {"add_bos_token": True, "add_eos_token": has_end}
    write(tmp_path, change, tokenizer_config=names | flags)
    assert load_tokenizer(tmp_path).encode("a") == [2, 0, *[2] * has_end]


def test_templates_in_files_replace_those_of_the_configuration(tmp_path):
    templates = [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]
    write(tmp_path, tokenizer_config={"chat_template": templates})
    tokenizer = load_tokenizer(tmp_path)
    assert [tokenizer.chat("c"), tokenizer.chat("c", chat_template="rag")] == [[0], [1]]
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("{{ tools | length }}</s>")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.chat("c", tools=[{}]) == [0, 3]
    with pytest.raises(ArgumentError, match="tool_use"):
        tokenizer.chat("c")  # it has no default
    (tmp_path / "chat_template.jinja").write_text("<s>")
    assert load_tokenizer(tmp_path).chat("c") == [2]
