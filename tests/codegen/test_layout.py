"""The argument block: one layout in NumPy and in the generated C++ struct."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from etc_dist.codegen import Arguments, generate
from etc_dist.codegen.layout import (
    CONTROL,
    FAULT,
    TRACE_RECORD,
    prepared_divisor,
)
from etc_dist.schedule import schedule_dynamic, schedule_static
from etc_dist.settings import MAX_SECONDS
from tests.graphs.mixtures import moe_graph
from tests.graphs.written import GRAPHS, three_matmuls

# Sizes and alignments of the members on the device.
TYPES = {
    "TensorMap": (128, 128),
    "u64": (8, 8),
    "u32": (4, 4),
    "i32": (4, 4),
    "Divisor": (8, 4),
}


def compiled(text: str, near: int) -> tuple[dict[str, int], int]:
    """Offsets of the members and size of a struct, by the rules of C."""
    blocks = "u64 peer[kWorld], first_near;"
    text = text.replace(f"NearBlocks<{near}> peer;", blocks)
    offsets: dict[str, int] = {}
    at = largest = 0
    for kind, names in re.findall(r"^  (\w+) ([^=;]+);$", text, re.MULTILINE):
        size, alignment = TYPES[kind]
        at = -(-at // alignment) * alignment
        for name, many in re.findall(r"(\w+)(?:\[(\w+)\])?", names):
            offsets[name] = at
            at += size * (near if many == "kWorld" else int(many or 1))
        largest = max(largest, alignment)
    return offsets, -(-at // largest) * largest


@pytest.mark.parametrize("hosts", [1, 2, 128])
@pytest.mark.parametrize("near", [1, 3, 8])
@pytest.mark.parametrize("name", GRAPHS)
def test_numpy_and_the_compiler_place_every_argument_alike(name, near, hosts):
    graph = replace(GRAPHS[name], world_size=hosts * near, local_size=near)
    arguments = Arguments.of(replace(schedule_static(graph), has_far=hosts > 1))
    offsets, size = compiled(arguments.text(), near)
    dtype = arguments.dtype
    assert dtype.names == tuple(offsets)
    assert {n: dtype.fields[n][1] for n in dtype.names} == offsets
    assert dtype.itemsize == size
    assert f"static_assert(sizeof(Args) == {size});" in arguments.text()


def test_the_block_holds_a_pointer_for_each_rank_and_each_tensor():
    arguments = Arguments.of(schedule_static(GRAPHS["user"]))
    assert arguments.dtype["peer"].shape == (2,)
    tensors = ("address_x", "address_table", "address_y", "address_box")
    assert [arguments.dtype[name] for name in tensors] == [np.dtype("u8")] * 4
    assert arguments.maps == ()


def test_operands_with_the_same_box_share_a_tensor_map():
    arguments = Arguments.of(schedule_static(GRAPHS["all_gather_matmul"]))
    names = [m.name for m in arguments.maps]
    assert names == [
        "map_x_tile_even_rowsx64",
        "map_w_tile_w_boxx64",
        "map_gathered_tile_even_rowsx64",
    ]
    names = [m.name for m in Arguments.of(schedule_static(three_matmuls(1))).maps]
    dense = ["map_x_128x64", "map_w_128x64", "map_w_kn_64x64"]
    assert names == [*dense, "map_x_64x64", "map_w_64x64"]


def test_an_operand_with_a_large_box_has_two_maps():
    plan = schedule_static(moe_graph(1, experts=8, top_k=2))
    names = [m.name for m in Arguments.of(plan).maps if m.tensor.name == "active"]
    assert names == ["map_active_16x64", "map_active_64x64"]
    pairs = re.findall(r"\.bulk\(\{&g\.(\w+), &g\.(\w+)\}", generate(plan).text)
    assert pairs == [("map_active_16x64", "map_active_64x64")]


def test_a_call_with_a_loaded_extent_tells_which_tasks_exist():
    graph = moe_graph(1, experts=8, top_k=2)
    texts = [generate(make(graph)).text for make in (schedule_static, schedule_dynamic)]
    for text in texts:
        assert text.count("kLimit = 1") == 2
        for name in ("gate_up", "down"):
            call = re.search(
                rf"struct Call_{name}_proj.*? {{.*?\n}};", text, re.DOTALL
            )[0]
            assert (
                "is_surplus(Coord c, i32 count) { return c.axis_q >= count; }" in call
            )
    assert "kHasSurplus = 1" in texts[1]


def test_records_have_the_sizes_that_the_device_code_names():
    assert (FAULT.itemsize, TRACE_RECORD.itemsize) == (32, 32)
    assert (CONTROL.fields["faults"][1], CONTROL.fields["fault"][1]) == (24, 64)


def test_longest_limit_fits_the_steps_that_the_device_counts():
    # Twice the limit, as for waits inside a worker, in steps of 2**20 ns.
    assert 1 <= int(2 * MAX_SECONDS * 1e9) >> 20 < 2**31


NATURALS = st.integers(0, 2**31 - 1)


@given(NATURALS, st.one_of(st.integers(1, 64), NATURALS.map(lambda n: max(n, 1))))
@example(2**31 - 1, 1)
@example(2**31 - 1, 2**31 - 1)
@example(2**31 - 2, 2**31 - 1)
@example(2**31 - 1, 2**30 + 1)
def test_prepared_divisors_divide_every_natural_number(number, value):
    factor, shift = prepared_divisor(value)
    assert 0 <= factor < 2**32 and 0 <= shift < 32
    # As div_by() of kernels/common/types.cuh, in 32 bits.
    assert (2 * number * factor >> 32) >> shift == number // value


@pytest.mark.parametrize("value", [-3, 0, 2**31, 2**32 + 1])
def test_other_values_give_the_quotient_zero(value):
    assert prepared_divisor(value) == (0, 0)
