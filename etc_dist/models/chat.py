"""The command `etc-dist generate`: a model's answer, as it is written."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from etc_dist.errors import ArgumentError
from etc_dist.models.batch import Batch
from etc_dist.models.blas import use_one_thread
from etc_dist.models.extras import PACKAGED, packaged_model
from etc_dist.models.loading import load
from etc_dist.models.sampling import Sampling
from etc_dist.models.tokenizer import TextStream, Tokenizer
from etc_dist.models.tokenizer_files import load_tokenizer
from etc_dist.world import World, start


class ProgressLine:
    """A line of a terminal that is replaced by the next one. Writes nothing to a file
    or a pipe, except results."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._shows = stream, stream.isatty()

    def show(self, text: str) -> None:
        """Replaces the line by `text`, if the stream is a terminal."""
        if self._shows:
            self._stream.write(f"\r\x1b[K{text}")
            self._stream.flush()

    def result(self, text: str) -> None:
        """Prints `text` in a line of its own."""
        self.show("")
        print(text, file=self._stream, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.show("")


def answer(
    folder: str | None,
    prompt: str,
    max_new_tokens: int,
    sampling: Sampling | None,
    template_arguments: Sequence[str] = (),
    speculate: int = 0,
) -> None:
    """Print the answer of the model in `folder` (default: the packaged one) to a
    prompt, and on stderr what it does and its speed: on rank 0 alone. sampling: None
    for the most likely tokens. template_arguments: keyword arguments of
    `Tokenizer.chat`, as NAME=VALUE. speculate: as of `load`."""
    arguments = dict(map(_template_argument, template_arguments))
    with start() as world, ProgressLine(_of_rank_0(sys.stderr, world)) as progress:
        if world.backend == "cpu":
            use_one_thread()
        out = _of_rank_0(sys.stdout, world)
        path = packaged_model() if folder is None else Path(folder)
        name = PACKAGED if folder is None else path.name
        progress.show(f"loading {name}")
        tokenizer = load_tokenizer(path)
        ids = prompt_ids(tokenizer, prompt, arguments)
        options: dict[str, Any] = {"batch": 1, "speculate": speculate, "world": world}
        with load(path, **options) as model, Batch(model) as requests:
            room = min(max_new_tokens, max(1, model.positions - len(ids)))
            request = requests.add(ids, max_new_tokens=room, sampling=sampling)
            text, num_printed, began = TextStream(tokenizer), 0, time.perf_counter()
            first, num_first, num_steps = began, 0, 0
            while not requests.is_done:
                if request.cached < len(ids):
                    progress.show(f"prompt: {request.cached} of {len(ids)} tokens")
                requests.step()
                num_steps += 1
                if num_printed == 0 and request.cached >= len(ids):
                    progress.show("")
                    first, num_steps = time.perf_counter(), 0
                    num_first = len(request.new_tokens)
                new = request.new_tokens[num_printed:]
                num_printed += len(new)
                print(text.add(new), end="", file=out, flush=True)
        print(text.end(), file=out, flush=True)
        seconds = time.perf_counter() - first
        speed, more = "", num_printed - num_first
        if more > 0:
            speed = f", {more / seconds:.1f} tokens/s"
            speed += f", {more / num_steps:.2f} a step" if speculate else ""
        progress.result(
            f"{name} on {world.backend}: {len(ids)} tokens read in "
            f"{first - began:.1f} s, {num_printed} written{speed}"
        )


def prompt_ids(
    tokenizer: Tokenizer, prompt: str, arguments: Mapping[str, Any]
) -> list[int]:
    """As `Tokenizer.chat`, with an ArgumentError for arguments of a wrong type."""
    try:
        return tokenizer.chat(prompt, **arguments)
    except TypeError as error:
        raise _argument_refused(str(error)) from error


def _template_argument(text: str) -> tuple[str, Any]:
    """NAME=VALUE, whose value is JSON, or a text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier() or name == "messages":
        raise _argument_refused(repr(text))
    try:
        return name, json.loads(value)
    except (RecursionError, ValueError):
        return name, value


def _argument_refused(got: str) -> ArgumentError:
    return ArgumentError(
        "an argument of the chat template cannot be used",
        where="etc-dist generate --template-argument",
        wanted="NAME=VALUE, as in enable_thinking=false",
        got=got,
        fix="give a name that the model's chat template takes, and a value for it",
    )


def _of_rank_0(stream: TextIO, world: World) -> TextIO:
    """The stream, where all ranks would write the same."""
    return stream if world.rank == 0 else StringIO()
