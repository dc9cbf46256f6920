"""Texts and conversations as token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Any

from etc_dist.errors import ArgumentError, expect_choice, expect_type
from etc_dist.models.chat_template import (
    ChatTemplate,
    contents,
    conversation,
    is_left_out,
    missing_template,
)
from etc_dist.models.ids import checked_ids
from etc_dist.models.tokenizer_config import DEFAULT

TOOL_USE = "tool_use"
"""The template of conversations with tools, if there is one."""
INCOMPLETE = "\ufffd"
"""The end of a text whose last character needs further tokens."""
MOST_BYTES = 4
"""Of a character, and thus its tokens."""


class Tokenizer:
    """The tokenizer of a model, by the package `tokenizers`; made by `load_tokenizer`.

    chat_templates: Jinja templates by name. special: texts by the names that templates
    use, such as bos_token. conflict: what `encode` raises where it would add special
    tokens on which the files of the model disagree."""

    def __init__(
        self,
        tokens: Any,
        chat_templates: Mapping[str, str],
        special: Mapping[str, str],
        conflict: ArgumentError | None = None,
    ) -> None:
        self._tokens, self._conflict = tokens, conflict
        self.chat_templates, self._special = dict(chat_templates), dict(special)
        token_items = tokens.get_added_tokens_decoder().items()
        self._invisible = {number for number, token in token_items if token.special}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, without a template. Names of special tokens in it become
        their ids. add_special_tokens: with the beginning and end tokens that the files
        of the model declare.

        Raises ArgumentError if the files disagree about those."""
        if add_special_tokens and self._conflict is not None:
            raise self._conflict
        if not text.isascii():
            text = text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates
        encoding = self._tokens.encode(text, add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, without special tokens. TypeError unless all are integers
        from 0."""
        return self.text(checked_ids(ids))

    def text(self, ids: list[int]) -> str:
        """Internal: as `decode`, of ids that were checked."""
        return str(self._tokens.decode(ids, skip_special_tokens=True))

    def visible(self, ids: Iterable[int]) -> list[tuple[int, str]]:
        """Ids and their tokens, without those that `decode` leaves out."""
        tokens = [(n, self._tokens.id_to_token(n)) for n in checked_ids(ids)]
        return [(n, text) for n, text in tokens if text and n not in self._invisible]

    def largest_id(self) -> int:
        """The largest id of a token; 0 without tokens."""
        return int(max(self._tokens.get_vocab().values(), default=0))

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        **arguments: Any,
    ) -> list[int]:
        """The ids of a conversation, up to the beginning of the model's answer.
        messages: mappings with "role" and "content" and what else the template takes,
        or the text of one message of the user. A content is a text, a list of parts, or
        None with other fields. tools, documents: JSON schemas and documents for the
        template. chat_template: the name of one, if the model has several; default:
        "tool_use" with tools, otherwise "default". add_generation_prompt: with what
        begins an answer. arguments: others that the template takes, such as
        enable_thinking.

        Without a chat template, `encode` of the contents, joined by newlines.

        Raises ArgumentError where the template refuses or drops what it is given, and
        TypeError for values that are not JSON data."""
        expect_type(add_generation_prompt, bool, "add_generation_prompt")
        dialogue = conversation(messages)
        arguments |= {"tools": tools, "documents": documents}
        for name in ("tools", "documents"):
            expect_type(arguments[name], (list, tuple, NoneType), name)
            for entry in arguments[name] or ():
                expect_type(entry, Mapping, f"one of {name}")
        if self.chat_templates:
            text = self._template(chat_template, tools is not None)
            arguments |= (
                {} if add_generation_prompt else {"add_generation_prompt": False}
            )
            chat = ChatTemplate(text).chat(dialogue, arguments, self._special)
            return self.encode(chat, add_special_tokens=False)
        arguments["chat_template"] = chat_template
        names = [name for name, value in arguments.items() if is_left_out(name, value)]
        if names:
            missing_template(", ".join(names))
        return self.encode(contents(dialogue))

    def _template(self, name: str | None, has_tools: bool) -> str:
        if name is None:
            uses_tools = has_tools and TOOL_USE in self.chat_templates
            name = TOOL_USE if uses_tools else DEFAULT
        expect_choice(name, tuple(self.chat_templates), "chat_template")
        return self.chat_templates[name]


class TextStream:
    """The text of tokens that come one by one: `print(text.add([id]), end="")` for
    each id, then `print(text.end())`. Each id costs the same, however long the text is.
    """

    # NOTE: the text of first words and of bytes depends on the ids before them. So ids
    # are decoded together with those of the last complete character.

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []
        self._num_sent = 0  # characters of the context's text

    def add(self, ids: Iterable[int]) -> str:
        """The text that these ids add, up to the last complete character."""
        return "".join([self._add(*piece) for piece in self._tokenizer.visible(ids)])

    def end(self) -> str:
        """What is left of the text, with a mark for an incomplete character."""
        text = self._tokenizer.decode(self._context + self._pending)
        return text[self._num_sent :]

    def _add(self, number: int, token: str) -> str:
        self._pending.append(number)
        text = self._tokenizer.text(self._context + self._pending)
        is_mark = token.endswith(INCOMPLETE)  # written by the model
        num_held = int(text.endswith(INCOMPLETE) and not is_mark)
        if num_held and len(self._pending) < MOST_BYTES:
            return ""
        new = text[self._num_sent : len(text) - num_held]
        self._context, self._pending = self._pending, []
        self._num_sent = len(self._tokenizer.text(self._context)) - num_held
        return new
