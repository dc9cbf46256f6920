"""Evaluates the expressions of a program for one task, and records its loads."""

from __future__ import annotations

import ast
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any


class Refused(Exception):
    """The program is a GraphError, whatever else is wrong with it."""


class Unknown:
    """A number that depends on a tensor without values."""

    def _same(self, *_: Any) -> Unknown:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _same
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _same
    __lt__ = __le__ = __gt__ = __ge__ = _same

    def __bool__(self) -> bool:
        raise AssertionError("an unknown number decides")


UNKNOWN = Unknown()


@dataclass
class Table:
    """An int32 tensor on one rank. A load adds (tensor, index) to `loads`; the index is
    None for a load that may be of any element."""

    name: str
    shape: tuple[int, ...]
    values: Any
    loads: list[tuple[str, tuple[int, ...] | None]]
    unsure: list[bool]
    """Not empty inside of a branch of an undecided select."""

    def load(self, *index: Any) -> Any:
        if self.unsure or any(i is UNKNOWN for i in index):
            self.loads.append((self.name, None))
            return UNKNOWN
        if any(not 0 <= i < n for i, n in zip(index, self.shape, strict=True)):
            raise Refused(f"{self.name}{list(index)} is out of range")
        self.loads.append((self.name, tuple(index)))
        if self.values is None:
            return UNKNOWN
        value = self.values
        for i in index:
            value = value[i]
        return value


def _either(choose: Any) -> Any:
    def pick(*numbers: Any) -> Any:
        return UNKNOWN if UNKNOWN in numbers else choose(*numbers)

    return pick


def _ceildiv(a: Any, b: Any) -> Any:
    return -(-a // b) if a is not UNKNOWN else a


def functions(unsure: list[bool]) -> dict[str, Any]:
    def select(condition: Any, a: Any, b: Any) -> Any:
        if condition is UNKNOWN:
            unsure.append(True)
            a(), b()
            unsure.pop()
            return UNKNOWN
        return a() if condition else b()

    return {
        "ceildiv": _ceildiv,
        "equal": _either(lambda a, b: a == b),
        "maximum": _either(max),
        "minimum": _either(min),
        "select": select,
    }


class _Lazy(ast.NodeTransformer):
    """select(c, a, b) -> select(c, lambda: a, lambda: b)."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "select":
            none = ast.arguments([], [], None, [], [], None, [])
            node.args[1:] = [ast.Lambda(none, branch) for branch in node.args[1:]]
        return node


@functools.lru_cache(10_000)
def code(text: str) -> CodeType:
    tree = _Lazy().visit(ast.parse(text, mode="eval"))
    return compile(ast.fix_missing_locations(tree), text, "eval")


@functools.lru_cache(10_000)
def names_in(text: str) -> frozenset[str]:
    """The names in an expression; those of loaded tensors begin with "@"."""
    if text == ":":
        return frozenset()
    names = set()
    for node in ast.walk(ast.parse(text, mode="eval")):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names.add(f"@{node.value.id}")
        elif isinstance(node, ast.Name):
            names.add(node.id)
    return frozenset(names)


def tables_in(texts: Sequence[str]) -> frozenset[str]:
    """The tensors that expressions load from."""
    return frozenset(
        name[1:] for text in texts for name in names_in(text) if name[0] == "@"
    )


@dataclass(frozen=True)
class Part:
    """One axis of a region as texts. `kept`: not indexed by one number; without a size,
    the whole axis."""

    start: str
    size: str
    kept: bool


@functools.lru_cache(10_000)
def part_of(text: str) -> Part:
    if text == ":":
        return Part("0", "", True)
    node = ast.parse(text, mode="eval").body
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        first, *bounds = map(ast.unparse, node.args)
        if node.func.id == "tile":
            return Part(f"({first}) * ({bounds[0]})", bounds[0], True)
        if node.func.id == "span":
            return Part(first, bounds[0], True)
    return Part(text, "1", False)


def evaluate(text: str, names: dict[str, Any]) -> Any:
    """The value of an expression: a number, or UNKNOWN."""
    try:
        return eval(code(text), names)
    except ZeroDivisionError as error:
        raise Refused(str(error)) from error
