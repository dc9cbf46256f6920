"""The program and the arrays of a decode step: a model with random weights, of which
each rank has a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from benchmarks.decoder_models import MODELS, SMALL_MODELS
from benchmarks.device import DTYPES, NUMBERS, Call, Device, Gpu, seed_of
from benchmarks.subjects import moe
from benchmarks.workload import DTYPE
from etc_dist import Program, compile
from etc_dist.functions.scaled_weights import BLOCK, E4M3, scales_name
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.models.decoder import decoder_for
from etc_dist.models.experts import EXPERT_BIASES
from etc_dist.models.pages import UNUSED
from etc_dist.models.part import (
    INNER,
    SPLIT_AXES,
    Part,
    check_ranks,
    has_blocks,
    of_blocks,
)
from etc_dist.models.rows import UNUSED_ROW
from etc_dist.models.sampling import Sampling, row_sampling
from etc_dist.models.sizes import MLP_WEIGHTS, scaled_weights, weight_of
from etc_dist.models.step_policy import StepPolicy, padded
from etc_dist.models.weights import FLOAT32, tied_head, weight_shapes
from etc_dist.ops.tuning import tuning_of

PAGE_SIZE = 64


DEVIATIONS = {"cache": 1.0, "qkv_bias": 1.0, "o_bias": 1.0, "sinks": 4.0}
DEVIATIONS |= {"correction": 0.1, **dict.fromkeys(EXPERT_BIASES, 1.0)}
"""Of arrays other than matrices. Some sinks are as large as the sum of the scores."""
ROUTINGS = ("uniform", "zipf", "one set")
"""How rows choose experts, see `routing_bias` of moe.py."""
COMMON, PREFERRED = 32.0, 1 / 16
"""A column of all embeddings, through which routers prefer experts; and about what it
is divided by until it reaches them."""


def drawn_table(num_own_pages: Any) -> Any:
    """The page table of requests with so many pages each, in random order."""
    table = np.full((len(num_own_pages), num_own_pages.max()), UNUSED, np.int32)
    has_page = np.arange(table.shape[1]) < num_own_pages[:, None]
    table[has_page] = np.random.default_rng(0).permutation(num_own_pages.sum())
    return table


class Decoder:
    """A model's program and arrays: up to `most` requests, each at the last of
    `context` positions, or of its own `lengths`, in the first of `steps` steps of a
    launch."""

    def __init__(
        self,
        device: Device,
        name: str,
        most: int,
        context: int,
        schedule: str,
        steps: int = 1,
        routing: str = ROUTINGS[0],
        sampling: Sampling | None = None,
        lengths: Sequence[int] = (),
    ):
        """lengths: the positions of each request, of which `context` is the largest."""
        self.device, self.name, self.context = device, name, context
        self.lengths = np.array(lengths or [context] * most, np.int32)
        self.steps, self.routing, self.sampling = steps, routing, sampling
        config = self.config = {**MODELS, **SMALL_MODELS}[name]
        world = device.world
        check_ranks(config, world.size)
        self.part = Part(world.rank, world.size)
        part_config = self.part.config(config)
        assert part_config.float8 == config.float8, "ranks would have parts of blocks"
        has_biases = config.mixture is not None and config.mixture.has_biases
        assert world.size == 1 or not has_biases, "ranks would add biases of experts"
        self.columns = self.part.ids(config.vocabulary)
        sizes = part_config.sizes(PAGE_SIZE)
        self.matmuls = sizes.matmuls
        graph = decoder_for(schedule, world.size, sizes)
        self.program: Program = compile(graph, world, schedule=schedule)
        workers = self.program.workers if isinstance(device, Gpu) else None
        self.policy = StepPolicy(
            part_config,
            workers,
            tuning=tuning_of(world),
            ranks=world.size,
        )
        num_own_pages = -(-(self.lengths + steps - 1) // PAGE_SIZE)
        table = drawn_table(num_own_pages)
        self._num_pages, most_pages = int(num_own_pages.sum()), table.shape[1]
        drawn = self._draw_all(self.part, config.layers)
        self.cache, self.weights = drawn.pop("cache"), drawn
        self.given = {"table": table, **config.tables(most_pages * PAGE_SIZE)}
        self.given = {n: device.xp.asarray(a) for n, a in self.given.items()}

    @property
    def is_plain(self) -> bool:
        """Whether the most likely ids are chosen, a step a launch, uniform experts."""
        is_greedy = self.sampling is None and self.steps == 1
        return is_greedy and self.routing == ROUTINGS[0]

    def whole(self, batch: int, layers: int) -> dict[str, Any]:
        """The `arrays` of a single rank that has the whole model, with a new cache and
        no chosen experts."""
        arrays = self.arrays(batch, layers)
        if self.part.count == 1:
            return arrays
        return arrays | self._draw_all(Part(), layers)

    def arrays(self, batch: int, layers: int, steps: int = 1) -> dict[str, Any]:
        """The arguments of steps of the first layers. Rows after those of `batch`
        requests are padding, as in a model."""
        config, xp = self.config, self.device.xp
        arrays = {**self.weights, "cache": self.cache}
        for name in arrays.keys() - {"embedding", "w_head"}:
            arrays[name] = arrays[name][: self._num_layers(name, layers)]
        request, rows = np.arange(batch, dtype=np.int32), padded(batch)
        position = self.lengths[:batch] - 1
        numbers = request * 37 % config.vocabulary, position, request, position + steps
        padding = np.repeat(UNUSED_ROW, rows - batch, axis=1)
        all_numbers = np.concatenate([numbers, padding], axis=1, dtype=np.int32)
        names = "ids", "position", "request", "end"
        of_rows = {
            **dict(zip(names, all_numbers, strict=True)),
            "stop": np.full((rows, 1), -1, np.int32),
            "sampling": row_sampling(rows, [self.sampling] * rows),
        }
        arrays |= self.given
        if "spans" in arrays:
            arrays["spans"] = arrays["spans"][:layers]
        arrays |= {n: xp.asarray(a.copy()) for n, a in of_rows.items()}
        columns = self.columns.stop - self.columns.start
        arrays["logits"] = self.device.empty((rows, columns), DTYPE)
        if config.mixture is not None:
            shape = layers, rows, config.mixture.router.top_k
            arrays["experts"] = xp.full(shape, -1, np.int32)
        return {**arrays, "next_ids": xp.empty((steps, rows), np.int32)}

    def _num_layers(self, name: str, layers: int) -> int:
        """The length of a stack in a model of `layers` layers."""
        return weight_shapes(replace(self.config, layers=layers)).get(name, (layers,))[
            0
        ]

    def call(
        self, arrays: Mapping[str, Any], is_greedy: bool = False, in_order: bool = False
    ) -> Call:
        """A launch with `arrays`, of the tiles and slices of the last step of a launch.
        is_greedy: without sampling. in_order: with the same bits in each batch."""
        steps, rows = arrays["next_ids"].shape
        policy = replace(self.policy, in_order=in_order)
        dims = policy.dims(rows, self.context + self.steps - 1)
        samples = self.sampling is not None and not is_greedy
        dims |= {"steps": steps, "samples": int(samples)}
        return partial(self.program.run, dims=dims, **arrays)

    def bytes_read(self, arrays: Mapping[str, Any], batch: int) -> int:
        """The bytes of this rank's weights and cache, once each, in a step that has
        run. Of the experts only those that the step chose count."""
        config = self.part.config(self.config)
        windows, lengths = config.windows or (0,) * config.layers, self.lengths[:batch]
        num_positions = sum(
            int(np.minimum(lengths, n or lengths.max()).sum()) for n in windows
        )
        sizes = {n: a.nbytes for n, a in self.weights.items() if n != "embedding"}
        if config.mixture is not None:
            share = self.active_experts(arrays, batch) / config.mixture.experts
            for name in sizes:
                sizes[name] *= share if weight_of(name) in MLP_WEIGHTS else 1
        row = 2 * config.kv_heads * config.head_dim * self.cache.itemsize
        return int(sum(sizes.values()) + num_positions * row)

    def active_experts(self, arrays: Mapping[str, Any], batch: int) -> float:
        """The mean number of experts of a layer that a step chose."""
        chosen_ids = arrays["experts"][self.config.dense_layers :, :batch]
        num_experts = [len(self.device.xp.unique(ids)) for ids in chosen_ids]
        return sum(num_experts) / len(num_experts)

    def policy_text(self, batch: int) -> str:
        dims = self.policy.dims(padded(batch), self.context)
        tiles = [f"{n} {self.policy.text(n, dims)}" for n in self.matmuls]
        shares = f"{dims['shares']} shares, {dims['shares_of_task']} of a task"
        return "; ".join([*tiles, shares])

    def _draw_all(self, part: Part, layers: int) -> dict[str, Any]:
        """The weights and the cache of the first layers: a part of them."""
        config = replace(self.config, layers=layers)
        pages, dim = self._num_pages, config.head_dim
        shape = layers, pages, 2, config.kv_heads, PAGE_SIZE, dim
        shapes = weight_shapes(config) | {"cache": shape}
        scaled = {name: shapes[name] for name in scaled_weights(config.float8)}
        drawn = {
            n: self._draw(n, s, part)
            for n, s in shapes.items()
            if weight_of(n) not in scaled
        }
        for n, s in scaled.items():
            drawn |= self._draw_scaled(n, s, part)
        if config.is_tied:
            drawn["w_head"] = tied_head(drawn["embedding"], part)
        return drawn

    def _draw_scaled(
        self, name: str, shape: tuple[int, ...], part: Part
    ) -> dict[str, Any]:
        """Codes of all numbers, so that some are far larger than most, and scales that
        differ by half of their mean, of the deviation that keeps the size of a vector.
        """
        device, (layers, *stack, n, k) = self.device, shape
        usual = np.sqrt(np.nanmean(NUMBERS**2) * k)
        blocks = (*stack, -(-n // BLOCK), -(-k // BLOCK))
        arrays: dict[str, Any] = {name: [], scales_name(name): []}
        for number in range(layers):
            full = f"{self.name} {name} {number}"
            codes = device.random_codes((prod(stack) * n, k), full)
            codes = codes.reshape(*stack, n, k)
            scales = device.random(blocks, "float32", f"{full} scales", 0.5)
            scales = device.xp.exp(scales) / np.float32(usual)
            for of, drawn in ((name, codes), (scales_name(name), scales)):
                arrays[of].append(self._own(of, drawn, part))
        arrays = {of: device.xp.stack(layers_of) for of, layers_of in arrays.items()}
        if not isinstance(device, Gpu):
            arrays[name] = arrays[name].view(numpy_dtype(E4M3))
        return arrays

    def _draw(self, name: str, shape: tuple[int, ...], part: Part) -> Any:
        """Random numbers; gains about 1; else each layer by itself, of the deviation
        that keeps the size of a vector, or of `DEVIATIONS`."""
        deviation = DEVIATIONS.get(name, shape[-1] ** -0.5)
        device, full, dtype = self.device, f"{self.name} {name}", FLOAT32.get(name)
        if name.endswith("norm"):
            gains = device.normal(device.xp.empty(shape, np.float32), seed_of(full))
            return (1 + gains / 8).astype(DTYPES[DTYPE])
        is_stack = name not in ("embedding", "w_head")
        layers, of_layer = (shape[0], shape[1:]) if is_stack else (1, shape)
        bits, array = np.uint16 if dtype is None else np.uint32, None
        for number in range(layers):
            drawn = device.random(
                of_layer, dtype or DTYPE, f"{full} {number}", deviation
            )
            if self.routing != ROUTINGS[0]:
                self._prefer_experts(name, number, drawn)
            own_part = self._own(name, drawn.view(bits), part)
            if array is None:
                array = device.xp.empty((layers, *own_part.shape), bits)
            array[number] = own_part
        assert array is not None
        return array.view(DTYPES[dtype or DTYPE])[... if is_stack else 0]

    def _own_blocks(self, drawn: Any, axis: int, part: Part, is_scales: bool) -> Any:
        """Of a weight along the inner width, or of its scales."""
        own_inner = part.config(self.config).inner
        shape = [*drawn.shape]
        shape[axis] = -(-own_inner // BLOCK) if is_scales else own_inner
        result = self.device.xp.zeros(shape, drawn.dtype)
        for to, of in part.blocks(self.config.inner, own_inner):
            to, of = (of_blocks(to), of_blocks(of)) if is_scales else (to, of)
            after = (slice(None),) * (-1 - axis)
            result[(..., to, *after)] = drawn[(..., of, *after)]
        return result

    def _prefer_experts(self, name: str, layer: int, drawn: Any) -> None:
        """Changes embeddings and routers so that rows prefer the same experts."""
        if name == "embedding":
            column = np.full(len(drawn), COMMON, np.float32)
        elif name == "router":
            mixture, (experts, hidden) = self.config.mixture, drawn.shape
            assert mixture is not None
            model = moe.Model(hidden, self.config.inner, experts, mixture.router.top_k)
            column = moe.routing_bias(self.routing, model, layer) * PREFERRED
        else:
            return
        bits = column.astype(DTYPES[DTYPE]).view(np.uint16)
        drawn.view(np.uint16)[:, 0] = self.device.xp.asarray(bits)

    def _own(self, name: str, drawn: Any, part: Part) -> Any:
        """A part of one layer's array."""
        config, part_config = self.config, part.config(self.config)
        if name == "cache":
            return drawn[:, :, part.span(config.kv_heads, part_config.kv_heads)]
        weight = weight_of(name)
        if weight not in ("w_qkv", "qkv_bias"):
            axis = SPLIT_AXES.get(weight)
            if axis is None:
                return drawn
            if drawn.ndim == 1:  # sinks
                return drawn[part.span(len(drawn), len(drawn) // part.count)]
            whole = drawn.shape[axis - 2]  # of a matrix, or those of all experts
            if has_blocks(config) and weight in INNER:
                return self._own_blocks(drawn, axis - 2, part, weight != name)
            rows = part.span(whole, whole // part.count)
            return drawn[..., rows, :] if axis == 0 else drawn[..., rows]
        heads = [
            (config.heads, part_config.heads),
            *2 * [(config.kv_heads, part_config.kv_heads)],
        ]
        pieces, first = [], 0
        unit = BLOCK if weight != name else 1
        for count, part_count in heads:
            whole, own_rows = (n * config.head_dim // unit for n in (count, part_count))
            rows = part.span(whole, own_rows)
            pieces.append(drawn[first + rows.start : first + rows.stop])
            first += whole
        return self.device.xp.concatenate(pieces)
