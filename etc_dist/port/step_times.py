"""A prediction of the time of a decode step, from the bytes that it reads.

A step reads each weight once, of a mixture those of the experts that its rows choose,
and the keys and values of all positions. To these bytes, at the rates of streaming
programs, it adds the other times of a layer: the hand-overs between its tasks, and the
work for each row. The constants are a least-squares fit, of relative errors, to the
records of static programs on one, two and four H200 in benchmarks/results/decode.jsonl
with uniform routing, made before FITTED: 34 records of two models, all of them within
14 %, 4 % on average. Other models, and newer programs, may be further off: it is a
prediction. Since then steps of qwen3-30b-a3b have become up to 25 % faster."""

from __future__ import annotations

from dataclasses import dataclass

from etc_dist.models.config import ModelConfig
from etc_dist.models.part import Part
from etc_dist.models.sizes import MLP_WEIGHTS, weight_of
from etc_dist.models.step_policy import padded
from etc_dist.models.weights import weight_bytes

DEVICE = "NVIDIA H200"
FITTED = "2026-11-30"
"""The date of the fit."""
ELEMENT_BYTES = 2


@dataclass(frozen=True)
class StepConstants:
    """Rates in bytes a microsecond, times in microseconds: layer_us of each layer,
    mixture_us more of one with experts, ranks_us more on several ranks, row_us of each
    row in each layer."""

    weight_bytes_per_us: float = 3.99e6
    cache_bytes_per_us: float = 3.68e6
    layer_us: float = 21.2
    mixture_us: float = 24.1
    ranks_us: float = 15.4
    row_us: float = 0.616


CONSTANTS = StepConstants()


@dataclass(frozen=True)
class StepBytes:
    """What a rank reads in a step, in bytes."""

    weights: float
    cache: float


def step_bytes(config: ModelConfig, ranks: int, batch: int, context: int) -> StepBytes:
    """Of a step that decodes `batch` requests of `context` positions each. Rows choose
    experts uniformly and independently."""
    part = Part(0, ranks)
    rank_config = part.config(config)
    head = rank_config.vocabulary * rank_config.hidden
    expected = float(ELEMENT_BYTES * head)
    for name, size in weight_bytes(config, part).items():
        if name in ("embedding", "w_head"):
            continue
        share = 1.0
        if config.mixture is not None and weight_of(name) in MLP_WEIGHTS:
            chosen_share = config.mixture.router.top_k / config.mixture.experts
            share = 1 - (1 - chosen_share) ** batch
        expected += share * size
    windows = config.windows or (0,) * config.layers
    positions = sum(min(context, window or context) for window in windows)
    cache_elements = batch * positions * 2 * rank_config.kv_heads * rank_config.head_dim
    return StepBytes(expected, ELEMENT_BYTES * cache_elements)


def predict_us(
    config: ModelConfig,
    ranks: int,
    batch: int,
    context: int,
    constants: StepConstants = CONSTANTS,
) -> float:
    """Microseconds of such a step on `ranks` H200."""
    read, c = step_bytes(config, ranks, batch, context), constants
    of_layer = c.layer_us + c.row_us * padded(batch)
    of_layer += c.mixture_us * (config.mixture is not None) + c.ranks_us * (ranks > 1)
    return (
        read.weights / c.weight_bytes_per_us
        + read.cache / c.cache_bytes_per_us
        + config.layers * of_layer
    )
