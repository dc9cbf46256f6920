"""From a program to a cubin, by the real compiler and without a GPU."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from etc_dist.codegen import Source, generate
from etc_dist.errors import BuildError
from etc_dist.ir import DeviceFunction, Graph, graph_function
from etc_dist.ops.all_gather_matmul import all_gather_matmul_graph
from etc_dist.ops.matmul_reduce_scatter import matmul_reduce_scatter_graph
from etc_dist.runtime import build as building
from etc_dist.runtime.build import build, compile_cubin, kernels_folder, report
from etc_dist.schedule import schedule_dynamic, schedule_static
from etc_dist.settings import Settings

ROOT = Path(__file__).parents[2]
OPS = {
    "matmul_reduce_scatter": matmul_reduce_scatter_graph,
    "all_gather_matmul": all_gather_matmul_graph,
}
BODY = """#pragma once
#include "worker/task.cuh"
namespace etc {
template <class Task>
struct fill {
  static void run(const Task& task) {
    const auto y = task.template operand<0>();
    for (i32 i = task.thread; i < y.size[0]; i += Task::threads) *y.at(i) = VALUE;
  }
};
}  // namespace etc
"""


@pytest.fixture
def settings(tmp_path) -> Settings:
    return Settings(cache=tmp_path / "cache")


def filling(folder: Path, value: str = "7.0f") -> Source:
    """A small program with a body of the user's own, which is quick to compile."""
    path = folder / "fill.cuh"
    path.write_text(BODY.replace("VALUE", value))

    @graph_function
    def filled(g: Graph) -> None:
        (n,) = g.dims("n")
        y = g.output("y", (n,), "float32")
        fill = DeviceFunction("fill", print, path, "tensor", 0, 1)
        g.call(fill, g.grid(i=1), writes=[y[:]])

    return generate(schedule_static(filled(1)))


def folders(settings: Settings) -> list[str]:
    return sorted(p.name for p in (settings.cache / "programs").iterdir())


# ------------------------------------------------------------------------ programs


@pytest.mark.parametrize("schedule", [schedule_static, schedule_dynamic])
@pytest.mark.parametrize("op", OPS)
def test_a_library_program_keeps_its_registers(op, schedule):
    found = report(op, schedule(OPS[op](4)))
    assert found["spill_bytes"] == found["stack_bytes"] == 0
    # NOTE: remarks hold warnings, and C7508 where setmaxnreg was ignored.
    assert found["remarks"] == []
    assert found["registers"] == 168  # 65536 a worker of 384 threads, in steps of 8


@pytest.mark.parametrize("op", OPS)
def test_a_library_program_is_generated_and_compiled_in_time(op):
    graph = OPS[op](8, dtype="float16", w_layout="kn")
    found = report(op, schedule_static(graph))
    assert found["generate_s"] < 0.2
    assert found["compile_s"] < 3


def test_a_body_of_the_users_own_is_compiled(tmp_path, settings):
    cubin = build(filling(tmp_path), settings)
    assert cubin.path.read_bytes()[:4] == b"\x7fELF"
    assert not cubin.cached
    assert f'#include "{tmp_path}/fill.cuh"' in (
        cubin.path.with_name("program.cu").read_text()
    )


# --------------------------------------------------------------------------- cache


def test_a_second_build_comes_from_the_cache(tmp_path, settings, monkeypatch):
    source = filling(tmp_path)
    first = build(source, settings)
    monkeypatch.setattr(building, "compile_cubin", lambda *_: pytest.fail("compiled"))
    began = time.perf_counter()
    second = build(source, settings)
    assert time.perf_counter() - began < 0.1
    assert second == replace(first, cached=True, seconds=second.seconds)


def test_a_change_of_the_users_body_is_built_anew(tmp_path, settings):
    first = build(filling(tmp_path, "7.0f"), settings)
    second = build(filling(tmp_path, "8.0f"), settings)
    assert not second.cached
    assert second.path != first.path
    assert build(filling(tmp_path, "7.0f"), settings).path == first.path


def test_two_processes_that_build_the_same_leave_one_program(tmp_path, settings):
    code = (
        "from etc_dist.runtime.build import build\n"
        "from etc_dist.settings import Settings\n"
        "from tests.runtime.test_build import *\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "print(build(filling(folder), Settings(cache=folder / 'cache')).path)\n"
    )
    command = [sys.executable, "-c", code]
    kind = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    both = [subprocess.Popen(command, **kind, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60)[0] for process in both]
    assert said[0] == said[1]
    assert Path(said[0].strip()).exists(), said
    assert len(folders(settings)) == 1


def test_a_build_that_another_overtook_takes_the_others(
    tmp_path, settings, monkeypatch
):
    source = filling(tmp_path)

    def overtaken(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(building, "compile_cubin", compile_cubin)
            assert not build(source, settings).cached
        return compile_cubin(*arguments)

    monkeypatch.setattr(building, "compile_cubin", overtaken)
    assert build(source, settings).path.exists()
    assert len(folders(settings)) == 1


# -------------------------------------------------------------------------- errors


def test_a_fault_in_the_users_body_is_shown_with_file_and_line(tmp_path, settings):
    source = filling(tmp_path, "seven")
    with pytest.raises(BuildError) as caught:
        build(source, settings)
    assert f"{tmp_path}/fill.cuh(8): error:" in caught.value.got
    assert '"seven" is undefined' in caught.value.got
    assert caught.value.where == "// filled on 1 ranks, static schedule"
    assert not (settings.cache / "programs").exists()


def test_a_body_that_does_not_exist_is_told_by_its_path(tmp_path, settings):
    source = filling(tmp_path)
    (tmp_path / "fill.cuh").unlink()
    with pytest.raises(BuildError) as caught:
        build(source, settings)
    assert caught.value.what == "the source of a device function does not exist"
    assert caught.value.got == f"no file {tmp_path}/fill.cuh"
    assert caught.value.fix == "write the CUDA body there, or correct source="


def test_a_build_error_carries_the_numbered_source(tmp_path):
    source = filling(tmp_path)
    broken = source.text.replace("struct Program {", "struct Program { oops;")
    with pytest.raises(BuildError) as caught:
        compile_cubin(broken, [kernels_folder()])
    assert caught.value.source == broken
    lines = caught.value.numbered().splitlines()
    assert lines[0] == "   1  // filled on 1 ranks, static schedule"
    at = next(n for n, line in enumerate(broken.splitlines(), 1) if "oops" in line)
    assert lines[at - 1] == f"{at:4d}  struct Program {{ oops;"
    assert f"program.cu({at}): error" in caught.value.got
