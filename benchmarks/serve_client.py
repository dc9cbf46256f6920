"""Clients of a server of OpenAI's interface: streams of completions, with the times of
their tokens, and checks that each has all of them."""

from __future__ import annotations

import asyncio
import json
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median
from typing import Any
from urllib.parse import SplitResult, urlsplit

DATA, LAST = b"data: ", b"[DONE]"
LIMIT_SECONDS = 120.0
"""Of all streams together."""


@dataclass(frozen=True)
class Stream:
    """The answer of a request. begin, times: when it was sent, and when each part of
    its text came, in seconds of one clock. faults: what is wrong with it."""

    begin: float
    times: Sequence[float]
    text: str
    faults: Sequence[str]

    @property
    def first_token_ms(self) -> float:
        """From the request to the first part of the text."""
        return 1e3 * (self.times[0] - self.begin)

    def token_ms(self, num_tokens: int) -> float:
        """Between its tokens, on average."""
        return 1e3 * (self.times[-1] - self.times[0]) / (num_tokens - 1)


class Receiver(asyncio.Protocol):
    """Sends one request, and notes when each piece of its answer comes. It is read
    later, so that the client takes little time while the server works."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.begin = 0.0
        self.pieces: list[tuple[float, bytes]] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def receive(self, place: SplitResult) -> None:
        """Connect, and wait for the end of the answer."""
        loop = asyncio.get_running_loop()
        await loop.create_connection(
            lambda: self, str(place.hostname), place.port or 80
        )
        await self.ended

    def connection_made(self, transport: Any) -> None:
        self.begin = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def drive(
    url: str, model: str, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[Stream]:
    """The streams of requests that begin together, for `num_tokens` tokens each.
    TimeoutError if they do not end."""
    bodies = [body(model, prompt, num_tokens) for prompt in prompts]
    receivers = asyncio.run(_receive(url, bodies))
    return [stream_of(r.begin, r.pieces, num_tokens) for r in receivers]


def body(model: str, prompt: Sequence[int], num_tokens: int) -> bytes:
    """The JSON of a request for the most likely tokens."""
    fields = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(fields).encode()


async def _receive(url: str, bodies: Sequence[bytes]) -> list[Receiver]:
    place = urlsplit(url)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\n"
        "Content-Type: application/json\r\nConnection: close\r\n"
    )
    requests = [
        f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text for text in bodies
    ]
    receivers = [Receiver(request) for request in requests]
    async with asyncio.timeout(LIMIT_SECONDS):
        await asyncio.gather(*(receiver.receive(place) for receiver in receivers))
    return receivers


# ------------------------------------------------------------------ reading an answer


def stream_of(
    begin: float, pieces: Sequence[tuple[float, bytes]], num_tokens: int
) -> Stream:
    """The stream in the pieces of an answer, each with the time when it came."""
    raw = b"".join(data for _, data in pieces)
    head, _, _ = raw.partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        return Stream(begin, [], "", [f"no stream: {raw.decode(errors='replace')}"])
    ends = list(accumulate(len(data) for _, data in pieces))
    documents: list[tuple[float, dict[str, Any]]] = []
    is_ended = False
    for end, data in events(raw, len(head) + 4):
        is_ended = data == LAST
        if not is_ended:
            documents.append((pieces[bisect_left(ends, end)][0], json.loads(data)))
    faults = [str(d["error"]) for _, d in documents if "error" in d]
    faults += [] if is_ended else ["it has no end"]
    choices = [(t, choice) for t, d in documents for choice in d.get("choices", ())]
    texts = [(t, choice["text"]) for t, choice in choices if choice["text"]]
    finish = [c["finish_reason"] for _, c in choices if c["finish_reason"]]
    counts = [d["usage"]["completion_tokens"] for _, d in documents if d.get("usage")]
    if finish != ["length"]:
        faults.append(f"finish_reason: wanted ['length'], got {finish}")
    if counts[-1:] != [num_tokens]:
        faults.append(f"completion_tokens: wanted {num_tokens}, got {counts}")
    times = [t for t, _ in texts]
    return Stream(begin, times, "".join(text for _, text in texts), faults)


def events(raw: bytes, place: int) -> Iterator[tuple[int, bytes]]:
    """The data of server-sent events in the chunks of an answer from `place` on, and
    where in `raw` the chunk is that completes each."""
    text = b""
    while (line_end := raw.find(b"\r\n", place)) >= 0:
        size = int(raw[place:line_end], 16)
        first, place = line_end + 2, line_end + size + 4
        text += raw[first : first + size]
        *whole, text = text.split(b"\n\n")
        for event in whole:
            yield min(place, len(raw)), event.removeprefix(DATA)


# ------------------------------------------------------------------ their times


def times_of(streams: Sequence[Stream], num_tokens: int) -> dict[str, float]:
    """Of streams that began together: medians in milliseconds of the first token, of a
    later one, and of one while all streams have tokens, if there is such a time; and
    tokens a second."""
    first = min(stream.begin for stream in streams)
    all_begun = max(stream.times[0] for stream in streams)
    first_end = min(stream.times[-1] for stream in streams)
    gaps = [
        after - before
        for stream in streams
        for before, after in pairwise(stream.times)
        if all_begun <= before and after <= first_end
    ]
    last = max(stream.times[-1] for stream in streams)
    times = {
        "first_token_ms": median(stream.first_token_ms for stream in streams),
        "token_ms": median(stream.token_ms(num_tokens) for stream in streams),
        "tokens_per_s": len(streams) * num_tokens / (last - first),
    }
    return times | ({"step_ms": 1e3 * median(gaps)} if gaps else {})
