"""Conversations as text: parts of messages, tools, and arguments of templates."""

from __future__ import annotations

import pytest

from etc_dist.models.chat_template import ChatTemplate, contents, conversation

EACH = "{% for m in messages %}"
WRITES = {
    "text": EACH + "{{ m.content }}|{% endfor %}",
    "trimmed text": EACH + "{{ m.content | trim }}|{% endfor %}",
    "only text": EACH + "{{ m.content if m.content is string else '' }}|{% endfor %}",
    "sum": EACH + "{{ m.content + '|' }}{% endfor %}",
    "parts": EACH + "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<im>{% else %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endif %}|{% endfor %}",
}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def text(value):
    return {"type": "text", "text": value}


def chat(template, messages, special=None, **arguments):
    return ChatTemplate(template).chat(conversation(messages), arguments, special or {})


@pytest.mark.parametrize("name", WRITES)
def test_text_parts_are_written_by_every_template(name):
    messages = [
        {"role": "user", "content": [text("a"), text("'text'")]},
        {"role": "assistant", "content": "b"},
    ]
    between = "" if name == "parts" else "\n"
    assert chat(WRITES[name], messages) == f"a{between}'text'|b|"


def test_a_list_that_is_written_as_json_is_written_as_text():
    template = EACH + "{{ m.content | tojson }}{% endfor %}"
    assert chat(template, [{"role": "tool", "content": [text("a")]}]) == '"a"'


def test_content_may_be_none_with_other_fields():
    template = EACH + (
        "{% if m.content is defined %}{{ m.content }}{% endif %}"
        "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
        "{% endfor %}"
    )
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "a"},
    ]
    assert chat(template, messages) == '{"name": "f", "arguments": {"x": 1}}a'


def test_messages_that_a_template_leaves_out_may_have_parts():
    template = EACH + "{{ m.content if m.role == 'user' else '' }}{% endfor %}"
    messages = [
        {"role": "tool", "content": [text("a")]},
        {"role": "user", "content": "b"},
    ]
    assert chat(template, messages) == "b"


@pytest.mark.parametrize("data", [{"x": [1]}, [1, {"type": "function"}], 3])
def test_a_result_of_a_tool_may_be_data(data):
    template = EACH + "{{ m.content | string }}{% endfor %}"
    assert chat(template, [{"role": "tool", "content": data}]) == str(data)
    with pytest.raises(TypeError, match="of a message"):
        contents(conversation([{"role": "tool", "content": data}]))
    with pytest.raises(TypeError, match="of a message"):
        conversation([{"role": "user", "content": data}])


def test_a_generation_block_of_a_template_is_written():
    template = EACH + (
        "{% generation %}\n{% set word = m.content %}{{ word }}{% endgeneration %}"
        "{{ word }};{% endfor %}"
    )
    assert chat(template, "a") == "a;"


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_a_reasoning_has_each_name_that_templates_use(name):
    template = EACH + "{{ m.thinking }}{{ m.reasoning_content }}{% endfor %}"
    assert chat(template, [{"role": "assistant", "content": "a", name: "b"}]) == "bb"


def test_templates_have_the_arguments_of_the_call():
    template = "{{ bos_token }}{{ tools | tojson }}{{ documents[0].text }}{{ x }}"
    arguments = {"tools": [{"name": "é"}], "documents": [{"text": "d"}], "x": False}
    output = chat(template, "a", special={"bos_token": "<s>"}, **arguments)
    assert output == '<s>[{"name": "é"}]dFalse'
    assert chat("{{ bos_token }}", "a", {"bos_token": "<s>"}, bos_token="") == ""


def test_arguments_that_ask_for_nothing_suit_every_template():
    arguments = {"tools": [], "documents": (), "add_generation_prompt": False}
    assert chat(WRITES["text"], "a", **arguments) == "a|"


def test_without_a_template_texts_are_joined():
    messages = [
        {"role": "user", "content": [text("a"), text("b")]},
        {"role": "user", "content": "c"},
    ]
    assert contents(conversation(messages)) == "a\nb\nc"
