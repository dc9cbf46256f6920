"""The JSON of answers, as OpenAI's interfaces have it."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from etc_dist.models.tokenizer import INCOMPLETE, Tokenizer
from etc_dist.serve.jobs import TokenLogprobs
from etc_dist.serve.writer import Delta

Json = dict[str, Any]
Tokens = Sequence[tuple[int, TokenLogprobs]]


_ENCODER = json.JSONEncoder(separators=(",", ":"))


def encode(document: Mapping[str, Any]) -> bytes:
    """A JSON document."""
    return _ENCODER.encode(document).encode()


def event(document: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + encode(document) + b"\n\n"


LAST_EVENT = b"data: [DONE]\n\n"


def error(message: str, status: int, param: str | None = None) -> Json:
    """The document of an error, also within a stream."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    inner = {"message": message, "type": kind, "param": param, "code": status}
    return {"error": inner}


def usage(prompt: int, completion: int, num_cached: int) -> Json:
    """The tokens of a request."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


class CompletionAnswer:
    """An answer of /v1/completions: whole, or in chunks."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._common = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        # NOTE: what all parts begin with is encoded once.
        self._chunk_head = event({**self._common, "object": self.chunk_kind})[:-3]
        self._lengths: dict[int, int] = {}
        """Of each text, the characters of the tokens that were sent."""
        self._begun_idxs: set[int] = set()

    def whole(self, choices: Sequence[Json], usage: Json) -> Json:
        """The answer that is not streamed."""
        common = {**self._common, "object": self.kind}
        return {**common, "choices": list(choices), "usage": usage}

    def event(self, part: Json) -> bytes:
        """The event of a part of a text."""
        return b'%s,"choices":[%s]}\n\n' % (self._chunk_head, encode(part))

    def usage_event(self, usage: Json) -> bytes:
        """The event of the tokens, after all parts."""
        return b'%s,"choices":[],"usage":%s}\n\n' % (self._chunk_head, encode(usage))

    def choice(self, idx: int, delta: Delta) -> Json:
        """A text of the answer that is not streamed."""
        return {
            "index": idx,
            "text": delta.text,
            "logprobs": self._logprobs(idx, delta.tokens),
            "finish_reason": delta.finish,
        }

    def part(self, idx: int, delta: Delta) -> Json:
        """A part of a text."""
        return CompletionAnswer.choice(self, idx, delta)

    def _logprobs(self, idx: int, tokens: Tokens) -> Json | None:
        if not tokens:
            return None
        texts = [self._text(number) for number, _ in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._lengths.setdefault(idx, 0))
            self._lengths[idx] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [logprobs.own_logprob for _, logprobs in tokens],
            "top_logprobs": [
                self._by_text(logprobs.most_likely) for _, logprobs in tokens
            ],
            "text_offset": offsets,
        }

    def _by_text(self, most_likely: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Of tokens with one text, such as parts of characters, the most likely one."""
        values: dict[str, float] = {}
        for number, value in most_likely:
            values.setdefault(self._text(number), value)
        return values

    def _text(self, number: int) -> str:
        return self._tokenizer.decode([number])


class ChatAnswer(CompletionAnswer):
    """An answer of /v1/chat/completions."""

    prefix, kind = "chatcmpl", "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def choice(self, idx: int, delta: Delta) -> Json:
        """A message of the answer that is not streamed."""
        message = {"role": "assistant", "content": delta.text}
        return {"index": idx, "message": message, **self._rest(idx, delta)}

    def part(self, idx: int, delta: Delta) -> Json:
        """A part of a message; the first one has the role."""
        content = {"content": delta.text} if delta.text else {}
        if idx not in self._begun_idxs:
            self._begun_idxs.add(idx)
            content = {"role": "assistant", "content": delta.text}
        return {"index": idx, "delta": content, **self._rest(idx, delta)}

    def _rest(self, idx: int, delta: Delta) -> Json:
        logprobs = self._logprobs(idx, delta.tokens)
        return {"logprobs": logprobs, "finish_reason": delta.finish}

    def _logprobs(self, idx: int, tokens: Tokens) -> Json | None:
        if not tokens:
            return None
        content = [
            {
                **self._token(number, logprobs.own_logprob),
                "top_logprobs": [self._token(*pair) for pair in logprobs.most_likely],
            }
            for number, logprobs in tokens
        ]
        return {"content": content}

    def _token(self, number: int, logprob: float) -> Json:
        text = self._text(number)
        # The bytes of a part of a character are not known.
        utf8 = None if INCOMPLETE in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": utf8}
