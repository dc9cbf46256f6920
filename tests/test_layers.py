"""Imports go one way: from the right of this line to its left.

errors, files, messages, settings <- cache <- ir <- schedule <- verify <- codegen
                 <- runtime <- compiler, program, ahead, emulate <- functions <- ops
                 <- layers <- models, torch, predict <- port, serve
                 <- cli, doctor, new_function;
world needs only errors, messages and settings, functions only ir"""

import ast
import functools
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.sources import PACKAGE, nodes_of, tree_of

LAYERS = [
    {"errors", "files", "messages", "settings"},
    {"cache"},
    {"ir"},
    {"schedule"},
    {"verify"},
    {"codegen"},
    {"runtime"},
    {"compiler", "program", "ahead", "emulate"},
    {"functions"},
    {"ops"},
    {"layers"},
    {"models", "torch", "predict"},
    {"port", "serve", "explain"},
    {"cli", "doctor", "new_function"},
]
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}
FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def may_import(user: str, module: str) -> bool:
    """Whether a file of layer `user` may import from layer `module`."""
    if user == module:
        return True
    if user == "world":
        return HEIGHT[module] == 0
    if user == "functions":
        return module in ("errors", "ir")
    if module == "world":
        return HEIGHT[user] >= HEIGHT["runtime"]
    return HEIGHT[module] <= HEIGHT[user]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imported(path: Path) -> list[str]:
    """Full names of what a file imports from the package, wherever it does so."""
    return list(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package.pop()
    for node in nodes_of(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (n.name for n in node.names if n.name.startswith("etc_dist"))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            full = ".".join([*base, *([node.module] if node.module else [])])
            if full.split(".")[0] == "etc_dist":
                yield from (f"{full}.{name.name}" for name in node.names)


def layer(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def test_files_import_only_from_layers_to_their_left():
    wrong = []
    for path in FILES:
        user = layer(module_name(path))
        assert user in HEIGHT or user == "world", f"{user} has no place in LAYERS"
        right = (name for name in imported(path) if not may_import(user, layer(name)))
        wrong += [f"{module_name(path)} imports {name}" for name in right]
    assert wrong == []


def test_no_two_layers_import_each_other():
    uses: dict[str, set[str]] = {}
    for path in FILES:
        user = layer(module_name(path))
        uses.setdefault(user, set()).update(layer(name) for name in imported(path))
        uses[user].discard(user)
    try:
        TopologicalSorter(uses).prepare()
    except CycleError as error:
        pytest.fail(f"layers import in a circle: {' -> '.join(error.args[1])}")
