"""The time from weights in memory to a model's first token, with a bundle.

The bundle is built before, by another process, as
`.venv/bin/etc-dist build MODEL --bundle` does."""

from __future__ import annotations

import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.decoder import PAGE_SIZE
from benchmarks.decoder_models import MODELS, SMALL_MODELS
from benchmarks.device import Device, Gpu
from benchmarks.harness import SMALL, Result, Run, Subject, add_models, provenance
from benchmarks.workload import DTYPE
from etc_dist.models import Model
from etc_dist.models.model_bundle import WORKERS, build_bundle
from etc_dist.models.setup import ModelSetup
from etc_dist.models.weights import weight_shapes
from etc_dist.runtime.build import ARCH
from etc_dist.runtime.bundle import Bundle, read_bundle

BATCH, POSITIONS, TOKENS = 8, 512, 4
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
PROTOCOL = (
    "weights on the GPU, then models.Model(bundle=) and generate(max_new_tokens=1), "
    f"a prompt of {len(PROMPT)} tokens; once"
)


def setup_of(name: str) -> ModelSetup:
    config = {**MODELS, **SMALL_MODELS}[name]
    return ModelSetup(config, BATCH, POSITIONS, PAGE_SIZE)


def generated(
    device: Device, name: str, weights: Any, bundle: Bundle | None
) -> tuple[list[int], float, dict[str, Any]]:
    """The first id, then several, the seconds until the first, and where it ran."""
    setup, start = setup_of(name), time.perf_counter()
    with Model(
        setup.config,
        weights,
        batch=BATCH,
        positions=POSITIONS,
        page_size=PAGE_SIZE,
        bundle=bundle,
        world=device.world,
    ) as model:
        (first,) = model.generate([PROMPT], max_new_tokens=1)
        seconds = time.perf_counter() - start
        (ids,) = model.generate([PROMPT], max_new_tokens=TOKENS)
        where = provenance(model.program)
    return first + ids, seconds, where


def benchmark(device: Device, name: str, folder: Path) -> Result:
    """The ids must be those without a bundle."""
    config = setup_of(name).config
    weights = {
        n: device.random(shape, DTYPE, f"{name} {n}", shape[-1] ** -0.5)
        for n, shape in weight_shapes(config).items()
    }
    device.synchronize()
    with_bundle, seconds, where = generated(device, name, weights, read_bundle(folder))
    without, _, _ = generated(device, name, weights, None)
    wrong = [] if with_bundle == without else ["a bundle gives other ids"]
    values: dict[str, Any] = {"model": name, "batch": BATCH, "positions": POSITIONS}
    if isinstance(device, Gpu):
        values |= {**where, "first_token_s": round(seconds, 3)}
    return values, wrong


def build(name: str, folder: Path) -> None:
    build_bundle(setup_of(name), folder, WORKERS, ARCH)


def measure(run: Run) -> Iterator[Result]:
    device = run.device
    run.shared["protocol"] = PROTOCOL
    names = ["qwen3-8b"] if isinstance(device, Gpu) else [SMALL]
    for name in run.options.models or names:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "bundle"
            builder = get_context("spawn").Process(target=build, args=(name, folder))
            builder.start()
            builder.join()
            yield benchmark(device, name, folder)


def add_options(parser: ArgumentParser) -> None:
    add_models(parser, {**MODELS, **SMALL_MODELS})


SUBJECTS = {"first_token": Subject("Time a model's first token.", measure, add_options)}
