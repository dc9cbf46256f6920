"""A server of a model with random weights and many clients, against the same steps
without a server, and against vLLM's server of the same folder.

    .venv/bin/python benchmarks/run.py serve
    .venv/bin/python benchmarks/run.py serve --vllm    # which needs the package

Clients begin together, each with its own prompt, and each stream is checked: its
tokens, its end and its text. Waves of clients follow each other; the first one is not
timed. vLLM's own benchmark client runs against the server, too. A gate that is not met
is recorded as a failure of the run."""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import urlopen

import numpy as np

from benchmarks.decoder import PAGE_SIZE
from benchmarks.decoder_models import FIELDS, SMALL_FIELDS, Fields
from benchmarks.device import Gpu
from benchmarks.harness import SMALL, Result, Run, Subject, numbers, provenance
from benchmarks.model_folder import write_model
from benchmarks.records import ROOT
from benchmarks.serve_client import Stream, drive, times_of
from benchmarks.subjects.decode_vllm import ENVIRONMENT
from benchmarks.workload import DTYPE
from etc_dist.models import Batch, Model, load
from etc_dist.serve.serve_command import PACKAGES

ON_GPU = {"model": "qwen3-8b", "clients": [1, 32, 64], "prompt": 512}
ON_GPU |= {"tokens": 100, "waves": 3}
ON_CPU = {"model": SMALL, "clients": [1, 3], "prompt": 9, "tokens": 4, "waves": 0}
"""Defaults of options."""
Wave = Callable[[int, Sequence[Sequence[int]]], list[Stream]]
"""The streams of prompts that begin together, of so many tokens each."""
Times = dict[str, float]
ADDED = {1: 0.05, 32: 0.12, 64: 0.15}
"""The gates: by clients, how much longer a token may take than without a server."""
LEAST_THROUGHPUT, MOST_FIRST_TOKEN = 0.95, 1.2
"""The gates for the most clients, relative to vLLM's server."""
START_SECONDS, END_SECONDS = 200.0, 30.0
"""In which a server, or vLLM's client, has to be ready, and in which a server ends."""
ENGINE_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
OF_LAUNCHERS = ("PMI", "OMPI_", "HYDI_")
"""Variables of a rank, which a server that is a separate job does not have."""
PROTOCOL = (
    "an HTTP client of one thread; all prompts of a wave at once; in a wave medians of "
    "the streams, then of {} waves after a warm-up; without a server: the same "
    "requests of a models.Batch"
)


def prompts_of(wave: int, count: int, length: int, vocabulary: int) -> list[list[int]]:
    """Random prompts that no other wave has."""
    rng = np.random.default_rng([wave, count])
    prompts: list[list[int]] = rng.integers(vocabulary, size=(count, length)).tolist()
    return prompts


def times_of_waves(run: Run, wave: Wave, count: int) -> tuple[Times, list[str]]:
    """The medians of some waves, and what is wrong with their streams."""
    options, wrong, times = run.options, list[str](), list[Times]()
    for number in range(options.waves + 1):
        vocabulary = fields_of(options)["vocab_size"]
        prompts = prompts_of(number, count, options.prompt, vocabulary)
        streams = wave(options.tokens, prompts)
        wrong += [fault for stream in streams for fault in stream.faults]
        if wrong:
            return {}, wrong[:3]
        times.append(times_of(streams, options.tokens))
    timed = times[1:] or times
    names = set.intersection(*map(set, timed))
    return {name: median(t[name] for t in timed) for name in sorted(names)}, []


# ------------------------------------------------------------------ without a server


def wave_of_batch(
    model: Model, num_tokens: int, prompts: Sequence[Sequence[int]]
) -> list[Stream]:
    """The streams of a batch: its steps and nothing else."""
    begin = time.perf_counter()
    with Batch(model, reuse=True) as batch:
        requests = [batch.add(p, max_new_tokens=num_tokens, stop=()) for p in prompts]
        times: dict[Any, list[float]] = {request: [] for request in requests}
        while not batch.is_done:
            extended_requests, now = batch.step(), time.perf_counter()
            for request in extended_requests:
                times[request].append(now)
    return [Stream(begin, of_request, "", []) for of_request in times.values()]


def own_times(run: Run, folder: Path) -> dict[int, Times]:
    """By the number of requests, the times without a server."""
    options = run.options
    with load(
        folder,
        batch=max(options.clients),
        positions=positions(options),
        world=run.device.world,
    ) as model:
        run.shared |= provenance(model.program)
        return {
            count: times_of_waves(
                run, lambda n, prompts: wave_of_batch(model, n, prompts), count
            )[0]
            for count in options.clients
        }


# ------------------------------------------------------------------ servers


def positions(options: Namespace) -> int:
    """Of a request: full pages."""
    length: int = options.prompt + options.tokens
    return -(-length // PAGE_SIZE) * PAGE_SIZE


def own_command(folder: Path, options: Namespace) -> list[str]:
    """Starts the server, but for its port."""
    command = [sys.executable, "-m", "etc_dist.cli", "serve", str(folder)]
    sizes = {"--batch": max(options.clients), "--positions": positions(options)}
    return [*command, *(str(part) for pair in sizes.items() for part in pair)]


def vllm_command(folder: Path, options: Namespace) -> list[str]:
    """Starts vLLM's server, but for its port."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    values = {
        "--model": folder,
        "--served-model-name": folder.name,
        "--dtype": DTYPE,
        "--max-model-len": positions(options),
        "--max-num-seqs": max(options.clients),
        "--gpu-memory-utilization": 0.7,
        "--host": "127.0.0.1",
    }
    return [*command, *(str(part) for pair in values.items() for part in pair)]


def variables(**changes: str) -> dict[str, str]:
    """The environment of a process that is not a rank."""
    environment = {
        n: v for n, v in os.environ.items() if not n.startswith(OF_LAUNCHERS)
    }
    path = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    return environment | {"PYTHONPATH": path} | changes


def vllm_variables() -> dict[str, str]:
    """The environment of vLLM, whose server runs its engine in a separate process."""
    return {**ENVIRONMENT, **variables(VLLM_PLUGINS=""), ENGINE_PROCESS: "1"}


@contextmanager
def served(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """The URL of a server, once it is ready. RuntimeError with what it wrote if it
    ends before, or takes too long."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)], env=environment, stdout=log, stderr=log
        )
        try:
            url = f"http://127.0.0.1:{port}"
            end = time.monotonic() + START_SECONDS
            while not is_ready(url):
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise RuntimeError(f"no server: {log.read()[-8000:]}")
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            process.kill()


def is_ready(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=END_SECONDS):
            return True
    except OSError:
        return False


def times_of_server(
    run: Run, url: str, folder: Path
) -> tuple[dict[int, Times], list[str]]:
    """By the number of clients, and what is wrong with streams."""

    def wave(num_tokens: int, prompts: Sequence[Sequence[int]]) -> list[Stream]:
        streams = drive(url, folder.name, prompts, num_tokens)
        lengths = {len(stream.text.split()) for stream in streams if not stream.faults}
        if lengths - {num_tokens}:
            raise RuntimeError(f"streams of {lengths} words, not {num_tokens}")
        return streams

    results, wrong = {}, list[str]()
    for count in run.options.clients:
        results[count], faults = times_of_waves(run, wave, count)
        wrong += faults
    return results, wrong


def run_vllm_client(url: str, folder: Path, options: Namespace) -> list[str]:
    """What is wrong with requests of `vllm bench serve`."""
    count, result = max(options.clients), folder.parent / "client.json"
    values = {
        "--backend": "openai",
        "--base-url": url,
        "--endpoint": "/v1/completions",
        "--model": folder.name,
        "--tokenizer": folder,
        "--dataset-name": "random",
        "--random-input-len": options.prompt,
        "--random-output-len": options.tokens,
        "--num-prompts": count,
        "--max-concurrency": count,
        "--temperature": 0,
        "--result-dir": folder.parent,
        "--result-filename": result.name,
    }
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
    command += [str(part) for pair in values.items() for part in pair]
    try:
        process = subprocess.run(
            [*command, "--ignore-eos", "--save-result"],
            env=vllm_variables(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=START_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return [f"vllm bench serve: not ready after {START_SECONDS:g} s"]
    print(process.stdout[-2500:], flush=True)
    if process.returncode:
        return [f"vllm bench serve: exit code {process.returncode}"]
    values = json.loads(result.read_text())
    num_tokens = values["total_output_tokens"]
    if (values["completed"], num_tokens) == (count, count * options.tokens):
        return []
    return [f"vllm bench serve: {num_tokens} tokens of {values['completed']} requests"]


# ------------------------------------------------------------------ the subject


def fields_of(options: Namespace) -> Fields:
    return {**FIELDS, **SMALL_FIELDS}[options.model]


def measure(run: Run) -> Iterator[Result]:
    options, device = run.options, run.device
    is_on_gpu = run.is_timed = isinstance(device, Gpu)
    for name, value in (ON_GPU if is_on_gpu else ON_CPU).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    run.shared["protocol"] = PROTOCOL.format(options.waves)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / options.model
        folder.mkdir()
        write_model(folder, fields_of(options))
        bare = own_times(run, folder)
        gc.collect()  # the model
        device.release()
        backend = {} if is_on_gpu else {"ETC_DIST_BACKEND": "cpu"}
        with served(own_command(folder, options), variables(**backend)) as url:
            ours, wrong = times_of_server(run, url, folder)
            if options.vllm:
                run.failed += run_vllm_client(url, folder, options)
        baseline = vllm_times(run, folder) if options.vllm else {}
    for count in options.clients:
        values = {
            "model": options.model,
            "clients": count,
            "prompt_tokens": options.prompt,
            "tokens": options.tokens,
            "dtype": DTYPE,
        }
        if wrong or not run.is_timed:
            yield values, wrong
            continue
        values |= rounded(ours[count])
        values |= {f"bare_{n}": v for n, v in rounded(bare[count]).items()}
        of_vllm = rounded(baseline.get(count, {}))
        values |= {f"baseline_{n}": v for n, v in of_vllm.items()}
        yield values, []
        check_gates(run, count, ours[count], bare[count], baseline.get(count))


def vllm_times(run: Run, folder: Path) -> dict[int, Times]:
    """By the number of clients; a failure of vLLM is one of the run, too."""
    try:
        with served(vllm_command(folder, run.options), vllm_variables()) as url:
            times, wrong = times_of_server(run, url, folder)
    except (RuntimeError, TimeoutError) as error:
        times, wrong = {}, [str(error)]
    run.failed += [f"vLLM: {fault}" for fault in wrong]
    run.say("\n".join(run.failed))
    return {} if wrong else times


def rounded(times: Times) -> Times:
    return {name: round(value, 3) for name, value in times.items()}


def check_gates(
    run: Run, count: int, ours: Times, bare: Times, baseline: Times | None
) -> None:
    """Print the ratios; a gate that is not met is a failure of the run."""
    gates = [
        (f"{name} / without a server", ours[name] / bare[name], most_added(count))
        for name in ("token_ms", "step_ms")
        if name in ours and name in bare
    ]
    if baseline is not None and count == max(run.options.clients):
        slowness = baseline["tokens_per_s"] / ours["tokens_per_s"]
        gates += [("vLLM's tokens a second / ours", slowness, 1 / LEAST_THROUGHPUT)]
        ratio = ours["first_token_ms"] / baseline["first_token_ms"]
        gates += [("first token / vLLM's", ratio, MOST_FIRST_TOKEN)]
    for name, value, most in gates:
        text = f"{count} clients: {name}: {value:.3f}, at most {most:.3f}"
        run.say(text)
        run.failed += [text] * (value > most)


def most_added(count: int) -> float:
    """The gate of the next number of clients that has one."""
    shares = [share for clients, share in ADDED.items() if clients >= count]
    return 1 + min(shares, default=max(ADDED.values()))


def refusal(options: Namespace) -> str:
    if lacking := [name for name in PACKAGES if find_spec(name) is None]:
        return f"the server needs packages that are not installed: {', '.join(lacking)}"
    if options.vllm and find_spec("vllm") is None:
        return "--vllm: the package vllm is not on the path"
    return ""


def add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", choices=(*FIELDS, *SMALL_FIELDS))
    add("--clients", type=numbers, help="at once")
    add("--prompt", type=int, help="tokens")
    add("--tokens", type=int, help="of each answer")
    add("--waves", type=int, help="that are timed, after one that is not")
    add("--vllm", action="store_true", help="also vLLM's server, and its client")


SUBJECTS = {"serve": Subject("Time a server.", measure, add_options, refusal=refusal)}
