"""Each public definition of the library has a docstring, which names its errors and
options."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.sources import PACKAGE, nodes_of, tree_of

INTERNAL = {"AssertionError", "AttributeError", "KeyError", "SystemExit"}
"""Errors of the library itself, and those that Python's protocols expect."""
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
API = runpy.run_path(str(PACKAGE.parent / "docs/make_api.py"))


@cache
def trees() -> dict[Path, ast.Module]:
    return {
        path.relative_to(PACKAGE): tree_of(path)
        for path in sorted(PACKAGE.rglob("*.py"))
    }


@cache
def classes() -> dict[str, ast.ClassDef]:
    nodes = (node for tree in trees().values() for node in nodes_of(tree))
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def definitions(body: list[ast.stmt]) -> Iterator[Definition]:
    for node in body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield node
        elif isinstance(node, ast.If):
            yield from definitions(node.body)


def bases(node: ast.ClassDef) -> Iterator[ast.ClassDef]:
    """The classes of the library that a class extends, itself included."""
    yield node
    for base in node.bases:
        name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
        if name in classes() and classes()[name] is not node:
            yield from bases(classes()[name])


def is_described(owner: ast.ClassDef, method: str) -> bool:
    """Whether the method has a docstring here or where it is declared."""
    declared = (d for base in bases(owner) for d in definitions(base.body))
    return any(d.name == method and ast.get_docstring(d) for d in declared)


def test_each_public_definition_has_a_docstring():
    lacking = []
    for path, tree in trees().items():
        for node in definitions(tree.body):
            if not ast.get_docstring(node):
                lacking.append(f"{path}:{node.lineno} {node.name}")
            if isinstance(node, ast.ClassDef):
                lacking += [
                    f"{path}:{part.lineno} {node.name}.{part.name}"
                    for part in definitions(node.body)
                    if not is_described(node, part.name)
                ]
    assert not lacking, "\n".join(lacking)


def raised(node: ast.AST) -> Iterator[str]:
    """The classes of errors that a function raises itself, and does not catch."""
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.Raise) and isinstance(part.exc, ast.Call):
            yield ast.unparse(part.exc.func)
        elif not isinstance(part, Definition | ast.Lambda | ast.Try):
            yield from raised(part)


def functions(body: list[ast.stmt], text: str = "") -> Iterator[tuple[Definition, str]]:
    """The public functions and methods, with their docstrings and that of the class."""
    for node in definitions(body):
        full_text = f"{ast.get_docstring(node) or ''}\n{text}"
        if isinstance(node, ast.ClassDef):
            yield from functions(node.body, full_text)
        else:
            yield node, full_text


def test_a_docstring_names_the_errors_that_a_function_raises():
    lacking = [
        f"{path}:{node.lineno} {node.name}: {error}"
        for path, tree in trees().items()
        for node, text in functions(tree.body)
        for error in raised(node)
        if error[0].isupper() and error not in INTERNAL
        if not re.search(rf"\b{error}\b", text)
    ]
    assert not lacking, "\n".join(lacking)


@cache
def texts() -> dict[str, str]:
    """The docstrings of all definitions of a name."""
    by_name: dict[str, str] = {}
    for tree in trees().values():
        for node, text in functions(tree.body):
            by_name[node.name] = by_name.get(node.name, "") + text
        for node in definitions(tree.body):
            by_name.setdefault(node.name, ast.get_docstring(node) or "")
    return by_name


def with_references(text: str, depth: int = 3) -> str:
    """A docstring, and those of the definitions that it names."""
    names = re.findall(r"`[\w.]*?(\w+)`", text) if depth else []
    return text + "".join(
        with_references(texts().get(name, ""), depth - 1) for name in names
    )


def options(node: ast.FunctionDef) -> Iterator[str]:
    """The parameters with defaults."""
    arguments = node.args
    first = len(arguments.args) - len(arguments.defaults)
    yield from (argument.arg for argument in arguments.args[first:])
    for argument, default in zip(
        arguments.kwonlyargs, arguments.kw_defaults, strict=True
    ):
        if default is not None:
            yield argument.arg


def described(module: str, name: str) -> Iterator[tuple[ast.FunctionDef, str]]:
    """The functions of a public name, and their docstrings: what a user calls."""
    definition = API["find"](module, name)
    if isinstance(definition.node, ast.FunctionDef):
        yield definition.node, definition.text
    if isinstance(definition.node, ast.ClassDef):
        for node in definition.node.body:
            if not isinstance(node, ast.FunctionDef):
                continue
            is_internal = node.name == "__init__" and API["MADE"].search(
                definition.text
            )
            if node.name == "__init__" or not (is_internal or node.name[0] == "_"):
                yield node, f"{ast.get_docstring(node) or ''}\n{definition.text}"


def test_a_docstring_names_the_options_that_a_user_has():
    """Or names a definition that does."""
    lacking = {
        f"{module}.{name}: {node.name}: {option}"
        for module in API["PACKAGES"]
        for name in API["public_names"](module)
        for node, text in described(module, name)
        for option in options(node)
        if not re.search(rf"\b{option}\b", with_references(text))
    }
    assert not lacking, "\n".join(sorted(lacking))


DTYPES = re.compile(r"dtype|fp32|float|int32|16 bits|bytes|\bregion\b", re.I)
"""Words of a docstring with dtypes, or for a copy of any region."""


def test_device_functions_and_graphs_give_shapes_and_dtypes():
    """x [rows, columns] -> y [rows, columns], and their dtypes."""
    lacking = []
    for path, tree in trees().items():
        for node in definitions(tree.body):
            is_graph = any(
                ast.unparse(d) == "graph_function" for d in node.decorator_list
            )
            returns = ast.unparse(getattr(node, "returns", None) or ast.Constant(None))
            if is_graph or (
                path.parts[0] == "functions" and returns == "DeviceFunction"
            ):
                text = with_references(ast.get_docstring(node) or "")
                if not (DTYPES.search(text) and re.search(r"->|\[", text)):
                    lacking.append(f"{path}:{node.lineno} {node.name}")
    assert not lacking, "\n".join(lacking)


def test_each_folder_names_its_files():
    """In its docstring; functions have a file each, named after it."""
    wrong = []
    for path in trees():
        if path.name != "__init__.py" or path.parent.name in ("", "functions"):
            continue
        text = ast.get_docstring(trees()[path]) or ""
        mentions = set(re.findall(r"(?<![\w/])\w+\.py\b", text)) - {path.name}
        files = {p.name for p in trees() if p.parent == path.parent} - {path.name}
        wrong += [f"{path.parent / name}: no file" for name in sorted(mentions - files)]
        wrong += [f"{path.parent / name}: no name" for name in sorted(files - mentions)]
    assert wrong == []
