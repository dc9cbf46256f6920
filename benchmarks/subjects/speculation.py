"""Decoding with drafts of the next tokens, against the same model without, of one
request: a text that repeats, and a random one from a small set of tokens, of which most
drafts are wrong.

The layers add nothing to the embedding of a token. Of the first text, the output head
makes each token follow from the one before it, in circles; of the second one, it gives
some ids random logits, and others none. A gate that is not met is recorded as a failure
of the run."""

from __future__ import annotations

import time
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from benchmarks.decoder import PAGE_SIZE
from benchmarks.decoder_models import MODELS, SMALL_MODELS
from benchmarks.device import DTYPES, Device, Gpu
from benchmarks.harness import SMALL, Result, Run, Subject, provenance
from benchmarks.workload import DTYPE
from etc_dist.models import Batch, Model, Sampling
from etc_dist.models.config import ModelConfig
from etc_dist.models.weights import weight_shapes

CIRCLE, ALPHABET = 16, 32
"""The tokens of a text that repeats, and of a random one."""
PROMPT = 32
LEAST = {"repeats": 1.5, "random": 0.95}
"""The gates: tokens a second, relative to those without drafts."""
PROTOCOL = (
    f"models.Batch of one request, a prompt of {PROMPT} tokens; from the first id to "
    "the last one by the host's clock, divided by their number; with and without "
    "drafts in turn, medians after a warm-up"
)


@dataclass(frozen=True)
class Text:
    """What one request gives. token_ms: from one id to the next, on average. steps:
    those that gave ids."""

    ids: list[int]
    token_ms: float
    steps: int
    num_drafted: int
    num_accepted: int


def weights_of(device: Device, config: ModelConfig) -> dict[str, Any]:
    """Random weights without the output head. Gains are 1, and the matrices that would
    add to an embedding 0."""
    weights = {}
    for name, shape in weight_shapes(config).items():
        if name.endswith("norm"):
            weights[name] = filled(device, shape, 1)
        elif name in ("w_o", "w_down"):
            weights[name] = filled(device, shape, 0)
        elif name != "w_head":
            weights[name] = device.random(shape, DTYPE, name, shape[-1] ** -0.5)
    return weights


def filled(device: Device, shape: tuple[int, ...], value: int) -> Any:
    array = device.empty(shape, DTYPE)
    array.view(np.uint16).fill(int(np.array(value, DTYPES[DTYPE]).view(np.uint16)))
    return array


def heads_of(device: Device, embedding: Any) -> dict[str, Any]:
    """By the kind of text, the output head."""
    bits, (num_ids, hidden) = embedding.view(np.uint16), embedding.shape
    circles = device.xp.roll(bits.reshape(-1, CIRCLE, hidden), 1, axis=1)
    random = filled(device, embedding.shape, 0)
    rows = device.random((ALPHABET, hidden), DTYPE, "ids", hidden**-0.5)
    random.view(np.uint16)[:ALPHABET] = rows.view(np.uint16)
    return {
        "repeats": circles.reshape(num_ids, hidden).view(embedding.dtype),
        "random": random,
    }


def generated(model: Model, sampling: Sampling | None, num_tokens: int) -> Text:
    """A text, from ids that are in it."""
    prompt = [number % CIRCLE for number in range(PROMPT)]
    with Batch(model) as batch:
        request = batch.add(
            prompt, max_new_tokens=num_tokens, stop=(), sampling=sampling
        )
        num_first = num_steps = 0
        begin = 0.0
        while not batch.is_done:
            batch.step()
            num_steps += bool(request.new_tokens)
            if not num_first:
                num_first, begin = len(request.new_tokens), time.perf_counter()
        seconds = time.perf_counter() - begin
        ids = request.new_tokens
        return Text(
            ids,
            1e3 * seconds / (len(ids) - num_first),
            num_steps,
            batch.num_drafted,
            batch.num_accepted,
        )


def benchmark(
    run: Run, config: ModelConfig, weights: Mapping[str, Any], kind: str
) -> Result:
    """The times of a kind of text. Its ids do not depend on drafts; those of a random
    one are compared where rounding does not depend on the rows of a step."""
    options, device = run.options, run.device
    sampling = None
    if kind == "random":
        sampling = Sampling(temperature=1.0, top_k=ALPHABET // 2, seed=1)
    texts: dict[int, list[Text]] = {0: [], options.speculate: []}
    with ExitStack() as stack:
        models = {
            count: stack.enter_context(
                Model(
                    config,
                    weights,
                    batch=1,
                    positions=-(-(PROMPT + options.tokens) // PAGE_SIZE) * PAGE_SIZE,
                    page_size=PAGE_SIZE,
                    speculate=count,
                    world=device.world,
                )
            )
            for count in texts
        }
        run.shared |= provenance(models[0].program)
        for _ in range(1 + options.repeats if run.is_timed else 1):
            for count, model in models.items():
                texts[count].append(generated(model, sampling, options.tokens))
    plain, drafted = texts.values()
    wrong = []
    is_exact = sampling is None or not run.is_timed
    if is_exact and plain[0].ids != drafted[0].ids:
        wrong.append("drafts change the ids")
    text = drafted[0]
    values: dict[str, Any] = {
        "model": options.model,
        "text": kind,
        "drafts": options.speculate,
        "tokens": options.tokens,
        "dtype": DTYPE,
        "drafted_per_step": round(text.num_drafted / text.steps, 3),
        "accepted_per_step": round(text.num_accepted / text.steps, 3),
    }
    if run.is_timed and not wrong:
        ours, baseline = (
            median(t.token_ms for t in of[1:] or of) for of in (drafted, plain)
        )
        values |= {"ours_ms": round(ours, 5), "baseline_ms": round(baseline, 5)}
        values["speedup"] = round(baseline / ours, 4)
        if values["speedup"] < LEAST[kind]:
            gate = f"{kind}: {values['speedup']} of the speed, at least {LEAST[kind]}"
            run.failed.append(gate)
            run.say(gate)
    return values, wrong


def measure(run: Run) -> Iterator[Result]:
    device, options = run.device, run.options
    run.is_timed = isinstance(device, Gpu)
    run.shared["protocol"] = PROTOCOL
    options.model = options.model or ("qwen3-8b" if run.is_timed else SMALL)
    config = {**MODELS, **SMALL_MODELS}[options.model]
    weights = weights_of(device, config)
    for kind, head in heads_of(device, weights["embedding"]).items():
        yield benchmark(run, config, {**weights, "w_head": head}, kind)


def add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", choices=(*MODELS, *SMALL_MODELS))
    add("--speculate", type=int, default=4, help="drafts of a step")
    add("--tokens", type=int, default=512, help="of each text")
    add("--repeats", type=int, default=3, help="timed texts")


SUBJECTS = {
    "speculation": Subject("Time drafts of the next tokens.", measure, add_options)
}
