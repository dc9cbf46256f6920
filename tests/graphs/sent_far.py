"""Messages to another host: one of each rank, or one for each row."""

from __future__ import annotations

from collections.abc import Callable

from etc_dist.functions.push_far import push_far
from etc_dist.functions.push_rows import push_rows
from etc_dist.ir import (
    DeviceFunction,
    Expr,
    Graph,
    GraphFunction,
    Tensor,
    graph_function,
)
from tests.graphs.calls import Task, calls


def partner(g: Graph) -> Expr:
    """The rank of the same number on the next host."""
    return (g.rank + g.local_size) % g.world_size


@graph_function
def sent_far(
    g: Graph,
    *,
    to: Callable[[Graph], Expr] = partner,
    copy: DeviceFunction | None = None,
    send: DeviceFunction | None = None,
    dtype: str = "float32",
    counts: bool = False,
    overwrites: bool = False,
    keep: DeviceFunction | None = None,
) -> None:
    """y is the x that comes to a rank. to: where its own goes. counts: tasks wait for
    `count` notifications. overwrites: what was sent is overwritten in the same run,
    which is wrong. keep: z is x, by tasks that do not wait."""
    n = g.dims("n")
    x, y = g.input("x", (n,), dtype), g.output("y", (n,), dtype)
    box, local_rows = (g.symmetric(name, (n,), dtype) for name in ("box", "own"))
    expects = g.input("count", (8,), "int32").load(0) if counts else 1
    came = g.events("came", (1,), expects=expects, cross_rank=True)
    ready = g.events("ready", (1,), expects=1)
    rank, copy, grid = to(g), copy or push_rows(), g.grid(i=1)

    def add(f: DeviceFunction, name: str, of: Tensor, to: Tensor, **events) -> None:
        g.call(f, grid, name=name, reads=[of[:]], writes=[to[:]], **events)

    add(copy, "keep", x, local_rows, notifies=[ready[0]])
    g.call(
        send or push_far(),
        grid,
        name="send",
        reads=[local_rows[:]],
        writes=[box.on(rank)[:]],
        waits=[ready[0]],
        notifies=[came.on(rank)[0]],
    )
    if overwrites:
        # The partner's rows show that it has begun, not that this rank's have left.
        moved = g.events("moved", (1,), expects=1)
        add(copy, "again", box, local_rows, waits=[came[0]], notifies=[moved[0]])
        add(copy, "take", local_rows, y, waits=[moved[0]])
    else:
        add(copy, "take", box, y, waits=[came[0]])
    if keep:
        add(keep, "keep_own", x, g.output("z", (n,), dtype))


def send_rows() -> GraphFunction:
    """Each row is filled by the tensor lane, sent to the next host, and used there."""
    parts = """
        symmetric staged [rows, n] float32
        symmetric arrived [rows, n] float32
        events ready [rows] expects 1
        cross-rank events come [rows] expects 1
    """
    next_host, staged, arrivals = (
        "on((rank + 1) % ranks)",
        "staged[i, :]",
        "arrived[i, :]",
    )
    fill = {"reads": ["x rows[i] n float32"], "writes": [staged]}
    send = {"reads": [staged], "writes": [f"arrived.{next_host}[i, :]"]}
    events = {"waits": ["ready[i]"], "notifies": [f"come.{next_host}[i]"]}
    use = {"reads": [arrivals], "writes": ["y rows[i] n float32"]}
    filler, by_row = push_rows(lane="tensor"), {"grid": "i: rows"}
    tasks = [
        Task(filler, name="fill", notifies=["ready[i]"], **fill, **by_row),
        Task(push_far(), name="send", **send, **events, **by_row),
        Task(push_rows(), name="use", waits=["come[i]"], **use, **by_row),
    ]
    return calls(2, tasks=tasks, dims="rows n", parts=parts, local_size=1)
