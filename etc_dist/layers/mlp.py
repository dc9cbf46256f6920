"""The dense MLP of a transformer, tensor-parallel, as one persistent kernel a rank."""

from __future__ import annotations

from typing import Any

from etc_dist.compiler import world_or_current
from etc_dist.errors import ArgumentError
from etc_dist.functions.matmul import TILE, matmul_gated, matmul_send
from etc_dist.functions.push_rows import PACKET_BYTES
from etc_dist.functions.sum_slots import PIECE_COLUMNS, PIECE_ROWS
from etc_dist.ir import Graph, ceildiv, graph_function, tile
from etc_dist.ir.expr import wrap
from etc_dist.layers.mlp_policy import choose_tiles
from etc_dist.layers.mlp_steps import add_tensors
from etc_dist.layers.mlp_tiles import mlp_tiles_graph
from etc_dist.ops.all_gather_matmul import push_packets, source_of
from etc_dist.ops.deterministic import BATCH
from etc_dist.ops.few_rows import MOST_ROWS, capacity_dims, has_few_rows
from etc_dist.ops.operation import Candidate, Operation
from etc_dist.ops.order import ROW_GROUP, grouped_rows, shards_in_turn
from etc_dist.ops.slots import add_sum_slots, make_slots
from etc_dist.ops.tile_model import FAMILY
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
    gathered, arrived = push_packets(g, x, blocks, 2 * inner, wrap(size), packet_bytes)
    p, i, j = grid = g.grid(p=world - 1, i=blocks, j=wide)
    weights = gate[tile(j, size // 2), :], up[tile(j, size // 2), :]
    source = source_of(g, p)
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

    slots = make_slots(g, blocks, columns, size, dtype, COLUMN_GROUP)
    *_, i, j = slots.grid
    g.call(
        matmul_send("nk", dtype),
        slots.grid,
        name="down_projection",
        reads=[active[slots.owner, tile(i, size), :], down[tile(j, size), :]],
        writes=[slots.slot],
        waits=[activated[slots.owner, i]],
        notifies=[slots.ready],
        order=slots.order,
    )
    add_sum_slots(g, slots, y, piece)


class SharedMLP(Operation):
    """`MLP` with the weights as arguments, so that layers of one shape share a program
    and its buffers: `call((x, gate, up, down), out, stream)`."""

    inputs = (
        "x [rows, hidden]",
        "gate [inner, hidden]",
        "up [inner, hidden]",
        "down [hidden, inner]",
    )
    output = "out [rows, hidden]"
    most_gathered = MOST_ROWS
    """Internal: the rows of all ranks that the first program serves, on several."""

    def candidates(self) -> list[Candidate]:
        """Internal: the programs for up to `most_gathered` rows of all ranks, and for
        more on several ranks. Over several hosts the latter serves all."""
        overlapped = Candidate(mlp_graph, over_hosts=True)
        if self.world.hosts.count > 1:
            return [overlapped]
        ranks, most = self.world.size, self.most_gathered
        shapes, in_order = self.sizes.get("shapes", FAMILY), self.deterministic == BATCH
        names = "gate_up_", "down_"
        tiles = Candidate(
            mlp_tiles_graph,
            self.sizes,
            serves=lambda dims: ranks == 1 or has_few_rows(dims["rows"], ranks, most),
            capacity=lambda w_layout, dims, workers: capacity_dims(
                *(dims, most // ranks, shapes, workers, ranks, names),
                in_order=in_order,
            ),
            policy=lambda tuning, w_layout, dims, workers: choose_tiles(
                dims, ranks, workers, shapes, in_order=in_order, tuning=tuning
            ),
        )
        return [tiles] if ranks == 1 else [tiles, overlapped]


class MLP(SharedMLP):
    """y = (silu(x @ gate.T) * (x @ up.T)) @ down.T over all ranks, one kernel a rank.

    gate, up [I / world_size, H] and down [H, I / world_size]: this rank's shard of the
    weights, kept by reference. mlp(x, out=None, stream=None): x [M / world_size, H] ->
    [M / world_size, H], each rank its own rows (sequence-parallel in and out). The
    dtype is that of the weights, bfloat16 or float16. On GPUs H and I / world_size are
    multiples of 8. Arrays and errors as for `MatmulReduceScatter`. Making a layer is
    collective and compiles its programs.

    GEMMs accumulate in fp32, and activations are rounded once to the dtype. The ranks'
    partial sums are rounded to the dtype before they are sent, and added in fp32 in
    rank order: the same bits on every run.

    Two programs: one for a single rank, and for few rows of several ranks, with tiles
    that suit their number; the other overlaps transfers with computation. schedule,
    trace: as for `etc_dist.compile`. deterministic: as for `Matmul`.
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
        deterministic: str = "run",
    ):
        world = world_or_current(world)
        self._hold(world, gate, up, down)
        self.dtype = self.known.dtype
        self.options = {"dtype": self.dtype}
        super().__init__(
            world=world, schedule=schedule, trace=trace, deterministic=deterministic
        )

    def __call__(self, x: Any, out: Any = None, *, stream: Any = None) -> Any:
        """Run on x; returns `out`, or a new array. Collective."""
        return self.call((x,), out, stream)
