"""Plans that cannot be written as one kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from etc_dist.codegen import generate
from etc_dist.errors import CodegenError
from etc_dist.functions.grouped_matmul import grouped_gated, thin_float
from etc_dist.functions.matmul import matmul_store
from etc_dist.ir import DeviceFunction, Graph, graph_function, span, tile
from etc_dist.ir.function import TmaBox
from etc_dist.schedule import schedule_dynamic, schedule_static
from tests.codegen.graphs import GRAPHS, three_matmuls
from tests.runtime.exchange_hosts import exchange_hosts


def refused(graph) -> CodegenError:
    with pytest.raises(CodegenError) as caught:
        generate(schedule_static(graph))
    return caught.value


@pytest.mark.parametrize("hosts", [1, 2])
def test_too_many_ranks_of_a_host_are_refused(hosts):
    graph = replace(GRAPHS["user"], world_size=33 * hosts, local_size=33)
    with pytest.raises(CodegenError, match="has too many ranks") as caught:
        generate(replace(schedule_static(graph), has_far=hosts > 1))
    error = caught.value
    assert (error.wanted, error.got) == ("at most 32 ranks on a host", "33")


def test_a_dynamic_plan_with_far_ranks_is_refused():
    plan = schedule_dynamic(exchange_hosts(2, local_size=1))
    generate(plan)
    with pytest.raises(CodegenError, match="dynamic plan over several hosts"):
        generate(replace(plan, has_far=True))


def test_a_matmul_that_reads_early_is_refused():
    graph = GRAPHS["all_gather_matmul"]
    calls = [
        replace(c, function=replace(c.function, reads_before_wait=(1,)))
        if c.function.name == "matmul_store"
        else c
        for c in graph.calls
    ]
    error = refused(replace(graph, calls=tuple(calls)))
    assert error.wanted == "no reads_before_wait= of a function with roles="


@pytest.mark.parametrize("name", ["kFreeWaits", "threads"])
def test_a_constant_does_not_replace_a_name_of_generated_code(name):
    graph = GRAPHS["user"]
    call = graph.calls[0]
    function = replace(call.function, constants={"kMine": 1, name: 0})
    error = refused(replace(graph, calls=(replace(call, function=function),)))
    assert error.got == name


def test_two_cuda_bodies_of_one_name_are_refused():
    graph = GRAPHS["user"]
    call = graph.calls[0]
    other = replace(call.function, source="/elsewhere/other.cuh")
    second = replace(call, name="second", function=other)
    error = refused(replace(graph, calls=(*graph.calls, second)))
    assert error.what == f"two device functions are named {call.function.name}"


@pytest.mark.parametrize(
    "store", [matmul_store("nk", "bfloat16"), thin_float("bfloat16")]
)
def test_a_matmul_that_writes_to_a_peer_is_refused(store):
    @graph_function
    def far(g: Graph) -> None:
        x = g.input("x", (128, 64), "bfloat16")
        dtype = "float32" if store.name == "thin_float" else "bfloat16"
        y = g.symmetric("y", (128, 128), dtype)
        peer = (g.rank + 1) % 2
        reads, writes = [x[:, :], x[:, :]], [y.on(peer)[:, :]]
        g.call(store, g.grid(i=1), name="send", reads=reads, writes=writes)

    error = refused(far(2))
    assert error.what == "graph far has a GEMM that writes to a peer's memory"
    assert error.got.startswith("send writes y")


def test_a_function_with_roles_runs_on_the_cluster_of_its_lane():
    graph = three_matmuls(1)
    calls = [
        replace(c, function=replace(c.function, cluster=1)) if c.name == "kn" else c
        for c in graph.calls
    ]
    error = refused(replace(graph, calls=tuple(calls)))
    assert error.wanted == "functions with roles= on the lane's cluster of 2"
    assert error.got == "kn: cluster 1"


def test_a_buffer_larger_than_shared_memory_is_refused():
    graph = three_matmuls(1)
    calls = [
        replace(c, function=replace(c.function, shared=1 << 18)) for c in graph.calls
    ]
    assert refused(replace(graph, calls=tuple(calls))).got == "262144"


@pytest.mark.parametrize(("offset", "rows"), [(32, 64), (31, 64), (32, 66)])
def test_a_gated_product_needs_both_halves_of_one_tensor(offset, rows):
    @graph_function
    def gated(g: Graph) -> None:
        x, weight = g.input("x", (8, 64), "bfloat16"), (1, rows, 64)
        both = g.input("both", weight, "bfloat16")
        tokens = g.input("tokens", (8,), "int32")
        y = g.output("y", (8, 32), "bfloat16")
        (j,) = grid = g.grid(j=2)
        gate, up = (span(first + j * 16, 16) for first in (0, offset))
        g.call(
            grouped_gated("bfloat16"),
            grid,
            reads=[x[:, :], both[0, gate, :], both[0, up, :], tokens[:]],
            writes=[y[:, tile(j, 16)]],
        )

    if (offset, rows) == (32, 64):
        assert "halves_both_128x64" in generate(schedule_static(gated(1))).text
    else:
        error = refused(gated(1))
        assert error.what == "call grouped_gated: operand 2 is not the other half of 1"
        assert error.got == f"a tensor of {rows} rows"


@pytest.mark.parametrize(("axes", "got"), [(1, "x[:]"), (4, "x[:, :, :, :]")])
def test_a_bulk_copy_needs_a_part_of_one_matrix(axes, got):
    boxed = DeviceFunction("f", print, "f.cuh", "tensor", 1, 0, boxes={0: TmaBox(8, 8)})

    @graph_function
    def copied(g: Graph) -> None:
        x = g.input("x", (8,) * axes, "float32")
        g.call(boxed, g.grid(i=1), reads=[x[(slice(None),) * axes]])

    error = refused(copied(1))
    assert error.what == "call f: operand 0 cannot be copied in bulk"
    assert error.got == got


def test_a_matrix_of_a_stack_of_stacks_is_copied_in_bulk():
    boxed = DeviceFunction("f", print, "f.cuh", "tensor", 1, 0, boxes={0: TmaBox(8, 8)})

    @graph_function
    def copied(g: Graph) -> None:
        x = g.input("x", (3, 5, 16, 8), "float32")
        i, j = grid = g.grid(i=3, j=5)
        g.call(boxed, grid, reads=[x[i, j, 8:16, :]])

    assert (
        "0, 8, ((c.axis_i * 5) + c.axis_j)}"
        in generate(schedule_static(copied(1))).text
    )
