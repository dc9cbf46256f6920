"""Compares what the plug-in needs with the files of vLLM's wheels, without installing
them: `python tests/torch/vllm_wheels.py 0.26.0 0.33.0`, or paths of wheels. Not part of
CI: a wheel is 300 MB. Exits with 1 if a version lacks something."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from etc_dist.torch.vllm_hooks import HOOKS

Definition = ast.ClassDef | ast.FunctionDef


class Wheel:
    """The Python files of a wheel."""

    def __init__(self, path: Path) -> None:
        self.files = ZipFile(path)
        self.tree = cache(self._tree)

    def _tree(self, module: str) -> ast.Module | None:
        """A module's file."""
        path = module.replace(".", "/")
        for file in (f"{path}.py", f"{path}/__init__.py"):
            if file in self.files.namelist():
                return ast.parse(self.files.read(file))
        return None

    def find(self, module: str, name: str) -> tuple[str, Definition] | None:
        """The definition of a name that a module has, and the module of it."""
        tree = self.tree(module)
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, Definition) and node.name == name:
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if name == (alias.asname or alias.name):
                        return self.find(_absolute(module, node), alias.name)
        return None

    def members(self, module: str, name: str) -> Iterator[tuple[str, ast.AST]]:
        """The names in a class and its bases, and what defines each, nearest first."""
        definition = self.find(module, name)
        if definition is None or not isinstance(definition[1], ast.ClassDef):
            return
        module, defined = definition
        for node in defined.body:
            if isinstance(node, ast.FunctionDef):
                yield node.name, node
            for target in _targets(node):
                if isinstance(target, ast.Name):
                    yield target.id, node
        for node in ast.walk(defined):
            for target in _targets(node):
                if isinstance(target, ast.Attribute) and _is_self(target.value):
                    yield target.attr, node
        for base in defined.bases:
            if isinstance(base, ast.Name):
                yield from self.members(module, base.id)

    def seen(self, module: str, signature: str) -> str:
        """What a module has in the place of `signature`, written in the same way."""
        path, _, parameters = signature.partition("(")
        first, _, last = path.partition(".")
        if last:
            definition = dict(reversed([*self.members(module, first)])).get(last)
        else:
            definition = (self.find(module, first) or (None, None))[1]
        if definition is None:
            return "nothing"
        if not parameters:
            return path
        if not isinstance(definition, ast.FunctionDef):
            return f"no function {path}"
        return f"{path}({', '.join(_parameters(definition))})"


def _absolute(module: str, node: ast.ImportFrom) -> str:
    """The module that a statement imports from."""
    parents = module.split(".")[: -node.level] if node.level else []
    return ".".join([*parents, *([node.module] if node.module else [])])


def _targets(node: ast.AST) -> list[ast.expr]:
    """What a statement assigns to."""
    if isinstance(node, ast.AnnAssign):
        return [node.target]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [part for target in targets for part in getattr(target, "elts", [target])]


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _parameters(function: ast.FunctionDef) -> list[str]:
    """Those that a caller gives, and `self`."""
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    names += [arguments.vararg.arg] if arguments.vararg else []
    names += [argument.arg for argument in arguments.kwonlyargs]
    names += [arguments.kwarg.arg] if arguments.kwarg else []
    decorators = [getattr(argument, "id", None) for argument in function.decorator_list]
    return names[1:] if "classmethod" in decorators else names


def compare(path: Path) -> bool:
    """Print what of HOOKS a wheel has; whether it has all."""
    wheel, has_all = Wheel(path), True
    print(f"vLLM {path.name.split('-')[1]}")
    for hook, modules in HOOKS.items():
        needs = [(module, name) for module, names in modules.items() for name in names]
        wrong = [
            f"    {module}: {text} in place of {signature}"
            for module, signature in needs
            if (text := wheel.seen(module, signature)) != signature
        ]
        print(
            f"  {hook}: has {len(needs) - len(wrong)} of {len(needs)}", *wrong, sep="\n"
        )
        has_all = has_all and not wrong
    return has_all


def main(versions: list[str]) -> int:
    with TemporaryDirectory() as folder:
        has_all = True
        for version in versions:
            path = Path(version)
            if not path.exists():
                command = [sys.executable, "-m", "pip", "download", "--quiet"]
                command += ["--no-deps", "--only-binary=:all:", "--dest", folder]
                subprocess.run([*command, f"vllm=={version}"], check=True)
                [path] = Path(folder).glob(f"vllm-{version}-*.whl")
            has_all = compare(path) and has_all
    return 0 if has_all else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
