"""A graph of one task on whole arrays, for tests of what surrounds a task."""

from __future__ import annotations

from etc_dist.ir import DeviceFunction, Graph, graph_function


@graph_function
def whole(
    g: Graph,
    *,
    function: DeviceFunction,
    dtype: str = "float32",
    x: tuple[str | int, ...] = ("n",),
    y: tuple[str | int, ...] = ("n",),
) -> None:
    """y is what `function` makes of x, if it reads something. x, y: their extents, of
    which names are dims."""
    names = dict.fromkeys(n for n in (*x, *y) if isinstance(n, str))
    dims = {name: g.dims(name) for name in names}
    shapes = [tuple(dims.get(extent, extent) for extent in shape) for shape in (x, y)]
    reads = [g.input("x", shapes[0], dtype)] if function.reads else []
    written = g.output("y", shapes[1], dtype)
    g.call(
        function,
        g.grid(i=1),
        reads=[tensor[(slice(None),) * len(x)] for tensor in reads],
        writes=[written[(slice(None),) * len(y)]],
    )
