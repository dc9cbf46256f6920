"""Texts and conversations as ids, with the tokenizer of a folder."""

from __future__ import annotations

import json

import pytest
import tokenizers

from etc_dist.errors import ArgumentError
from etc_dist.models import load_tokenizer
from tests.models.small import CONFIG

WORDS = {
    word: number
    for number, word in enumerate(["a", "b", "c", "d", "user", "é", "[UNK]", "[PAD]"])
}
EACH = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"


def made(folder, config=None, change=lambda tokens: None):
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokens = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="[UNK]"))
    tokens.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    change(tokens)
    (folder / "tokenizer.json").write_text(tokens.to_str())
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (folder / "tokenizer_config.json").write_text(text)
    return load_tokenizer(folder)


def cut(tokens):
    tokens.enable_truncation(2)
    tokens.enable_padding(length=9, pad_id=7, pad_token="[PAD]")


def test_settings_of_the_training_do_not_change_a_text(tmp_path):
    assert made(tmp_path, change=cut).encode("a b c d") == [0, 1, 2, 3]


def test_lone_surrogates_are_unknown_characters(tmp_path):
    assert made(tmp_path).encode("a \udcff b") == [0, 6, 1]


@pytest.mark.parametrize("ids", [[-1], [2**40], ["a"], [0.5]], ids=str)
def test_ids_that_are_not_tokens_are_a_type_error(tmp_path, ids):
    with pytest.raises(TypeError, match="ids of tokens are integers from 0, got"):
        made(tmp_path).decode(ids)


@pytest.mark.parametrize(
    "template",
    [
        EACH,
        [{"name": "tool_use", "template": "d"}, {"name": "default", "template": EACH}],
        "{% for m in messages %}user {{ m.content }}{% break %}{% endfor %}",
        "user {{ messages[0].content | tojson | replace('\"', '') }}",
    ],
    ids=["text", "named", "break", "tojson"],
)
def test_conversations_are_written_by_the_template(tmp_path, template):
    tokenizer = made(tmp_path, {"chat_template": template})
    assert tokenizer.chat("a é") == [4, 0, 5]


def test_a_template_has_what_transformers_gives_it(tmp_path):
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "user"}')
    template = (
        "{% if tools is none and documents is none %}"
        "{{ bos_token }} {{ pad_token }} {{ messages[0].content }}{% endif %}"
    )
    tokenizer = made(tmp_path, {"chat_template": template, "pad_token": "d"})
    assert tokenizer.chat("a é") == [4, 3, 0, 5]


def add_end(tokens):
    tokens.add_special_tokens(["<end>"])


END = {"content": "<end>", "special": True, "lstrip": False}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"added_tokens_decoder": {"9": {"content": "<im>"}}}, "<im>"),
        ({"added_tokens_decoder": {"8": {**END, "lstrip": True}}}, "'lstrip': True"),
        ({"added_tokens_decoder": {"7": END}}, "<end>"),
        ({"extra_special_tokens": {"image": "<im>"}}, "<im>"),
        ({"additional_special_tokens": ["<end>", {"content": "<im>"}]}, "<im>"),
        ({"eos_token": "<im>"}, "<im>"),
    ],
    ids=str,
)
def test_tokens_that_tokenizer_json_lacks_are_refused(tmp_path, config, text):
    with pytest.raises(ArgumentError) as caught:
        made(tmp_path, config, add_end)
    assert text in caught.value.got
    same = {"added_tokens_decoder": {"8": END}, "eos_token": "<end>"}
    assert made(tmp_path, same, add_end).encode("a <end>") == [0, 8]
    (tmp_path / "added_tokens.json").write_text('{"<im>": 9}')
    with pytest.raises(ArgumentError, match="token 9 as in tokenizer.json"):
        made(tmp_path, same, add_end)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ raise_exception('two users in a row') }}", "two users in a row"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ messages.__class__.__mro__ }}", "SecurityError"),
        ("{{ [] | tojson(default=cycler) }}", "TypeError"),
    ],
)
def test_a_template_that_refuses_is_an_error_with_its_message(tmp_path, template, text):
    tokenizer = made(tmp_path, {"chat_template": template})
    with pytest.raises(
        ArgumentError, match="the chat template cannot be used"
    ) as error:
        tokenizer.chat("a")
    assert text in error.value.got


def test_a_jinja_with_an_open_sandbox_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("jinja2.__version__", "3.1.5")
    with pytest.raises(ArgumentError, match="can leave the sandbox"):
        made(tmp_path, {"chat_template": "a"}).chat("a")


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ("{", "a JSON object"),
        ([], "a JSON object"),
        ({"bos_token": {}}, "bos_token: a text"),
        ({"bos_token": [1]}, "bos_token: a text"),
        ({"chat_template": [{"name": "default"}]}, "chat_template: a text"),
        ({"chat_template": 2}, "chat_template: a text"),
        ({"extra_special_tokens": "<im>"}, "extra_special_tokens: texts"),
        ({"additional_special_tokens": [1]}, "additional_special_tokens: texts"),
        ({"added_tokens_decoder": ["a"]}, "added_tokens_decoder: an object"),
    ],
    ids=str,
)
def test_a_damaged_tokenizer_config_is_refused(tmp_path, config, text):
    with pytest.raises(ArgumentError, match="the tokenizer cannot be used") as error:
        made(tmp_path, config)
    assert text in error.value.wanted


@pytest.mark.parametrize(
    "messages",
    [
        ["a"],
        [{"content": "a"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": ["a"]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": "a", "time": b"a"}],
    ],
    ids=str,
)
def test_messages_have_a_role_and_a_content(tmp_path, messages):
    with pytest.raises(TypeError, match="message|value for the chat template"):
        made(tmp_path).chat(messages)
