"""The error of the logits of a model with float8 weights, of which some elements are
outliers: relative, over all rows of a prompt, against the dequantized weights in fp32.
Also that of the same model with these weights in bf16; and, of both computed in
fp32, that of the dequantized weights against those that were quantized.

Runs on the CPU backend, on one rank, and is recorded there: it measures no times."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

import etc_dist
from benchmarks.decoder import PAGE_SIZE
from benchmarks.decoder_models import config_of, in_float8, qwen3
from benchmarks.decoder_reference import Fp32, prompt_logits
from benchmarks.device import DTYPES, dequantized
from benchmarks.harness import Result, Run, Subject, numbers, provenance
from benchmarks.workload import DTYPE
from etc_dist import World
from etc_dist.functions.scaled_weights import scales_name
from etc_dist.models import Model
from etc_dist.models.config import ModelConfig
from etc_dist.models.sizes import scaled_weights
from etc_dist.models.weights import weight_shapes
from etc_dist.settings import Settings

SIZES = {"vocab_size": 1024, "num_key_value_heads": 4, "head_dim": 64}
CONFIG = config_of(in_float8({**qwen3(4, 512, 1536, 8), **SIZES}))
NAME = "4 layers, hidden 512"
ROWS = 64
"""Of the prompt."""
SHARE = 1e-3
"""Of the elements of a matrix, those that are outliers."""
FACTORS = [1, 10, 100, 1000]
"""How many times as large as the others."""
MOST = 1.1
"""Of bf16's error: the gate."""
PROTOCOL = f"{ROWS} rows of one prompt, all logits, relative Frobenius norm"
Arrays = Mapping[str, Any]


def drawn_weights(config: ModelConfig, factor: int) -> dict[str, Any]:
    """The weights of a model in fp32 that are not yet quantized. Those that will stay
    in bf16 are rounded. A matrix keeps the size of a vector."""
    rng, weights = np.random.default_rng(0), {}
    scaled = scaled_weights(config.float8)
    for name, shape in weight_shapes(replace(config, float8=())).items():
        w: Any = rng.standard_normal(shape, np.float32)
        if name.endswith("norm"):
            w = 1 + w / 8
        elif name in scaled:
            w *= np.where(rng.random(shape) < SHARE, np.float32(factor), np.float32(1))
            w *= np.float32(shape[-1] ** -0.5) / np.sqrt((w**2).mean())
        else:
            w *= np.float32(shape[-1] ** -0.5)
        weights[name] = w if name in scaled else w.astype(DTYPES[DTYPE])
    return weights


def quantized(config: ModelConfig, weights: Arrays) -> dict[str, Any]:
    """The same with codes and scales."""
    arrays = dict(weights)
    for name in scaled_weights(config.float8):
        arrays[name], arrays[scales_name(name)] = etc_dist.quantize(weights[name])
    return arrays


def in_bf16(config: ModelConfig, arrays: Arrays) -> dict[str, Any]:
    """The same with dequantized weights, rounded."""
    names = scaled_weights(config.float8)
    scales = {*map(scales_name, names)}
    weights = {name: array for name, array in arrays.items() if name not in scales}
    for name in names:
        pairs = zip(arrays[name], arrays[scales_name(name)], strict=True)
        matrices = [dequantized(np, *pair) for pair in pairs]
        weights[name] = np.stack(matrices).astype(DTYPES[DTYPE])
    return weights


def logits_of(
    world: World, config: ModelConfig, weights: Arrays, prompt: Any
) -> tuple[Any, dict[str, Any]]:
    """Those of all rows of a prompt, in fp32, and where they were computed."""
    rows = np.arange(len(prompt))
    with Model(
        config,
        weights,
        batch=1,
        positions=ROWS + 1,
        page_size=PAGE_SIZE,
        world=world,
    ) as model:
        model.pages.add(len(prompt) + 1)
        model.step(prompt, 0 * rows, rows, model.pages.table)
        return model.logits.astype(np.float32), provenance(model.program)


def exact_logits(config: ModelConfig, weights: Arrays, prompt: Any) -> Any:
    """Those of all rows in fp32."""
    arrays = {**weights, **config.tables(ROWS), "ids": prompt}
    arrays["position"] = np.arange(len(prompt))
    logits, _ = prompt_logits(Fp32(np), config, arrays, rows=len(prompt))
    return logits


def relative(logits: Any, expected: Any) -> float:
    """The relative Frobenius norm of the difference."""
    return float(np.linalg.norm(logits - expected) / np.linalg.norm(expected))


def benchmark(world: World, factor: int) -> Result:
    prompt = np.random.default_rng(1).integers(CONFIG.vocabulary, size=ROWS)
    weights = drawn_weights(CONFIG, factor)
    codes = quantized(CONFIG, weights)
    expected = exact_logits(CONFIG, codes, prompt)
    logits, where = logits_of(world, CONFIG, codes, prompt)
    of_bf16, plain = in_bf16(CONFIG, codes), replace(CONFIG, float8=())
    bf16_logits, _ = logits_of(world, plain, of_bf16, prompt)
    error, bf16_error = (relative(y, expected) for y in (logits, bf16_logits))
    codes_error = relative(expected, exact_logits(plain, weights, prompt))
    values = {**where, **dict.fromkeys(("device", "driver", "cuda"), "none")}
    values |= {"model": NAME, "dtype": DTYPE, "outliers": factor, "rows": ROWS}
    values |= {"error": error, "bf16_error": bf16_error, "codes_error": codes_error}
    wrong = []
    if not error <= MOST * bf16_error:  # also for NaN
        wrong.append(f"error {error:.2e}, wanted {MOST} x {bf16_error:.2e}")
    return values, wrong


def measure(run: Run) -> Iterator[Result]:
    run.shared["protocol"] = PROTOCOL
    cpu = {"ETC_DIST_BACKEND": "cpu", "ETC_DIST_VERIFY": "0"}
    with etc_dist.start(Settings.load({**os.environ, **cpu})) as world:
        for factor in run.options.outliers:
            yield benchmark(world, factor)


def add_options(parser: ArgumentParser) -> None:
    text = "times that an outlier is as large as other weights"
    parser.add_argument("--outliers", type=numbers, default=FACTORS, help=text)


SUBJECTS = {
    "float8_accuracy": Subject(
        "Compare the logits of float8 and bf16 weights with those in fp32.",
        measure,
        add_options,
        has_world=False,
    )
}
