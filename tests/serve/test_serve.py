"""`etc-dist serve`, as clients see it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

import etc_dist
from etc_dist.models import Sampling, load, load_tokenizer
from etc_dist.serve.answers import CompletionAnswer
from etc_dist.serve.jobs import TokenLogprobs
from etc_dist.serve.writer import Delta
from etc_dist.settings import Settings
from tests.serve.conftest import ROOT, of_bytes

IDS = [65, 300, 7, 411, 30]
TOKENS = of_bytes()
TOOL = {"type": "function", "function": {"name": "f"}}


def complete(server, prompt, count, **options):
    options = {"model": server.name, "temperature": 0} | options
    return server.client.completions.create(prompt=prompt, max_tokens=count, **options)


@pytest.fixture(scope="module")
def model(folder):
    with etc_dist.start(Settings(backend="cpu")) as world:
        yield load(folder, batch=1, positions=96, page_size=16, world=world)


@pytest.fixture
def texts(model):
    """The text of the model itself after ids, by its sampling."""

    def texts(ids, count, sampling=None):
        (new,) = model.generate([ids], max_new_tokens=count, sampling=sampling)
        return TOKENS.decode(new)

    return texts


def test_texts_are_those_of_the_model(server, texts):
    drawn = {"temperature": 2.0, "top_p": 0.8, "seed": 9, "n": 2}
    with ThreadPoolExecutor(4) as pool:  # more texts than fit the batch at once
        first = pool.submit(complete, server, IDS, 20)
        second = pool.submit(complete, server, [IDS, IDS * 6], 5, **drawn)
        third = pool.submit(complete, server, "a text", 7)
    assert first.result().choices[0].text == texts(IDS, 20)
    assert first.result().choices[0].finish_reason == "length"
    samplings = [Sampling(temperature=2.0, top_p=0.8, seed=seed) for seed in (9, 10)]
    expected = [
        texts(ids, 5, sampling) for ids in (IDS, IDS * 6) for sampling in samplings
    ]
    assert [choice.text for choice in second.result().choices] == expected
    usage = second.result().usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (35, 20)
    assert third.result().choices[0].text == texts(TOKENS.encode("a text").ids, 7)


def test_a_stream_has_the_same_text_and_its_usage(server, texts):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *parts, last = complete(server, IDS, 12, **options)
    assert len(parts) >= 6
    assert "".join(part.choices[0].text for part in parts) == texts(IDS, 12)
    assert [part.choices[0].finish_reason for part in parts[-2:]] == [None, "length"]
    assert last.choices == [] and last.usage.total_tokens == len(IDS) + 12


@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_string_ends_a_text_before_it(server, texts, streams):
    whole = texts(IDS, 20)
    stop = whole[15:18]
    answer = complete(server, IDS, 20, stop=["\0never", stop], stream=streams)
    chunks = list(answer) if streams else [answer]
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert text == whole[: whole.index(stop)] != ""
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_stop_id_ends_a_text(server, texts):
    ends = {"stop_token_ids": [TOKENS.token_to_id(texts(IDS, 1))]}
    choice = complete(server, IDS, 20, extra_body=ends).choices[0]
    assert (choice.text, choice.finish_reason) == ("", "stop")


def test_logprobs_are_those_of_the_logits(server, model):
    answer = complete(server, IDS, 3, logprobs=3).choices[0].logprobs
    (*_, best) = model.step(IDS, [0] * 5, range(5), [[0, 1]])
    logits = model.logits[4].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum())
    assert answer.token_logprobs[0] == pytest.approx(logprobs[best], abs=1e-5)
    order = np.argsort(-logprobs, kind="stable")[:3].tolist()
    expected = {TOKENS.decode([n]): logprobs[n] for n in order}
    assert answer.top_logprobs[0] == pytest.approx(expected, abs=1e-5)
    assert answer.text_offset[:2] == [0, len(answer.tokens[0])]


def test_of_tokens_with_one_text_the_most_likely_has_the_logprob(folder):
    answer = CompletionAnswer("m", load_tokenizer(folder))
    parts = [n for n in range(256) if TOKENS.decode([n]) == "\ufffd"][:3]
    pairs = *zip(parts, (-1.0, -2.0, -3.0), strict=True), (300, -4.0)
    delta = Delta(tokens=[(parts[1], TokenLogprobs(-2.0, pairs))])
    logprobs = answer.choice(0, delta)["logprobs"]
    assert logprobs["top_logprobs"] == [{"\ufffd": -1.0, TOKENS.decode([300]): -4.0}]


def test_a_conversation_has_tools_and_logprobs(server, texts):
    def chat(**options):
        return server.client.chat.completions.create(
            model=server.name,
            messages=[{"role": "user", "content": "Hi"}],
            tools=[TOOL],
            max_tokens=4,
            temperature=0,
            **options,
        )

    prompt = 'Hi[{"type": "function", "function": {"name": "f"}}]'
    expected = texts(TOKENS.encode(prompt).ids, 4)
    whole = chat(logprobs=True, top_logprobs=2).choices[0]
    assert whole.message.content == expected
    assert [len(token.top_logprobs) for token in whole.logprobs.content] == [2] * 4
    first = whole.logprobs.content[0]
    assert (first.token, first.logprob) == (
        first.top_logprobs[0].token,
        first.top_logprobs[0].logprob,
    )
    deltas = [part.choices[0].delta for part in chat(stream=True)]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == expected


def test_prompts_with_one_beginning_share_pages(server, texts):
    first = complete(server, IDS * 8, 5)
    again = complete(server, [[*IDS * 8, 9], [*IDS * 7, 9]], 5, n=2)
    assert [first.choices[0].text, *(answer.text for answer in again.choices)] == [
        texts(ids, 5) for ids in (IDS * 8, *2 * [[*IDS * 8, 9]], *2 * [[*IDS * 7, 9]])
    ]
    num_cached = [
        answer.usage.prompt_tokens_details.cached_tokens for answer in (first, again)
    ]
    assert num_cached[0] < 40 and num_cached[1] == 64  # pages of 16 positions
    assert server.metrics()["prompt_tokens_cached_total"] >= 64


def test_drafts_change_no_text_and_no_logprobs(server, serve):
    """Nor do pages that are not reused."""
    other_server = serve("--speculate", "4", "--no-prefix-reuse")
    whole = complete(server, IDS * 8, 40, logprobs=2).choices[0]
    for _ in range(2):
        answer = complete(other_server, IDS * 8, 40, logprobs=2)
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        assert answer.choices[0].text == whole.text
        logprobs = answer.choices[0].logprobs
        assert logprobs.token_logprobs == pytest.approx(whole.logprobs.token_logprobs)
    numbers = other_server.metrics()
    assert 0 < numbers["drafts_accepted_total"] <= numbers["drafts_total"]
    assert other_server.end() == 0


async def leave(server, seconds, num_parts):
    """Begin a text of 60 tokens, and leave after some pieces of the answer, or after
    some time."""
    place = urlsplit(server.url)
    fields = {"prompt": IDS * 3, "max_tokens": 60, "stream": bool(num_parts)}
    body = json.dumps(fields)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {place.netloc}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    writer.write((head + body).encode())
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            for _ in range(num_parts or 1):
                await reader.read(2**16)
    writer.transport.abort()


async def leave_often(server, rng, count, at_once=40):
    """As many clients leave at random times, so many of them at once."""
    numbers = zip(rng.uniform(0, 0.2, count), rng.integers(6, size=count), strict=True)

    async def one_after_the_other():
        for seconds, num_parts in numbers:
            await leave(server, seconds, int(num_parts))

    await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))


def expect_no_page_left(server):
    until = time.monotonic() + 30
    while (metrics := server.metrics())["texts_running"] + metrics["texts_waiting"]:
        assert time.monotonic() < until, metrics
        time.sleep(0.05)
    assert metrics["pages_free"] == metrics["pages"] > 0
    return metrics


def test_clients_that_leave_leave_no_page_behind(server, rng):
    """A thousand, of which few have their whole answer."""
    asyncio.run(leave_often(server, rng, 1000))
    metrics = expect_no_page_left(server)
    assert metrics['texts_total{reason="left"}'] > 500


def test_sigterm_lets_answers_end_and_takes_no_more(serve, texts, openai):
    server = serve()
    with complete(server, IDS, 30, stream=True) as stream:
        text = next(stream).choices[0].text
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        with pytest.raises((openai.APIConnectionError, openai.InternalServerError)):
            complete(server, IDS, 1)
        text += "".join(part.choices[0].text for part in stream)
    assert text == texts(IDS, 30)
    assert server.process.wait(10) == 0


def test_answers_that_take_too_long_end_with_an_error(serve, openai):
    server = serve("--drain-seconds", "0")
    with complete(server, IDS, 80, stream=True) as stream:
        next(stream)
        server.process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="was shut down before the end"):
            list(stream)
    assert server.process.wait(10) == 0
    assert server.log.read_text().count("\n") == 1


def test_a_body_that_does_not_come_is_refused_once_the_server_drains(serve):
    server = serve("--drain-seconds", "600")
    host, port = server.url.split("/")[2].split(":")
    head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n"
    with socket.create_connection((host, int(port))) as client:
        client.sendall(f"{head}content-type: application/json\r\n\r\n{{".encode())
        server.metrics()  # by the same loop, later
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        assert client.recv(99).startswith(b"HTTP/1.1 503")
    assert "Traceback" not in server.log.read_text()


def test_logits_that_are_not_finite_are_an_error_of_their_request(
    serve, overflowing, openai
):
    server = serve("--dtype", "float16", of=overflowing)
    for streams in (False, True):
        with pytest.raises(openai.APIError, match="NotFiniteError: the logits of a"):
            list(complete(server, IDS, 4, stream=streams))
    expect_no_page_left(server)
    assert server.end() == 0


def test_a_lost_http_server_ends_the_process_of_the_steps(serve):
    server = serve()
    os.kill(server.front(), signal.SIGKILL)
    assert server.process.wait(20) == 1
    assert "the process of the HTTP server has ended" in server.log.read_text()


def test_the_http_server_ends_without_the_process_of_the_steps(serve, openai):
    server = serve()
    front = server.front()
    with complete(server, IDS, 80, stream=True) as stream:
        next(stream)
        server.process.kill()
        with pytest.raises(openai.APIError, match="the server has ended"):
            list(stream)
    until = time.monotonic() + 20
    while Path(f"/proc/{front}").exists():
        assert time.monotonic() < until
        time.sleep(0.05)


LAUNCHER = (str(ROOT / "launch" / "mpirun"), "-n", "2")


def test_two_ranks_serve_until_sigterm(serve, rng):
    server = serve(launcher=LAUNCHER)
    first = complete(server, IDS, 4, logprobs=2).choices[0]
    assert first.logprobs.tokens[0] in first.logprobs.top_logprobs[0]
    asyncio.run(leave_often(server, rng, 20))
    expect_no_page_left(server)
    with complete(server, IDS, 4, stream=True) as stream:
        text = next(stream).choices[0].text
        server.process.send_signal(signal.SIGTERM)
        text += "".join(part.choices[0].text for part in stream)
    assert text == first.text
    assert server.process.wait(20) == 0


def test_a_lost_rank_is_an_error_of_all_clients(serve, openai):
    server = serve(launcher=LAUNCHER)
    with complete(server, IDS, 80, stream=True) as stream:
        next(stream)
        os.kill(server.rank(1), signal.SIGKILL)
        with pytest.raises(openai.APIError, match="(WorldError|WaitTimeoutError): "):
            list(stream)
    assert server.process.wait(20) != 0
    assert re.search(r"\[rank 0\] W\w+Error: ", server.log.read_text())
