"""All-reduce: each rank gets the sum over ranks of x."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etc_dist.compiler import world_or_current
from etc_dist.errors import expect_choice
from etc_dist.functions.share_sum import share_sum
from etc_dist.ir import (
    Expr,
    Graph,
    GraphFunction,
    ceildiv,
    equal,
    graph_function,
    select,
    tile,
)
from etc_dist.ops.exchange_model import (
    FLAGGED,
    LEAST_PIECE,
    ONE_SHOT,
    TWO_SHOT,
    AllReduceSizes,
    choose_algorithm,
    largest_sizes,
)
from etc_dist.ops.operation import Candidate, Operation
from etc_dist.ops.sum_steps import (
    Shares,
    add_flagged_sum,
    add_one_shot,
    add_two_shot,
)
from etc_dist.ops.tuning import Tuning
from etc_dist.program import GPU_WORKERS
from etc_dist.schedule.plan import Choice
from etc_dist.world import World


@graph_function
def all_reduce_graph(
    g: Graph, *, dtype: str = "bfloat16", has_flags: bool = False
) -> None:
    """x [8 * rows * vectors] on each rank -> y, the sum over ranks, both of `dtype`; y
    may be x.

    The dim `algorithm` selects one or two exchanges, by its position in ALGORITHMS;
    `piece` are the vectors of a task. Over several hosts there are always two.
    has_flags: also one exchange of flagged words, of `flag_tasks` tasks, which are 0 or
    a multiple of the workers; not for dynamic schedules."""
    rows, vectors, algorithm, piece = g.dims("rows vectors algorithm piece")
    total = g.let("total", rows * vectors)
    x = g.input("x", (8 * total,), dtype)
    y = g.output("y", (8 * total,), dtype, over=x)
    if g.world_size == 1:
        (i,) = grid = g.grid(i=ceildiv(total, piece))
        elements = tile(i, 8 * piece)
        g.call(
            share_sum(dtype, 1),
            grid,
            name="copy",
            reads=[x[elements]],
            writes=[y[elements]],
        )
        return

    def uses(number: int) -> Expr:
        return g.let(f"uses_{number}", select(equal(algorithm, number), 1, 0))

    if g.local_size < g.world_size:
        add_two_shot(g, x, y, Shares.of(g, total, piece, 1))
        return
    if has_flags:
        add_flagged_sum(g, x, y, piece, g.dims("flag_tasks"))
    add_one_shot(g, x, y, piece, uses(ONE_SHOT))
    add_two_shot(g, x, y, Shares.of(g, total, piece, uses(TWO_SHOT)))


class SumOperation(Operation):
    """Internal: base of operations whose graph has the dims of `all_reduce_graph`."""

    def exchange(self, dims: Mapping[str, int], has_flags: bool) -> AllReduceSizes:
        """The exchange of a call."""
        raise NotImplementedError

    def dims_of(self, dims: Mapping[str, int], count: int) -> Mapping[str, int]:
        """Those of a call with so many units of the exchange."""
        raise NotImplementedError

    def candidate(
        self, graph: Callable[..., GraphFunction], **options: Any
    ) -> Candidate:
        """Internal: with the algorithm chosen for each call."""
        world = self.world
        is_near = 1 < world.size == world.local_size
        self._has_flags = is_near and self._schedule != "dynamic"
        flags = {"has_flags": True} if self._has_flags else {}
        return Candidate(
            graph,
            {**options, **flags},
            capacity=self._capacity,
            policy=self._choose,
            over_hosts=True,
        )

    def _capacity(
        self, w_layout: str, dims: Mapping[str, int], workers: int
    ) -> list[Mapping[str, int]]:
        """For all sizes up to this one: a smaller one may use more memory by another
        algorithm, or more events by smaller pieces."""
        calls: list[Mapping[str, int]] = []
        for algorithm, count in largest_sizes(self.exchange(dims, self._has_flags)):
            call_dims = {**dims, **self.dims_of(dims, count)}
            call_dims |= {"algorithm": algorithm, "piece": LEAST_PIECE}
            if self._has_flags:
                num_tasks = self._flag_tasks(algorithm, call_dims["rows"], workers)
                call_dims["flag_tasks"] = num_tasks
            calls.append(call_dims)
        return calls

    def _flag_tasks(self, algorithm: int, rows: int, workers: int) -> int:
        """The tasks that exchange flagged words, a multiple of the workers; on the CPU
        backend a plan is proved for those of a GPU, too."""
        if algorithm != FLAGGED:
            return 0
        if self.world.backend == "cpu":
            workers = math.lcm(workers, GPU_WORKERS)
        return workers * -(-rows // workers)

    def _choose(
        self, tuning: Tuning, w_layout: str, dims: Mapping[str, int], workers: int
    ) -> Sequence[Choice]:
        exchange = self.exchange(dims, self._has_flags)
        rows = self.dims_of(dims, exchange.count)["rows"]
        num_tasks = self._flag_tasks(exchange.fastest, rows, workers)
        choices = choose_algorithm(exchange, num_tasks or workers)
        flagged = [Choice("flag_tasks", num_tasks, list)] if self._has_flags else []
        return [*choices, *flagged]


class AllReduce(SumOperation):
    """All-reduce as a reusable object.

    op(x, out=None, stream=None): x [M, H] on every rank, each with its own values;
    returns out [M, H], the sum over ranks, the same bits on all ranks. out may be x. M
    is at least 1, H a multiple of 8.

    The dtype is that of x, bfloat16 or float16. Sums are in fp32 in rank order, and
    rounded once: the same bits on every run. Over several hosts the ranks of a host are
    added first, in fp32, and then the sums of hosts, in their order.

    Small arrays take one exchange: each rank stores x on all ranks, and each adds; the
    smallest ones as flagged words (not with schedule="dynamic"). Large arrays take two:
    each rank adds a share, and stores the sum on all ranks. `show` prints the choice,
    predicted times and the memory.

    reduction: "sum", the only one. Arrays, other options and errors as for
    `MatmulReduceScatter`.
    """

    inputs = ("x [rows, 8 * vectors]",)
    output = "out [rows, 8 * vectors]"
    over: Mapping[str, str] = {"out": "x"}

    def __init__(
        self,
        *,
        reduction: str = "sum",
        world: World | None = None,
        schedule: str = "static",
        trace: bool | None = None,
        deterministic: str = "run",
    ):
        world = world_or_current(world)
        with world.refusing(f"the options of {type(self).__name__}"):
            expect_choice(reduction, ["sum"], "reduction")
        super().__init__(
            world=world, schedule=schedule, trace=trace, deterministic=deterministic
        )

    def __call__(self, x: Any, out: Any = None, *, stream: Any = None) -> Any:
        """Run on x; returns `out`, or a new array. Collective."""
        return self.call((x,), out, stream)

    def candidates(self) -> list[Candidate]:
        """Internal: one graph, with the algorithm chosen for each call."""
        return [self.candidate(all_reduce_graph)]

    def exchange(self, dims: Mapping[str, int], has_flags: bool) -> AllReduceSizes:
        """Internal: in vectors."""
        world, vectors = self.world, dims["rows"] * dims["vectors"]
        return AllReduceSizes(vectors, 1, world.size, world.local_size, has_flags)

    def dims_of(self, dims: Mapping[str, int], count: int) -> Mapping[str, int]:
        """Internal: `count` vectors."""
        return {"rows": 1, "vectors": count}
