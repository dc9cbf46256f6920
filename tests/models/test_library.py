"""The programs that `etc-dist build` compiles have all of the library's graphs and
device functions."""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

import etc_dist.layers
import etc_dist.ops
from etc_dist.models.library import library_graphs
from etc_dist.runtime.build import kernels_folder

OF_HOSTS = {"functions/push_far.cuh", "functions/sum_pieces.cuh"}
"""Programs over several hosts need NVSHMEM: tests/runtime/test_far_link.py."""
APPLIED = {f"epilogues/{name}.cuh" for name in ("residual", "row_squares", "soft_cap")}
"""Epilogues whose code is that of a user's own: tests/functions/test_epilogue.py."""

OF_OTHER_MODELS = {"functions/clear_rows.cuh"}
"""Of models without an example: tests/functions/test_clear_rows.py compiles it."""


@cache
def header_names(name: str) -> frozenset[str]:
    """A header of the kernels, and those that it includes."""
    text = (kernels_folder() / name).read_text()
    names = re.findall(r'^#include "([^"]+)"$', text, re.MULTILINE)
    return frozenset([name]).union(*map(header_names, names))


def graph_names() -> set[str]:
    """Of the functions that make graphs."""
    return {
        name
        for package in (etc_dist.ops, etc_dist.layers)
        for module in iter_modules(package.__path__, f"{package.__name__}.")
        for name in vars(import_module(module.name))
        if re.fullmatch(r"[a-z]\w*_graph", name)
    }


def test_each_device_function_and_graph_is_built():
    graphs = [graph for _, _, graph in library_graphs()]
    functions = [call.function for graph in graphs for call in graph.calls]
    functions += [f.epilogue for f in functions if f.epilogue is not None]
    sources = {str(function.source) for function in functions}
    built = frozenset().union(*map(header_names, sources))
    folders = ("functions", "epilogues")
    files = [p for f in folders for p in kernels_folder().glob(f"{f}/*.cuh")]
    names = {p.relative_to(kernels_folder()).as_posix() for p in files}
    assert names - built == OF_HOSTS | APPLIED | OF_OTHER_MODELS
    assert graph_names() - {graph.name for graph in graphs} == set()
