"""Texts and conversations as ids, as transformers makes them."""

from __future__ import annotations

import ast
import inspect
import json
from importlib import import_module
from textwrap import dedent

import pytest
import tokenizers

from etc_dist.models import load_tokenizer, read_config
from etc_dist.models.tokenizer_config import HONOURED, NEUTRAL, UNUSED
from tests.models.small import CONFIG
from tests.models.test_tokenizer_config import write

pytestmark = pytest.mark.torch
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
TEXTS = ["a b", "<s>a", " <im> <snd>b", "", "a</s> <end>"]
EACH = "{% for m in messages %}{{ m.role }} {{ m.content }} {{ eos_token }}{% endfor %}"
TEMPLATES = {
    "without bos": EACH,
    "with bos": "{{ bos_token }}" + EACH,
    "with names": "{{ image_token }}{{ sound }}" + EACH,
}
CONFIGS = {
    "none": {},
    "bos": {**NAMES, "add_bos_token": False},
    "names": {
        **NAMES,
        "image_token": "<im>",
        "extra_special_tokens": {"sound": "<snd>"},
    },
    "list": {**NAMES, "extra_special_tokens": ["<snd>", "<end>"]},
    "older list": {**NAMES, "additional_special_tokens": ["<im>"]},
    "decoder": {**NAMES, "added_tokens_decoder": {"2": {"content": "<s>"}}},
}
FILES = {
    "alone": {},
    "others": {"special_tokens_map": {"bos_token": "<end>", "pad_token": "<im>"}},
    "objects": {
        "special_tokens_map": {"eos_token": {"content": "<im>", "lstrip": True}}
    },
}
SURROUNDINGS = {"nothing": "$A", "bos": "<s> $A", "both": "<s> $A </s>"}
MESSAGES = [
    {"role": "user", "content": "a <snd>"},
    {"role": "assistant", "content": None, "reasoning": "b", "tool_calls": [{}]},
    {"role": "user", "content": "<s> b"},
]
TAKES = (
    "{{ tools | tojson }} {{ documents }} {{ enable_thinking }} "
    "{% for m in messages %}{% generation %}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content or [] %}{{ p.text }} {% endfor %}{% endif %} "
    "{{ m.reasoning_content }} {{ m.tool_calls }} {% endgeneration %}{% endfor %}"
    "{% if add_generation_prompt %}b{% endif %}"
)


def surround(single):
    def change(tokens):
        special = [("<s>", 2), ("</s>", 3)]
        tokens.add_tokens([tokenizers.AddedToken("<snd>", lstrip=True)])
        tokens.post_processor = tokenizers.processors.TemplateProcessing(
            single=single, special_tokens=special
        )

    return change


def both(folder, template, config, surrounding="$A", **files):
    from transformers import PreTrainedTokenizerFast

    settings = {"clean_up_tokenization_spaces": False, "chat_template": template}
    write(folder, surround(surrounding), tokenizer_config=settings | config, **files)
    return load_tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("files", FILES)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("around", SURROUNDINGS)
def test_texts_have_the_ids_of_transformers(tmp_path, around, config, files):
    around, settings = SURROUNDINGS[around], dict(CONFIGS[config])
    if around != "$A":
        settings.pop("add_bos_token", None)
    ours, theirs = both(tmp_path, EACH, settings, around, **FILES[files])
    for text in TEXTS:
        for flag in (True, False):
            ids = theirs.encode(text, add_special_tokens=flag)
            assert ours.encode(text, add_special_tokens=flag) == ids
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("prefix", [None, False])
@pytest.mark.parametrize("kind", ["LlamaTokenizer", "Qwen2Tokenizer"])
def test_tokenizers_that_transformers_saves_are_its_own(tmp_path, kind, prefix):
    words = ["<s>", "</s>", "<unk>", "<|endoftext|>", "\u2581", "\u2581a", "b"]
    words += sorted({*tokenizers.pre_tokenizers.ByteLevel.alphabet()} - {"b"})
    words += [f"<0x{word_id:02X}>" for word_id in range(256)]
    vocabulary = {word: word_id for word_id, word in enumerate(words)}
    saved = getattr(import_module("transformers"), kind)(
        vocabulary, [], add_prefix_space=prefix
    )
    saved.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 1024}))
    ours = load_tokenizer(tmp_path)
    assert read_config(tmp_path).stop_tokens == (saved.eos_token_id,)
    for text in [*TEXTS, "é 🙂", "  b"]:
        assert ours.encode(text) == saved.encode(text)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("config", CONFIGS)
def test_conversations_have_the_ids_of_transformers(tmp_path, template, config):
    settings = CONFIGS[config].copy()
    settings.pop("add_bos_token", None)
    ours, theirs = both(tmp_path, TEMPLATES[template], settings, "<s> $A")
    assert ours.chat(MESSAGES) == ids_of(theirs, MESSAGES)


def ids_of(tokenizer, messages, **options):
    options = {"add_generation_prompt": True, "return_dict": False} | options
    return tokenizer.apply_chat_template(messages, **options)


def test_templates_get_what_transformers_gives(tmp_path):
    ours, theirs = both(tmp_path, TAKES, NAMES)
    parts = [{"role": "a", "content": [{"type": "text", "text": "a"}] * 2}]
    arguments = {"tools": [{"b": 1}], "documents": [{"text": "b"}]}
    for messages in (MESSAGES, parts):
        for more in ({}, arguments, {"enable_thinking": False}):
            for flag in (True, False):
                more = {**more, "add_generation_prompt": flag}
                ids = ids_of(theirs, messages, **more)
                assert ours.chat(messages, **more) == ids


def test_named_templates_are_chosen_as_by_transformers(tmp_path):
    templates = {"default": "a", "tool_use": "b", "rag": "<s>"}
    templates = [{"name": name, "template": text} for name, text in templates.items()]
    ours, theirs = both(tmp_path, templates, {})
    assert ours.chat("a") == ids_of(theirs, MESSAGES) == [0]
    assert ours.chat("a", chat_template="rag") == [2]
    assert ids_of(theirs, MESSAGES, tools=[]) == [1]
    templates[1]["template"] = "b{{ tools }}"
    ours, theirs = both(tmp_path, templates, {})
    assert ours.chat("a", tools=[]) == ids_of(theirs, MESSAGES, tools=[])


def fields_of_transformers():
    """Fields that the classes of tokenizers read."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    for function in (
        PreTrainedTokenizerBase.__init__,
        PreTrainedTokenizerBase._from_pretrained,
        PreTrainedTokenizerFast.__init__,
    ):
        for node in ast.walk(ast.parse(dedent(inspect.getsource(function)))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            first, called = node.args[0], ast.unparse(node.func)
            if called.startswith(("kwargs.", "init_kwargs.")) and isinstance(
                getattr(first, "value", None), str
            ):
                yield first.value


def test_all_fields_of_transformers_are_known():
    names = set(fields_of_transformers())
    assert len(names) > 30
    assert names - HONOURED - NEUTRAL.keys() - UNUSED == set()
