"""Graph functions: the values and the text of a described graph."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from etc_dist.ir import (
    DeviceFunction,
    Graph,
    GraphFunction,
    ceildiv,
    device_function,
    graph_function,
    tile,
    up_to,
)
from etc_dist.ir.function import TmaBox


@device_function(source="copy.cuh", reads=1, writes=1, lane="transfer")
def copy(x, y):
    y[...] = x


@graph_function
def shifted(g: Graph, *, size: int = 4) -> None:
    n = g.dims("n")
    num_tiles = g.let("tiles", ceildiv(n, size))
    x = g.input("x", (n,), "float32")
    y = g.output("y", (n,), "float32")
    box = g.symmetric("box", (n,), "float32")
    here = g.events("here", (num_tiles,), expects=1, cross_rank=True)
    following = (g.rank + 1) % g.world_size
    (i,) = grid = g.grid(i=num_tiles)
    g.call(
        copy,
        grid,
        name="send",
        reads=[x[tile(i, size)]],
        writes=[box.on(following)[tile(i, size)]],
        notifies=[here.on(following)[i]],
        pace=n // 2,
    )
    g.call(
        copy,
        grid,
        reads=[box[tile(i, size)]],
        writes=[y[tile(i, size)]],
        waits=[here[i]],
    )


def test_the_text_shows_all_that_was_declared():
    assert shifted(2).show() == (
        "graph shifted(n) on 2 ranks\n"
        "let tiles = (n + 3) // 4\n"
        "input x [n] float32\n"
        "output y [n] float32\n"
        "symmetric box [n] float32\n"
        "cross-rank events here [here_0: tiles] expects 1\n"
        "call send: copy [i: tiles]\n"
        "  lane transfer\n"
        "  order t -> (t)\n"
        "  pace n // 2 ns\n"
        "  reads x[i * 4 +: 4]\n"
        "  writes box.on((rank + 1) % 2)[i * 4 +: 4]\n"
        "  notifies here.on((rank + 1) % 2)[i]\n"
        "call copy: copy [i: tiles]\n"
        "  lane transfer\n"
        "  order t -> (t)\n"
        "  reads box[i * 4 +: 4]\n"
        "  writes y[i * 4 +: 4]\n"
        "  waits here[i]\n"
    )


def test_options_of_the_body_are_options_of_the_graph_function():
    assert shifted.__name__ == "shifted"
    assert "let tiles = (n + 7) // 8" in shifted(2, size=8).show()


def test_the_text_is_written_once_for_all_digests(monkeypatch):
    graph = shifted(2)
    digest = graph.digest()
    monkeypatch.delattr(GraphFunction, "show")
    assert graph.digest() == digest


def test_the_digest_is_that_of_the_text():
    assert shifted(2).digest() == shifted(2).digest()
    assert shifted(2).digest() != shifted(3).digest()
    assert shifted(2).digest() != shifted(2, size=8).digest()


def test_a_loaded_extent_is_part_of_the_text():
    def of(limited):
        g = Graph("one", 1)
        x, y = (
            make(n, (4,), "float32") for make, n in ((g.input, "x"), (g.output, "y"))
        )
        count_event, counts = (
            g.events("known", (1,), expects=0),
            g.input("n", (1,), "int32"),
        )
        extent = up_to(4, counts.load(0)) if limited else 4
        (i,) = grid = g.grid(i=extent)
        operands = {"reads": [x[tile(i, 1)]], "writes": [y[tile(i, 1)]]}
        on_tensor = replace(copy, lane="tensor")
        g.call(on_tensor, grid, **operands, waits=[count_event[0]])
        return g.finish()

    plain, limited = of(False), of(True)
    assert "[i: n[0], at most 4]" in limited.show()
    assert plain.digest() != limited.digest()
    assert [tensor.name for tensor in limited.loaded_tensors()] == ["n"]
    assert limited.calls[0].tasks == plain.calls[0].tasks


def test_values_of_a_call_are_part_of_the_text():
    def body(x, y, *, size):
        y[...] = x * size

    def of(size):
        g = Graph("one", 1)
        size, g_x = size(g), g.input("x", (4,), "float32")
        y, grid = g.output("y", (4,), "float32"), g.grid(i=4)
        f = DeviceFunction("scale", body, "", "transfer", 1, 1)
        g.call(f, grid, reads=[g_x[:]], writes=[y[:]], values={"size": size})
        return g.finish()

    dim, constant = of(lambda g: g.dims("n")), of(lambda g: 3)
    assert "\n  size = n\n" in dim.show() and "\n  size = 3\n" in constant.show()
    assert dim.calls[0].keywords({"n": 7, "size": 1}) == {"size": 7}


def test_a_body_may_get_the_first_index_of_a_region():
    def body(x, y, *, first):
        y[...] = x + first

    f = DeviceFunction("shift", body, "", "transfer", 1, 1, starts={"first": (0, -1)})
    g = Graph("one", 1)
    x, y = g.input("x", (2, 8), "float32"), g.output("y", (8,), "float32")
    (i,) = grid = g.grid(i=4)
    g.call(f, grid, reads=[x[0, tile(i, 2)]], writes=[y[tile(i, 2)]])
    [call] = g.finish().calls
    assert call.keywords({"i": 3}) == {"first": 6}


def test_the_environment_has_dims_rank_and_derived_numbers():
    assert shifted(4).environment({"n": 13}, 2) == {"n": 13, "rank": 2, "tiles": 4}


def test_a_named_constant_stays_a_number_in_expressions():
    g = Graph("one", 1)
    assert str(g.let("four", 4)) == "4"
    assert g.finish().environment({}, 0) == {"rank": 0, "four": 4}


def test_parts_are_found_by_name_and_kind():
    graph = shifted(2)
    assert [t.name for t in graph.inputs()] == ["x"]
    assert [t.name for t in graph.outputs()] == ["y"]
    assert graph.tensor("box").kind == "symmetric"
    assert graph.event("here").cross_rank


def coordinates(order=None) -> list[list[int]]:
    def body(g: Graph) -> None:
        grid = g.grid(i=2, j=3)
        g.call(DeviceFunction("f", print, "", "tensor", 0, 0), grid, order=order)

    graph: GraphFunction = graph_function(body)(1)
    places = graph.calls[0].coordinates(np.arange(6), graph.environment({}, 0))
    return np.array([places["i"], places["j"]]).T.tolist()


def test_tasks_go_row_by_row_unless_ordered():
    rows = [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert coordinates() == rows
    columns = [[0, 0], [1, 0], [0, 1], [1, 1], [0, 2], [1, 2]]
    assert coordinates(lambda t: (t % 2, t // 2)) == columns


def test_a_call_counts_its_tasks():
    assert str(shifted(2).calls[0].tasks) == "tiles"


def test_a_device_function_keeps_boxes_and_constants_sorted_and_frozen():
    boxes = {1: TmaBox(64, 64), 0: TmaBox(128, 64)}
    function = DeviceFunction("f", print, "", "tensor", 2, 1, boxes=boxes)
    assert list(function.boxes) == [0, 1]
    boxes.clear()
    assert len(function.boxes) == 2


def test_a_decorated_body_stays_the_body():
    y = np.zeros(3)
    copy.body(np.ones(3), y)
    assert (copy.name, copy.lane, y.tolist()) == ("copy", "transfer", [1, 1, 1])


def test_one_name_gives_one_dim_and_several_give_a_tuple():
    g = Graph("one", 1)
    n = g.dims("n")
    assert g.local("x", (n * 2, 4), "float32").shape[0] == n * 2
    assert [str(dim) for dim in g.dims("rows columns")] == ["rows", "columns"]
