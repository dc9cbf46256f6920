"""The time to the first token of one prompt, of a model with random weights, against
vLLM's.

The last row's logits and id of the first layers are compared with fp32, and those of
three runs bit by bit. --vllm FILE adds times of `prompt_vllm` of the same day and kind
of GPU as baseline_ms:

    .venv/bin/python benchmarks/run.py prompt_vllm --model qwen3-8b --record vllm.jsonl
    launch/mpirun -n 1 benchmarks/run.py prompt --models qwen3-8b --vllm vllm.jsonl"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.decoder import PAGE_SIZE, Decoder
from benchmarks.decoder_models import MODELS, SMALL_MODELS
from benchmarks.decoder_reference import Fp32, prompt_logits
from benchmarks.device import WARM_UP, Gpu
from benchmarks.harness import (
    REPEATS,
    SMALL,
    Result,
    Run,
    Subject,
    add_models,
    numbers,
    provenance,
)
from benchmarks.subjects.decode import (
    CHECKED_LAYERS,
    ERROR,
    GAP,
    ROUTER_GAP,
    Shapes,
    is_timed,
    vllm_steps,
)
from benchmarks.workload import DTYPE
from etc_dist.models import Model
from etc_dist.models.config import ModelConfig
from etc_dist.models.step_policy import ROWS, padded

Ids = np.ndarray[Any, Any]
CONTEXTS, SMALL_CONTEXTS = [512, 4096], [24]
RUNS = 3
PROTOCOL = (
    "Model.generate of one token after one prompt, by the host's clock; median after "
    f"{WARM_UP} warm-ups"
)


def model_of(
    decoder: Decoder, config: ModelConfig, weights: Any, most_rows: int
) -> Model:
    return Model(
        config,
        weights,
        batch=1,
        positions=decoder.context + 1,
        page_size=PAGE_SIZE,
        most_rows=most_rows,
        schedule=decoder.program.plan.schedule,
        world=decoder.device.world,
    )


def read_prompt(model: Model, prompt: Ids) -> tuple[int, list[Any]]:
    """The id after a prompt, and the experts of its rows, if there are any. In steps
    like those of `Model.generate`: the prompt's last row is the first one."""
    model.pages.add(len(prompt) + 1)
    experts, rows, next_ids = list[Any](), np.arange(len(prompt)), np.zeros(1)
    for first in range(0, len(prompt), model.most_rows):
        some = rows[first : first + model.most_rows]
        num_last = int(some[-1] == rows[-1])
        some = np.roll(some, num_last)
        table = model.pages.table
        (next_ids,) = model.steps(
            prompt[some], 0 * some, some, table, count=1, outputs=1
        )
        if (mixture := model.config.mixture) is not None:
            of_rows = model._experts(padded(len(some)), mixture)
            experts.append(of_rows[:, np.argsort(some)])
    return int(next_ids[0]), experts


def check(
    decoder: Decoder, prompt: Ids, most_rows: int
) -> tuple[dict[str, Any], list[str]]:
    """The errors of the first layers, and a text for each check that failed."""
    device, layers = decoder.device, min(CHECKED_LAYERS, decoder.config.layers)
    config, xp = replace(decoder.config, layers=layers), device.xp
    if config.windows:
        config = replace(config, windows=config.windows[:layers])
    arrays = decoder.arrays(1, layers)
    weights = {n: arrays[n] for n in decoder.weights}
    with model_of(decoder, config, weights, most_rows) as model:
        first_id, experts = read_prompt(model, prompt)
        logits = model.logits[-1:].copy()
    whole = decoder.whole(1, layers) | {"ids": xp.asarray(prompt.astype(np.int32))}
    whole["position"] = xp.arange(len(prompt), dtype=np.int32)
    if experts:
        whole["experts"] = xp.concatenate(experts, axis=1)
    expected, below = prompt_logits(Fp32(xp), config, whole)
    error = device.relative_error([logits], [expected[:, decoder.columns]])
    norm = xp.sqrt((expected**2).mean())
    gap = float((expected.max() - expected[0, first_id]) / norm)
    errors = {"error": error, "id_gap": gap, "checked_layers": layers}
    errors |= {"router_gap": below} if experts else {}
    most = {"error": ERROR, "id_gap": GAP, "router_gap": ROUTER_GAP}
    wrong = [
        f"{name} {errors[name]:.2e}, wanted {allowed:.1e}"
        for name, allowed in most.items()
        if name in errors and not errors[name] <= allowed  # also for NaN
    ]
    return errors, wrong


def benchmark(decoder: Decoder, options: Namespace) -> Result:
    """Check, then, on a GPU, time the first token of a prompt."""
    device, context = decoder.device, decoder.context
    prompt = np.random.default_rng(0).integers(decoder.config.vocabulary, size=context)
    most_rows = options.most_rows
    errors, wrong = check(decoder, prompt, most_rows)
    values = {"model": decoder.name, "batch": 1, "context": context, "dtype": DTYPE}
    values |= {"schedule": decoder.program.plan.schedule, **errors}
    values |= {"most_rows": most_rows}
    tokens = prompt.tolist()
    with model_of(decoder, decoder.config, decoder.weights, most_rows) as model:
        results: list[tuple[Any, Any]] = []
        for _ in range(RUNS):
            (ids,) = model.generate([tokens], max_new_tokens=1)
            results.append((ids, model.logits[-1:].copy()))
        first_ids, first_logits = results[0]
        is_same = all(
            ids == first_ids and not device.differs(logits, first_logits)
            for ids, logits in results
        )
        values["bitwise_equal"] = all(device.world.gather(is_same))
        if is_timed(device):

            def call() -> None:
                model.generate([tokens], max_new_tokens=1)

            times = device.host_us(call, WARM_UP + options.repeats, 1)[WARM_UP:] / 1e3
            spread = (round(float(q), 5) for q in np.percentile(times, (25, 75)))
            values |= {**provenance(model.program), "repeats": options.repeats}
            values |= {"ours_ms": round(float(median(times)), 5)}
            values |= {"ours_spread_ms": tuple(spread)}
    if not values["bitwise_equal"]:
        wrong.append(f"the bits of {RUNS} runs differ")
    return values, wrong


def measure(run: Run) -> Iterator[Result]:
    device, options = run.device, run.options
    run.shared["protocol"] = PROTOCOL
    run.is_timed, baselines = is_timed(device), Shapes()
    is_on_gpu = isinstance(device, Gpu)
    if isinstance(device, Gpu) and options.vllm is not None:
        baselines = vllm_steps(options.vllm, device.machine["device"], "prompt_vllm")
    for name in options.models or (["qwen3-8b"] if is_on_gpu else [SMALL]):
        for context in options.context or (CONTEXTS if is_on_gpu else SMALL_CONTEXTS):
            decoder = Decoder(device, name, 1, context, options.schedule)
            values, wrong = benchmark(decoder, options)
            shape = device.world.size, name, context, 1, None
            if shape in baselines and not wrong:
                speedup = round(baselines[shape] / values["ours_ms"], 4)
                of_vllm = {"baseline_ms": baselines[shape], "speedup": speedup}
                values = {**values, **of_vllm}
            yield values, wrong
            decoder.program.close()
            del decoder  # before the next one is made
            device.release()


def add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add_models(parser, {**MODELS, **SMALL_MODELS})
    add("--context", type=numbers, help="512 and 4096, or 24 on the CPU backend")
    add("--schedule", choices=("static", "dynamic"), default="static")
    text = "positions that a step computes, at most; default: %(default)s"
    add("--most-rows", type=int, default=ROWS[-1], metavar="N", help=text)
    add("--repeats", type=int, default=REPEATS)
    add("--vllm", type=Path, help="file of prompt_vllm's records on this machine")


SUBJECTS = {
    "prompt": Subject("Time the first token of a prompt.", measure, add_options)
}
