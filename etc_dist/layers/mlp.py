"""The dense MLP of a transformer, tensor-parallel, as one persistent kernel a rank."""

from __future__ import annotations

from typing import Any

from etc_dist.compiler import world_or_current
from etc_dist.errors import ArgumentError, expect_range, expect_type
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
from etc_dist.ops.all_gather_matmul import push_packets
from etc_dist.ops.argument_table import ArgumentTable
from etc_dist.ops.matmul_reduce_scatter import add_sum_slots
from etc_dist.ops.operation import (
    Candidate,
    Operation,
    shapes_up_to,
)
from etc_dist.ops.order import (
    ROW_GROUP,
    grouped_rows,
    rotated_owners,
    shards_in_turn,
)
from etc_dist.world import World

COLUMN_GROUP = 16
"""Columns of output tiles that are sent to all owners before the next ones: with fewer,
the down projection starts on rows whose activations are not complete yet."""


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

    gate, up [inner, hidden] and down [hidden, inner] are a rank's shard of the weights,
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
            fix="choose an even number",
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

    gate, up [I / world_size, H] and down [H, I / world_size]: this rank's shard of the
    weights, kept by reference. mlp(x, out=None, stream=None): x [M / world_size, H] ->
    [M / world_size, H], each rank its own rows (sequence-parallel in and out). The
    dtype is that of the weights, bfloat16 or float16. On GPUs H and I / world_size are
    multiples of 8. Arrays and errors as for `MatmulReduceScatter`. Making a layer is
    collective and compiles its programs.

    GEMMs accumulate in fp32, and activations are rounded once to the dtype. The ranks'
    partial sums are rounded to the dtype before they are sent (in fp32 up to few_rows)
    and added in fp32 in rank order: the same bits on every run.

    few_rows: up to so many rows of all ranks (at most 128; 0 for none) use a program in
    which all workers read the weights. packed: so do rows that together fill at least a
    quarter fewer tiles of 256 than each rank's rows do separately, in a program whose
    tiles hold rows of several ranks. schedule, trace: as for `etc_dist.compile`.
    """

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
    ):
        world = world_or_current(world)
        self.weights = gate, up, down
        table = ArgumentTable(
            "MLP",
            world,
            [
                "x [rows, hidden]",
                "gate [inner, hidden]",
                "up [inner, hidden]",
                "down [hidden, inner]",
            ],
            "out [rows, hidden]",
        )
        with world.refusing("the arguments of MLP"):
            known = table.hold(self.weights)
            few_rows = min(expect_range(few_rows, 0, None, "few_rows"), FEW_ROWS)
            expect_type(packed, bool, "packed")
        self.dtype = known.dtype
        candidates = _candidates(world.size, few_rows, packed)
        candidates.append(Candidate(mlp_graph, self.sizes))
        super().__init__(
            table,
            candidates,
            world,
            schedule=schedule,
            trace=trace,
            options={"dtype": known.dtype, "few_rows": few_rows, "packed": packed},
            held=self.weights,
            known=known,
        )

    def __call__(self, x: Any, out: Any = None, *, stream: Any = None) -> Any:
        return self._call((x,), out, stream)


def _candidates(world_size: int, few_rows: int, packed: bool) -> list[Candidate]:
    """The programs for some numbers of rows."""
    candidates = []
    if few_rows > 0:
        candidates.append(
            Candidate(
                mlp_few_rows_graph,
                serves=lambda dims: world_size * dims["rows"] <= few_rows,
                capacity=shapes_up_to("rows", few_rows // world_size),
            )
        )
    most = most_packed(world_size)
    if packed and most > 0:
        candidates.append(
            Candidate(
                mlp_packed_rows_graph,
                serves=lambda dims: are_packed(world_size, dims["rows"]),
                capacity=lambda dims: [{**dims, "rows": most}],
            )
        )
    return candidates
