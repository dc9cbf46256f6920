"""Each public definition of the library has a docstring."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "etc_dist"
Definition = ast.ClassDef | ast.FunctionDef


@cache
def trees() -> dict[Path, ast.Module]:
    return {
        path.relative_to(PACKAGE): ast.parse(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    }


@cache
def classes() -> dict[str, ast.ClassDef]:
    nodes = (node for tree in trees().values() for node in ast.walk(tree))
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


def test_each_folder_names_its_files():
    """In its docstring; functions have a file each, named after it."""
    wrong = []
    for path in trees():
        if path.name != "__init__.py" or path.parent.name in ("", "functions"):
            continue
        text = ast.get_docstring(trees()[path]) or ""
        named = set(re.findall(r"(?<![\w/])\w+\.py\b", text)) - {path.name}
        files = {p.name for p in trees() if p.parent == path.parent} - {path.name}
        wrong += [f"{path.parent / name}: no file" for name in sorted(named - files)]
        wrong += [f"{path.parent / name}: no name" for name in sorted(files - named)]
    assert wrong == []
