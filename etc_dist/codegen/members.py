"""Member functions of generated structs: an expression, or a selection by index."""

from __future__ import annotations


def constant(name: str, value: int | float | tuple[int, ...]) -> str:
    """A declaration, without the end; a Python float is one of fp32."""
    if isinstance(value, tuple):
        return f"int {name}[] = {{{', '.join(map(str, value))}}}"
    return (
        f"float {name} = {value}f"
        if isinstance(value, float)
        else f"int {name} = {value}"
    )


def method(head: str, body: str, extra: str = "") -> str:
    """A static method of a generated type, of the arguments g and `extra`."""
    parameters = "const Args& g" + (f", {extra}" if extra else "")
    return f"  ETC_DEVICE static {head}({parameters}) {{ return {body}; }}"


def select(head: str, options: list[str]) -> list[str]:
    """A member function template that selects by a compile-time index."""
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
    """A member function that selects by the index of an unrolled loop."""
    kind, name = head.split()
    lines = [f"  ETC_DEVICE static {kind} {name}({parameters}) {{"]
    lines += [f"    if (n == {n}) return {o};" for n, o in enumerate(options)]
    return [*lines, "    return {};", "  }"]


def block(head: str, body: str) -> list[str]:
    """A member function of a task's coordinate, over several lines."""
    return [
        f"  ETC_DEVICE static {head}(const Args& g, Coord c) {{",
        f"    return {body};",
        "  }",
    ]
