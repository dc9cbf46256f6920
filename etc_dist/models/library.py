"""The programs of the library, for building ahead of time; of models, examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from etc_dist.functions.activation import Activation
from etc_dist.functions.router import Router
from etc_dist.functions.routing import PLAIN, Mixture
from etc_dist.functions.scaled_weights import PER_BLOCK, PER_ROW, Scaling
from etc_dist.ir import GraphFunction
from etc_dist.layers.mlp import mlp_graph
from etc_dist.layers.mlp_tiles import mlp_tiles_graph
from etc_dist.layers.moe import PACKED_INNER
from etc_dist.layers.moe_few_tokens import moe_few_tokens_graph
from etc_dist.layers.moe_graph import PARALLEL, chosen_experts_graph, moe_graph
from etc_dist.models.decoder import decoder_for
from etc_dist.models.experts import DecoderMixture
from etc_dist.models.sizes import DecoderSizes, Features
from etc_dist.ops.all_gather_matmul import (
    all_gather_matmul_graph,
    gathered_matmul_graph,
)
from etc_dist.ops.all_reduce import all_reduce_graph
from etc_dist.ops.all_reduce_norm import all_reduce_norm_graph
from etc_dist.ops.argument_table import DTYPES
from etc_dist.ops.matmul import matmul_graph
from etc_dist.ops.matmul_all_reduce import matmul_all_reduce_graph
from etc_dist.ops.matmul_reduce_scatter import (
    matmul_reduce_scatter_graph,
    returned_matmul_graph,
)
from etc_dist.ops.tile_model import FAMILY, FLOAT8_FAMILY
from etc_dist.schedule import SCHEDULES, Plan

KINDS = ((4, DTYPES[0]), (8, DTYPES[1]))
"""World sizes and dtypes. Programs of other pairs differ in constants and in the types
of instructions only, as do programs of another dtype with the same weights or model.
On one rank, the collectives of a matmul are the matmul.

NOTE: the compiler spills 8 bytes in the MLP of 3 and of 5 ranks, whose divisions by the
world size need more registers."""
FEW_TILES = tuple(
    shape for shape in FAMILY if not shape.swapped or shape.rows in (8, 64, 256)
)
"""Tiles with all kinds of code: others differ from one of them in a number of rows, and
have at most its registers."""
MIXTURES: Mapping[str, tuple[Mixture, int]] = {
    "qwen3-30b-a3b": (Mixture(128, Router(8)), 768),
    "mixtral-8x7b": (Mixture(8, Router(2)), 14336),
}
"""The mixture, and the inner width of all ranks."""
DECODERS: Mapping[str, tuple[int, DecoderSizes]] = {
    "qwen3-32b float8": (
        1,
        DecoderSizes(64, 8, 128, normalizes_heads=True, float8=("gate_up", "down")),
    ),
    "olmo-2-32b of 4": (
        4,
        DecoderSizes(
            10,
            2,
            128,
            features=Features(pre_norm=False, post_norm=True, normalizes_all=True),
        ),
    ),
    "glm-4.6": (
        1,
        DecoderSizes(
            96,
            8,
            128,
            1e-5,
            normalizes_heads=True,
            mixture=DecoderMixture(
                160,
                Router(8, score="sigmoid", scale=2.5, has_correction=True),
                PLAIN,
                has_dense=True,
            ),
            features=Features(qkv_bias=True),
        ),
    ),
    "gpt-oss-20b": (
        1,
        DecoderSizes(
            64,
            8,
            64,
            mixture=DecoderMixture(
                32,
                Router(4, score="softmax_chosen", has_bias=True),
                activation=Activation(alpha=1.702, limit=7.0, shift=1.0),
                has_biases=True,
            ),
            features=Features(
                qkv_bias=True, o_bias=True, has_span=True, has_sinks=True
            ),
        ),
    ),
}
"""Examples of models: the ranks, and the sizes of one."""


def library_programs() -> Iterator[tuple[str, Plan]]:
    """(name, plan) of each program: one of each kind of code. Some have FEW_TILES."""
    for name, schedule, graph in library_graphs():
        yield name, SCHEDULES[schedule](graph)


def library_graphs() -> Iterator[tuple[str, str, GraphFunction]]:
    """(name, schedule, graph) of each program."""
    for name, graph in _graphs():
        yield name, "static", graph
    for name, graph in _dynamic_graphs():
        yield f"{name} dynamic", "dynamic", graph


def _graphs() -> Iterator[tuple[str, GraphFunction]]:
    yield from _matmul_graphs()
    yield from _float8_graphs()
    yield from _sum_graphs()
    yield from _mlp_graphs()
    yield from _mixture_graphs()
    for model, (ranks, sizes) in DECODERS.items():
        graph = decoder_for("static", ranks, sizes)
        yield f"{graph.name} {model} {sizes.dtype}", graph


def _matmul_graphs() -> Iterator[tuple[str, GraphFunction]]:
    """On one rank, and with a gathering or a reduction of rows."""
    for make, world_size, dtype, w_layout in (
        (matmul_graph, 1, DTYPES[0], "nk"),
        (matmul_graph, 1, DTYPES[1], "kn"),
        (all_gather_matmul_graph, 4, DTYPES[0], "kn"),
        (gathered_matmul_graph, 8, DTYPES[0], "nk"),
        (matmul_reduce_scatter_graph, 8, DTYPES[1], "nk"),
        (returned_matmul_graph, 4, DTYPES[0], "kn"),
    ):
        graph = make(world_size, dtype=dtype, w_layout=w_layout, shapes=FEW_TILES)
        yield f"{graph.name} few tiles {world_size} {dtype} {w_layout}", graph
    graph = matmul_reduce_scatter_graph(8, partials="float32")
    yield f"{graph.name} 8 {DTYPES[0]} float32", graph
    graph = matmul_all_reduce_graph(4, shapes=FEW_TILES)
    yield f"{graph.name} few tiles 4 {DTYPES[0]}", graph


def _float8_graphs() -> Iterator[tuple[str, GraphFunction]]:
    """Matmuls and MLPs by scaled weights, and of scaled activations."""
    layout = Scaling(PER_ROW, "float32").w_layout
    graph = matmul_graph(1, dtype=DTYPES[1], w_layout=layout)
    yield f"{graph.name} float8 per row 1 {DTYPES[1]}", graph
    layout = Scaling(PER_BLOCK, "float32").w_layout
    graph = mlp_tiles_graph(4, w_layout=layout)
    yield f"{graph.name} float8 per block 4 {DTYPES[0]}", graph
    layout = Scaling(PER_BLOCK, "float32", quantizes=True).w_layout
    for make in (matmul_all_reduce_graph, mlp_graph):
        graph = make(4, w_layout=layout, shapes=FLOAT8_FAMILY)
        yield f"{graph.name} float8 activations 4 {DTYPES[0]}", graph


def _sum_graphs() -> Iterator[tuple[str, GraphFunction]]:
    """All-reduces."""
    for world_size, dtype in ((1, DTYPES[0]), *KINDS):
        for make_sum in (all_reduce_graph, all_reduce_norm_graph):
            graph = make_sum(world_size, dtype=dtype, has_flags=world_size > 1)
            yield f"{graph.name} {world_size} {dtype}", graph


def _mlp_graphs() -> Iterator[tuple[str, GraphFunction]]:
    graph = mlp_graph(4)
    yield f"{graph.name} 4 {DTYPES[0]}", graph
    graph = mlp_tiles_graph(8, dtype=DTYPES[1], shapes=FEW_TILES)
    yield f"{graph.name} few tiles 8 {DTYPES[1]}", graph


def _mixture_graphs() -> Iterator[tuple[str, GraphFunction]]:
    for (model, (mixture, inner)), dtype in zip(MIXTURES.items(), DTYPES, strict=True):
        graph = moe_few_tokens_graph(1, mixture=mixture, dtype=dtype)
        yield f"{graph.name} {model} {dtype}", graph
        per = PER_BLOCK if dtype == DTYPES[0] else PER_ROW
        layout = Scaling(per, "float32").w_layout
        graph = moe_few_tokens_graph(1, mixture=mixture, dtype=dtype, w_layout=layout)
        yield f"{graph.name} {model} float8 per {per} {dtype}", graph
        if dtype == DTYPES[0]:
            counts = {"experts": mixture.experts, "top_k": mixture.router.top_k}
            graph = chosen_experts_graph(1, **counts, dtype=dtype, w_layout=layout)
        else:
            graph = moe_graph(1, mixture=mixture, dtype=dtype, w_layout=layout)
        yield f"{graph.name} {model} float8 per {per} {dtype}", graph
        # An expert-parallel program has all functions of a tensor-parallel one.
        divisions = PARALLEL if dtype == DTYPES[0] else ("expert",)
        for parallel in divisions:
            share = 4 if parallel == "tensor" else 1
            packs = inner // share >= PACKED_INNER
            options = {"dtype": dtype, "packs": packs, "parallel": parallel}
            graph = moe_graph(4, mixture=mixture, **options)
            yield f"{graph.name} {model} {parallel} 4 {dtype}", graph


def _dynamic_graphs() -> Iterator[tuple[str, GraphFunction]]:
    """Examples: on one rank and on several, with and without loads."""
    for make, world_size in ((matmul_graph, 1), (all_gather_matmul_graph, 4)):
        graph = make(world_size, shapes=FEW_TILES)
        yield f"{graph.name} few tiles {world_size}", graph
    model, (mixture, _) = next(iter(MIXTURES.items()))
    graph = moe_graph(4, mixture=mixture, parallel="expert")
    yield f"{graph.name} {model} expert 4", graph
