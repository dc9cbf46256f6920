"""Fixes for bodies that do not compile, with NVRTC and in the emulator."""

from __future__ import annotations

from pathlib import Path

import pytest

from etc_dist.codegen import generate
from etc_dist.emulate import Emulator
from etc_dist.errors import BuildError
from etc_dist.ir import DeviceFunction, GraphFunction
from etc_dist.runtime.build import build
from etc_dist.schedule import schedule_static
from etc_dist.settings import Settings
from tests.graphs.calls import whole

HEAD = '#pragma once\n#include "worker/task.cuh"\nnamespace etc {\n'
WRONG = {
    "another name": "template <class Task> struct relo {};",
    "no template": "struct relu {};",
    "no run": "template <class Task> struct relu {};",
}


BODIES = {
    "y.at(0) = task.operand<0>().at(0);": "write task.template operand<n>()",
    "const auto x = task.template operand<1>();": "the call has fewer operands",
    "y.at(0) = 2 * y.at(0);": "an element is *x.at(i, j)",
    "y[0] = bf16::from(1);": "an element is *x.at(i, j)",
    "*y.at(0) = 1.5f;": "bf16::from(v) rounds a float",
    "*y.at(0) = __float2bfloat16(1.5f);": "bf16::from(v) rounds a float",
    "__syncthreads();": "in a body call task.sync(), not __syncthreads()",
    "__shared__ float x[4];": "in a body use task.scratch, not __shared__",
    "reinterpret_cast<float*>(task.scratch)[0] = 0;": "have no scratch memory",
}


def one_call(source: Path, lane: str = "tensor") -> GraphFunction:
    relu = DeviceFunction("relu", print, source, lane, 0, 1)
    return whole(1, function=relu, dtype="bfloat16", y="8")


def refusal(compiler: str, graph: GraphFunction, folder: Path) -> BuildError:
    with pytest.raises(BuildError) as caught:
        if compiler == "emulator":
            Emulator(graph)
        else:
            build(generate(schedule_static(graph)), Settings(cache=folder / "cache"))
    return caught.value


@pytest.mark.parametrize("compiler", ["nvrtc", "emulator"])
@pytest.mark.parametrize("body", WRONG.values(), ids=WRONG)
def test_missing_struct_is_named_with_its_file(compiler, body, tmp_path):
    path = tmp_path / "activation.cuh"
    path.write_text(f"{HEAD}{body}\n}}  // namespace etc\n")
    caught = refusal(compiler, one_call(path), tmp_path)
    text = f"{path} must define, in namespace etc: template <class Task> struct relu"
    assert caught.fix.startswith(text)


@pytest.mark.parametrize("compiler", ["nvrtc", "emulator"])
@pytest.mark.parametrize("line", BODIES)
def test_mistake_in_a_body_is_named_with_what_to_write(compiler, line, tmp_path):
    path = tmp_path / "relu.cuh"
    path.write_text(
        f"{HEAD}template <class Task> struct relu {{ static void run(const Task& task) "
        f"{{ const auto y = task.template operand<0>();\n{line}\n}} }};\n}}\n"
    )
    lane = "transfer" if "scratch)" in line else "tensor"
    caught = refusal(compiler, one_call(path, lane), tmp_path)
    assert BODIES[line] in caught.fix + caught.got
    assert caught.where == "calls on 1 ranks, static schedule"


@pytest.mark.parametrize("compiler", ["nvrtc", "emulator"])
def test_mistake_in_a_body_is_shown_without_the_headers_that_use_it(compiler, tmp_path):
    path = tmp_path / "relu.cuh"
    path.write_text(
        f"{HEAD}template <class Task> struct relu {{ static void run(const Task& task) "
        "{\nconst auto x = task.template operand<1>();\nfloat y = no_such;\n} };\n}\n"
    )
    text = refusal(compiler, one_call(path), tmp_path).got
    assert "no_such" in text and "tensor_lane" not in text and "Call::visit" not in text
    at = {"nvrtc": f"at line 5 of {path}", "emulator": f"{path}:5:"}[compiler]
    assert "the call has fewer operands" in text and at in text


@pytest.mark.parametrize("compiler", ["nvrtc", "emulator"])
@pytest.mark.parametrize("source", ["mine.cuh", Path("/no/such/mine.cuh")])
def test_source_that_does_not_exist_is_named(compiler, source, tmp_path):
    caught = refusal(compiler, one_call(source), tmp_path)
    assert caught.what == "the source of a device function does not exist"
    assert caught.got == f"no file {source}"
    assert "Path(__file__).with_name" in caught.fix
