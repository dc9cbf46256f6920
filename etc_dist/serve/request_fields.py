"""The fields of a request: honoured, neutral, or refused by name.

A field that would change an answer and is not implemented is refused, unless its value
is the neutral one."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from etc_dist.errors import ArgumentError
from etc_dist.models import Sampling
from etc_dist.models.fields import is_among, short
from etc_dist.models.sampling import MOST_SEED

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "audio": (),
    "best_of": (1,),
    "continue_final_message": (False,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
"""Refused unless null or one of these values."""
UNUSED = {
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "user",
}
"""They do not change an answer."""
MOST_STOPS, MOST_STOP_LENGTH = 16, 256
MOST_TEXTS = 128
"""Of a request: the prompts, each `n` times."""
MOST_LOGPROBS = 20
MOST_SHOWN = 60
"""Characters of what is wrong in the message of an error."""
NOT_OF_TEMPLATE = "messages", "self", "tools"
"""Arguments of `Tokenizer.chat` that are not variables of a template."""


class BadRequest(Exception):
    """A request that is answered by an error. param: the field that is wrong."""

    def __init__(
        self, message: str, param: str | None = None, *, status: int = 400
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.status = message, param, status


@dataclass(frozen=True)
class Options:
    """How the texts of a request are generated. max_new_tokens: None for as many as
    fit. samplings: of each of the n texts of a prompt. stops: texts that end one.
    stop_ids: ids that do; those of the model do, too, unless ignores_end. num_logprobs:
    None without them."""

    max_new_tokens: int | None
    samplings: tuple[Sampling | None, ...]
    stops: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignores_end: bool = False
    num_logprobs: int | None = None
    streams: bool = False
    includes_usage: bool = False


@dataclass(frozen=True)
class Completion:
    """A request for /v1/completions. prompts: texts, or lists of ids."""

    prompts: list[str | list[int]]
    options: Options


@dataclass(frozen=True)
class Chat:
    """A request for /v1/chat/completions. arguments: of the chat template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    options: Options
    arguments: Mapping[str, Any] = field(default_factory=dict)


class Fields:
    """The fields of a JSON object, of which each is taken once."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._unread = dict(document)

    def take(self, name: str, kind: type | tuple[type, ...], default: Any) -> Any:
        """The value of a field; the default where it is absent or null. Raises
        BadRequest for another kind."""
        value = self._unread.pop(name, None)
        if value is None:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        # Bool is an int in Python, and integers of JSON are numbers.
        is_fitting = isinstance(value, kinds) or (float in kinds and type(value) is int)
        if not is_fitting or (isinstance(value, bool) and bool not in kinds):
            kinds_text = " or ".join(JSON_NAMES[json_kind] for json_kind in kinds)
            raise BadRequest(f"{name}: expected {kinds_text}, got {short(value)}", name)
        return value

    def integer(self, name: str, default: Any, low: int, high: int) -> Any:
        """An integer from low to high. Raises BadRequest for others."""
        value = self.take(name, int, default)
        if value is not None and not low <= value <= high:
            text = f"{name}: expected an integer from {low} to {high}, got {value}"
            raise BadRequest(text, name)
        return value

    def expect_no_other(self) -> None:
        """BadRequest for a field that was not taken, unless it changes nothing."""
        for name, value in self._unread.items():
            if name in UNUSED or value is None:
                continue
            neutral = NEUTRAL.get(name)
            if neutral is None:
                label = name[:MOST_SHOWN] + "..." * (len(name) > MOST_SHOWN)
                raise BadRequest(f"{label}: this field is not known", label)
            if not is_among(value, neutral):
                text = f"{name}: not supported"
                if neutral:
                    text += f", except {' or '.join(map(short, neutral))}"
                raise BadRequest(f"{text}; got {short(value)}", name)


JSON_NAMES = {
    bool: "true or false",
    dict: "an object",
    float: "a number",
    int: "an integer",
    list: "an array",
    str: "a string",
}
"""Of Python's types."""


def read_completion(document: Mapping[str, Any], model: str) -> Completion:
    """The request in a JSON object, for the model of this name. BadRequest names the
    first field that is wrong or not supported."""
    fields = Fields(document)
    expect_model(fields.take("model", str, model), model)
    prompts = _prompts(fields.take("prompt", (str, list), None))
    num_logprobs = fields.integer("logprobs", None, 0, MOST_LOGPROBS)
    most = fields.integer("max_tokens", 16, 1, 2**31)
    options = _options(fields, most, num_logprobs, len(prompts))
    return Completion(prompts, options)


def read_chat(document: Mapping[str, Any], model: str) -> Chat:
    """As `read_completion`. Raises BadRequest, too."""
    fields = Fields(document)
    expect_model(fields.take("model", str, model), model)
    messages = fields.take("messages", list, [])
    if not messages or not all(isinstance(message, dict) for message in messages):
        raise BadRequest(
            "messages: expected an array of one object or more", "messages"
        )
    tools = fields.take("tools", list, None)
    choice = fields.take("tool_choice", (str, dict), "auto")
    if choice not in ("auto", "none"):
        text = f'tool_choice: expected "auto" or "none", got {short(choice)}'
        raise BadRequest(text, "tool_choice")
    arguments = fields.take("chat_template_kwargs", dict, {})
    for name in arguments.keys() & set(NOT_OF_TEMPLATE):
        text = f"chat_template_kwargs: {name} is no variable that may be set here"
        raise BadRequest(text, "chat_template_kwargs")
    has_logprobs = fields.take("logprobs", bool, False)
    num_logprobs = fields.integer("top_logprobs", 0, 0, MOST_LOGPROBS)
    if num_logprobs and not has_logprobs:
        raise BadRequest("top_logprobs: needs logprobs = true", "top_logprobs")
    most = fields.integer("max_tokens", None, 1, 2**31)
    most = fields.integer("max_completion_tokens", most, 1, 2**31)
    options = _options(fields, most, num_logprobs if has_logprobs else None, 1)
    return Chat(messages, None if choice == "none" else tools, options, arguments)


def expect_model(name: str, model: str) -> None:
    """BadRequest unless `name` is that of the model."""
    if name != model:
        text = f"model: {short(name)} is not served here, but {short(model)}"
        raise BadRequest(text, "model", status=404)


def _prompts(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(type(part) is int for part in prompt):
            return [prompt]
        if all(isinstance(part, str) for part in prompt):
            return prompt
        if all(isinstance(part, list) and part for part in prompt) and all(
            type(number) is int for part in prompt for number in part
        ):
            return prompt
    prompt_kinds = "a text, an array of ids, or an array of one of these or more"
    raise BadRequest(f"prompt: expected {prompt_kinds}", "prompt")


def _options(
    fields: Fields, most: int | None, num_logprobs: int | None, num_prompts: int
) -> Options:
    """The fields that both interfaces have; then none may be left."""
    n = fields.integer("n", 1, 1, MOST_TEXTS)
    if n * num_prompts > MOST_TEXTS:
        raise BadRequest(f"n: expected at most {MOST_TEXTS} texts of a request", "n")
    streams = fields.take("stream", bool, False)
    of_stream = Fields(fields.take("stream_options", dict, {}))
    includes_usage = of_stream.take("include_usage", bool, False)
    of_stream.take("include_obfuscation", bool, False)
    of_stream.expect_no_other()
    options = Options(
        max_new_tokens=most,
        samplings=_samplings(fields, n),
        stops=_stops(fields.take("stop", (str, list), [])),
        stop_ids=_stop_ids(fields.take("stop_token_ids", list, [])),
        ignores_end=fields.take("ignore_eos", bool, False),
        num_logprobs=num_logprobs,
        streams=streams,
        includes_usage=includes_usage,
    )
    fields.expect_no_other()
    return options


def _samplings(fields: Fields, n: int) -> tuple[Sampling | None, ...]:
    """Of n texts, whose seeds follow each other; None for the most likely ids."""
    temperature = fields.take("temperature", float, 1.0)
    top_p = fields.take("top_p", float, 1.0)
    top_k = max(0, fields.integer("top_k", 0, -1, 2**31 - 1))  # -1: as 0
    seed = fields.integer("seed", None, -(2**63), MOST_SEED)
    first = secrets.randbits(63) if seed is None else seed
    samplings: list[Sampling] = []
    for idx in range(n):
        number = (first + idx) % (MOST_SEED + 1)
        try:
            samplings.append(Sampling(temperature, top_k, top_p, number))
        except ArgumentError as error:
            name = error.got.partition(" ")[0]
            raise BadRequest(f"{name}: expected {error.wanted}", name) from error
    return tuple(sampling if temperature else None for sampling in samplings)


def _stops(value: str | list[Any]) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    is_good = len(stops) <= MOST_STOPS and all(
        isinstance(stop, str) and 0 < len(stop) <= MOST_STOP_LENGTH for stop in stops
    )
    if not is_good:
        limits = f"up to {MOST_STOPS} texts of 1 to {MOST_STOP_LENGTH} characters"
        raise BadRequest(f"stop: expected {limits}", "stop")
    return tuple(stops)


def _stop_ids(ids: Sequence[Any]) -> tuple[int, ...]:
    if len(ids) > MOST_TEXTS or not all(type(number) is int for number in ids):
        text = f"stop_token_ids: expected up to {MOST_TEXTS} ids"
        raise BadRequest(text, "stop_token_ids")
    return tuple(ids)
