"""Decode steps whose models, batches and lengths follow from the commit, checked and
timed as those of `decode`, against vLLM's.

A seed gives 8. The batch and the length of each request are uniform in their
logarithms, drawn again until weights and cache have at most 110 GB.

    .venv/bin/python benchmarks/run.py decode_vllm --seeds 1 --model qwen3-8b \\
        --record vllm.jsonl    # for each model that was drawn
    .venv/bin/python benchmarks/run.py random_decode --seeds 1 --vllm vllm.jsonl

A gate that is not met is recorded as a failure of the run."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import records
from benchmarks.decoder import PAGE_SIZE, ROUTINGS, Decoder
from benchmarks.decoder_models import MODELS, SMALL_MODELS
from benchmarks.device import Device, Gpu
from benchmarks.harness import REPEATS, Result, Run, Subject
from benchmarks.random_sizes import log_uniform, seed_of
from benchmarks.records import Record
from benchmarks.subjects.decode import (
    CHECKED_LAYERS,
    PROTOCOL,
    Shapes,
    benchmark,
    is_timed,
    vllm_steps,
)
from benchmarks.subjects.random_sizes import (
    CPU_DRAWS,
    add_options,
    check_gates,
    compile_at_once,
    refusal,
)
from etc_dist.models.decoder import decoder_for
from etc_dist.models.part import Part
from etc_dist.models.weights import weight_shapes
from etc_dist.ops.tuning import PACKAGE

OP = "random_decode"
NUM_DRAWS = 8
MOST_BYTES = 110e9
"""Of weights and cache: less than vLLM uses of an H200."""
STEPS = 100
"""Compared bit by bit."""
Range = tuple[int, int]


@dataclass(frozen=True)
class Choices:
    """What is drawn from."""

    models: Sequence[str] = ("qwen3-8b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b")
    batch: Range = (1, 128)
    length: Range = (32, 16384)


SMALL = Choices(("small", "small-experts"), (1, 6), (4, 150))
"""For the CPU backend."""


@dataclass(frozen=True)
class DecodeDraw:
    """lengths: the positions of each request, its own included."""

    seed: str
    number: int
    model: str
    lengths: Sequence[int]

    @property
    def name(self) -> str:
        """The model of a record."""
        return f"draw {self.number}, {self.model}"


def decode_draws(seed: str, choices: Choices | None = None) -> Iterator[DecodeDraw]:
    """The steps that a seed gives."""
    choices = choices or Choices()
    rng = np.random.default_rng(int(seed, 16))
    for number in range(NUM_DRAWS):
        model = choices.models[int(rng.integers(len(choices.models)))]
        while True:
            batch = round(log_uniform(rng, *choices.batch))
            lengths = [round(log_uniform(rng, *choices.length)) for _ in range(batch)]
            if num_bytes(model, lengths) <= most_bytes(model):
                break
        yield DecodeDraw(seed, number, model, lengths)


def most_bytes(model: str) -> float:
    """Of weights and cache; those of a model for several GPUs are up to equal."""
    weights = num_bytes(model, [])
    return MOST_BYTES if weights < MOST_BYTES else 2 * weights


def num_bytes(model: str, lengths: Sequence[int]) -> int:
    """Of the weights and the cache."""
    config = {**MODELS, **SMALL_MODELS}[model]
    elements = sum(map(prod, weight_shapes(config).values()))
    pages = sum(-(-length // PAGE_SIZE) for length in lengths)
    row = 2 * config.kv_heads * config.head_dim
    return 2 * (elements + config.layers * pages * PAGE_SIZE * row)


def all_draws(turns: Sequence[int], choices: Choices | None = None) -> list[DecodeDraw]:
    """Those of some seeds of this commit."""
    seeds = [seed_of(records.commit(), OP, turn) for turn in turns]
    return [draw for seed in seeds for draw in decode_draws(seed, choices)]


def draws_of(
    turns: Sequence[int], model: str | None, choices: Choices | None = None
) -> list[DecodeDraw]:
    """`all_draws`, or those of one model. If this is not drawn by itself, all draws
    have it."""
    choices = choices or Choices()
    if model is not None and model not in choices.models:
        choices = replace(choices, models=(model,))
    drawn = all_draws(turns, choices)
    return [draw for draw in drawn if model in (None, draw.model)]


def compile_programs(device: Device, drawn: Sequence[DecodeDraw]) -> None:
    """Those of all models that were drawn, at once."""
    size, rank = device.world.size, device.world.rank
    configs = [Part(rank, size).config(MODELS[n]) for n in {d.model for d in drawn}]
    compile_at_once(
        [decoder_for("static", size, config.sizes(PAGE_SIZE)) for config in configs]
    )


def measure(run: Run) -> Iterator[Result]:
    """The results of all draws, then the summary."""
    device, options = run.device, run.options
    run.is_timed, baselines = is_timed(device), dict[Any, float]()
    if isinstance(device, Gpu) and options.vllm is not None:
        baselines = vllm_steps(options.vllm, device.machine["device"])
    baseline = "vLLM" if baselines else "none, vLLM was not measured"
    run.shared |= {"protocol": PROTOCOL, "baseline": baseline}
    run.say(f"baseline: {baseline}")
    choices = None if isinstance(device, Gpu) else SMALL
    drawn = draws_of(options.seeds, options.model, choices)
    num_draws = NUM_DRAWS if isinstance(device, Gpu) else CPU_DRAWS
    num_draws = min(options.draws or num_draws, num_draws)
    drawn = [draw for draw in drawn if draw.number < num_draws]
    if isinstance(device, Gpu):
        compile_programs(device, drawn)
    results: list[Record] = []
    for draw in drawn:
        values, wrong = result_of(run, draw, baselines)
        if not wrong:
            results.append(Record(**values))
        yield values, wrong
        device.release()
    if run.is_timed:
        check_gates(run, OP, results)


def result_of(run: Run, draw: DecodeDraw, baselines: Shapes) -> Result:
    """Of one draw; its decoder is dropped."""
    num_rows, context = len(draw.lengths), max(draw.lengths)
    decoder = Decoder(
        run.device,
        draw.model,
        most=num_rows,
        context=context,
        schedule="static",
        lengths=draw.lengths,
    )
    values, wrong = benchmark(decoder, num_rows, run.options)
    decoder.program.close()
    values = {**values, "model": draw.name, "seed": draw.seed, "speedup": None}
    values["num_positions"] = sum(draw.lengths)
    shape = run.device.world.size, draw.name, context, num_rows, draw.seed
    if shape in baselines:
        values["baseline_ms"] = baselines[shape]
        values["speedup"] = round(baselines[shape] / values["ours_ms"], 4)
    elif baselines:
        values["baseline"] = "none, vLLM did not measure this draw"
    return values, wrong


def add_decode_options(parser: ArgumentParser) -> None:
    add_options(parser)
    add = parser.add_argument
    add("--model", choices={**MODELS, **SMALL_MODELS}, help="only draws of this model")
    add("--steps", type=int, default=STEPS, help="compared bit by bit")
    add("--vllm", type=Path, help="file of decode_vllm's records on this machine")
    parser.set_defaults(
        batch=False,
        checked_layers=CHECKED_LAYERS,
        repeats=REPEATS,
        routing=ROUTINGS[0],
    )


SUBJECTS = {
    OP: Subject(
        "Check and time decode steps whose lengths follow from the commit.",
        measure,
        add_decode_options,
        refusal=refusal,
        settings={"tuning": PACKAGE},
    )
}
