"""Index arithmetic has 32 bits on GPUs; the CPU backend would compute with more."""

from functools import partial

import pytest

from etc_dist.ir import tile
from etc_dist.schedule import schedule_static
from etc_dist.verify.verify import verify
from tests.graphs.kit import ROW, Kit, made
from tests.refusals import refused

ROWS = 500


def read(g: Kit, row=lambda n: ROW, order=None):
    n = g.dims("n")
    x, y = g.input("x", (n, 4), "float32"), g.output("y", (n, 4), "float32")
    g.do("copy", n, reads=[x[row(n), :]], writes=[y[ROW, :]], order=order)


def size_of(g: Kit, place: str):
    n = g.dims("n")
    sizes = {**dict.fromkeys(("shape", "grid", "events"), 4), place: n * n // n}
    y = g.output("y", (sizes["shape"],), "float32")
    end_event = g.event("done", sizes["events"], expects=0)
    g.do("copy", sizes["grid"], writes=[y[tile(ROW, n)]], waits=[end_event[0]])


def load(g: Kit):
    table = g.input("table", g.dims("n m"), "int32")
    x = g.input("x", (4,), "float32")
    g.do("copy", reads=[x[tile(table.load(0, 0), 4)]])


def proved(act, **dims):
    return verify(schedule_static(made(act)), dims or {"n": ROWS}, workers=4)


# The graph, and words of the refusal; dims.
REFUSALS = {
    "factor": (
        partial(read, row=lambda n: ROW * 2654435761 % n),
        "2654435761 in|may be 2654435761 to",
    ),
    "product": (
        partial(read, row=lambda n: (ROW * 5000000 + 7) % n),
        "5000000 in|may be 0 to 2495000000",
    ),
    "negative": (
        partial(read, row=lambda n: (0 - ROW) * 5000000 % n),
        "may be -2495000000 to 0",
    ),
    "order": (
        partial(read, order=lambda t: (t * 10000019 % ROWS,)),
        "index arithmetic has 32 bits",
    ),
    **{
        place: (partial(size_of, place=place), "n * n in n * n // n may be", 65536)
        for place in ("shape", "grid", "events")
    },
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_number_beyond_32_bits_is_refused(name):
    act, words, *n = REFUSALS[name]
    refused(lambda: proved(act, n=(n or [ROWS])[0]), words)


def test_a_load_beyond_32_bits_is_refused():
    assert proved(load, n=2**16, m=2**15).tasks == 1
    words = "n * m in|may be 2147549184"
    refused(lambda: proved(load, n=2**16, m=2**15 + 1), words)


def test_an_index_that_fits_is_proved():
    assert proved(partial(read, row=lambda n: ROW * 4000001 % n)).tasks == ROWS
