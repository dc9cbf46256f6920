"""The files of a new device function: NumPy body, CUDA body and test, to be edited."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from string import Template

from etc_dist.errors import ArgumentError

OF_CPP = """
alignas alignof asm auto bool case catch char class concept const constexpr decltype
default delete do double enum explicit export extern float friend goto inline int long
mutable namespace new noexcept operator private protected public register requires short
signed sizeof static struct switch template this throw try typedef typeid typename union
unsigned using virtual void volatile
"""
"""Keywords of C++ that are none of Python."""

PYTHON = '''\
"""$name: y = 2 * x. CUDA half in $cuda_place."""

from __future__ import annotations

${import_path}from typing import Any

from etc_dist.ir import Operand, device_function


# The regions of one task, by position: reads, then writes. The CUDA body supports one
# row of any number of columns, as many in y as in x.
@device_function(
    source=$source,
    reads=1,
    writes=1,
    tile={0: Operand((1, "columns"), "float32"), 1: Operand((1, "columns"), "float32")},
)
def $name(x: Any, y: Any) -> None:
    """x [rows, columns] -> y [rows, columns], both float32: y = 2 * x."""
    y[...] = 2 * x
'''

CUDA = """\
// $name: y = 2 * x.
#pragma once
#include "worker/task.cuh"

namespace etc {

template <class Task>
struct $name {
  static void run(const Task& task) {
    const auto x = task.template operand<0>();
    const auto y = task.template operand<1>();
    for (i32 column = task.thread; column < x.size[1]; column += Task::threads) {
      *y.at(0, column) = 2.0f * *x.at(0, column);
    }
  }
};

}  // namespace etc
"""

TEST = '''\
"""$name: the NumPy body, and the CUDA body against it."""

from __future__ import annotations

import numpy as np
import pytest

import etc_dist
from etc_dist import graph_function
from etc_dist.emulate import Emulator
${library_import}from etc_dist.ir import Graph, span
${local_import}

@graph_function
def ${name}_of_rows(g: Graph) -> None:
    """x [rows, columns] -> y [rows, columns], each task one row."""
    rows, columns = g.dims("rows columns")
    x = g.input("x", (rows, columns), "float32")
    y = g.output("y", (rows, columns), "float32")
    (r,) = grid = g.grid(r=rows)
    row = span(r, 1), slice(None)
    g.call($name, grid, reads=[x[row]], writes=[y[row]])


def draw(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, columns), np.float32)


def test_the_numpy_body_computes_the_formula() -> None:
    x = draw(3, 5)
    y = np.empty_like(x)
    $name.body(x, y)
    np.testing.assert_allclose(y, 2 * x.astype(np.float64), rtol=2**-24)


# Rows of 16 bytes, the least, and of more columns than a task has threads.
@pytest.mark.parametrize(("rows", "columns"), [(1, 4), (3, 260)])
def test_the_cuda_body_agrees_with_the_numpy_body(rows: int, columns: int) -> None:
    x = draw(rows, columns)
    expected = np.empty_like(x)
    $name.body(x, expected)
    emulator = Emulator(${name}_of_rows(1))
    for seed in range(3):
        (outputs,) = emulator.run([{"x": x}], seed=seed)
        np.testing.assert_array_equal(outputs["y"], expected)


def test_the_cuda_body_compiles_without_spills() -> None:
    binary = etc_dist.build(${name}_of_rows(1))
    assert (binary.spill_bytes, binary.remarks) == (0, ())
'''


def write_function(name: str, folder: Path) -> list[Path]:
    """Write the files of the device function `name`, which doubles a float32 array
    [rows, columns] until it is edited. In the root of a checkout of the library they
    become a part of it; elsewhere all are in `folder`, which is made if there is none.
    Returns their paths.

    Raises ArgumentError for a name that is not one of a C++ struct and a Python module,
    and for files that exist. Then nothing is written."""
    where = f"etc-dist new-function {name}"
    is_keyword = keyword.iskeyword(name) or name in OF_CPP.split()
    if is_keyword or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ArgumentError(
            "the name of a device function cannot be used",
            where=where,
            wanted="lower-case letters, digits and _, a letter first, no keyword",
            got=name,
            fix="choose a name such as scale_rows",
        )
    if (folder / "etc_dist" / "functions").is_dir():
        python = folder / "etc_dist" / "functions" / f"{name}.py"
        cuda = folder / "kernels" / "functions" / f"{name}.cuh"
        test = folder / "tests" / "functions" / f"test_{name}.py"
        terms = {
            "import_path": "",
            "source": f'"functions/{name}.cuh"',
            "cuda_place": f"`kernels/functions/{name}.cuh`",
            "library_import": f"from etc_dist.functions.{name} import {name}\n",
            "local_import": "",
        }
    else:
        python, cuda = folder / f"{name}.py", folder / f"{name}.cuh"
        test = folder / f"test_{name}.py"
        terms = {
            "import_path": "from pathlib import Path\n",
            "source": 'Path(__file__).with_suffix(".cuh")',
            "cuda_place": f"`{name}.cuh`",
            "library_import": "",
            "local_import": f"\nfrom {name} import {name}\n",
        }
    texts = {python: PYTHON, cuda: CUDA, test: TEST}
    existing = [str(path) for path in texts if path.exists()]
    if existing:
        raise ArgumentError(
            "a file of the device function exists",
            where=where,
            wanted="a name that no file has",
            got=", ".join(existing),
            fix="choose another name, or another --folder",
        )
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(Template(text).substitute(terms, name=name))
    return list(texts)
