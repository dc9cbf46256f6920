"""The dense MLP of a transformer, tensor-parallel, as one persistent kernel a rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from etc_dist.compiler import world_or_current
from etc_dist.functions.epilogue import swiglu
from etc_dist.functions.push_rows import PACKET_BYTES
from etc_dist.functions.tile_shape import TileShape, shapes_for
from etc_dist.ir import Graph, equal, graph_function, select
from etc_dist.layers.mlp_policy import choose_tiles
from etc_dist.layers.mlp_steps import add_tensors
from etc_dist.layers.mlp_tiles import mlp_tiles_graph
from etc_dist.ops.all_gather_matmul import add_gathered_matmul
from etc_dist.ops.deterministic import BATCH
from etc_dist.ops.few_rows import MOST_ROWS, capacity_dims, has_few_rows
from etc_dist.ops.multiply import Matrix, RowEvents, tiles_of_dims
from etc_dist.ops.operation import Candidate, Capacity, ScalableOperation
from etc_dist.ops.quantized_rows import rows_for
from etc_dist.ops.rank_tiles import RankTiles
from etc_dist.ops.return_rows import add_returned_matmul
from etc_dist.ops.tile_model import FAMILY
from etc_dist.world import World


@graph_function
def mlp_graph(
    g: Graph,
    *,
    dtype: str = "bfloat16",
    w_layout: str = "nk",
    shapes: Sequence[TileShape] = FAMILY,
    packet_bytes: int = PACKET_BYTES,
) -> None:
    """x [rows, hidden] on each rank -> y [rows, hidden], the same rows.

    gate, up [inner, hidden] and down [hidden, inner] are a rank's shard of the weights,
    split along the inner width. All ranks' rows are gathered, multiplied by gate and up
    into activations, and these by down; the partial sums go to the rows' owners. A tile
    of the down projection starts when its rows' activations are complete on its rank:
    those of the tile if both matmuls have tiles of equally many rows, else all of the
    rows' owner. With a layout of float8 activations, x is quantized before it is
    gathered, and the activations before they are multiplied. The dims of tiles begin
    with `gate_up_` and `down_`: see `tiles_of_dims` and `TiledMatmul`."""
    x, y, (gate, up), down = add_tensors(g, dtype, w_layout)
    (rows, _), (_, inner), world = x.shape, down.shape, g.world_size
    tiles = tiles_of_dims(g, "gate_up_", shapes, rows, w_layout)
    down_tiles = tiles_of_dims(g, "down_", shapes, rows, w_layout)
    block = select(equal(tiles.rows, down_tiles.rows), tiles.rows, rows)
    block = g.let("activated_rows", block)
    active = g.local("active", (world, rows, inner), dtype)
    local_active = Matrix(active, (g.rank,))
    own_rows, own_events = rows_for(g, "gate_up_", tiles, x, 2 * inner, None)
    own_x, weights = Matrix.of(own_rows), (gate, up)
    matmul = RankTiles(
        g, "gate_up_", tiles, dtype, own_x, weights, local_active, swiglu
    )
    events = matmul.complete_rows("activated", world, block, g.rank)
    activated = RowEvents(events, block)
    add_gathered_matmul(
        g,
        matmul,
        own_rows,
        active,
        2 * inner,
        packet_bytes,
        waits=own_events,
        complete=activated,
    )
    add_returned_matmul(g, "down_", down_tiles, active, down, y, waits=activated)


class SharedMLP(ScalableOperation):
    """`MLP` with the weights as arguments, so that layers of one shape share a program
    and its buffers: `call((x, gate, up, down), out, stream)`."""

    inputs = (
        "x [rows, hidden]",
        "gate [inner, hidden]",
        "up [inner, hidden]",
        "down [hidden, inner]",
    )
    output = "out [rows, hidden]"
    scalable = ("gate", "up", "down")
    most_gathered = MOST_ROWS
    """Internal: the rows of all ranks that the first program serves, on several."""

    def candidates(self) -> list[Candidate]:
        """Internal: the programs for up to `most_gathered` rows of all ranks, and for
        more on several ranks. Over several hosts the latter serves all."""
        ranks, most = self.world.size, self.most_gathered
        in_order = self.deterministic == BATCH
        names = "gate_up_", "down_"

        def capacity(
            most: int, own_ranks: int, shapes: Sequence[TileShape]
        ) -> Capacity:
            return lambda w_layout, dims, workers: capacity_dims(
                dims,
                most,
                shapes_for(w_layout, shapes),
                workers,
                own_ranks,
                names,
                in_order=in_order,
            )

        family = {"shapes": self.family, **self.sizes}
        shapes = family["shapes"]
        overlapped = Candidate(
            partial(mlp_graph, shapes=self.family),
            over_hosts=True,
            capacity=capacity(1, 1, self.family),
            policy=lambda tuning, w_layout, dims, workers: choose_tiles(
                dims,
                ranks,
                workers,
                shapes_for(w_layout, self.family),
                in_order=in_order,
                tuning=tuning,
                of_one_rank=True,
            ),
        )
        if self.world.hosts.count > 1:
            return [overlapped]
        tiles = Candidate(
            mlp_tiles_graph,
            family,
            serves=lambda dims: ranks == 1 or has_few_rows(dims["rows"], ranks, most),
            capacity=capacity(most // ranks, ranks, shapes),
            policy=lambda tuning, w_layout, dims, workers: choose_tiles(
                dims,
                ranks,
                workers,
                shapes_for(w_layout, shapes),
                in_order=in_order,
                tuning=tuning,
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

    The weights may each be a `ScaledWeight`, as for `Matmul`, with scales of one kind
    and dtype. The dtype is then that of x, at whose first call a program is compiled.

    GEMMs accumulate in fp32, and activations are rounded once to the dtype. The ranks'
    partial sums are rounded to the dtype before they are sent, and added in fp32 in
    rank order: the same bits on every run.

    Two programs: one for a single rank, and for few rows of several ranks, with tiles
    that suit their number; the other overlaps transfers with computation. schedule,
    trace: as for `etc_dist.compile`. deterministic: as for `Matmul`. activations: as
    for `Matmul`: "float8" quantizes x before its rows are sent to peers, and the
    activations after they are rounded to the dtype.
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
        activations: str = "16-bit",
    ):
        world = world_or_current(world)
        self._hold(world, gate, up, down, activations=activations)
        self.dtype = self.known.dtype
        self.options = {"dtype": self.dtype}
        super().__init__(
            world=world,
            schedule=schedule,
            trace=trace,
            deterministic=deterministic,
            activations=activations,
        )

    def __call__(self, x: Any, out: Any = None, *, stream: Any = None) -> Any:
        """Run on x; returns `out`, or a new array. Collective."""
        return self.call((x,), out, stream)
