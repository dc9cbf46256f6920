"""A decode step whose work list is a result: a task for each page of each request."""

from __future__ import annotations

from etc_dist.ir import Graph, graph_function, span, up_to
from tests.graphs.kit import touch


@graph_function
def decode_list(g: Graph, *, starts: bool = True, arrives: bool = False) -> None:
    """`plan` writes the list and the number of its items. An item names its request,
    which expects as many notifications as it has pages. Without `starts`, nothing
    orders the requests after the list. With `arrives`, an item waits for an event of
    its own, too."""
    requests, pages = g.dims("requests pages")
    items = g.let("items", requests * pages)
    table = g.input("table", (requests, pages), "int32")
    q, y = (
        make(name, (requests, 128), "float32")
        for make, name in ((g.input, "q"), (g.output, "y"))
    )
    cache = g.input("cache", (items, 64, 128), "float32")
    count, start, total = (
        g.local(name, (size,), "int32")
        for name, size in (("count", requests), ("start", requests), ("total", 1))
    )
    request, page = (g.local(name, (items,), "int32") for name in ("request", "page"))
    part = g.local("part", (items, 128), "float32")
    plan_event = g.events("planned", (1,), expects=1)
    request_events = g.events("done", (requests,), expects=lambda r: count.load(r))
    lists = [tensor[:] for tensor in (count, start, total, request, page)]
    g.call(
        touch(0, 5), g.grid(one=1), name="plan", writes=lists, notifies=[plan_event[0]]
    )
    order_waits = []
    if arrives:
        item_events = g.events("arrived", (items,), expects=1)
        (i,) = grid = g.grid(i=up_to(items, total.load(0)))
        waits, notifies = [plan_event[0]], [item_events[i]]
        g.call(touch(0, 0), grid, name="arrive", waits=waits, notifies=notifies)
    (i,) = grid = g.grid(i=up_to(items, total.load(0)))
    if arrives:
        order_waits = [item_events[i]]
    request_idx = request.load(i)
    g.call(
        touch(2, 1),
        grid,
        name="attend",
        reads=[q[request_idx, :], cache[table.load(request_idx, page.load(i)), :, :]],
        writes=[part[i, :]],
        waits=[plan_event[0], *order_waits],
        notifies=[request_events[request_idx]],
    )
    (r,) = grid = g.grid(r=requests)
    g.call(
        touch(1, 1),
        grid,
        name="combine",
        reads=[part[span(start.load(r), count.load(r)), :]],
        writes=[y[r, :]],
        waits=[plan_event[0], request_events[r]] if starts else [request_events[r]],
    )
