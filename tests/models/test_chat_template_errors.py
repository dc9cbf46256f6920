"""Conversations that a chat template does not take."""

from __future__ import annotations

import pytest

from etc_dist.errors import ArgumentError
from etc_dist.models.chat_template import contents, conversation
from tests.models.test_chat_template import CALL, WRITES, chat, text


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("kind", ["image", "image_url"])
def test_parts_that_a_template_does_not_take_are_refused(name, kind):
    message = {"role": "user", "content": [text("a"), {"type": kind, "url": "x"}]}
    if (name, kind) == ("parts", "image"):
        assert chat(WRITES[name], [message]) == "a<im>|"
        return
    template = WRITES[name].replace("{% else %}{{ part", "{% elif part.text %}{{ part")
    with pytest.raises(ArgumentError, match=f"has the type '{kind}'"):
        chat(template, [message])


@pytest.mark.parametrize("name", ["tools", "documents", "enable_thinking"])
def test_arguments_that_a_template_would_drop_are_refused(name):
    with pytest.raises(ArgumentError, match=f"does not take '{name}'"):
        chat(WRITES["text"], "a", **{name: [1]})
    defined = f"{{% if not {name} is defined %}}{{% set {name} = 2 %}}{{% endif %}}"
    assert chat(f"{defined}{{{{ {name} }}}}", "a", **{name: [1]}) == "[1]"


def test_false_is_an_argument_that_a_template_would_drop():
    with pytest.raises(ArgumentError, match="does not take 'enable_thinking'"):
        chat(WRITES["text"], "a", enable_thinking=False)


@pytest.mark.parametrize("value", [object(), {1, 2}, b"a"], ids=["object", "set", "b"])
def test_a_template_gets_json_data_alone(value):
    with pytest.raises(TypeError, match="a value for the chat template"):
        chat("{{ x }}", "a", x=[value])


def test_a_conversation_has_messages():
    with pytest.raises(ArgumentError, match="a conversation has no messages"):
        conversation([])


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"content": [{"type": "image"}]}, "has the type 'image'"),
        ({"tool_calls": [CALL]}, "tool_calls"),
    ],
    ids=str,
)
def test_without_a_template_messages_with_more_than_texts_are_refused(message, words):
    with pytest.raises(ArgumentError, match=words):
        contents(conversation([{"role": "user", **message}]))
