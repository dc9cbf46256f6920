"""Released groups, compared with a search of all groups; and the text of a dynamic
program."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from etc_dist.codegen import generate
from etc_dist.codegen.dynamic_queues import released
from etc_dist.ir import DeviceFunction, Graph, Symbol, tile
from etc_dist.ir.expr import Const, Expr, maximum, wrap
from etc_dist.ops.all_gather_matmul import all_gather_matmul_graph
from etc_dist.runtime.build import compile_cubin, kernels_folder
from etc_dist.runtime.includes import headers
from etc_dist.runtime.memory_plan import plan_memory
from etc_dist.schedule import schedule_dynamic, schedule_static
from tests.graphs.kit import ROW, Kit, made
from tests.graphs.rank_tiles import small_mlp, tile_dims

A, B = (Symbol(name, "coordinate") for name in "ab")
X, Y = (Symbol(f"e_{k}", "coordinate") for k in range(2))
N, OWNER = Symbol("n", "dim"), Symbol("owner", "task")
EXTENTS: dict[str, Expr] = {"a": N, "b": wrap(5)}
ENV = {"n": 7, "owner": 2}

INDICES = {
    "coordinates": ([A, B], 1),
    "exchanged": ([B, A], 1),
    "shifted": ([A + 2, N - 1 - B], 1),
    "doubly shifted": ([3 - (A - N), B - OWNER + 1], 1),
    "by the rank": ([(OWNER + 1 + A) % N, B], 1),
    "backwards by the rank": ([(OWNER + N - A) % N, B], 1),
    "of a longer ring": ([A, (OWNER + B) % 6], 1),
    "of a shorter ring": ([A, (OWNER + B) % 3], 5),
    "divided": ([A // 3, B], 3),
    "divided and shifted": ([(A + 4) // 3, (7 - B) // 2], 6),
    "divided twice": ([A // 2 // 2, B], 4),
    "one of two": ([A], 5),
    "sum": ([A + B], 35),
    "constant and coordinate": ([wrap(1), A], 5),
    "one coordinate twice": ([A, A + B, B], 1),
    "at least a number": ([maximum(A, 3), B], 4),
    "at least a name": ([A, maximum(B, N - 5)], 3),
    "at least none": ([maximum(A, 0), B], 1),
    "shifted, at least a number": ([maximum(A - 2, 0), B], 7),
    "backwards, at least a number": ([A, maximum(3 - B, 1)], 5),
    "multiplied": ([2 * A, B], 7),
    "no coordinate": ([wrap(0)], 35),
}


@pytest.mark.parametrize("name", INDICES)
def test_spans_contain_all_waiting_groups(name):
    index, most = INDICES[name]
    element = tuple(Symbol(f"e_{k}", "coordinate") for k in range(len(index)))
    spans = released(list(index), element, EXTENTS)
    assert list(spans) == ["a", "b"]
    grid = list(itertools.product(range(7), range(5)))
    waits = {(a, b): values(index, {"a": a, "b": b}) for a, b in grid}
    widest = 0
    for target in set(waits.values()):
        env = {**ENV, **{str(e): v for e, v in zip(element, target, strict=True)}}
        box = []
        for (low, count), extent in zip(spans.values(), (7, 5), strict=True):
            begin, size = int(low.evaluate(env)), int(count.evaluate(env))
            box.append(range(max(begin, 0), min(begin + size, extent)))
        candidates = set(itertools.product(*box))
        assert {at for at, of in waits.items() if of == target} <= candidates
        widest = max(widest, len(candidates))
    assert widest <= most


def values(index: list[Expr], at: dict[str, int]) -> tuple[int, ...]:
    return tuple(int(part.evaluate({**ENV, **at})) for part in index)


def test_ring_of_all_others_is_invertible():
    """As in the ops: peer p of world - 1 is rank (rank + 1 + p) % world."""
    part = (OWNER + 1 + A) % 4
    spans = released([part, B], (X, Y), {"a": wrap(3), "b": N})
    assert [count for _, count in spans.values()] == [Const(1), Const(1)]
    env = {"owner": 2, "e_0": 1, "e_1": 6}
    lows = [int(low.evaluate(env)) for low, _ in spans.values()]
    assert lows == [2, 6]


# ---------------------------------------------------------------------- the text


def test_source_of_a_dynamic_program(golden):
    golden(generate(schedule_dynamic(all_gather_matmul_graph(2))).text)


def test_static_programs_have_no_queues():
    source = generate(schedule_static(small_mlp(2)))
    for word in ("kDynamic", "Queue", "Release", "Event_", "Group "):
        assert word not in source.text


def by_rank(g: Kit) -> None:
    """The expected counts differ between ranks."""
    share = g.let("share", g.rank + 2)
    begin_event = g.event("done", 4, expects=lambda e: share + e, cross_rank=True)
    g.do("begin", 4, notifies=[begin_event.on((g.rank + 1) % 2)[ROW]])
    g.do("follow", 4, waits=[begin_event[(g.rank + ROW) % 4]])


def test_counts_are_evaluated_for_the_owner():
    text = generate(schedule_dynamic(made(by_rank, 2))).text
    assert (
        "u32 target(const Args& g, i32 owner, Coord c) "
        "{ return u32(owner + 2 + c.axis_done_0); }" in text
    )
    assert "return u32(g.events_done + floormod(owner + c.axis_i, 4));" in text
    assert "return {floormod(c.axis_done_0 - owner, 4), 1};" in text
    assert (
        "if constexpr (n == 0) f(Event_done{}, floormod(g.rank + 1, 2), "
        "Event_done::Coord{c.axis_i});" in text
    )


def test_any_name_of_a_user_can_be_compiled():
    """C++ keywords, and names of the generated code."""
    body = Path(__file__).parent.parent / "emulate" / "copy_numbers.cuh"
    copy = DeviceFunction("copy_numbers", print, body, "transfer", 1, 1)

    def named(g: Graph) -> None:
        n = g.let("double", g.dims("class") * 1 + 1)
        x, y = g.input("control", (n,), "float32"), g.output("rank_", (n,), "float32")
        z = g.output("head_tensor", (n,), "float32")
        v = g.output("v", (3, n), "float32")
        peer = g.events("peer", (n,), expects=1)
        (i,) = grid = g.grid(g=n)
        reads, region = {"reads": [x[tile(i, 1)]]}, tile(i, 1)
        g.call(
            copy, grid, name="units", notifies=[peer[i]], writes=[y[region]], **reads
        )
        g.call(copy, grid, name="if_", waits=[peer[i]], writes=[z[region]], **reads)
        # Joined by underscores, both are peer_a_b.
        later = g.events("peer_a", (n,), expects=1)
        g.call(
            copy, grid, name="c", notifies=[later[i]], writes=[v[0, region]], **reads
        )
        g.call(copy, grid, name="a_b", waits=[peer[i]], writes=[v[1, region]], **reads)
        g.call(copy, grid, name="b", waits=[later[i]], writes=[v[2, region]], **reads)

    source = generate(schedule_dynamic(made(named)))
    compile_cubin(source.text, headers(source, kernels_folder()))


# --------------------------------------------------------------------- the memory


def test_queues_follow_the_events_on_separate_lines():
    plan = schedule_dynamic(small_mlp(2))
    dims = {"rows": 1000, "hidden": 4096, "inner": 1792, **tile_dims(plan.graph)}
    static = plan_memory(schedule_static(plan.graph), dims)
    memory = plan_memory(plan, dims)
    assert static.queue_bases == {}
    assert memory.event_bases == static.event_bases
    sizes = {
        "head_tensor": 1,
        "tail_tensor": 1,
        "slots_tensor": 125 * 56 + 2 * 125 * 256,  # of peers' rows, of down
        "head_transfer": 1,
        "tail_transfer": 1,
        "slots_transfer": 2250,
        "states_sum_ranks": 125,
    }
    assert list(memory.queue_bases) == list(sizes)
    end = static.event_count
    for name, base in memory.queue_bases.items():
        assert base % 32 == 0
        assert base >= end
        end = base + sizes[name]
    assert memory.event_count >= end
    assert set(memory.queue_bases) <= set(generate(plan).arguments.integers)
