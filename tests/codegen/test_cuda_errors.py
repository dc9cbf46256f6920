"""Plans that cannot be written as one kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from etc_dist.codegen import generate
from etc_dist.errors import CodegenError
from etc_dist.ir import DeviceFunction, Graph, graph_function
from etc_dist.ir.function import TmaBox
from etc_dist.ops.matmul import matmul_store
from etc_dist.schedule import schedule_static
from tests.codegen.graphs import GRAPHS


def refused(graph) -> CodegenError:
    with pytest.raises(CodegenError) as caught:
        generate(schedule_static(graph))
    return caught.value


def test_too_many_ranks_are_refused():
    graph = replace(GRAPHS["user"], world_size=33)
    error = refused(graph)
    assert (error.wanted, error.got) == ("at most 32 ranks", "33")


def test_two_kinds_of_matmul_in_a_program_are_refused():
    @graph_function
    def mixed(g: Graph) -> None:
        x = g.input("x", (256, 256), "bfloat16")
        for name, layout in (("one", "nk"), ("two", "kn")):
            y = g.output(f"y_{name}", (256, 256), "bfloat16")
            g.call(
                matmul_store(layout, "bfloat16"),
                g.grid(i=1),
                name=name,
                reads=[x[:, :], x[:, :]],
                writes=[y[:, :]],
            )

    error = refused(mixed(1))
    assert error.where == "plan mixed: one, two"
    assert "'kWeightIsKN': 0" in error.got and "'kWeightIsKN': 1" in error.got


@pytest.mark.parametrize("axes", [1, 4])
def test_a_bulk_copy_needs_two_or_three_axes(axes):
    boxed = DeviceFunction("f", print, "f.cuh", "tensor", 1, 0, boxes={0: TmaBox(8, 8)})

    @graph_function
    def copied(g: Graph) -> None:
        x = g.input("x", (8,) * axes, "float32")
        g.call(boxed, g.grid(i=1), reads=[x[(slice(None),) * axes]])

    error = refused(copied(1))
    assert error.what == "call f: operand 0 cannot be copied in bulk"
    assert error.got == f"{axes} axes"
