"""Member functions of generated structs: no logic beyond a choice by number."""

from __future__ import annotations

from collections.abc import Iterable


def method(head: str, body: str, extra: str = "") -> str:
    parameters = "const Args& g" + (f", {extra}" if extra else "")
    return f"  ETC_DEVICE static {head}({parameters}) {{ return {body}; }}"


def select(head: str, options: list[str]) -> list[str]:
    """A member function template, chosen by a compile-time number."""
    kind, name = head.split()
    lines = [
        f"  template <int n> ETC_DEVICE static {kind} {name}(const Args& g, Coord c) {{"
    ]
    for n, option in enumerate(options):
        if option:
            lines.append(f"    if constexpr (n == {n}) return {option};")
    return [*lines, "  }"]


def indexed(
    head: str, options: list[str], parameters: str = "const Args& g, Coord c, int n"
) -> list[str]:
    """A member function that picks one of a few by an unrolled loop's number."""
    kind, name = head.split()
    lines = [f"  ETC_DEVICE static {kind} {name}({parameters}) {{"]
    lines += [f"    if (n == {n}) return {o};" for n, o in enumerate(options)]
    return [*lines, "    return {};", "  }"]


def conjunction(head: str, conditions: Iterable[str]) -> list[str]:
    """A member function that says whether all of a task's conditions hold: those that
    load later than others' results only if these hold, all others side by side."""
    stages: dict[int, list[str]] = {}
    for condition in conditions:
        stages.setdefault(_depth(condition), []).append(f"({condition})")
    joined = [" & ".join(stages[depth]) for depth in sorted(stages)]
    body = " &&\n        ".join(joined or ["true"])
    return [
        f"  ETC_DEVICE static {head}(const Args& g, Coord c) {{",
        f"    return {body};",
        "  }",
    ]


def _depth(condition: str) -> int:
    """How many loads, at most, wait for each other in a condition's text."""
    inside: list[bool] = []
    most = 0
    for end, letter in enumerate(condition):
        if letter == "(":
            inside.append(condition[:end].endswith("load_index"))
            most = max(most, sum(inside))
        elif letter == ")":
            inside.pop()
    return most
