"""Plans that cannot be written as one kernel."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from etc_dist.codegen import generate
from etc_dist.errors import CodegenError
from etc_dist.functions.epilogue import partial as unrounded
from etc_dist.functions.epilogue import store as store_tile
from etc_dist.ir import DeviceFunction, GraphFunction
from etc_dist.ir.function import TmaBox
from etc_dist.schedule import schedule_dynamic, schedule_static
from tests.graphs.calls import one_call
from tests.graphs.dense import dense
from tests.graphs.exchange_hosts import exchange_hosts
from tests.graphs.written import GRAPHS, three_matmuls
from tests.refusals import refused


def of_function(graph: GraphFunction, name: str = "", **fields: Any) -> GraphFunction:
    """`graph` with other `fields` of the functions that have this name, or of all."""
    calls = (
        replace(c, function=replace(c.function, **fields))
        if name in ("", c.name, c.function.name)
        else c
        for c in graph.calls
    )
    return replace(graph, calls=tuple(calls))


def twice(graph: GraphFunction) -> GraphFunction:
    """`graph` with its first call twice, of two functions of one name."""
    call = of_function(graph, source="/elsewhere/other.cuh").calls[0]
    return replace(graph, calls=(*graph.calls, replace(call, name="second")))


def far(dtype: str) -> GraphFunction:
    """A GEMM that stores on the next rank."""
    store = partial(dense, epilogue=unrounded if dtype == "float32" else store_tile)
    return one_call(
        2,
        store,
        ["x 128 64 bfloat16"] * 2,
        ["y.on((rank + 1) % 2)[:, :]"],
        parts=f"symmetric y [128, 128] {dtype}",
        name="send",
    )


BOXED = DeviceFunction("f", print, "f.cuh", "tensor", 1, 0, boxes={0: TmaBox(8, 8)})


PEER = "graph calls has a GEMM that writes to a peer's memory|got: send writes y"
BULK = "call f: operand 0 cannot be copied in bulk|got: "
USER = GRAPHS["user"]
REFUSALS = {
    "early read": (
        of_function(GRAPHS["all_gather_matmul"], "tile_matmul", reads_before_wait=[1]),
        "wanted: no reads_before_wait= of a function with roles= got:",
    ),
    **{
        name: (of_function(USER, constants={"kMine": 1, name: 0}), f"got: {name} to do")
        for name in ("kFreeWaits", "threads")
    },
    "two functions": (twice(USER), "two device functions are named "),
    "peer": (far("bfloat16"), PEER),
    "peer of floats": (far("float32"), PEER),
    "memory": (of_function(three_matmuls(1), shared=1 << 18), "got: 262144 to do"),
    "one axis": (one_call(1, BOXED, ["x 8 float32"]), BULK + "x[:] to do"),
    "four axes": (
        one_call(1, BOXED, ["x 8 8 8 8 float32"]),
        BULK + "x[:, :, :, :] to do",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_graph_that_cannot_be_one_kernel_is_refused(name):
    graph, words = REFUSALS[name]
    refused(lambda: generate(schedule_static(graph)), words, CodegenError)


@pytest.mark.parametrize("hosts", [1, 2])
def test_too_many_ranks_of_a_host_are_refused(hosts):
    graph = replace(USER, world_size=33 * hosts, local_size=33)
    plan = replace(schedule_static(graph), has_far=hosts > 1)
    words = "has too many ranks|wanted: at most 32 ranks on a host got: 33 to do"
    refused(lambda: generate(plan), words, CodegenError)


def test_a_dynamic_plan_with_far_ranks_is_refused():
    plan = schedule_dynamic(exchange_hosts(2, local_size=1))
    generate(plan)
    words = "dynamic plan over several hosts"
    refused(lambda: generate(replace(plan, has_far=True)), words, CodegenError)


def test_a_matrix_of_a_stack_of_stacks_is_copied_in_bulk():
    x = "x 3[i] 5[j] 16[8:] 8 float32"
    graph = one_call(1, BOXED, [x], grid="i: 3, j: 5")
    copy = "tensor_x(g).bulk({&g.map_x_8x8}, c.axis_i, c.axis_j, span_of(8, 8), kAll)"
    assert copy in generate(schedule_static(graph)).text
