"""Index arithmetic has 32 bits on GPUs; the CPU backend would compute with more."""

import pytest

from etc_dist.errors import GraphError
from etc_dist.ir import DeviceFunction, Graph, graph_function, tile
from etc_dist.schedule import schedule_static
from etc_dist.verify.verify import verify

ROWS = 500
COPY = DeviceFunction("copy", print, "copy.cuh", "tensor", reads=1, writes=1)


def proved(read=lambda i, n: i, order=None):
    @graph_function
    def graph(g: Graph) -> None:
        n = g.dims("n")
        x, y = g.input("x", (n, 4), "float32"), g.output("y", (n, 4), "float32")
        (i,) = grid = g.grid(i=n)
        writes = [y[i, :]]
        g.call(COPY, grid, reads=[x[read(i, n), :]], writes=writes, order=order)

    return verify(schedule_static(graph(1)), {"n": ROWS}, workers=4)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (lambda i, n: i * 2654435761 % n, "2654435761 in .* may be 2654435761 to"),
        (lambda i, n: (i * 5000000 + 7) % n, "5000000 in .* may be 0 to 2495000000"),
        (lambda i, n: (0 - i) * 5000000 % n, "may be -2495000000 to 0"),
    ],
)
def test_an_index_beyond_32_bits_is_refused(read, text):
    with pytest.raises(GraphError, match=text):
        proved(read)


def test_an_order_beyond_32_bits_is_refused():
    with pytest.raises(GraphError, match="index arithmetic has 32 bits"):
        proved(order=lambda t: (t * 10000019 % ROWS,))


@pytest.mark.parametrize("place", ["shape", "grid", "events"])
def test_a_size_beyond_32_bits_is_refused(place):
    @graph_function
    def graph(g: Graph) -> None:
        n = g.dims("n")
        sizes = {**dict.fromkeys(("shape", "grid", "events"), 4), place: n * n // n}
        x, y = (
            g.input("x", (n,), "float32"),
            g.output("y", (sizes["shape"],), "float32"),
        )
        done = g.events("done", (sizes["events"],), expects=0)
        (i,) = grid = g.grid(i=sizes["grid"])
        g.call(COPY, grid, reads=[x[0:4]], writes=[y[tile(i, n)]], waits=[done[0]])

    with pytest.raises(GraphError, match=r"n \* n in n \* n // n may be"):
        verify(schedule_static(graph(1)), {"n": 65536}, workers=4)


@pytest.mark.parametrize("columns", [2**15, 2**15 + 1])
def test_a_load_beyond_32_bits_is_refused(columns):
    @graph_function
    def graph(g: Graph) -> None:
        n, m = g.dims("n m")
        table = g.input("table", (n, m), "int32")
        x, y = (
            make(name, (4,), "float32")
            for make, name in ((g.input, "x"), (g.output, "y"))
        )
        at = table.load(0, 0)
        g.call(COPY, g.grid(i=1), reads=[x[tile(at, 4)]], writes=[y[:]])

    plan, dims = schedule_static(graph(1)), {"n": 2**16, "m": columns}
    if columns > 2**15:
        with pytest.raises(GraphError, match=r"n \* m in .* may be 2147549184"):
            verify(plan, dims, workers=4)
    else:
        assert verify(plan, dims, workers=4).tasks == 1


def test_an_index_that_fits_is_proved():
    assert proved(lambda i, n: i * 4000001 % n).tasks == ROWS
