"""The program and the arrays of a decode step: a model with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.device import DTYPES, Call, Device, Gpu, seed_of
from benchmarks.workload import DTYPE, SMALL
from etc_dist import Program, compile
from etc_dist.models.config import ModelConfig
from etc_dist.models.decoder import decoder_graph
from etc_dist.models.sizes import MATMULS
from etc_dist.models.step_policy import StepPolicy
from etc_dist.models.weights import weight_shapes
from etc_dist.ops.matmul_policy import SHAPES

PAGE_SIZE = 64


def qwen3(layers: int, hidden: int, inner: int, heads: int) -> ModelConfig:
    return ModelConfig(
        architecture="Qwen3ForCausalLM",
        layers=layers,
        hidden=hidden,
        inner=inner,
        vocabulary=151936,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        positions=40960,
        norm_eps=1e-6,
        rope_base=1e6,
        rope={},
        is_tied=False,
        stop_tokens=(),
    )


MODELS: Mapping[str, ModelConfig] = {
    "qwen3-8b": qwen3(36, 4096, 12288, 32),
    "qwen3-14b": qwen3(40, 5120, 17408, 40),
    "qwen3-32b": qwen3(64, 5120, 25600, 64),
}
SMALL_MODEL = replace(
    qwen3(3, 72, 136, 4), vocabulary=520, kv_heads=2, head_dim=64, positions=512
)


class Decoder:
    """A model's program and arrays: up to `most` requests, each at the last of
    `context` positions, in the first of `steps` steps of a launch."""

    def __init__(
        self,
        device: Device,
        name: str,
        most: int,
        context: int,
        schedule: str,
        steps: int = 1,
    ):
        self.device, self.name, self.context = device, name, context
        self.steps = steps
        config = self.config = SMALL_MODEL if name == SMALL else MODELS[name]
        graph = decoder_graph(1, sizes=config.sizes(PAGE_SIZE))
        self.program: Program = compile(graph, device.world, schedule=schedule)
        workers = self.program.workers if isinstance(device, Gpu) else None
        self.policy = StepPolicy(config, workers)
        self.weights = {n: self._draw(n, s) for n, s in weight_shapes(config).items()}
        pages = -(-(context + steps - 1) // PAGE_SIZE)
        shape = (config.layers, most * pages, 2, config.kv_heads, PAGE_SIZE)
        self.cache = self._draw("cache", (*shape, config.head_dim), 1.0)
        table = np.random.default_rng(0).permutation(most * pages)
        self.given = {
            "table": table.reshape(most, pages).astype(np.int32),
            "cos_sin": config.cos_sin(pages * PAGE_SIZE),
        }
        self.given = {n: device.xp.asarray(a) for n, a in self.given.items()}

    def arrays(self, batch: int, layers: int, steps: int = 1) -> dict[str, Any]:
        """The arguments of steps of the first layers."""
        config, xp = self.config, self.device.xp
        found = {**self.weights, "cache": self.cache}
        for name in found.keys() - {"embedding", "w_head"}:
            found[name] = found[name][: layers + (name == "norm")]
        rows = np.arange(batch, dtype=np.int32)
        ids, position = (np.full((steps + 1, batch), -1, np.int32) for _ in range(2))
        ids[0], position[0] = rows * 37 % config.vocabulary, self.context - 1
        of_rows = {
            "ids": ids,
            "position": position,
            "request": rows,
            "end": position[0] + steps,
            "stop": np.full((batch, 1), -1, np.int32),
        }
        found |= self.given | {n: xp.asarray(a) for n, a in of_rows.items()}
        found["logits"] = self.device.empty((batch, config.vocabulary), DTYPE)
        return {**found, "next_ids": xp.empty((steps, batch), np.int32)}

    def call(self, arrays: Mapping[str, Any]) -> Call:
        """A launch with `arrays`."""
        steps, batch = arrays["next_ids"].shape
        dims = self.policy.dims(batch, self.context + steps - 1)
        return partial(self.program.run, dims=dims | {"steps": steps}, **arrays)

    def bytes_read(self, batch: int) -> int:
        """Of the weights and the cache, once each."""
        config, weights = self.config, self.weights
        matmuls = sum(a.nbytes for n, a in weights.items() if n != "embedding")
        row = 2 * config.kv_heads * config.head_dim * self.cache.itemsize
        return int(matmuls + config.layers * batch * self.context * row)

    def policy_text(self, batch: int) -> str:
        dims = self.policy.dims(batch, self.context)
        tiles = [f"{n} {SHAPES[dims[f'{n}_shape']]}" for n in MATMULS]
        return "; ".join([*tiles, f"slices {dims['slices']}"])

    def _draw(
        self, name: str, shape: tuple[int, ...], deviation: float | None = None
    ) -> Any:
        """Random numbers; gains about 1; else each layer by itself, of the deviation
        that keeps the size of a vector."""
        device, full = self.device, f"{self.name} {name}"
        if name.endswith("norm"):
            gains = device.normal(device.xp.empty(shape, np.float32), seed_of(full))
            return (1 + gains / 8).astype(DTYPES[DTYPE])
        array = device.empty(shape, DTYPE)
        for number, part in enumerate(array if len(shape) > 2 else [array]):
            scale = deviation or shape[-1] ** -0.5
            drawn = device.random(part.shape, DTYPE, f"{full} {number}", scale)
            part.view(np.uint16)[...] = drawn.view(np.uint16)
        return array
