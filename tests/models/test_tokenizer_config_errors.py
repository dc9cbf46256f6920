"""Files of tokenizers that are damaged, or that contradict each other."""

from __future__ import annotations

import pytest
import tokenizers

from etc_dist.errors import ArgumentError
from etc_dist.models import load_tokenizer, read_config
from etc_dist.models.chat import prompt_ids
from etc_dist.models.tokenizer_config import NEUTRAL
from tests.models.test_tokenizer_config import write


@pytest.mark.parametrize(
    ("name", "files", "text"),
    [
        ("tokenizer_config", {"tokenizer_config": "{"}, "a JSON object"),
        ("special_tokens_map", {"special_tokens_map": "[]"}, "a JSON object"),
        (
            "special_tokens_map",
            {"special_tokens_map": {"eos_token": 3}},
            "eos_token: a",
        ),
        ("added_tokens", {"added_tokens": "a"}, "a JSON object"),
        ("tokenizer", {"tokenizer": "{"}, "a JSON object"),
        ("tokenizer", {"tokenizer": "{}"}, "model.vocab and added_tokens"),
        (
            "tokenizer",
            {"tokenizer": {"model": {"vocab": {"</s>": "x"}}, "added_tokens": []}},
            "model.vocab and added_tokens",
        ),
        (
            "tokenizer_config",
            {"tokenizer_config": {"eos_token": "<x>"}},
            "in tokenizer.",
        ),
        (
            "tokenizer_config",
            {"tokenizer": {"model": {"vocab": {"</s>": 600}}, "added_tokens": []}},
            "an eos_token below 520",
        ),
    ],
    ids=str,
)
def test_damaged_files_are_refused_by_name(tmp_path, name, files, text):
    files = {"tokenizer_config": {"eos_token": "</s>"}} | files
    with pytest.raises(ArgumentError) as caught:
        read_config(write(tmp_path, **files))
    assert caught.value.where == str(tmp_path / f"{name}.json")
    assert text in caught.value.wanted


@pytest.mark.parametrize("name", NEUTRAL)
def test_fields_that_are_not_implemented_are_refused(tmp_path, name):
    write(tmp_path, tokenizer_config={name: ["other.json"]})
    with pytest.raises(ArgumentError, match=f"no {name}, which is not implemented"):
        load_tokenizer(tmp_path)
    read_config(tmp_path)  # token ids need no tokenizer
    write(tmp_path, tokenizer_config={name: NEUTRAL[name][-1]})
    load_tokenizer(tmp_path)


def test_decoded_texts_that_are_cleaned_up_are_refused(tmp_path):
    write(tmp_path, tokenizer_config={"clean_up_tokenization_spaces": True})
    with pytest.raises(ArgumentError, match="unless the model is BPE"):
        load_tokenizer(tmp_path)


def begin_with_space(tokens):
    tokens.normalizer = tokenizers.normalizers.Prepend("\u2581")


def split_bytes(tokens):
    tokens.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)


@pytest.mark.parametrize("has_space", [True, False])
@pytest.mark.parametrize("change", [begin_with_space, split_bytes, None])
def test_files_that_disagree_on_a_space_before_a_text_are_refused(
    tmp_path, change, has_space
):
    config = {"add_prefix_space": has_space}
    change = change or (lambda tokens: None)
    write(tmp_path, change, tokenizer_config=config)
    if has_space == (change in (begin_with_space, split_bytes)):
        load_tokenizer(tmp_path)
        return
    with pytest.raises(ArgumentError, match=f"space: {not has_space}".lower()):
        load_tokenizer(tmp_path)


def surround(tokens):
    tokens.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
    )


@pytest.mark.parametrize("flag", ["add_bos_token", "add_eos_token"])
@pytest.mark.parametrize("change", [surround, lambda tokens: None])
def test_files_that_disagree_on_tokens_around_a_text_are_refused(
    tmp_path, flag, change
):
    names = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "b"}
    is_added = change is surround
    write(tmp_path, change, tokenizer_config=names | {flag: is_added})
    ids = [2, 0, 3] if is_added else [0]
    assert load_tokenizer(tmp_path).encode("a") == ids
    write(tmp_path, change, tokenizer_config=names | {flag: not is_added})
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(ArgumentError, match=f"{flag}: {is_added}".lower()):
        tokenizer.encode("a")
    assert tokenizer.encode("a", add_special_tokens=False) == [0]
    assert tokenizer.chat("a") == [1]


def test_a_template_argument_of_a_wrong_type_is_refused(tmp_path):
    write(tmp_path, tokenizer_config={"chat_template": "{{ tools }}"})
    tokenizer = load_tokenizer(tmp_path)
    assert prompt_ids(tokenizer, "a", {"tools": []}) == [0]  # [] is an unknown word
    with pytest.raises(ArgumentError, match="tools expects a list"):
        prompt_ids(tokenizer, "a", {"tools": 5})
