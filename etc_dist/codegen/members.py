"""Members of generated structs: constants, an expression, a selection by number."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

WIDTH = 160
"""Longer lines are broken."""
_BREAK = re.compile(r"(?<=,) | (?=(?:[-+*?:<&]|&&|\|\||[<=!]=) )")
COORD, GROUP = "const Args& g, Coord c", "const Args& g, i32 group"
INDEX, ROW = "const Args& g, i32 t", f"{COORD}, int n"
_HEADS = {COORD: "ETC_OF_TASK", INDEX: "ETC_OF_INDEX", ROW: "ETC_ROWS"}
"""Macros of kernels/worker/defaults.cuh for functions with these parameters."""
Constant = int | float | str | tuple[int, ...]


def wrapped(line: str, continued: int = 4) -> list[str]:
    """`line` in lines of WIDTH, broken after commas and before operators, where
    brackets are least nested. continued: the further indent of all but the first."""
    if len(line) <= WIDTH:
        return [line]
    indent = len(line) - len(line.lstrip())
    places = [m.start() for m in _BREAK.finditer(line, indent + 8, WIDTH + 1)]
    if not places:
        return [line]
    deeper = [(sign in "([{") - (sign in ")]}") for sign in line[:WIDTH]]
    nesting = [0, *accumulate(deeper)]
    late = [at for at in places if at > WIDTH // 3] or places[-1:]
    at = min(late, key=lambda place: (nesting[place], -place))
    tail = " " * (indent + continued) + line[at + 1 :]
    return [line[:at], *wrapped(tail, continued=0)]


def packed(rows: Iterable[str]) -> list[str]:
    """Rows in lines of WIDTH, of several short rows each."""
    lines = [""]
    for row in rows:
        if lines[-1] and len(lines[-1]) + len(row.lstrip()) < WIDTH:
            lines[-1] += " " + row.lstrip()
        elif len(broken := wrapped(row)) > 1:
            lines += [*broken, ""]
        else:
            lines += broken
    return [line for line in lines if line]


def constants(values: Mapping[str, Constant]) -> list[str]:
    """Declarations of constants; a Python float is one of fp32, a text an int."""
    rows: dict[str, list[str]] = {}
    for name, value in values.items():
        is_float = isinstance(value, float)
        if isinstance(value, tuple):
            name, value = f"{name}[]", f"{{{', '.join(map(str, value))}}}"
        kind, end = ("float", "f") if is_float else ("int", "")
        row = rows.setdefault(kind, [])
        row.append(f"{'' if row else kind + ' '}{name} = {value}{end}")
    return [
        line
        for row in rows.values()
        for line in wrapped(f"  static constexpr {', '.join(row)};")
    ]


def _head(head: str, parameters: str) -> str:
    if macro := _HEADS.get(parameters):
        return f"{macro}({', '.join(head.split())})"
    return f"ETC_DEVICE static {head}({parameters})"


def function(head: str, body: Sequence[str], parameters: str) -> list[str]:
    """A function with these lines."""
    return [f"  {_head(head, parameters)} {{", *body, "  }"]


def method(head: str, value: str, parameters: str = "const Args& g") -> list[str]:
    """A function that returns one value."""
    short = f"  {_head(head, parameters)} {{ return {value}; }}"
    long = function(head, wrapped(f"    return {value};"), parameters)
    return [short] if len(short) <= WIDTH else long


def table(name: str, rows: Iterable[str], kind: str = "auto") -> list[str]:
    """A function template that selects a row by a compile-time index. kind: "auto" for
    rows of any types; "i32" for numbers, which may name other rows."""
    lines = packed(f"    ETC_ROW({n}) {row};" for n, row in enumerate(rows))
    head = f"ETC_TABLE({name})" if kind == "auto" else f"ETC_NUMBERS({name})"
    return [f"  {head} {{", *lines, "  }"]


def indexed(head: str, options: Sequence[str], parameters: str = ROW) -> list[str]:
    """A function that selects a value by the index of an unrolled loop."""
    if len(options) < 2:
        return method(head, options[0] if options else "{}", parameters)
    last = len(options) - 1
    rows = (
        f"    {f'if (n == {n}) ' if n < last else ''}return {option};"
        for n, option in enumerate(options)
    )
    return function(head, packed(rows), parameters)
