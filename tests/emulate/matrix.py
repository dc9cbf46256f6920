"""The matrix of emulated programs: graphs at shapes of every kind of tile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from etc_dist.functions.epilogue import swiglu
from etc_dist.functions.push_rows import push_rows
from etc_dist.functions.scaled_weights import PER_BLOCK, PER_ROW, Scaling
from etc_dist.functions.tile_shape import TileShape
from etc_dist.ir import GraphFunction
from etc_dist.layers.mlp import mlp_graph
from etc_dist.layers.mlp_tiles import mlp_tiles_graph
from etc_dist.layers.moe_steps import Sizes
from etc_dist.ops.all_gather_matmul import all_gather_matmul_graph
from etc_dist.ops.matmul import matmul_graph
from etc_dist.ops.matmul_all_reduce import matmul_all_reduce_graph
from etc_dist.ops.matmul_reduce_scatter import (
    FLOAT_FAMILY,
    matmul_reduce_scatter_graph,
)
from etc_dist.ops.tile_model import Tiling, dims_of
from tests.emulate.cases import (
    Example,
    all_gather_matmul,
    counted_late,
    float_partials,
    four_matmuls,
    gated,
    matmul,
    matmul_all_reduce,
    matmul_and_scratch,
    matmul_of_one,
    matmul_reduce_scatter,
    mlp,
    moe,
    moe_of_two,
    numbers,
    one_of_three,
    rows_of_two,
    sums,
    sums_of_ranks,
    tiles,
)
from tests.graphs.epilogues import all_kinds, applied_given, product
from tests.graphs.mixtures import moe_few_tokens_graph, moe_graph
from tests.graphs.parts import (
    BY_KIND,
    HALVES,
    TURNS,
    chained,
    gated_parts,
    given_to,
    graph_of,
    signs,
)
from tests.graphs.parts import TALL as TALL_TILE
from tests.graphs.ring import ring
from tests.graphs.running_sums import running_sums, sums_over_ranks
from tests.graphs.scaled import gated as gated_by_scaled
from tests.graphs.scaled import mlp as scaled_mlp
from tests.graphs.scaled import moe as scaled_moe
from tests.graphs.scaled import multiplied, products_of_ranks
from tests.graphs.stages import (
    SIZES,
    copied,
    copies,
    gathered,
    gathered_last,
    in_stages,
)
from tests.graphs.turned_layers import turned, turned_layers
from tests.graphs.written import three_matmuls


@dataclass(frozen=True)
class Case:
    graph: Callable[[], GraphFunction]
    make_example: Callable[[], Example]
    always: tuple[str, ...] = ("static",)
    """Schedules that run without --all, too."""
    schedule: str = "static"
    """That of its mutations."""
    dtype: str = "bfloat16"
    workers: int = 4


STATIC, DYNAMIC, NEVER = ("static",), ("dynamic",), ()
BOTH = ("static", "dynamic")


def experts(
    tokens: int,
    hidden: int,
    inner: int,
    always: tuple[str, ...],
    packs: bool = False,
    count: int = 8,
    workers: int = 4,
) -> Case:
    graph = partial(moe_graph, 1, experts=count, top_k=2, packs=packs)
    make_example = partial(moe, tokens, count, 2, hidden, inner, "bfloat16")
    return Case(graph, make_example, always, workers=workers)


def few(
    tokens: int, hidden: int, tasks: int, always: tuple[str, ...], workers: int = 4
) -> Case:
    options = {"experts": 16, "top_k": 3, "product_tasks": tasks}
    graph = partial(moe_few_tokens_graph, 1, **options)
    make_example = partial(moe, tokens, 16, 3, hidden, 56, "bfloat16")
    return Case(graph, make_example, always, workers=workers)


def experts_of_two(
    parallel: str, tokens: int, always: tuple[str, ...], workers: int = 4
) -> Case:
    graph = partial(moe_graph, 2, experts=8, top_k=2, parallel=parallel)
    return Case(graph, lambda: moe_of_two(parallel, tokens), always, workers=workers)


def shaped(shape: TileShape, *sizes: int) -> Case:
    """One of the shapes of tests/functions/test_tile_matmul.py."""
    return Case(partial(product, 1, shapes=[shape]), lambda: tiles(*sizes), NEVER)


def divided(kind: str, name: str) -> Case:
    """One of the divisions into parts of tests/graphs/parts.py."""
    division = BY_KIND[kind][name]
    options = {"shapes": (division.shape,)}
    graph = partial(graph_of, kind, **options)
    return Case(graph, lambda: given_to(kind, division, **options), NEVER, workers=3)


def applied_to(shape: TileShape) -> Case:
    """A reducing epilogue on tiles of one shape."""
    graph = partial(product, 1, what=all_kinds, shapes=[shape])
    return Case(graph, lambda: applied_given(72, 328, 136, shape), NEVER)


def gated_by(shape: TileShape) -> Case:
    graph = partial(product, 1, what=swiglu, shapes=[shape])
    return Case(graph, lambda: gated(200, 200, 600), NEVER)


def scaled_by(shape: TileShape, sizes: tuple[int, int, int], tiling: Tiling) -> Case:
    """Gated, by float8 weights with a scale for each row, on tiles of one shape."""
    scaling = Scaling(PER_ROW, "float32")
    graph = partial(gated_parts, 1, shapes=[shape], w_layout=scaling.w_layout)
    make_example = partial(gated_by_scaled, sizes, scaling, tiling)
    return Case(graph, make_example, NEVER, workers=2)


def scaled_blocks(
    shape: TileShape,
    sizes: tuple[int, int, int],
    tiling: Tiling,
    *,
    quantizes: bool = False,
) -> Case:
    """By float8 weights with a scale for each block, on tiles of one shape. quantizes:
    with float8 activations."""
    scaling = replace(BLOCKS, quantizes=quantizes)
    graph = partial(matmul_graph, 1, shapes=[shape], w_layout=scaling.w_layout)
    return Case(graph, partial(multiplied, sizes, scaling, tiling), NEVER, workers=2)


def scaled_experts(graph: Any, tokens: int, **options: Any) -> Case:
    """By float8 weights of experts, of which up begins within a block of scales."""
    options |= {"experts": 8, "top_k": 2, "w_layout": BLOCKS.w_layout}
    inputs = partial(scaled_moe, tokens, (8, 272, 208), BLOCKS)
    return Case(partial(graph, 1, **options), inputs, NEVER, workers=2)


def gathered_codes(rows: int, n: int, k: int) -> Case:
    """Of two ranks, each of which quantizes its rows and sends codes and scales."""
    shapes, layout = [WIDE_FLOAT8], FLOAT8_BLOCKS.w_layout
    graph = partial(all_gather_matmul_graph, 2, shapes=shapes, w_layout=layout)

    def make_example() -> Example:
        sizes = {"rows": rows, "n": n, "k": k}
        dims = sizes | dims_of(Tiling(0, WIDE_FLOAT8.columns))
        return *products_of_ranks(graph(), "gather", dims, FLOAT8_BLOCKS), dims

    return Case(graph, make_example, NEVER, workers=2)


BLOCKS = Scaling(PER_BLOCK, "float32")
FLOAT8_BLOCKS = replace(BLOCKS, quantizes=True)
WIDE_FLOAT8 = TileShape(128, 160, float8=True)
TALL_SCALED = TileShape(128, 128, swapped=True, scaled=True)
FLAT = TileShape(128, 160)
ONE_TASK = Sizes(score_tasks=1)
"""Logits are computed in tiles."""
CASES = {
    "moe, tiles of one row": experts(1, 64, 64, DYNAMIC, workers=2),
    "moe, narrow tiles": experts(16, 136, 200, STATIC, workers=2),
    "moe, half as many columns": experts(300, 64, 72, NEVER),
    "moe": experts(300, 320, 264, NEVER),
    "moe, two tiles of an expert": experts(680, 640, 200, NEVER),
    "moe, packed": experts(100, 72, 72, STATIC, True, 16, workers=2),
    "moe, more blocks of tokens than lanes": experts(1100, 8, 8, NEVER),
    "moe, many tokens": experts(8200, 8, 8, NEVER),  # more blocks than threads
    "moe, logits in tiles": Case(
        partial(moe_graph, 1, experts=8, top_k=1, dtype="float16", sizes=ONE_TASK),
        lambda: moe(150, 8, 1, 72, 24, "float16"),
        NEVER,
        dtype="float16",
    ),
    "few": few(3, 104, 8, STATIC, workers=2),
    "wide": few(1, 1000, 1, NEVER),  # more pairs than scratch has room for
    "few, many tasks": few(1, 200, 132, NEVER),
    "moe of two, by expert": experts_of_two("expert", 20, STATIC, workers=2),
    "moe of two, by expert, wider": experts_of_two("expert", 150, NEVER),
    "moe of two, by tensor": experts_of_two("tensor", 150, NEVER),
    # Tiles of 48 and of 8 rows; some of own rows are divided along k.
    "mlp": Case(
        partial(mlp_graph, 2, shapes=[HALVES, TURNS]),
        lambda: mlp(2, 45, 264, 136, Tiling(0, 96, 1, 2), Tiling(1, 32)),
        NEVER,
    ),
    # Two blocks of rows; parts of k of both matmuls.
    "mlp on tiles": Case(
        partial(mlp_tiles_graph, 2, shapes=[TALL_TILE, FLAT]),
        lambda: mlp(2, 120, 200, 136, Tiling(0, 128, 1, 2), Tiling(0, 128, 1, 3)),
        DYNAMIC,
        "dynamic",
        workers=2,
    ),
    # Three pieces of a row of x, and of a row of partial sums.
    "mlp of long rows": Case(
        partial(mlp_tiles_graph, 2, shapes=[TURNS]),
        lambda: mlp(2, 3, 4104, 24, Tiling(0, 64, 1, 4), Tiling(0, 40)),
        NEVER,
        workers=2,
    ),
    # Down waits for all rows, which its tiles divide in another way.
    "mlp on other tiles of rows": Case(
        partial(mlp_tiles_graph, 1, shapes=[TALL_TILE, FLAT]),
        lambda: mlp(1, 264, 136, 200, Tiling(1, 160, 2, 2), Tiling(0, 128, 1, 2)),
        workers=2,
    ),
    # Weights that are loaded ahead fill the ring.
    "ahead": Case(
        partial(chained, 1, shapes=[TileShape(128, 256)]),
        lambda: signs(40, 640),
        workers=2,
    ),
    "ahead, loaded": Case(partial(matmul_of_one, 1), one_of_three, workers=2),
    "ahead, counted": Case(
        partial(matmul_of_one, 1, is_counted=True), one_of_three, workers=2
    ),
    "sum, kn": Case(
        partial(matmul_reduce_scatter_graph, 2, w_layout="kn", shapes=[TALL_TILE]),
        lambda: matmul_reduce_scatter(100, "kn"),
        DYNAMIC,
        workers=2,
    ),
    "sum, few rows": Case(
        partial(matmul_reduce_scatter_graph, 2, shapes=[TURNS]),
        lambda: matmul_reduce_scatter(20, columns=64),
        NEVER,
    ),
    # Two strips of columns; packets of rows of one tile, and of two.
    "sum in strips": Case(
        partial(matmul_reduce_scatter_graph, 2, shapes=[TALL_TILE, HALVES]),
        lambda: matmul_reduce_scatter(68, n=584, shape=1),
        workers=2,
    ),
    # One stage, and four: loads wait for the start of the peer before the last one.
    **{
        f"stored on ranks, {k} of k": Case(
            partial(matmul_all_reduce_graph, 2, shapes=[TURNS]),
            partial(matmul_all_reduce, 37, k, Tiling(0, 24)),
            NEVER,
            workers=2,
        )
        for k in (200, 904)
    },
    # All tiles in parts of k, so that no loads have waited for the peer.
    "sums on ranks": Case(
        partial(matmul_all_reduce_graph, 2, shapes=[TURNS]),
        partial(matmul_all_reduce, 37, 904, Tiling(0, 64, 3, 2)),
        NEVER,
        workers=2,
    ),
    # Two blocks of rows; tiles of own rows that are divided along k.
    "sum": Case(
        partial(matmul_reduce_scatter_graph, 2, shapes=[TALL_TILE, HALVES]),
        lambda: matmul_reduce_scatter(200, split=1, parts=2, n=136),
        workers=2,
    ),
    "sum in fp32": Case(
        partial(
            matmul_reduce_scatter_graph, 2, partials="float32", shapes=FLOAT_FAMILY[:1]
        ),
        lambda: float_partials(40),
        workers=2,
    ),
    "gather": Case(
        partial(all_gather_matmul_graph, 2, shapes=[TALL_TILE]),
        lambda: all_gather_matmul(split=1, parts=2),
        workers=2,
    ),
    "loops": Case(partial(turned_layers, 1), turned, NEVER),
    # Tiles that the first tasks of a run send.
    "sent": Case(
        partial(ring, 2, num_expected=1, send=push_rows("tensor")), rows_of_two
    ),
    "counts": Case(partial(counted_late, 1), numbers, DYNAMIC, schedule="dynamic"),
    "conditions": Case(
        partial(running_sums, 1, kind="local"),
        lambda: sums("local"),
        BOTH,
        dtype="float16",
    ),
    "conditions of dims": Case(
        partial(running_sums, 1, kind="dims"),
        lambda: sums("dims"),
        BOTH,
        dtype="float16",
    ),
    "conditions of ranks": Case(
        partial(sums_over_ranks, 2), lambda: sums_of_ranks(2), DYNAMIC, dtype="float16"
    ),
    "scratch": Case(
        partial(matmul_and_scratch, 1), lambda: matmul(140, 264, 136), workers=2
    ),
    "mixed": Case(
        partial(three_matmuls, 1), lambda: four_matmuls(300, 264, 200), NEVER
    ),
    "stages": Case(
        partial(copied, 1, **in_stages(*SIZES)), lambda: copies(2000), workers=2
    ),
    "short stages": Case(
        partial(copied, 1, **in_stages(*SIZES[::-1])), lambda: copies(2000), NEVER
    ),
    "gathered": Case(partial(gathered_last, 1), lambda: gathered(200, 264), NEVER),
    "tall": shaped(TileShape(240, 128, swapped=True), 238, 264, 136),
    "turns": shaped(TileShape(64, 64, swapped=True), 200, 200, 600),
    "gated warps": gated_by(TileShape(64, 64, swapped=True)),
    "gated groups": gated_by(TileShape(64, 128, swapped=True)),
    "parts, turns": divided("nk", "turns"),
    "parts, halves": divided("nk", "halves"),
    "parts, narrow": divided("nk", "halves, narrow"),
    "parts, tall": divided("nk", "two tall"),
    "parts, wide": divided("nk", "wide"),
    "gated parts, turns": divided("gated", "turns"),
    "gated parts, halves": divided("gated", "halves"),
    "gated parts, rows": divided("gated", "rows"),
    "chained": Case(
        partial(chained, 1, shapes=[TALL_TILE]), lambda: signs(141, 264), NEVER
    ),
    "scaled": scaled_blocks(HALVES, (33, 264, 4368), Tiling(0, 128, 1, 2)),
    "scaled, gated": scaled_by(HALVES, (70, 264, 784), Tiling(0, 128)),
    "scaled, tall": scaled_blocks(TALL_SCALED, (140, 136, 784), Tiling(0, 128)),
    "float8": scaled_blocks(
        WIDE_FLOAT8, (140, 392, 1296), Tiling(0, 160, 1, 2), quantizes=True
    ),
    "float8, gated": Case(
        partial(gated_parts, 1, shapes=[WIDE_FLOAT8], w_layout=FLOAT8_BLOCKS.w_layout),
        partial(gated_by_scaled, (70, 264, 784), FLOAT8_BLOCKS, Tiling(0, 160)),
        NEVER,
        workers=2,
    ),
    "float8, gather": gathered_codes(20, 104, 272),
    "scaled, turns": scaled_blocks(TURNS, (9, 136, 1296), Tiling(0, 48)),
    # Own rows of one tile; parts of k of both matmuls.
    "scaled mlp": Case(
        partial(mlp_tiles_graph, 2, shapes=[HALVES, TURNS], w_layout=BLOCKS.w_layout),
        lambda: scaled_mlp(
            2, 9, 272, 272, BLOCKS, Tiling(0, 128, 1, 2), Tiling(1, 40, 1, 2)
        ),
        workers=2,
    ),
    "moe, scaled": scaled_experts(moe_graph, 40),
    "few, scaled": scaled_experts(moe_few_tokens_graph, 3, product_tasks=12),
    "swapped epilogue": applied_to(TileShape(64, 64, swapped=True)),
    "epilogue": applied_to(TileShape(128, 160)),
}
