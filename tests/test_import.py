"""Importing the package starts nothing; see `etc_dist.world`."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import etc_dist

HEAVY = ("cupy", "mpi4py.MPI", "cuda", "nvshmem", "matplotlib", "torch")


SOURCES = {
    "import": """
import os, sys, threading
before = dict(os.environ)
import etc_dist.cli, etc_dist.world
assert before == dict(os.environ) and threading.active_count() == 1
""",
    "dir": """
import sys, etc_dist
names = dir(etc_dist)
assert {*etc_dist.__all__, "compile", "errors", "ir", "models"} <= {*names}, names
for name in names:
    getattr(etc_dist, name)
""",
}


@pytest.mark.parametrize("name", SOURCES)
def test_imports_and_names_in_dir_start_no_gpu_and_no_mpi(name):
    modules = _python(SOURCES[name] + 'print(*sys.modules, sep="\\n")').splitlines()
    assert [name for name in HEAVY if name in modules] == []


def test_type_checkers_find_each_name_where_it_is():
    source = Path(etc_dist.__file__).read_text()
    imported = dict.fromkeys(etc_dist._SUBMODULES, "etc_dist")
    imported |= {name: f"etc_dist.{where}" for name, where in etc_dist._PLACES.items()}
    (block,) = (n for n in ast.parse(source).body if isinstance(n, ast.If))
    assert imported == {
        alias.asname: node.module for node in block.body for alias in node.names
    }


def test_submodules_load_on_first_use():
    source = """
import sys, etc_dist
assert not {"etc_dist.models", "etc_dist.ir", "etc_dist.errors"} & {*sys.modules}
print(etc_dist.models.load.__name__, etc_dist.errors.EtcDistError.__name__)
print(hasattr(etc_dist, "cli"), hasattr(etc_dist, "nothing"))
"""
    assert _python(source).split() == ["load", "EtcDistError", "False", "False"]


def test_submodule_of_torch_loads_torch():
    source = """
import sys, etc_dist
sys.modules["torch"] = None
try:
    etc_dist.torch
except ModuleNotFoundError as error:
    print(error.name)
"""
    assert _python(source).split() == ["torch"]


def _python(source: str) -> str:
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", source], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    return process.stdout
