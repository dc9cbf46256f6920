"""Members of generated structs."""

from __future__ import annotations

import re

import pytest

from etc_dist.codegen import generate
from etc_dist.codegen.calls import VARIANTS, numbers_of
from etc_dist.codegen.members import WIDTH, constants, indexed, method, wrapped
from etc_dist.layers.mlp_tiles import mlp_tiles_graph
from etc_dist.runtime.build import kernels_folder
from etc_dist.schedule import schedule_static


def test_numbers_of_one_kind_are_one_declaration():
    assert constants({"kA": 3, "kEps": 1e-6, "kB": -2, "kAll": (1, 2)}) == [
        "  static constexpr int kA = 3, kB = -2, kAll[] = {1, 2};",
        "  static constexpr float kEps = 1e-06f;",
    ]


def test_long_lines_are_broken_where_brackets_are_least_nested():
    parts = [f"part_{n}(with_an_argument + {n}, {n})" for n in range(12)]
    line = f"    return {' + '.join(parts)};"
    lines = wrapped(line)
    assert re.sub(r"\s+", " ", " ".join(lines)) == re.sub(r"\s+", " ", line)
    assert len(lines) > 2 and max(map(len, lines)) <= WIDTH
    assert all(re.match(r" {8}\+ part_\d", line) for line in lines[1:])


def test_a_long_value_has_lines_of_its_own():
    assert method("i32 f", "1") == [
        "  ETC_DEVICE static i32 f(const Args& g) { return 1; }"
    ]
    first, *lines, end = method("i32 f", "g.x + " * 40 + "1")
    assert (first, end) == ("  ETC_DEVICE static i32 f(const Args& g) {", "  }")
    assert lines[0].startswith("    return g.x + ") and len(lines) > 1


def test_the_last_value_needs_no_number():
    assert indexed("i32 f", ["8", "9"], "int n") == [
        "  ETC_DEVICE static i32 f(int n) {",
        "    if (n == 0) return 8; return 9;",
        "  }",
    ]
    assert len(indexed("i32 f", ["8"], "int n")) == 1
    assert indexed("i32 f", [], "int n")[0].endswith("(int n) { return {}; }")


def test_the_header_has_the_constants_that_are_not_generated():
    plan = schedule_static(mlp_tiles_graph(1))
    numbers = numbers_of(plan, plan.lane("tensor"), plan.graph.calls[0])
    assert header_constants("CallDefaults") == dict.fromkeys(numbers, 0)
    assert header_constants("VariantDefaults").items() >= VARIANTS.items()


def header_constants(struct: str) -> dict[str, int]:
    header = (kernels_folder() / "worker" / "defaults.cuh").read_text()
    members = header.split(f"struct {struct}")[1].split("};")[0]
    pairs = re.findall(r"constexpr int (k\w+) = (\d+);", members)
    return {name: int(value) for name, value in pairs}


@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_each_call_has_its_own_values(name):
    text = generate(schedule_static(mlp_tiles_graph(1))).text
    assert f"ETC_NUMBER(packed_tile, g.dim_{name}_tile_tile)" in text
