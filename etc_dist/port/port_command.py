"""The command `etc-dist port`: its options, and the lines that it prints."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from etc_dist.errors import ArgumentError, expect_range
from etc_dist.files import read_object
from etc_dist.models import ModelConfig
from etc_dist.models.config import parse_config
from etc_dist.models.fields import refused
from etc_dist.models.part import Part, check_ranks
from etc_dist.models.setup import ModelSetup
from etc_dist.models.step_policy import MOST_REQUESTS
from etc_dist.models.weights import weight_bytes, weight_shapes
from etc_dist.port import likeness, step_times
from etc_dist.port.faults import find_faults
from etc_dist.port.step_checks import compile_steps, prove_steps

BATCHES, RANKS, CONTEXT = "1,8,32", "1,2,4", 512
MOST_RANKS, WIDTH = 8, 10


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add("config", type=Path, metavar="CONFIG", help="a config.json, or its folder")
    text = "of the predicted steps; default: %(default)s"
    add("--batches", default=BATCHES, metavar="N,N,...", help=f"requests {text}")
    add("--ranks", default=RANKS, metavar="N,N,...", help=f"GPUs {text}")
    text = f"positions of each request {text}"
    add("--context", type=int, default=CONTEXT, metavar="N", help=text)
    text = "do not compile and prove the program"
    add("--no-build", action="store_true", help=text)
    text = "do not compare two layers with those of transformers"
    add("--no-run", action="store_true", help=text)


def run(options: argparse.Namespace) -> int:
    """Print what is known of the model; 1 if it is not supported, or a check failed."""
    batches = parse_numbers(options.batches, MOST_REQUESTS, "--batches")
    counts = parse_numbers(options.ranks, MOST_RANKS, "--ranks")
    expect_range(options.context, 1, None, "--context")
    path = options.config
    path = path / "config.json" if path.is_dir() else path
    try:
        fields = read_object(path)
    except (OSError, ValueError) as error:
        fix = "give the config.json of a Hugging Face model"
        raise refused(path, "a readable config.json", str(error), fix) from error
    faults = find_faults(fields, path)
    if faults:
        print(f"{path}: not supported")
        print(*(f"  {fault.show()}" for fault in faults), sep="\n")
        return 1
    config = parse_config(fields, path)
    print(f"{path}: supported")
    print(*(f"  {line}" for line in show_sizes(config)), sep="\n", flush=True)
    is_good = run_checks(options, fields, config, batches)
    print(*show_times(config, batches, counts, options.context), sep="\n")
    return 0 if is_good else 1


def run_checks(
    options: argparse.Namespace,
    fields: Mapping[str, Any],
    config: ModelConfig,
    batches: Sequence[int],
) -> bool:
    """Print a line for each check; whether all have passed."""
    is_good = True
    if not options.no_build:
        setup = ModelSetup(config, batch=max(batches))
        setup.check()
        text, is_good = compile_steps(setup)
        print(f"compiled: {text}", flush=True)
        print(f"proved: {prove_steps(setup, batches)}", flush=True)
    if options.no_run:
        return is_good
    missing = likeness.missing_packages()
    if missing:
        print(f"not compared with transformers: {' and '.join(missing)} not installed")
        return is_good
    text, is_near = likeness.compare(fields, config)
    print(f"{'ran' if is_near else 'FAILED'}: {text}", flush=True)
    return is_good and is_near


def show_sizes(config: ModelConfig) -> Iterator[str]:
    """The sizes of a model, as text."""
    shapes = weight_shapes(replace(config, float8=()))  # without scales
    count = sum(map(prod, shapes.values()))
    yield f"{config.architecture}: {config.layers} layers, hidden size {config.hidden}"
    heads = f"{config.heads} query heads, {config.kv_heads} KV heads"
    yield f"{heads} of {config.head.size}, vocabulary {config.vocabulary}"
    kind = "MLPs"
    if config.mixture is not None:
        top_k = config.mixture.router.top_k
        kind = f"{config.mixture.experts} experts, {top_k} of a row, each"
    yield f"{kind} of inner size {config.inner}"
    if config.shared_inner:
        yield f"a shared expert of inner size {config.shared_inner}"
    if config.dense_layers:
        sizes = f"{config.dense_layers}, of inner size {config.dense_inner}"
        yield f"first layers without experts: {sizes}"
    position = 4 * config.layers * config.kv_heads * config.head_dim
    yield f"{count / 1e9:.2f} G parameters, {position} bytes of cache a position"


def show_times(
    config: ModelConfig, batches: Sequence[int], counts: Sequence[int], context: int
) -> Iterator[str]:
    """The table of predictions."""
    reasons = {ranks: split_fault(config, ranks) for ranks in counts}
    yield (
        f"predicted ms of a step on {step_times.DEVICE}, {context} positions of each "
        "request, not measured:"
    )
    heads = (f"{n} rank{'s' * (n > 1)}" for n in counts)
    yield f"{'batch':>7}" + "".join(f"{head:>{WIDTH}}" for head in heads)
    for batch in batches:
        line = f"{batch:>7}"
        for ranks in counts:
            text = "-"
            if not reasons[ranks]:
                us = step_times.predict_us(config, ranks, batch, context)
                text = f"{us / 1e3:.2f}"
            line += f"{text:>{WIDTH}}"
        yield line
    for ranks, reason in reasons.items():
        if reason:
            yield f"not on {ranks} ranks: {reason}"
        else:
            size = sum(weight_bytes(config, Part(0, ranks)).values()) / 1e9
            yield f"weights on each of {ranks} rank{'s' * (ranks > 1)}: {size:.1f} GB"


def split_fault(config: ModelConfig, ranks: int) -> str:
    """Why ranks cannot split the model, or an empty text."""
    try:
        check_ranks(config, ranks)
    except ArgumentError as error:
        return error.got
    return ""


def parse_numbers(text: str, most: int, name: str) -> list[int]:
    """Numbers from 1 to `most`, separated by commas; ArgumentError for others."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ArgumentError(
            f"{name} cannot be read",
            where=f"etc-dist port {name}",
            wanted="N,N,..., each at least 1",
            got=repr(text),
            fix="separate numbers by commas",
        )
    return [expect_range(int(part), 1, most, name) for part in parts]
