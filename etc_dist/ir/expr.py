"""Symbolic integers: the index arithmetic of graphs, plans and generated code.

`evaluate` computes a value, from integers or from NumPy arrays (the CPU backend, the
verifier); `codegen` writes an expression as CUDA text. Division and remainder round to
minus infinity, as in Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Never

import numpy as np

from etc_dist.errors import GraphError

Value = Any  # int or an integer NumPy array
NUMBERS = (int, float, np.generic, np.ndarray)
"""Values that no expression is compared with by ==."""


def _least(a: Value, b: Value) -> Value:
    # NOTE: of two ints an int: a NumPy integer divided by zero gives zero.
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else np.minimum(a, b)


def _greatest(a: Value, b: Value) -> Value:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else np.maximum(a, b)


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "min": _least,
    "max": _greatest,
}
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    "==": lambda a, b: a == b,
}
MOST_DEPTH = 200
"""The most nested operations of an expression, which recursion visits."""
OPERAND = "a symbolic expression"
"""A part of an expression, as a place in messages."""
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "//": 2, "%": 2}


@dataclass(frozen=True, eq=False)
class Expr:
    """Base of all index expressions; immutable, compared by structure."""

    depth: int = field(init=False, repr=False)
    """The most operations that are nested in it."""

    def __post_init__(self) -> None:
        # NOTE: at once, from its parts: later it might take too many recursive calls.
        deepest = max([child.depth for child in self.children()], default=-1)
        object.__setattr__(self, "depth", 1 + deepest)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, Expr):
            return self._hash == other._hash and self._terms == other._terms
        return isinstance(other, NUMBERS) and bool(self)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self._terms)

    @cached_property
    def _terms(self) -> tuple[object, ...]:
        names: tuple[str, ...] = self.__match_args__
        return type(self), *(getattr(self, name) for name in names)

    def __add__(self, other: Expr | int) -> Expr:
        return op("+", self, other)

    def __radd__(self, other: int) -> Expr:
        return op("+", other, self)

    def __sub__(self, other: Expr | int) -> Expr:
        return op("-", self, other)

    def __rsub__(self, other: int) -> Expr:
        return op("-", other, self)

    def __mul__(self, other: Expr | int) -> Expr:
        return op("*", self, other)

    def __rmul__(self, other: int) -> Expr:
        return op("*", other, self)

    def __floordiv__(self, other: Expr | int) -> Expr:
        return op("//", self, other)

    def __rfloordiv__(self, other: int) -> Expr:
        return op("//", other, self)

    def __mod__(self, other: Expr | int) -> Expr:
        return op("%", self, other)

    def __rmod__(self, other: int) -> Expr:
        return op("%", other, self)

    def __lt__(self, other: Expr | int) -> Comparison:
        return Comparison("<", self, wrap(other))

    def __le__(self, other: Expr | int) -> Comparison:
        return Comparison("<=", self, wrap(other))

    def __gt__(self, other: Expr | int) -> Comparison:
        return Comparison("<", wrap(other), self)

    def __ge__(self, other: Expr | int) -> Comparison:
        return Comparison("<=", wrap(other), self)

    def __bool__(self) -> bool:
        raise GraphError(
            "a symbolic value has no truth value",
            where=f"expression {self}",
            wanted="arithmetic that holds for every shape (minimum, select, //, %)",
            got="a Python `if`, `and` or `or` on it, or == with a number",
            fix="write the choice with select(), equal(), minimum() and maximum()",
        )

    def children(self) -> tuple[Expr, ...]:
        """Internal: the expressions that this one is made of."""
        return ()

    def evaluate(self, env: Mapping[str, Value]) -> Value:
        """The value under `env`: symbol name -> int or array; loads read
        `env["@" + tensor name]`."""
        raise NotImplementedError

    @cached_property
    def symbols(self) -> tuple[Symbol, ...]:
        """Internal: all symbols, each once, in order of first appearance."""
        symbol_by_name: dict[str, Symbol] = {}
        stack: list[Expr] = [self]
        while stack:
            node = stack.pop()
            if isinstance(node, Symbol):
                symbol_by_name.setdefault(node.name, node)
            stack.extend(reversed(node.children()))
        return tuple(symbol_by_name.values())

    @cached_property
    def loads(self) -> tuple[Load, ...]:
        """Internal: all loads, outer ones first."""
        loads: list[Load] = []
        stack: list[Expr] = [self]
        while stack:
            node = stack.pop()
            if isinstance(node, Load):
                loads.append(node)
            stack.extend(reversed(node.children()))
        return tuple(loads)

    @cached_property
    def symbol_names(self) -> frozenset[str]:
        """Internal: the names of all symbols."""
        return frozenset(symbol.name for symbol in self.symbols)

    @property
    def is_loaded(self) -> bool:
        """Internal: whether the value depends on a runtime tensor."""
        return bool(self.loads)


@dataclass(frozen=True, eq=False)
class Const(Expr):
    """An integer."""

    value: int

    def evaluate(self, env: Mapping[str, Value]) -> Value:
        return self.value

    def __str__(self) -> str:
        return str(self.value)


ZERO, ONE = Const(0), Const(1)


@dataclass(frozen=True, eq=False)
class Symbol(Expr):
    """A named integer: a dim of the program, a coordinate, the rank, a task index."""

    name: str
    kind: str  # "dim" | "own" | "derived" | "coordinate" | "rank" | "task" | "workers"

    def evaluate(self, env: Mapping[str, Value]) -> Value:
        return env[self.name]

    def __str__(self) -> str:
        return self.name


def _precedence(expr: Expr) -> int:
    return _PRECEDENCE.get(expr.name, 9) if isinstance(expr, Op) else 9


@dataclass(frozen=True, eq=False)
class Op(Expr):
    """An operation of two expressions."""

    name: str
    left: Expr
    right: Expr

    def children(self) -> tuple[Expr, ...]:
        return (self.left, self.right)

    def evaluate(self, env: Mapping[str, Value]) -> Value:
        return FUNCTIONS[self.name](self.left.evaluate(env), self.right.evaluate(env))

    def __str__(self) -> str:
        if self.name in ("min", "max"):
            return f"{self.name}({self.left}, {self.right})"
        precedence = _PRECEDENCE[self.name]
        left, right = str(self.left), str(self.right)
        if _precedence(self.left) < precedence:
            left = f"({left})"
        # NOTE: a right operand of equal precedence needs its parentheses: a // (b * c).
        if _precedence(self.right) <= precedence:
            right = f"({right})"
        return f"{left} {self.name} {right}"


@dataclass(frozen=True, eq=False)
class Load(Expr):
    """An element of a runtime tensor of int32, known only when the program runs.
    is_given: the tensor is the caller's, with all its values from the start."""

    tensor: str
    shape: tuple[Expr, ...]
    index: tuple[Expr, ...]
    is_given: bool = False

    def children(self) -> tuple[Expr, ...]:
        return (*self.index, *self.shape)

    def evaluate(self, env: Mapping[str, Value]) -> Value:
        """As `Expr.evaluate`; IndexError for an index out of range."""
        values = env["@" + self.tensor]
        index = tuple(i.evaluate(env) for i in self.index)
        # NOTE: NumPy counts a negative index from the end; the device does not.
        for i, extent in zip(index, values.shape, strict=True):
            if isinstance(i, int) and 0 <= i < extent:
                continue
            outside = np.less(i, 0) | np.greater_equal(i, extent)
            if np.any(outside):
                first = int(np.asarray(i)[outside][0])
                raise IndexError(f"{self}: index {first} is outside of [0, {extent})")
        elements = values[index]
        is_array = isinstance(elements, np.ndarray) and elements.ndim > 0
        return np.asarray(elements, np.int64) if is_array else int(elements)

    def __str__(self) -> str:
        return f"{self.tensor}[{', '.join(map(str, self.index))}]"


@dataclass(frozen=True)
class Comparison:
    """A condition of `select` or `when`: not a number, and without a truth value."""

    name: str  # "<" | "<=" | "=="
    left: Expr
    right: Expr

    def __eq__(self, other: object) -> bool:
        if isinstance(other, NUMBERS):
            return bool(self)
        return isinstance(other, Comparison) and vars(self) == vars(other)

    def __bool__(self) -> Never:
        raise TypeError(
            f"comparison {self} has no truth value, as its numbers are known only when "
            "the program runs: write select(comparison, a, b), or minimum() and "
            "maximum()"
        )

    def evaluate(self, env: Mapping[str, Value]) -> Value:
        """Whether it holds, for the values of symbols in `env`."""
        compare = COMPARISONS[self.name]
        return compare(self.left.evaluate(env), self.right.evaluate(env))

    def __str__(self) -> str:
        if self.name == "==":
            return f"equal({self.left}, {self.right})"
        return f"{self.left} {self.name} {self.right}"


@dataclass(frozen=True, eq=False)
class Select(Expr):
    """`then` where the comparison holds, else `other`. Only the chosen one is
    evaluated: the other may load out of range, or divide by zero."""

    condition: Comparison
    then: Expr
    other: Expr

    def children(self) -> tuple[Expr, ...]:
        return (self.condition.left, self.condition.right, self.then, self.other)

    def chosen(self, env: Mapping[str, Value]) -> Expr:
        """The expression that `env`, with integers only, selects."""
        return self.then if self.condition.evaluate(env) else self.other

    def evaluate(self, env: Mapping[str, Value]) -> Value:
        holds = self.condition.evaluate(env)
        if not isinstance(holds, np.ndarray) or holds.ndim == 0:
            return (self.then if holds else self.other).evaluate(env)
        arrays = {s.name: env[s.name] for s in self.symbols if np.ndim(env[s.name])}
        shape = np.broadcast_shapes(*(a.shape for a in (holds, *arrays.values())))
        result = np.empty(shape, np.int64)
        holds = np.broadcast_to(holds, shape)
        for mask, expr in ((holds, self.then), (~holds, self.other)):
            if mask.any():
                masked_arrays = {
                    n: np.broadcast_to(a, shape)[mask] for n, a in arrays.items()
                }
                result[mask] = expr.evaluate({**env, **masked_arrays})
        return result

    def __str__(self) -> str:
        return f"select({self.condition}, {self.then}, {self.other})"


def is_integer(value: object) -> bool:
    """Whether `value` is an integer of Python or NumPy."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def wrap(value: Expr | int, where: str = OPERAND) -> Expr:
    """An `Expr` from an `Expr` or a Python integer, given at `where`. Raises TypeError
    for others, GraphError for one of a graph that is nested too deeply."""
    if isinstance(value, Expr):
        if where != OPERAND and value.depth > MOST_DEPTH:
            raise GraphError(
                "an index expression has too many nested operations",
                where=where,
                wanted=f"at most {MOST_DEPTH}",
                got=f"{value.depth}",
                fix="write fewer operations, such as a product in place of a repeated "
                "sum, or name parts without coordinates by g.let",
            )
        return value
    if is_integer(value):
        return _const(int(value))
    raise TypeError(f"{where} expects an int or an expression, got {value!r}")


_const = lru_cache(1024)(Const)


def _is(expr: Expr, value: int) -> bool:
    return isinstance(expr, Const) and expr.value == value


def op(name: str, left: Expr | int, right: Expr | int) -> Expr:
    """`left name right`, simplified if both are constants or one is neutral. Raises
    GraphError for a division by zero."""
    a, b = wrap(left), wrap(right)
    if isinstance(a, Const) and isinstance(b, Const):
        if name in ("//", "%") and b.value == 0:
            raise GraphError(
                "division by zero in an index expression",
                where=f"{a} {name} {b}",
                wanted="a divisor other than zero",
                got="0",
                fix="correct the expression",
            )
        return Const(int(FUNCTIONS[name](a.value, b.value)))
    if (
        name in ("+", "-")
        and isinstance(b, Const)
        and isinstance(a, Op)
        and a.name in ("+", "-")
        and isinstance(a.right, Const)
    ):
        # (x + 2) - 1 -> x + 1
        signed = {"+": 1, "-": -1}
        total = signed[a.name] * a.right.value + signed[name] * b.value
        return op("+", a.left, total) if total >= 0 else op("-", a.left, -total)
    if name in ("min", "max") and a == b:
        return a
    if (name == "+" and _is(a, 0)) or (name == "*" and _is(a, 1)):
        return b
    if (name in ("+", "-") and _is(b, 0)) or (name in ("*", "//") and _is(b, 1)):
        return a
    if (name == "*" and (_is(a, 0) or _is(b, 0))) or (name == "%" and _is(b, 1)):
        return ZERO
    return Op(name, a, b)


def substitute(expr: Expr, values: Mapping[str, Expr]) -> Expr:
    """`expr` with the symbols named in `values` replaced."""
    if values.keys().isdisjoint(expr.symbol_names):
        return expr
    return _substitute(expr, values)


def _substitute(expr: Expr, values: Mapping[str, Expr]) -> Expr:
    if isinstance(expr, Symbol):
        return values.get(expr.name, expr)
    if isinstance(expr, Op):
        left, right = (_substitute(e, values) for e in expr.children())
        return op(expr.name, left, right)
    if isinstance(expr, Load):
        index = tuple(_substitute(i, values) for i in expr.index)
        return replace(expr, index=index)
    if isinstance(expr, Select):
        left, right, then, otherwise = (_substitute(e, values) for e in expr.children())
        return select(Comparison(expr.condition.name, left, right), then, otherwise)
    return expr


def ceildiv(a: Expr | int, b: Expr | int) -> Expr:
    """a / b, rounded up, of a positive b. GraphError for a number below 1."""
    divisor = wrap(b)
    if isinstance(divisor, Const) and divisor.value < 1:
        raise GraphError(
            "ceildiv has no divisor below 1",
            where=f"ceildiv({a}, {b})",
            wanted="b >= 1",
            got=f"b = {b}",
            fix="divide by a positive number",
        )
    return op("//", op("-", op("+", a, b), 1), b)


def minimum(a: Expr | int, b: Expr | int) -> Expr:
    """The smaller of a and b."""
    return op("min", a, b)


def maximum(a: Expr | int, b: Expr | int) -> Expr:
    """The larger of a and b."""
    return op("max", a, b)


def equal(a: Expr | int, b: Expr | int) -> Comparison:
    """Whether a and b are the same number, for `select`; a == b compares structure."""
    return Comparison("==", wrap(a), wrap(b))


def select(condition: Comparison, a: Expr | int, b: Expr | int) -> Expr:
    """a where the comparison (<, <=, >, >= of expressions, or equal()) holds, else b.
    Only the chosen one is evaluated. Raises TypeError for another condition."""
    if not isinstance(condition, Comparison):
        raise TypeError(
            f"select() expects a comparison of expressions, got {condition!r}: write "
            "a < b or equal(a, b); for numbers that Python knows, a Python `if`"
        )
    then, otherwise = wrap(a), wrap(b)
    if isinstance(condition.left, Const) and isinstance(condition.right, Const):
        return then if condition.evaluate({}) else otherwise
    return then if then == otherwise else Select(condition, then, otherwise)
