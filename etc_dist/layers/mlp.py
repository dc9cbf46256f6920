"""The dense MLP of a transformer, tensor-parallel, as one persistent kernel a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from etc_dist.errors import ArgumentError
from etc_dist.functions.matmul import TILE, matmul_gated, matmul_send
from etc_dist.functions.push_rows import PACKET_BYTES
from etc_dist.functions.sum_slots import PIECE_COLUMNS, PIECE_ROWS
from etc_dist.ir import Graph, ceildiv, graph_function, tile
from etc_dist.layers.mlp_few_rows import FEW_ROWS, mlp_few_rows_graph
from etc_dist.layers.mlp_packed_rows import (
    are_packed,
    mlp_packed_rows_graph,
    most_packed,
)
from etc_dist.layers.mlp_steps import add_tensors
from etc_dist.ops.all_gather_matmul import ROW_GROUP, push_packets
from etc_dist.ops.arguments import refuse_unknown, truth, whole_number
from etc_dist.ops.matmul_reduce_scatter import add_sum_slots
from etc_dist.ops.operation import Fitted, Operation, shapes_up_to
from etc_dist.ops.order import grouped_rows, rotated_owners, shards_in_turn
from etc_dist.ops.product import DTYPES
from etc_dist.program import Program, as_refusal
from etc_dist.runtime.arrays import Array, described, dtype_of, inspect, place_on
from etc_dist.world import World, given_world

COLUMN_GROUP = 16
"""Columns of output tiles that all owners get before the next ones: with fewer, the
down projection begins on rows whose activations are only just being made."""


@graph_function
def mlp_graph(
    g: Graph,
    *,
    dtype: str = "bfloat16",
    tile_size: int = TILE,
    piece: tuple[int, int] = (PIECE_ROWS, PIECE_COLUMNS),
    packet_bytes: int = PACKET_BYTES,
) -> None:
    """x [rows, hidden] on each rank -> y [rows, hidden], the same rows.

    gate, up [inner, hidden] and down [hidden, inner] are a rank's share of the weights,
    split along the inner width. All ranks' rows are gathered, multiplied by gate and up
    into activations, and these by down; the partial sums go to the rows' owners. A tile
    of the down projection starts when its rows' activations are complete on its rank.
    """
    if tile_size % 2:  # gate and up have a half each
        raise ArgumentError(
            "tile_size is odd",
            where="mlp_graph",
            wanted="tile_size: an even number",
            got=f"tile_size = {tile_size}",
            fix="leave it out, or choose such a number",
        )
    x, y, (gate, up), down = add_tensors(g, dtype)
    (rows, hidden), (_, inner) = x.shape, down.shape
    world, size = g.world_size, tile_size
    blocks = g.let("blocks", ceildiv(rows, size))
    wide = g.let("wide", ceildiv(inner, size // 2))
    columns = g.let("columns", ceildiv(hidden, size))
    active = g.local("active", (world, rows, inner), dtype)
    activated = g.events("activated", (world, blocks), expects=wide)

    i, j = grid = g.grid(i=blocks, j=wide)
    weights = gate[tile(j, size // 2), :], up[tile(j, size // 2), :]
    g.call(
        matmul_gated(dtype),
        grid,
        name="gate_up_own",
        reads=[x[tile(i, size), :], *weights],
        writes=[active[g.rank, tile(i, size), tile(j, size // 2)]],
        notifies=[activated[g.rank, i]],
        order=lambda t: grouped_rows(t, blocks, wide, ROW_GROUP),
    )
    if world > 1:
        gathered, arrived = push_packets(g, x, blocks, 2 * inner, size, packet_bytes)
        p, i, j = grid = g.grid(p=world - 1, i=blocks, j=wide)
        weights = gate[tile(j, size // 2), :], up[tile(j, size // 2), :]
        source = (g.rank + 1 + p) % world
        g.call(
            matmul_gated(dtype),
            grid,
            name="gate_up_peer",
            reads=[gathered[source, tile(i, size), :], *weights],
            writes=[active[source, tile(i, size), tile(j, size // 2)]],
            waits=[arrived[source, i]],
            notifies=[activated[source, i]],
            order=lambda t: shards_in_turn(t, blocks, wide, ROW_GROUP),
        )

    slots = g.symmetric("slots", (world, blocks, columns, size, size), dtype)
    ready = g.events("ready", (blocks, columns), expects=world, cross_rank=True)
    d, i, j = grid = g.grid(d=world, i=blocks, j=columns)
    g.call(
        matmul_send("nk", dtype),
        grid,
        name="down_projection",
        reads=[active[d, tile(i, size), :], down[tile(j, size), :]],
        writes=[slots.on(d)[g.rank, i, j, :, :]],
        waits=[activated[d, i]],
        notifies=[ready.on(d)[i, j]],
        order=lambda t: rotated_owners(t, world, blocks, columns, COLUMN_GROUP),
    )
    add_sum_slots(g, slots, ready, y, piece)


class MLP(Operation):
    """y = (silu(x @ gate.T) * (x @ up.T)) @ down.T over all ranks, one kernel a rank.

    gate, up [I / world_size, H] and down [H, I / world_size]: this rank's share of the
    weights, kept by reference; mlp(x, out=None, stream=None): x [M / world_size, H] ->
    [M / world_size, H], each rank its own rows (sequence-parallel in and out). bf16 or
    fp16; products accumulate in fp32, the activations are rounded once to the dtype,
    the ranks' partial sums are rounded to the dtype as they travel (not those of
    few_rows) and added in fp32 in rank order: the same bits on every run.
    M up to few_rows (at most 128; 0 for none) goes through a program of its own, in
    which all workers read the weights; so do, if `packed`, rows that fill fewer tiles
    of 256 together than each rank's apart, by more than a quarter. `options` are sizes
    of the program for all others.
    On GPUs H and I / world_size are multiples of 8. Arrays and errors as in
    MatmulReduceScatter. Making one is collective.
    """

    names = ("x", "gate", "up", "down")

    def __init__(
        self,
        gate: Any,
        up: Any,
        down: Any,
        *,
        world: World | None = None,
        schedule: str = "static",
        trace: bool | None = None,
        few_rows: int = FEW_ROWS,
        packed: bool = True,
        options: Mapping[str, Any] | None = None,
    ):
        world = given_world(world)
        dtype = dtype_of(gate)
        refuse_unknown(world, "MLP", dtype=(dtype, DTYPES))
        self.world, self.dtype, self.weights = world, dtype, (gate, up, down)
        try:
            named = zip(self.names[1:], self.weights, strict=True)
            self._check_weights([inspect(*weight) for weight in named])
            self._few_rows = min(whole_number("few_rows", few_rows), FEW_ROWS)
            packed = truth("packed", packed)
        except Exception as error:
            world.refuse(as_refusal(error, "the arguments of MLP"))
        own = {"dtype": dtype}
        others = {"few_rows": self._few_rows, "packed": packed}
        super().__init__(mlp_graph, own, world, schedule, trace, options, others)
        self._many = self.program
        self._packed: Program | None = None
        self._few: Program | None = None
        most = most_packed(world.size)
        if packed and most > 0:
            self._packed = self._compile(mlp_packed_rows_graph, own, schedule, trace)
            self._packed.room = lambda dims: [{**dims, "rows": most}]
        if self._few_rows > 0:
            self._few = self._compile(mlp_few_rows_graph, own, schedule, trace)
            self._few.room = shapes_up_to("rows", self._few_rows // world.size)

    def __call__(self, x: Any, out: Any = None, *, stream: Any = None) -> Any:
        return self._call((x, *self.weights), out, stream)

    def _program_for(self, dims: Mapping[str, int]) -> Program:
        world, rows = self.world.size, dims["rows"]
        if self._few is not None and world * rows <= self._few_rows:
            return self._few
        if self._packed is not None and are_packed(world, rows):
            return self._packed
        return self._many

    def _output_shape(self, *shapes: Sequence[int]) -> tuple[int, ...]:
        return tuple(shapes[0])

    def _check(self, inputs: Sequence[Array]) -> None:
        x, gate, up, down = inputs
        self._check_weights([gate, up, down])
        fits = len(x.shape) == 2 and x.shape[1] == gate.shape[1]
        if not fits or x.dtype != gate.dtype:
            raise self.misfit(
                "x [M, H], gate [I, H], up [I, H], down [H, I], of one dtype",
                described(*inputs),
            )

    def _check_weights(self, weights: Sequence[Array]) -> None:
        gate, up, down = weights
        shape = gate.shape
        fits = len(shape) == 2 and up.shape == shape and down.shape == shape[::-1]
        fits = fits and len({weight.dtype for weight in weights}) == 1
        device = self.world.device
        fits = fits and 0 not in shape and all(w.lies_on(device) for w in weights)
        wanted = "gate [I, H], up [I, H], down [H, I], of one dtype, not empty, "
        wanted += place_on(device)
        if self.world.backend == "cuda":
            fits = fits and not any(n % 8 for n in shape)
            wanted += ", I and H multiples of 8"
        if not fits:
            raise self.misfit(wanted, described(*weights))

    def _tensors(self, inputs: Sequence[Array], y: Array) -> Fitted:
        x, gate, up, down = inputs
        inner, hidden = gate.shape
        dims = {"rows": x.shape[0], "hidden": hidden, "inner": inner}
        return {"x": x, "gate": gate, "up": up, "down": down, "y": y}, dims
