"""Conversations as text, by the chat template of a model.

A template has the variables that transformers gives to it. What a template would drop
is refused: parts of messages, tools, documents and arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from etc_dist.errors import ArgumentError, expect_type
from etc_dist.models.extras import extra_module

SAFE_JINJA = 3, 1, 6
"""Earlier releases let a template run any code (CVE-2025-27516)."""
REASONING = "reasoning_content", "thinking", "reasoning"
"""The names that a message may have for its reasoning; templates use the first two."""
SPEAKERS = "system", "developer", "user", "assistant"
"""Roles whose messages are texts; those of other ones, such as tools, may be data."""
NOTHING: Mapping[str, Any] = {
    "tools": [],
    "documents": [],
    "add_generation_prompt": False,
}
"""Values that leave nothing out where a template does not have the variable."""
WHERE = "the model's chat template"


class ChatTemplate:
    """A Jinja template. variables: the names that it uses.

    Raises ArgumentError for a template that cannot be used."""

    def __init__(self, text: str) -> None:
        environment, meta = _environment(), extra_module("jinja2.meta")
        try:
            self.variables = meta.find_undeclared_variables(environment.parse(text))
            self._template = environment.from_string(text)
        except Exception as error:  # a template has any expression
            raise _unusable(error) from error

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        special: Mapping[str, str],
    ) -> str:
        """A conversation as text. messages: of `conversation`. arguments: of the
        template, tools and documents included. special: tokens by name."""
        for name, value in arguments.items():
            if name not in self.variables and is_left_out(name, value):
                raise ArgumentError(
                    f"the chat template does not take {name!r}",
                    where=WHERE,
                    wanted=f"arguments among {', '.join(sorted(self.variables))}",
                    got=f"{name}={value!r}"[:80],
                    fix="remove it, or choose a model or template that takes it",
                )
        values = {**special, "add_generation_prompt": True}
        values |= {"tools": None, "documents": None, **plain(arguments)}
        return self._render(self._fit_parts(messages, values), values)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]
    ) -> str:
        try:
            return str(self._template.render({**values, "messages": messages}))
        except Exception as error:  # a template runs any expression
            raise _unusable(error) from error

    def _fit_parts(
        self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]
    ) -> Sequence[Mapping[str, Any]]:
        """The messages, with text in place of parts that the template does not take."""
        parts = {n: m["content"] for n, m in enumerate(messages) if has_parts(m)}
        if not parts:
            return messages
        marked = {n: _marked(n, some) for n, some in parts.items()}
        rendered = self._shown(messages, marked, values)
        fit = dict(parts)
        for n, some in marked.items():
            marks = [part["text"] for part in some if part["type"] == "text"]
            if rendered is None or not all(_is_taken(m, rendered) for m in marks):
                expect_texts(parts[n])
                fit[n] = _joined(parts[n])
                continue
            for part_idx, part in enumerate(parts[n]):
                fewer_parts = {**marked, n: some[:part_idx] + some[part_idx + 1 :]}
                is_text = part["type"] == "text"
                if is_text:
                    continue
                if self._shown(messages, fewer_parts, values) == rendered:
                    raise _part_refused(part)
        return _with_contents(messages, fit)

    def _shown(
        self,
        messages: Sequence[Mapping[str, Any]],
        contents: Mapping[int, Any],
        values: Mapping[str, Any],
    ) -> str | None:
        """The text with other contents; None if the template refuses them."""
        try:
            return self._render(_with_contents(messages, contents), values)
        except ArgumentError:
            return None


def conversation(messages: Any) -> list[dict[str, Any]]:
    """The messages that a template gets: without fields that are None, and with all
    names of a reasoning.

    Raises TypeError for messages without a role, or without all other fields,
    ArgumentError for no messages."""
    expect_type(messages, (str, list, tuple), "messages")
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not messages:
        raise ArgumentError(
            "a conversation has no messages",
            where="Tokenizer.chat",
            wanted="at least one message",
            got="none",
            fix="give messages, or the text of one",
        )
    return [_message(message) for message in messages]


def is_left_out(name: str, value: Any) -> bool:
    """Whether a template without the variable `name` would drop this value."""
    return value is not None and plain(value) != NOTHING.get(name)


def contents(messages: Iterable[Mapping[str, Any]]) -> str:
    """The text of messages without a template."""
    texts = []
    for message in messages:
        if message.keys() - {"role", "name", "content"}:
            missing_template(f"messages with {', '.join(message)}")
        if has_parts(message):
            expect_texts(message["content"])
            texts.append(_joined(message["content"]))
        else:
            expect_type(message["content"], str, "'content' of a message")
            texts.append(message["content"])
    return "\n".join(texts)


def missing_template(got: str) -> None:
    """Raises ArgumentError: `got` needs a chat template."""
    raise ArgumentError(
        "the model has no chat template",
        where="Tokenizer.chat",
        wanted="messages with role and content alone, and no arguments",
        got=got,
        fix="use a model with a chat template, or give encode() a text that you made",
    )


def has_parts(message: Mapping[str, Any]) -> bool:
    """Whether the content is a list of parts, not data of a tool."""
    some = message.get("content")
    return isinstance(some, list) and (
        message["role"] in SPEAKERS
        or any(isinstance(part, dict) and part.get("type") == "text" for part in some)
    )


def expect_texts(parts: Iterable[Mapping[str, Any]]) -> None:
    """Raises ArgumentError unless all parts of a message are texts."""
    for part in parts:
        if part["type"] != "text":
            raise _part_refused(part)


def plain(value: Any) -> Any:
    """A copy of JSON data; TypeError for others, which a template could call."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value) if kind is not str else str.__str__(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    expect_type(value, (list, tuple), "a value for the chat template")
    return [plain(item) for item in value]


def _message(message: Any) -> dict[str, Any]:
    expect_type(message, Mapping, "a message")
    fields = {key: value for key, value in plain(message).items() if value is not None}
    expect_type(fields.get("role"), str, "'role' of a message")
    is_needed = fields.keys() <= {"role", "name"}
    if is_needed or (fields["role"] in SPEAKERS and "content" in fields):
        expect_type(fields.get("content"), (str, list), "'content' of a message")
    for part in fields["content"] if has_parts(fields) else ():
        expect_type(part, dict, "a part of a message")
        expect_type(part.get("type"), str, "'type' of a part of a message")
        if part["type"] == "text":
            expect_type(part.get("text"), str, "'text' of a part of a message")
    reasoning = [fields[name] for name in REASONING if name in fields]
    if reasoning:
        fields = {REASONING[1]: reasoning[0], **fields, REASONING[0]: reasoning[0]}
    return fields


def _joined(parts: Iterable[Mapping[str, Any]]) -> str:
    return "\n".join(part["text"] for part in parts if part["type"] == "text")


def _marked(number: int, parts: Sequence[Any]) -> list[Any]:
    """The parts of a message with texts that are found again, and one more text."""
    texts = [*parts, {"type": "text"}]
    return [
        {**part, "text": f"etcdist{number}x{part_idx}y"}
        if part["type"] == "text"
        else part
        for part_idx, part in enumerate(texts)
    ]


def _is_taken(mark: str, rendered: str) -> bool:
    """Whether the text of a part is written, and not the list itself."""
    return mark in rendered and not re.search(rf"text['\"]\s*:\s*['\"]{mark}", rendered)


def _with_contents(
    messages: Sequence[Mapping[str, Any]], contents: Mapping[int, Any]
) -> Sequence[Mapping[str, Any]]:
    return [
        {**message, "content": contents[n]} if n in contents else message
        for n, message in enumerate(messages)
    ]


def _part_refused(part: Mapping[str, Any]) -> ArgumentError:
    return ArgumentError(
        f"a part of a message has the type {part['type']!r}",
        where=WHERE,
        wanted="parts of types that the template takes, such as text",
        got=repr(part)[:80],
        fix="remove the part, or describe it in a text",
    )


def _unusable(error: Exception) -> ArgumentError:
    return ArgumentError(
        "the chat template cannot be used",
        where=WHERE,
        wanted="a conversation that it takes, and a Jinja template",
        got=f"{type(error).__name__}: {error}",
        fix="change the messages, or give encode() a text that you made",
    )


def _environment() -> Any:
    sandbox, jinja2 = extra_module("jinja2.sandbox"), extra_module("jinja2")
    if tuple(map(int, jinja2.__version__.split(".")[:3])) < SAFE_JINJA:
        raise ArgumentError(
            "templates can leave the sandbox of this jinja2",
            where=WHERE,
            wanted=f"jinja2 {'.'.join(map(str, SAFE_JINJA))} or later",
            got=jinja2.__version__,
            fix="pip install --upgrade jinja2",
        )

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    extensions = ["jinja2.ext.loopcontrols", _generation_block()]
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _generation_block() -> Any:
    """An extension of Jinja: the block that marks what the model wrote, for training.
    Here its content is written as it is."""
    base, nodes = extra_module("jinja2.ext").Extension, extra_module("jinja2.nodes")

    def parse(extension: Any, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)

    return type("GenerationBlock", (base,), {"tags": {"generation"}, "parse": parse})


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # NOTE: the other options of json.dumps would call what a template passes.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
