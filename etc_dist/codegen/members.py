"""Members of generated structs: constants, an expression, a selection by number."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

WIDTH = 130
"""Longer lines are broken."""
_BREAK = re.compile(r"(?<=,) | (?=(?:[-+*?:<&]|&&|\|\||[<=!]=) )")
COORD, GROUP = "const Args& g, Coord c", "const Args& g, i32 group"
Constant = int | float | tuple[int, ...]


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
    rest = " " * (indent + continued) + line[at + 1 :]
    return [line[:at], *wrapped(rest, continued=0)]


def constants(values: Mapping[str, Constant]) -> list[str]:
    """Declarations of constants; a Python float is one of fp32."""
    rows: dict[str, list[str]] = {}
    for name, value in values.items():
        if isinstance(value, tuple):
            numbers = ", ".join(map(str, value))
            rows[name] = [f"int {name}[] = {{{numbers}}}"]
        else:
            kind, end = ("float", "f") if isinstance(value, float) else ("int", "")
            row = rows.setdefault(kind, [])
            row.append(f"{'' if row else kind + ' '}{name} = {value}{end}")
    return [
        line
        for row in rows.values()
        for line in wrapped(f"  static constexpr {', '.join(row)};")
    ]


def function(head: str, body: Sequence[str], parameters: str) -> list[str]:
    """A function with these lines."""
    return [f"  ETC_DEVICE static {head}({parameters}) {{", *body, "  }"]


def method(head: str, value: str, parameters: str = "const Args& g") -> list[str]:
    """A function that returns one value."""
    short = f"  ETC_DEVICE static {head}({parameters}) {{ return {value}; }}"
    long = function(head, wrapped(f"    return {value};"), parameters)
    return [short] if len(short) <= WIDTH else long


def free_function(head: str, value: str, parameters: str) -> str:
    """A function outside of structs that returns one value."""
    start = f"ETC_DEVICE {head}({parameters}) {{"
    short = f"{start} return {value}; }}"
    long = "\n".join([start, *wrapped(f"  return {value};"), "}"])
    return short if len(short) <= WIDTH else long


def select(head: str, options: Iterable[str]) -> list[str]:
    """A function template that selects a value by a compile-time index."""
    rows = [
        line
        for n, option in enumerate(options)
        for line in wrapped(f"    if constexpr (n == {n}) return {option};")
    ]
    start = f"  template <int n> ETC_DEVICE static {head}({COORD}) {{"
    return [start, *rows, "  }"]


def indexed(
    head: str, options: Sequence[str], parameters: str = f"{COORD}, int n"
) -> list[str]:
    """A function that selects a value by the index of an unrolled loop."""
    if len(options) < 2:
        return method(head, options[0] if options else "{}", parameters)
    last = len(options) - 1
    rows = [
        line
        for n, option in enumerate(options)
        for line in wrapped(
            f"    {f'if (n == {n}) ' if n < last else ''}return {option};"
        )
    ]
    return function(head, rows, parameters)
