"""From a program to a cubin, by the real compiler and without a GPU."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from etc_dist.cli import REGISTERS
from etc_dist.codegen import Source, generate
from etc_dist.errors import BuildError
from etc_dist.ir import DeviceFunction
from etc_dist.layers.mlp_tiles import mlp_tiles_graph
from etc_dist.ops.all_gather_matmul import all_gather_matmul_graph
from etc_dist.ops.matmul_reduce_scatter import matmul_reduce_scatter_graph
from etc_dist.ops.tile_model import FAMILY
from etc_dist.runtime import build as building
from etc_dist.runtime.build import build, compile_cubin, kernels_folder
from etc_dist.runtime.includes import headers
from etc_dist.schedule import schedule_static
from etc_dist.settings import Settings
from tests.conftest import first_always
from tests.functions.compiled import check_compiled, check_wgmmas
from tests.graphs.calls import whole
from tests.graphs.mixtures import moe_graph
from tests.graphs.written import three_matmuls

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


def filling(folder: Path, value: str = "7.0f", includes: str = "") -> Source:
    """A small program with a body of the user's own, which is quick to compile."""
    path = folder / "fill.cuh"
    text = f"{includes}{BODY}".replace("VALUE", value)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)

    fill = DeviceFunction("fill", print, path, "tensor", 0, 1)
    return generate(schedule_static(whole(1, function=fill)))


# ------------------------------------------------------------------------ programs


PLAIN, OTHER = (4, {}), (8, {"dtype": "float16", "w_layout": "kn"})
"""Numbers of ranks, and options."""


def test_a_program_keeps_its_registers():
    # NOTE: remarks include warnings, and C7508 if setmaxnreg was ignored.
    assert check_compiled(three_matmuls(1)).registers == REGISTERS


@pytest.mark.exhaustive  # .ci/run builds some of them
@pytest.mark.parametrize("options", [PLAIN, OTHER])
@pytest.mark.parametrize("schedule", ["static", "dynamic"])
@pytest.mark.parametrize("op", OPS)
def test_a_library_program_keeps_its_registers(op, schedule, options):
    ranks, of_op = options
    program = check_compiled(OPS[op](ranks, **of_op), schedule)
    assert program.registers == REGISTERS


@pytest.mark.parametrize(
    ("graph", "schedule"),
    first_always(
        [
            (three_matmuls(1), "static"),
            (mlp_tiles_graph(1, shapes=FAMILY[::4]), "dynamic"),
            (mlp_tiles_graph(1, shapes=FAMILY[::4]), "static"),
            (moe_graph(1, experts=128, top_k=8), "static"),
        ],
        1,
    ),
)
def test_the_operands_of_a_wgmma_are_those_of_a_warp(graph, schedule):
    check_wgmmas(check_compiled(graph, schedule).cubin)


def test_a_body_of_the_users_own_is_compiled(tmp_path, settings):
    cubin = build(filling(tmp_path), settings)
    assert cubin.code[:4] == b"\x7fELF"
    assert not cubin.cached
    (text,) = (settings.cache / "programs").glob("*.cu")
    assert f'#include "{tmp_path}/fill.cuh"' in text.read_text()


def test_a_function_that_is_not_inlined_is_a_remark(tmp_path, settings):
    seven = "__noinline__ float seven(int n) { return n + 7.0f; }\n"
    cubin = build(filling(tmp_path, "seven(i)", includes=seven), settings)
    (remark,) = cubin.remarks
    assert re.fullmatch(r"not inlined: \w*seven\w*", remark)


# --------------------------------------------------------------------------- cache


@pytest.fixture
def compilations(monkeypatch) -> list[str]:
    """The texts that are compiled during the test, by a stand-in for the compiler: its
    code differs for another text, header or architecture."""
    texts: list[str] = []

    def compile_text(text: str, *options: Any) -> tuple[bytes, str]:
        texts.append(text)
        return b"\x7fELF" + hashlib.sha256(repr((text, options)).encode()).digest(), ""

    monkeypatch.setattr(building, "compile_cubin", compile_text)
    return texts


def test_a_second_build_comes_from_the_cache(tmp_path, settings, compilations):
    source = filling(tmp_path)
    first = build(source, settings)
    second = build(source, settings)
    assert len(compilations) == 1
    assert second == replace(first, cached=True, seconds=second.seconds)


def test_a_change_of_the_users_body_is_built_anew(tmp_path, settings, compilations):
    first = build(filling(tmp_path, "7.0f"), settings)
    second = build(filling(tmp_path, "8.0f"), settings)
    assert not second.cached
    assert second.code != first.code
    assert build(filling(tmp_path, "7.0f"), settings).cached
    assert len(compilations) == 2


@pytest.mark.parametrize("name", ["helper.h", "sub/deep.cuh"])
def test_a_changed_header_is_built_anew(tmp_path, settings, name):
    header = tmp_path / name
    header.parent.mkdir(exist_ok=True)
    codes = []
    for value in ("7.0f", "8.0f"):
        header.write_text(f"#define SEVEN {value}\n")
        cubin = build(filling(tmp_path, "SEVEN", f'#include "{name}"\n'), settings)
        assert not cubin.cached
        codes.append(cubin.code)
    assert codes[0] != codes[1]


def test_another_build_of_the_compiler_compiles_anew(
    tmp_path, settings, monkeypatch, compilations
):
    build(filling(tmp_path), settings)
    version = building.compiler_version()
    assert re.search(r"V\d+\.\d+\.\d+", version)
    monkeypatch.setattr(building, "compiler_version", lambda: f"{version}.1")
    assert not build(filling(tmp_path), settings).cached
    assert len(compilations) == 2


DAMAGES = [
    *(("cubin", b""), ("cubin", b"\x7fELF and more"), ("cu", b"")),
    *(("log", b"[]"), ("json", b""), ("json", b"[]")),
]
"""Of files of the cache, by their ends."""


def test_a_damaged_program_is_built_anew(tmp_path, settings, compilations):
    source = filling(tmp_path)
    first = build(source, settings)
    for kind, damage in DAMAGES:
        (file,) = (settings.cache / "programs").glob(f"*.{kind}")
        file.write_bytes(damage)
        second = build(source, settings)
        assert (second.cached, second.code) == (False, first.code), kind
        assert build(source, settings).cached
    assert len(compilations) == 1 + len(DAMAGES)


def test_one_flipped_bit_of_a_cubin_is_noticed(tmp_path, settings, compilations):
    first = build(filling(tmp_path), settings)
    (file,) = (settings.cache / "programs").glob("*.cubin")
    code = bytearray(file.read_bytes())
    code[len(code) // 2] ^= 1
    file.write_bytes(code)
    assert build(filling(tmp_path), settings).code == first.code
    assert len(compilations) == 2


def test_a_program_whose_cache_is_a_file_is_built_after_one_warning(
    tmp_path, compilations
):
    (tmp_path / "file").write_text("")
    settings = Settings(cache=tmp_path / "file")
    with pytest.warns(RuntimeWarning, match="Set ETC_DIST_CACHE") as caught:
        cubins = [build(filling(tmp_path), settings) for _ in range(2)]
    assert len(caught) == 1
    assert [c.code[:4] for c in cubins] == 2 * [b"\x7fELF"]
    assert len(compilations) == 2


def test_processes_that_build_the_same_compile_it_once(tmp_path, settings):
    code = (
        "from etc_dist.runtime.build import build\n"
        "from etc_dist.settings import Settings\n"
        "from tests.runtime.test_build import *\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "import time\n"
        "compiled = compile_cubin\n"
        "building.compile_cubin = lambda *a: (time.sleep(1), compiled(*a))[1]\n"
        "print(build(filling(folder), Settings(cache=folder / 'cache')).cached)\n"
    )
    filling(tmp_path)  # once, so that nobody reads it half
    command = [sys.executable, "-c", code]
    kind = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    every = [subprocess.Popen(command, **kind, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0].strip() for process in every]
    outputs = [line.splitlines()[-1] for line in outputs]
    assert sorted(outputs) == ["False", "True"]
    assert not list((settings.cache / "programs").glob("*.lock"))


def test_threads_may_compile_a_processs_first_programs():
    code = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from threading import Barrier\n"
        "from etc_dist.runtime.build import compile_cubin\n"
        "def compile(_):\n"
        "    barrier.wait()\n"
        "    return compile_cubin('__global__ void f() {}', {})[0][:4]\n"
        "barrier = Barrier(8)\n"
        "with ThreadPoolExecutor(8) as pool:\n"
        "    print({*pool.map(compile, range(8))})\n"
    )
    command = [sys.executable, "-c", code]
    process = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert (process.stdout, process.stderr) == ("{b'\\x7fELF'}\n", "")


# -------------------------------------------------------------------------- errors


def test_a_fault_in_the_users_body_is_shown_with_file_and_line(tmp_path, settings):
    source = filling(tmp_path, "seven")
    with pytest.raises(BuildError) as caught:
        build(source, settings)
    assert f"{tmp_path}/fill.cuh(8): error:" in caught.value.got
    assert '"seven" is undefined' in caught.value.got
    assert caught.value.where == "calls on 1 ranks, static schedule"
    assert list((settings.cache / "programs").iterdir()) == []


def test_a_missing_source_is_named_by_its_path(tmp_path, settings):
    source = filling(tmp_path)
    (tmp_path / "fill.cuh").unlink()
    with pytest.raises(BuildError) as caught:
        build(source, settings)
    assert caught.value.what == "the source of a device function does not exist"
    assert caught.value.got == f"no file {tmp_path}/fill.cuh"
    assert caught.value.fix.startswith("write the CUDA body there")


def test_a_build_error_carries_the_numbered_source(tmp_path):
    source = filling(tmp_path)
    broken = source.text.replace("struct Args {", "struct Args { oops;")
    with pytest.raises(BuildError) as caught:
        compile_cubin(broken, headers(source, kernels_folder()))
    assert caught.value.source == broken
    lines = caught.value.numbered().splitlines()
    assert lines[0] == "   1  // calls on 1 ranks, static schedule"
    at = next(n for n, line in enumerate(broken.splitlines(), 1) if "oops" in line)
    assert lines[at - 1] == f"{at:4d}  struct Args {{ oops;"
    assert f"program.cu({at}): error" in caught.value.got
