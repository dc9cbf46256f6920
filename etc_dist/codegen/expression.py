"""Index expressions as CUDA text: dims come from the arguments `g`, coordinates from
the task's coordinate `c`, the task index is `t`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from etc_dist.codegen.names import axis_name, dim_name, tensor_function
from etc_dist.ir.call import Call
from etc_dist.ir.expr import Comparison, Const, Expr, Load, Op, Select, Symbol

_CALLS = {"//": "floordiv", "%": "floormod", "min": "minimum", "max": "maximum"}
_NATURAL = {"//": "div_natural", "%": "mod_natural"}
"""For numbers that are not negative."""
_LEVELS = {"+": 1, "-": 1, "*": 2}
"""How strongly operators bind."""
_FEW_SIGNS = 20
"""A text that is at most so long is repeated rather than named."""


@dataclass(frozen=True)
class Writer:
    """Writes expressions as they are written in one place of the text."""

    naturals: Set[str] | None = None
    """The numbers of `g.let` that are not negative where expressions are evaluated;
    None for unknown ones."""
    divisors: Mapping[Expr, str] = field(default_factory=dict)
    """The texts of divisors that the host prepares."""
    names: Mapping[Expr, str] = field(default_factory=dict)
    """The texts of expressions that have a name."""

    def text(self, expr: Expr, level: int = 0) -> str:
        """`expr` as an i32 expression, in parentheses if it binds less than `level`."""
        if expr in self.names:
            return self.names[expr]
        if isinstance(expr, Const):
            return str(expr.value)
        if isinstance(expr, Symbol):
            return _symbol(expr)
        if isinstance(expr, Load):
            index = ", ".join(map(self.text, expr.index))
            return f"{tensor_function(expr.tensor)}(g).load({index})"
        if isinstance(expr, Select):
            then, otherwise = self.text(expr.then), self.text(expr.other)
            return f"({self.condition(expr.condition)} ? {then} : {otherwise})"
        assert isinstance(expr, Op)
        if expr.name in _LEVELS:
            own_level = _LEVELS[expr.name]
            left = self.text(expr.left, own_level)
            right = self.text(expr.right, own_level + 1)
            whole = f"{left} {expr.name} {right}"
            return f"({whole})" if own_level < level else whole
        left, right = self.text(expr.left), self.text(expr.right)
        if self._is_prepared(expr):
            by = self.divisors[expr.right]
            if expr.name == "//":
                return f"div_by({left}, {by})"
            return f"mod_by({left}, {right}, {by})"
        calls = _NATURAL if _divides_naturals(expr, self.naturals) else _CALLS
        return f"{calls[expr.name]}({left}, {right})"

    def condition(self, condition: Comparison) -> str:
        """`condition` as a bool expression."""
        left, right = self.text(condition.left), self.text(condition.right)
        return f"{left} {condition.name} {right}"

    def wide(self, expr: Op) -> str:
        """`expr` as an i64 expression that is exact if its operands have 32 bits."""
        if expr.name in ("min", "max", "%"):  # its result has 32 bits, too
            return f"i64({self.text(expr)})"
        dividend = f"i64({self.text(expr.left)})"
        if expr.name == "//":
            return f"floordiv({dividend}, i64({self.text(expr.right)}))"
        return f"{dividend} {expr.name} {self.text(expr.right, _LEVELS[expr.name] + 1)}"

    def linear(
        self, index: Sequence[Expr], shape: Sequence[Expr], level: int = 0
    ) -> str:
        """The row-major position of an element."""
        at: Expr = Const(0)
        for i, extent in zip(index, shape, strict=True):
            at = at * extent + i
        return self.text(at, level)

    def named(self, exprs: Sequence[Expr], name: str) -> tuple[list[str], Writer]:
        """The texts of long operations that `exprs` repeat, inner ones first, and a
        writer that calls the n-th one `name`_n."""
        uses: Counter[Expr] = Counter()
        operations: list[Expr] = []

        def visit(expr: Expr) -> None:
            uses[expr] += 1
            if uses[expr] > 1 or not isinstance(expr, Op | Select):
                return
            children = expr.children()
            if isinstance(expr, Op) and expr.name == "//" and self._is_prepared(expr):
                children = children[:1]
            for child in children:
                visit(child)
            operations.append(expr)

        for expr in exprs:
            visit(expr)
        writer, texts = self, list[str]()
        for expr in operations:
            long = writer.text(expr) if uses[expr] > 1 else ""
            if len(long) > _FEW_SIGNS:
                names = {**writer.names, expr: f"{name}_{len(texts)}"}
                texts.append(long)
                writer = replace(writer, names=names)
        return texts, writer

    def _is_prepared(self, expr: Op) -> bool:
        return expr.right in self.divisors and _divides_naturals(expr, self.naturals)


PLAIN = Writer()
text, linear = PLAIN.text, PLAIN.linear


def fixed_divisors(call: Call) -> Iterator[Expr]:
    """The divisors in the order of `call` that depend on dims alone."""
    naturals = extent_names(call)
    stack: list[Expr] = [*call.order]
    while stack:
        node = stack.pop()
        stack.extend(reversed(node.children()))
        if not isinstance(node, Op) or not _divides_naturals(node, naturals):
            continue
        kinds = {symbol.kind for symbol in node.right.symbols}
        if kinds and kinds <= {"dim", "derived"} and not node.right.is_loaded:
            yield node.right


def extent_names(call: Call) -> set[str]:
    """The numbers of `g.let` that are extents of the grid of `call`: positive wherever
    it has a task."""
    return {a.extent.name for a in call.axes if isinstance(a.extent, Symbol)}


def _divides_naturals(expr: Op, naturals: Set[str] | None) -> bool:
    if expr.name not in _NATURAL or naturals is None:
        return False
    return _is_natural(expr, naturals)


def _is_natural(expr: Expr, naturals: Set[str]) -> bool:
    """Whether `expr` is at least 0, as dims, coordinates, ranks, task indices are."""
    if isinstance(expr, Const):
        return expr.value >= 0
    if isinstance(expr, Symbol):
        return expr.kind != "derived" or expr.name in naturals
    if not isinstance(expr, Op) or expr.name == "-":
        return False
    sides = (_is_natural(side, naturals) for side in (expr.left, expr.right))
    return any(sides) if expr.name == "max" else all(sides)


def _symbol(symbol: Symbol) -> str:
    if symbol.kind == "coordinate":
        return f"c.{axis_name(symbol.name)}"
    if symbol.kind in ("dim", "own", "derived"):
        return f"g.{dim_name(symbol.name)}"
    return "g.rank" if symbol.kind == "rank" else symbol.name
