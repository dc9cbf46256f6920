"""Several steps in one launch against a launch for each, in one process with the same
weights: on the device alone, and as calls of a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, cast

import numpy as np

from benchmarks.decoder import PAGE_SIZE, Decoder
from benchmarks.device import WARM_UP, Gpu
from etc_dist.models import Model

Ids = np.ndarray[Any, Any]
OTHER_IDS = "a launch of several steps gives other ids than single launches"


def single_launches(
    decoder: Decoder, arrays: Mapping[str, Any], batch: int
) -> tuple[Callable[..., None], list[str]]:
    """A call that launches each step by itself, of those that a launch on `arrays` of
    `batch` requests has run, from the same ids; and failed checks of its results."""
    steps, _ = arrays["next_ids"].shape
    of_steps: list[dict[str, Any]] = []
    for number in range(steps):
        step_arrays = decoder.arrays(batch, decoder.config.layers)
        step_arrays["logits"] = (
            of_steps[0]["logits"] if of_steps else step_arrays["logits"]
        )
        if number:
            step_arrays["ids"] = arrays["next_ids"][number - 1].copy()
        for name in ("position", "end"):
            step_arrays[name][:batch] += number
        of_steps.append(step_arrays)
    calls: list[Callable[..., Any]] = [
        decoder.call(step_arrays) for step_arrays in of_steps
    ]

    def call(stream: Any = None) -> None:
        for launch in calls:
            launch(stream=stream)

    call()
    decoder.program.synchronize()
    xp, wrong = decoder.device.xp, []
    ids = xp.concatenate([step_arrays["next_ids"] for step_arrays in of_steps])
    if not bool((ids == arrays["next_ids"])[:, :batch].all()):
        wrong.append(OTHER_IDS)
    last, logits = (a["logits"][:batch].view("int16") for a in (of_steps[-1], arrays))
    if not bool((last == logits).all()):
        wrong.append("the logits of the last step have other bits than its own launch")
    return call, wrong


def model_calls(
    decoder: Decoder, batch: int, repeats: int
) -> tuple[dict[str, Any], list[str]]:
    """The parts of a record of a model's call for all steps, and of one for each, which
    has the ids of the one before: both from the same prompts, in turn. Collective."""
    device, steps, context = decoder.device, decoder.steps, decoder.context
    world, is_timed = device.world, isinstance(device, Gpu)
    rows = np.arange(batch)
    prompts = np.random.default_rng(0).integers(
        decoder.config.vocabulary, size=(batch, context)
    )
    with Model(
        decoder.config,
        decoder.weights,
        batch=batch,
        positions=context + steps - 1,
        page_size=PAGE_SIZE,
        schedule=decoder.program.plan.schedule,
        steps_per_launch=steps,
        world=world,
    ) as model:
        for _ in rows:
            model.pages.add(context + steps - 1)
        table, last = model.pages.table, np.full(batch, context - 1)
        read_prompts(model, prompts[:, :-1])

        def run(ids: Ids, positions: Ids, count: int) -> Ids:
            return model.steps(
                ids, rows, positions, table, count=count, sampling=decoder.sampling
            )

        def together() -> Ids:
            return run(prompts[:, -1], last, steps)

        def separately() -> Ids:
            ids = [prompts[:, -1]]
            for number in range(steps):
                ids.append(run(ids[-1], last + number, 1)[0])
            return np.stack(ids[1:])

        calls = {"call_ms": together, "single_calls_ms": separately}
        first, is_same = together(), True
        times: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(WARM_UP + repeats if is_timed else 1):
            for name, call in calls.items():
                world.barrier()
                start = time.perf_counter()
                ids = call()
                seconds = time.perf_counter() - start
                is_same &= bool((ids == first).all())
                if number >= WARM_UP:
                    times[name].append(seconds * 1e3 / steps)
    results = cast(list[tuple[bool, Any]], world.gather((is_same, times)))
    wrong = (
        [] if all(is_same for is_same, _ in results) else [OTHER_IDS + " of a model"]
    )
    if not is_timed:
        return {}, wrong
    of_ranks = [rank_times for _, rank_times in results]
    slowest = {
        n: np.max([rank_times[n] for rank_times in of_ranks], axis=0) for n in times
    }
    return {n: round(median(map(float, t)), 5) for n, t in slowest.items()}, wrong


def read_prompts(model: Model, prompts: Ids) -> None:
    """Fill the cache with the ids [requests, positions] of all requests."""
    requests, positions = (a.ravel() for a in np.indices(prompts.shape))
    for first in range(0, prompts.size, model.most_rows):
        some = slice(first, first + model.most_rows)
        model.step(
            prompts.ravel()[some], requests[some], positions[some], model.pages.table
        )
