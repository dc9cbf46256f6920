"""The routes of a server, in the thread of the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from etc_dist.errors import ArgumentError
from etc_dist.serve import answers
from etc_dist.serve.answers import ChatAnswer, CompletionAnswer
from etc_dist.serve.clients import Clients, RequestJobs
from etc_dist.serve.jobs import Job, Served
from etc_dist.serve.request_fields import (
    BadRequest,
    Options,
    expect_model,
    read_chat,
    read_completion,
)
from etc_dist.serve.writer import AnswerText, Delta


class Answering:
    """The response of a request: an ASGI application that ends its work if the client
    leaves."""

    def __init__(self, exchange: RequestJobs, work: Callable[[Send], Awaitable[None]]):
        self._exchange, self._work = exchange, work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        working = asyncio.ensure_future(self._work(send))
        leaving = asyncio.ensure_future(_disconnect(receive))
        tasks = {working, leaving}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        except asyncio.CancelledError:
            pass  # the client has not read its answer until the end of the server
        finally:
            self._exchange.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Routes:
    """The endpoints."""

    def __init__(self, served_model: Served, clients: Clients) -> None:
        self._served_model, self._clients = served_model, clients

    def app(self) -> Starlette:
        """The application."""
        routes = [
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
        ]
        refusals: Mapping[Any, Any] = {
            BadRequest: self._refuse,
            HTTPException: self._refuse_route,
            ClientDisconnect: self._ignore,
            Exception: self._refuse_fault,
        }
        return Starlette(routes=routes, exception_handlers=refusals)

    async def complete(self, request: Request) -> Any:
        """/v1/completions"""
        document = await self._read(request)
        completion = read_completion(document, self._served_model.name)
        encode = self._served_model.tokenizer.encode
        prompts = [
            prompt
            if isinstance(prompt, list)
            else await _encode("prompt", encode, prompt)
            for prompt in completion.prompts
        ]
        answer = CompletionAnswer(self._served_model.name, self._served_model.tokenizer)
        return self._answer(answer, prompts, completion.options)

    async def chat(self, request: Request) -> Any:
        """/v1/chat/completions"""
        document = await self._read(request)
        chat = read_chat(document, self._served_model.name)

        def encode(messages: list[dict[str, Any]]) -> list[int]:
            tokenizer, arguments = self._served_model.tokenizer, chat.arguments
            return tokenizer.chat(messages, tools=chat.tools, **arguments)

        prompt = await _encode("messages", encode, chat.messages)
        answer = ChatAnswer(self._served_model.name, self._served_model.tokenizer)
        return self._answer(answer, [prompt], chat.options)

    async def models(self, request: Request) -> Response:
        """/v1/models"""
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """/v1/models/NAME"""
        expect_model(request.path_params["name"], self._served_model.name)
        return _json(self._model())

    async def health(self, request: Request) -> Response:
        """/health: 200 while requests are taken, else 503."""
        why = self._clients.why_closed
        return _json({"status": why or "ready"}, 503 if why else 200)

    async def metrics(self, request: Request) -> Response:
        """/metrics, in the text format of Prometheus."""
        text = self._clients.metrics.show()
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def _read(self, request: Request) -> dict[str, Any]:
        async with self._clients.receiving():
            return await read_json(request, self._served_model.most_bytes)

    def _model(self) -> answers.Json:
        return {
            "id": self._served_model.name,
            "object": "model",
            "created": 0,
            "owned_by": "etc_dist",
            "max_model_len": self._served_model.positions,
        }

    def _answer(
        self, answer: CompletionAnswer, prompts: Sequence[list[int]], options: Options
    ) -> Answering:
        """Begin the texts of a request; the response that waits for them."""
        limits = [self._max_new_tokens(prompt, options) for prompt in prompts]
        stop = self._stop(options)
        if options.num_logprobs is not None and not self._served_model.has_logprobs:
            text = "logprobs: not supported with --steps-per-launch above 1"
            raise BadRequest(text, "logprobs")
        jobs = [
            Job(
                self._clients.next_number(),
                prompt,
                limit,
                stop,
                sampling,
                options.num_logprobs,
            )
            for prompt, limit in zip(prompts, limits, strict=True)
            for sampling in options.samplings
        ]
        exchange = self._clients.begin(jobs)
        writers = [
            AnswerText(self._served_model.tokenizer, options.stops) for _ in jobs
        ]
        sender = Sender(answer, exchange, writers, [*map(len, prompts)])
        if options.streams:
            return Answering(exchange, lambda s: sender.stream(s, options))
        return Answering(exchange, sender.send_whole)

    def _max_new_tokens(self, prompt: list[int], options: Options) -> int:
        """Of a text; BadRequest for a prompt that cannot be continued."""
        vocabulary, positions = (
            self._served_model.config.vocabulary,
            self._served_model.positions,
        )
        if not prompt or not all(0 <= number < vocabulary for number in prompt):
            text = f"prompt: expected one token or more, ids of 0 .. {vocabulary - 1}"
            raise BadRequest(text, "prompt")
        if len(prompt) >= positions:
            text = f"prompt: expected at most {positions - 1} tokens, got {len(prompt)}"
            raise BadRequest(text, "prompt")
        count = options.max_new_tokens or positions - len(prompt)
        if len(prompt) + count > positions:
            text = f"prompt: {len(prompt)} tokens, and max_tokens = {count} of the "
            text += f"answer, are more than the {positions} that this server takes"
            raise BadRequest(text, "max_tokens")
        return count

    def _stop(self, options: Options) -> frozenset[int]:
        config = self._served_model.config
        wrong = [n for n in options.stop_ids if not 0 <= n < config.vocabulary]
        if wrong:
            text = f"stop_token_ids: expected ids of 0 .. {config.vocabulary - 1}"
            raise BadRequest(f"{text}, got {wrong[0]}", "stop_token_ids")
        config_ids = () if options.ignores_end else config.stop_tokens
        return frozenset(
            (*options.stop_ids, *(n for n in config_ids if n < config.vocabulary))
        )

    async def _refuse(self, request: Request, error: BadRequest) -> Response:
        self._clients.metrics.add_refusal(error.status)
        document = answers.error(error.message, error.status, error.param)
        return _json(document, error.status)

    async def _refuse_route(self, request: Request, error: HTTPException) -> Response:
        text = f"{request.method} {request.url.path}: {error.detail}"
        return await self._refuse(request, BadRequest(text, status=error.status_code))

    async def _ignore(self, request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=400)  # nobody reads it

    async def _refuse_fault(self, request: Request, error: Exception) -> Response:
        text = f"{type(error).__name__}: {error}"
        return await self._refuse(request, BadRequest(text, status=500))


class Sender:
    """Sends the texts of a request, each with its writer."""

    def __init__(
        self,
        answer: CompletionAnswer,
        exchange: RequestJobs,
        writers: Sequence[AnswerText],
        lengths: Sequence[int],
    ) -> None:
        """lengths: of the prompts, each of equally many texts."""
        self._answer, self._exchange = answer, exchange
        self._writers, self._lengths = writers, lengths
        self._num_cached = [0] * len(writers)

    async def send_whole(self, send: Send) -> None:
        """All texts, when the last one has ended."""
        wholes = [Delta() for _ in self._writers]
        while not self._exchange.is_done:
            choice_idx, delta = await self._next()
            wholes[choice_idx].text += delta.text
            wholes[choice_idx].tokens += delta.tokens
            wholes[choice_idx].finish = delta.finish or wholes[choice_idx].finish
        choices = [
            self._answer.choice(choice_idx, text)
            for choice_idx, text in enumerate(wholes)
        ]
        body = answers.encode(self._answer.whole(choices, self._usage()))
        await _begin(send, "application/json")
        await send({"type": "http.response.body", "body": body})

    async def stream(self, send: Send, options: Options) -> None:
        """Parts of the texts as they come, as server-sent events. An error after the
        first one is an event, too."""
        await _begin(send, "text/event-stream")
        try:
            while not self._exchange.is_done:
                choice_idx, delta = await self._next()
                if delta.text or delta.tokens or delta.finish:
                    part = self._answer.part(choice_idx, delta)
                    await _send_part(send, self._answer.event(part))
            if options.includes_usage:
                await _send_part(send, self._answer.usage_event(self._usage()))
            await _send_part(send, answers.LAST_EVENT)
        except BadRequest as error:
            document = answers.error(error.message, error.status)
            await _send_part(send, answers.event(document))
        await send({"type": "http.response.body", "body": b""})

    async def _next(self) -> tuple[int, Delta]:
        """What comes next, and of which text; nothing more of one that has ended."""
        choice_idx, progress = await self._exchange.next()
        self._num_cached[choice_idx] = progress.num_cached
        writer = self._writers[choice_idx]
        if writer.finish is not None:
            return choice_idx, Delta()
        delta = writer.take(progress)
        if delta.finish is not None:
            self._exchange.stop(choice_idx)
        return choice_idx, delta

    def _usage(self) -> answers.Json:
        num_ids = sum(writer.num_ids for writer in self._writers)
        of_prompts = self._num_cached[:: len(self._writers) // len(self._lengths)]
        return answers.usage(sum(self._lengths), num_ids, sum(of_prompts))


async def _begin(send: Send, media_type: str) -> None:
    headers = [(b"content-type", media_type.encode())]
    headers += [(b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def read_json(request: Request, most_bytes: int) -> dict[str, Any]:
    """The JSON object in the body of a request. BadRequest for a body that is too
    large, of another type, or no such object."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        text = f"expected the header content-type: application/json, got {kind!r}"
        raise BadRequest(text, status=415)  # browsers send others across sites
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most_bytes:
            text = f"the body has more than {most_bytes} bytes"
            raise BadRequest(text, status=413)
    try:
        document = json.loads(body, parse_constant=_refuse_constant)
    except (RecursionError, ValueError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise BadRequest("the body is no JSON object")
    return document


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


async def _encode(param: str, encode: Callable[[Any], list[int]], text: Any) -> Any:
    """The ids of a prompt, made in another thread; BadRequest if it is refused."""
    try:
        return await asyncio.to_thread(encode, text)
    except (ArgumentError, RecursionError, TypeError) as error:
        raise BadRequest(f"{param}: {error}", param) from error


def _json(document: Mapping[str, Any], status: int = 200) -> Response:
    body = answers.encode(document)
    return Response(body, status, media_type="application/json")
