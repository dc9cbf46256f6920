"""The programs of the layers as graphs: their sizes, inputs, results and races."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from hypothesis import strategies as st

from etc_dist.functions.tile_shape import TileShape
from etc_dist.functions.weight_layouts import STAGE_K
from etc_dist.ir import GraphFunction
from etc_dist.layers.mlp import mlp_graph
from etc_dist.layers.mlp_tiles import mlp_tiles_graph
from etc_dist.layers.moe_few_tokens import FEW_TOKENS
from etc_dist.layers.moe_steps import Sizes as ExpertSizes
from etc_dist.ops.tile_model import FAMILY, Tiling, dims_of
from etc_dist.schedule import schedule_dynamic, schedule_static
from tests.graphs.mixtures import moe_few_tokens_graph, moe_graph
from tests.layers.reference import (
    TOLERANCE,
    Answer,
    aim,
    draw,
    draw_experts,
    draw_weights,
    moe_reference,
    own_experts,
    reference,
)

SCHEDULES = {"static": schedule_static, "dynamic": schedule_dynamic}
LOADED = ("tile_expert", "tile_row", "tile_rows", "tile_first", "groups_needed")
"""The tensors that a program loads from: the tiles of experts with tokens."""
Sizes = tuple[int, int, int]
"""Rows of a rank's result, hidden, inner."""
Given = tuple[list[dict[str, Any]], list[Answer]]
"""Each rank's inputs, and its expected result."""


@dataclass(frozen=True)
class Program:
    """A graph, and the shapes at which it is tested."""

    graph: Callable[..., GraphFunction]
    tiles: Mapping[str, Any]
    """Small tiles, so that small shapes have many."""
    worlds: Sequence[int]
    most: Sizes
    """The largest odd shape."""
    real: Sequence[tuple[int, dict[str, Any], Sizes]]
    """Ranks, options and sizes of real models."""
    world: int
    sizes: Sizes
    """A shape at which each event is needed."""
    protects: Mapping[str, str]
    """Event tensor -> an array that tasks race for without it, or what is wrong."""
    corners: Sequence[tuple[int, dict[str, Any], Sizes]] = ()
    """Shapes that are always tested, in addition to random ones."""
    full: Sizes = (40, 40, 24)
    """A shape for tiles as on GPUs."""
    given: Sequence[Mapping[str, Sequence[int]]] = ()
    """The loaded values of each rank at `sizes`, if the program loads."""

    def small(self, world: int, **options: Any) -> GraphFunction:
        return self.graph(world, **{**self.tiles, **options})

    @cached_property
    def smallest(self) -> GraphFunction:
        """Of `world` ranks, for `sizes`."""
        return self.small(self.world)

    def large(self, world: int, **options: Any) -> GraphFunction:
        """In tiles as on GPUs."""
        return self.graph(world, **options)

    def experts(self, world: int) -> dict[str, Any]:
        """Options that the graph needs."""
        return {}

    def dims(self, world: int, sizes: Sizes) -> dict[str, int]:
        return dict(zip(("rows", "hidden", "inner"), sizes, strict=True))

    def draw_options(self, data: Any, world: int) -> dict[str, Any]:
        return {"dtype": data.draw(st.sampled_from(sorted(TOLERANCE)))}

    def draw_case(
        self, data: Any, most_ranks: int = 8, most_rows: int = 50
    ) -> tuple[int, dict[str, Any], Sizes]:
        """Ranks, options and sizes of an odd shape."""
        worlds = [world for world in self.worlds if world <= most_ranks]
        world = data.draw(st.sampled_from(worlds))
        least = 8 if self.loads else 1
        rows, hidden, inner = self.most
        limits = (1, min(rows, most_rows)), (least, hidden), (1, inner)
        sizes = data.draw(st.tuples(*(st.integers(*limit) for limit in limits)))
        return world, self.draw_options(data, world), sizes

    @property
    def loads(self) -> bool:
        return bool(self.given)

    def tensors(self, graph: GraphFunction) -> dict[str, list[Any]] | None:
        """The loaded tensors at `sizes`."""
        if not self.loads:
            return None
        env = graph.environment(self.dims(self.world, self.sizes), 0)
        tables = {}
        for name in LOADED:
            (count,) = (int(n.evaluate(env)) for n in graph.tensor(name).shape)
            tables[name] = np.zeros((self.world, count), np.int32)
            for rank, values in enumerate(self.given):
                of_rank = values.get(name, [])
                tables[name][rank, : len(of_rank)] = of_rank
        return {name: list(table) for name, table in tables.items()}

    def inputs(
        self,
        rng: np.random.Generator,
        world: int,
        sizes: Sizes,
        dtype: str = "bfloat16",
    ) -> Given:
        rows, hidden, inner = sizes
        xs = [draw(rng, (rows, hidden), dtype) for _ in range(world)]
        shares = [draw_weights(rng, hidden, inner, dtype) for _ in range(world)]
        names = ("x", "gate", "up", "down")
        ranks = zip(xs, shares, strict=True)
        by_rank = [dict(zip(names, (x, *share), strict=True)) for x, share in ranks]
        return by_rank, reference(xs, shares)


@dataclass(frozen=True)
class Tiled(Program):
    """A graph whose dims choose tiles: any choice is right, and the sizes make one. In
    the last column of tiles, k is divided if a GPU could divide it."""

    def dims(self, world: int, sizes: Sizes) -> dict[str, int]:
        rows, hidden, inner = sizes
        gated = [n for n, shape in enumerate(FAMILY) if shape.may_be_gated]
        up, down = gated[(rows + hidden) % len(gated)], inner % len(FAMILY)
        dims = super().dims(world, sizes)
        for name, shape_idx, k in (("gate_up_", up, hidden), ("down_", down, inner)):
            split = int(k > FAMILY[shape_idx].depth)
            columns = FAMILY[shape_idx].columns
            dims |= dims_of(Tiling(shape_idx, columns, split, 1 + split), name)
        return dims


@dataclass(frozen=True)
class Experts(Program):
    """A mixture of experts; `parallel` over many ranks."""

    parallel: str = "tensor"
    choices: Sequence[int] = (8, 16, 37, 40)
    """Numbers of experts of a rank."""
    shared: str = ""
    """The kind of the shared expert, which is as wide as the others."""

    def small(self, world: int, **options: Any) -> GraphFunction:
        return self.large(world, **{**self.tiles, **options})

    def large(self, world: int, **options: Any) -> GraphFunction:
        if self.graph is moe_graph:
            options["parallel"] = self.parallel
        options["shared"] = self.shared
        return self.graph(world, **{"experts": 8, "top_k": 2, **options})

    def experts(self, world: int) -> dict[str, Any]:
        split = world if self.parallel == "expert" else 1
        return {"experts": max(8, 8 * split)}

    def dims(self, world: int, sizes: Sizes) -> dict[str, int]:
        is_shard = world > 1 and self.parallel == "tensor"
        names = ("shard" if is_shard else "tokens", "hidden", "inner")
        dims = dict(zip(names, sizes, strict=True))
        return dims | ({"shared_inner": dims["inner"]} if self.shared else {})

    def draw_options(self, data: Any, world: int) -> dict[str, Any]:
        return {
            **super().draw_options(data, world),
            "experts": world * data.draw(st.sampled_from(self.choices)),
            "top_k": data.draw(st.integers(1, 8)),
            "normalize": data.draw(st.booleans()),
        }

    def inputs(
        self,
        rng: np.random.Generator,
        world: int,
        sizes: Sizes,
        dtype: str = "bfloat16",
        *,
        experts: int = 8,
        top_k: int = 2,
        normalize: bool = True,
        ids: Any = None,
        equal: bool = False,
    ) -> Given:
        """`ids`: the experts that all ranks' tokens choose. `equal`: of small integers,
        so that logits are exact, and often equal."""
        tokens, hidden, inner = sizes
        split = world if self.parallel == "tensor" else 1
        x = draw(rng, (world * tokens, hidden), dtype)
        weights = draw_experts(rng, experts, hidden, split * inner, dtype)
        if equal:
            x[...] = rng.integers(-1, 2, x.shape)
            weights[0][...] = rng.integers(-1, 2, weights[0].shape)
        if ids is not None:
            aim(x, weights, ids)
        whole = draw_experts(rng, 1, hidden, split * inner, dtype)
        shared = [whole[1][0], whole[2][0], whole[0][0]][: SHARED[self.shared]]
        answer = moe_reference(x, weights, top_k, normalize, shared=shared)
        parts = [np.split(a, world) for a in (answer.expected, answer.magnitude)]
        xs = [x] * world if split > 1 else np.split(x, world)
        names = ("router", "gate_up", "down")
        by_rank = [
            {"x": xs[rank]}
            | dict(
                zip(
                    names, own_experts(weights, self.parallel, rank, world), strict=True
                )
            )
            | self._of_shared(whole, rank, world)
            for rank in range(world)
        ]
        return by_rank, [Answer(*pair) for pair in zip(*parts, strict=True)]

    def _of_shared(self, whole: Any, rank: int, world: int) -> dict[str, Any]:
        """A rank's part of the shared expert."""
        if self.parallel == "tensor":
            whole = own_experts(whole, "tensor", rank, world)
        gate, gate_up, down = whole
        names = "shared_gate_up", "shared_down", "shared_gate"
        pairs = zip(names, (gate_up, down, gate), strict=True)
        return dict([*pairs][: SHARED[self.shared]])


SHARED = {"": 0, "plain": 2, "gated": 3}
"""The arrays of a shared expert."""
QWEN3, MIXTRAL = {"experts": 128, "top_k": 8}, {"experts": 8, "top_k": 2}
"""Qwen3-30B-A3B and Mixtral 8x7B, here and in the sizes below."""
MOE_TILES = ExpertSizes(8, 10, 8, 8, group_tokens=4, passes=3)
MANY_TILES = replace(MOE_TILES, part_tokens=3, push_tasks=8, score_tasks=1)
PROTECTS = {"scored": "logits", "routed": "ids", "listed": "ids"}
PROTECTS |= {"planned": "loaded extent is not known"}
PROTECTS |= {"activated": "active", "produced": "outputs", "located": "place"}
SHARED_PROTECTS = {**PROTECTS, "arrived": "all_x", "returned": "partials"}
SHARED_PROTECTS |= {name: "all_ids" for name in ("shared", "listed")}
ONE_TILE = {"tile_expert": [0], "tile_row": [0], "tile_rows": [8], "groups_needed": [1]}
PARALLEL_CORNERS = [
    (2, {"experts": 16, "top_k": 4, "normalize": False}, (8, 40, 12)),
    (4, {"experts": 8, "top_k": 3}, (5, 16, 12)),
]


def real_moe(world: int, *tokens: int, split: int = 1) -> list[Any]:
    return [
        (world, options, (n, hidden, inner // split))
        for options, hidden, inner in ((QWEN3, 2048, 768), (MIXTRAL, 4096, 14336))
        for n in tokens
    ]


class SmallShape(TileShape):
    """A tile of any size, for the CPU backend."""

    def __post_init__(self) -> None:
        pass

    @property
    def depth(self) -> int:
        return STAGE_K


SMALL_SHAPES = [
    SmallShape(2 ** (n % 4 + 1), shape.columns, swapped=shape.swapped)
    for n, shape in enumerate(FAMILY)
]
"""Of as many shapes as on GPUs, so that the same dims choose."""
PROGRAMS: dict[str, Program] = {
    "mlp": Tiled(
        graph=mlp_tiles_graph,
        tiles={"shapes": SMALL_SHAPES, "few": 4},
        worlds=range(1, 9),
        most=(20, 300, 300),
        real=[
            (8, {}, (rows, *widths))
            for rows in (1, 3, 33, 128)
            for widths in ((5120, 3200), (8192, 3584))
        ],
        # Three ranks' rows in two blocks, of which one has rows of two ranks.
        world=3,
        sizes=(9, 278, 261),
        protects={
            "arrived": "all_x",
            "gate_up_parts_stored": "gate_up_sums",
            "activated": "active",
            "down_parts_stored": "down_sums",
            "produced": "product",
            "returned": "partials",
        },
        corners=[(1, {}, (90, 270, 19)), *((n, {}, (20, 37, 261)) for n in (1, 2, 5))],
    ),
    "mlp many rows": Tiled(
        graph=mlp_graph,
        tiles={"shapes": SMALL_SHAPES, "packet_bytes": 64},
        worlds=range(2, 9),
        most=(40, 300, 300),
        real=[(n, {}, (512, 8192, 28672 // n)) for n in (4, 8)],
        world=3,
        sizes=(9, 278, 261),
        protects={
            "arrived": "gathered",
            "gate_up_parts_stored": "gate_up_sums",
            "activated": "active",
            "down_parts_stored": "down_sums",
            "produced": "partials",
            "returned": "partials",
        },
        corners=[(n, {}, (20, 37, 261)) for n in (2, 5)],
    ),
    "moe": Experts(
        graph=moe_graph,
        tiles={"sizes": replace(MOE_TILES, score_tasks=3, combined=8)},
        worlds=[1],
        most=(50, 50, 30),
        real=real_moe(1, 1, 128, 8192),
        world=1,
        # Five tokens all choose experts 3 and 5: two tiles of 5 rows, from 0 and 16.
        sizes=(5, 40, 19),
        given=[
            {
                "tile_expert": [3, 5],
                "tile_row": [0, 16],
                "tile_rows": [5, 5],
                "tile_first": [24, 40],
                "groups_needed": [1],
            }
        ],
        protects=PROTECTS,
        corners=[
            (1, {"experts": 8, "top_k": 1}, (1, 8, 8)),
            (1, {"experts": 8, "top_k": 8, "normalize": False}, (1, 40, 24)),
            (1, {"experts": 16, "top_k": 4}, (32, 64, 32)),
            (1, {"experts": 24, "top_k": 3, "normalize": False}, (33, 50, 19)),
            (1, {"experts": 64, "top_k": 8}, (50, 24, 16)),
            (1, {"experts": 256, "top_k": 16}, (3, 8, 8)),
        ],
        full=(600, 40, 24),
    ),
    "moe few tokens": Experts(
        graph=moe_few_tokens_graph,
        tiles={"product_tasks": 6, "score_tasks": 4},
        worlds=[1],
        most=(5, 50, 30),
        real=real_moe(1, 1, 3, FEW_TOKENS),
        world=1,
        sizes=(2, 40, 19),
        protects={"routed": "logits", "picked": "ids", "activated": "active"},
        full=(3, 40, 24),
    ),
    "moe tensor-parallel": Experts(
        graph=moe_graph,
        parallel="tensor",
        tiles={"sizes": MANY_TILES},
        worlds=range(2, 9),
        most=(20, 50, 30),
        real=real_moe(4, 1, 2048, split=4),
        world=2,
        sizes=(4, 40, 19),
        given=[ONE_TILE] * 2,
        protects={**PROTECTS, "returned": "partials"},
        choices=[8],
        corners=PARALLEL_CORNERS,
        full=(110, 40, 12),
    ),
    "moe expert-parallel": Experts(
        graph=moe_graph,
        parallel="expert",
        tiles={"sizes": MANY_TILES},
        worlds=range(2, 9),
        most=(20, 50, 30),
        real=real_moe(4, 1, 2048),
        world=2,
        # Each rank has eight rows of one of its experts.
        sizes=(4, 40, 19),
        given=[{**ONE_TILE, "tile_expert": [r]} for r in (0, 1)],
        protects=SHARED_PROTECTS,
        choices=[8],
        corners=PARALLEL_CORNERS,
        full=(110, 40, 24),
    ),
}


def packed(program: Program) -> Program:
    """A mixture whose rows are first copied to their tiles."""
    return replace(
        program,
        tiles={**program.tiles, "packs": True},
        protects={**program.protects, "packed_groups": "packed"},
    )


def with_shared(name: str, kind: str = "gated") -> Program:
    """A mixture with a shared expert."""
    program = PROGRAMS[name]
    assert isinstance(program, Experts)
    protects = {"shared_activated": "shared_active"}
    if name == "moe few tokens":
        protects |= {"shared_picked": "shared_ids", "shared_routed": "shared_logits"}
    else:
        protects |= {"shared_done": "shared_rows"}
    return replace(
        program, shared=kind, protects={**program.protects, **protects}, real=()
    )


BASES = tuple(PROGRAMS)
"""The programs that others extend by some calls, to "NAME, EXTENSION"."""
PROGRAMS |= {
    f"{name}, shared": with_shared(name)
    for name in ("moe", "moe few tokens", "moe tensor-parallel", "moe expert-parallel")
}
PROGRAMS |= {
    f"{name}, packed": packed(PROGRAMS[name]) for name in ("moe", "moe expert-parallel")
}


def base_of(name: str) -> str:
    """The program that `name` extends, or `name` itself."""
    return name.partition(",")[0]


def without(graph: GraphFunction, event: str, *verbs: str) -> GraphFunction:
    """`graph` without the waits or notifications, or both, of one event tensor."""

    def kept(refs: Any) -> Any:
        return tuple(ref for ref in refs if ref.events.name != event)

    calls = (replace(c, **{v: kept(getattr(c, v)) for v in verbs}) for c in graph.calls)
    return replace(graph, calls=tuple(calls))
