"""What a body that does not compile is advised, by NVRTC and by the emulator."""

from __future__ import annotations

import pytest

from etc_dist.codegen import generate
from etc_dist.emulate import Emulator
from etc_dist.errors import BuildError
from etc_dist.ir import DeviceFunction, Graph, graph_function
from etc_dist.runtime.build import build
from etc_dist.schedule import schedule_static
from etc_dist.settings import Settings

HEAD = '#pragma once\n#include "worker/task.cuh"\nnamespace etc {\n'
WRONG = {
    "another name": "template <class Task> struct relo {};",
    "no template": "struct relu {};",
    "no run": "template <class Task> struct relu {};",
}


@graph_function
def one_call(g: Graph, *, source):
    y = g.output("y", (4,), "float32")
    relu = DeviceFunction("relu", print, source, "tensor", 0, 1)
    g.call(relu, g.grid(i=1), writes=[y[:]])


@pytest.mark.parametrize("compiler", ["nvrtc", "emulator"])
@pytest.mark.parametrize("body", WRONG.values(), ids=WRONG)
def test_missing_struct_is_named_with_its_file(compiler, body, tmp_path):
    path = tmp_path / "activation.cuh"
    path.write_text(f"{HEAD}{body}\n}}  // namespace etc\n")
    graph = one_call(1, source=path)
    with pytest.raises(BuildError) as caught:
        if compiler == "emulator":
            Emulator(graph)
        else:
            build(generate(schedule_static(graph)), Settings(cache=tmp_path / "cache"))
    wanted = f"{path} must define, in namespace etc: template <class Task> struct relu"
    assert caught.value.fix.startswith(wanted)
