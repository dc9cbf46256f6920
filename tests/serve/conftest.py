"""Servers of a small model, as processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING
from urllib.request import urlopen

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers

from tests.models.small import draw_tensors, make_model
from tests.models.test_weights import save

if TYPE_CHECKING:
    import openai

ROOT = Path(__file__).parents[2]
LIMIT = 60.0
"""Seconds in which a server starts or ends."""
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | tojson }}"
OPTIONS = [
    "--batch",
    "3",
    "--positions",
    "96",
    "--page-size",
    "16",
    "--port",
    "0",
    "--body-mib",
    "1",
]


def of_bytes() -> tokenizers.Tokenizer:
    """A token for each byte, and others whose texts are their ids."""
    texts = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts += [f"<{n}>" for n in range(len(texts), 528)]
    ids = {text: token_id for token_id, text in enumerate(texts)}
    tokens = tokenizers.Tokenizer(tokenizers.models.BPE(ids, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokens.decoder = decoders.ByteLevel()
    return tokens


@pytest.fixture
def openai() -> ModuleType:
    """The client. Its import takes half a second, which processes without these tests
    save."""
    import openai

    return openai


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that two ranks can split, with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("served")
    changes = {"intermediate_size": 144, "vocab_size": 528}
    make_model(folder, np.random.default_rng(3), **changes)
    (folder / "tokenizer.json").write_text(of_bytes().to_str())
    config = json.dumps({"chat_template": TEMPLATE})
    (folder / "tokenizer_config.json").write_text(config)
    return folder


@pytest.fixture
def overflowing(tmp_path: Path, folder: Path, rng: np.random.Generator) -> Path:
    """A model whose activations exceed the numbers of float16."""
    copy = tmp_path / "overflowing"
    shutil.copytree(folder, copy)
    tensors = draw_tensors(rng, json.loads((copy / "config.json").read_text()))
    for name in tensors:
        tensors[name] *= 3e4 if "down" in name else 50 if "up" in name else 1
    save(copy / "model.safetensors", tensors)
    return copy


@dataclass
class Server:
    """A process that serves. log: what it has written to stderr."""

    process: subprocess.Popen[str]
    log: Path
    url: str
    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @cached_property
    def client(self) -> openai.OpenAI:
        import openai

        return openai.OpenAI(base_url=self.url, api_key="none", max_retries=0)

    def metrics(self) -> dict[str, float]:
        """The numbers of /metrics, by their names without etc_dist_."""
        with urlopen(self.url.replace("/v1", "/metrics")) as answer:
            text = answer.read().decode()
        lines = [line for line in text.splitlines() if line[0] != "#"]
        pairs = (line.removeprefix("etc_dist_").rsplit(" ", 1) for line in lines)
        return {name: float(value) for name, value in pairs}

    def front(self) -> int:
        """The process of the HTTP server."""
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                is_child = int(parent) == self.process.pid
                if is_child and b"spawn_main" in (folder / "cmdline").read_bytes():
                    return int(folder.name)
        raise ProcessLookupError("the process of the HTTP server")

    def rank(self, number: int) -> int:
        """The process of a rank."""
        serve_command = f"\0-m\0etc_dist.cli\0serve\0{self.folder}\0".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                command = (folder / "cmdline").read_bytes()
                variables = (folder / "environ").read_bytes().split(b"\0")
                is_rank = b"PMI_RANK=%d" % number in variables
                if is_rank and serve_command in command and b"guard" not in command:
                    return int(folder.name)
        raise ProcessLookupError(f"rank {number}")

    def end(self, number: int = signal.SIGTERM) -> int:
        """The exit code after a signal."""
        self.process.send_signal(number)
        self.client.close()
        return self.process.wait(LIMIT)


Serve = Callable[..., Server]


def started(
    folder: Path, log: Path, *options: str, launcher: tuple[str, ...] = ()
) -> Server:
    """A server that takes requests."""
    command = [*launcher, sys.executable, "-m", "etc_dist.cli", "serve", str(folder)]
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    variables = {"ETC_DIST_BACKEND": "cpu", "PYTHONPATH": path}
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, *OPTIONS, *options],
            cwd=ROOT,
            env=os.environ | variables,
            stderr=file,
            stdout=file,
            text=True,
        )
    until = time.monotonic() + LIMIT
    while not (address := re.search(r"at (http://\S+/v1),", log.read_text())):
        assert process.poll() is None and time.monotonic() < until, log.read_text()
        time.sleep(0.02)
    return Server(process, log, address[1], folder)


@pytest.fixture(scope="session")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of one rank, for all tests that do not end it."""
    server = started(folder, tmp_path_factory.mktemp("server") / "log")
    yield server
    code = server.end()
    assert (code, server.log.read_text().count("\n")) == (0, 1), server.log.read_text()


@pytest.fixture
def serve(folder: Path, tmp_path: Path) -> Iterator[Serve]:
    """Starts a server of its own for a test."""
    servers: list[Server] = []

    def serve(
        *options: str, of: Path = folder, launcher: tuple[str, ...] = ()
    ) -> Server:
        servers.append(started(of, tmp_path / "log", *options, launcher=launcher))
        return servers[-1]

    yield serve
    for server in servers:
        server.client.close()
        server.process.kill()
        server.process.wait()
