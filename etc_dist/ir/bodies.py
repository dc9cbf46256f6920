"""The digest of NumPy bodies: equal on ranks that compute the same."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CodeType, FunctionType
from typing import Any

from etc_dist.ir.function import DeviceFunction
from etc_dist.ir.graph import GraphFunction

DEEPEST = 8
"""Levels of functions in functions; one may enclose itself."""
_PLAIN = (int, float, complex, str, bytes, type(None))


def digest_bodies(graph: GraphFunction) -> str:
    """A hash of the bodies of the graph's device functions and epilogues: of their
    source texts, defaults and enclosed values. Functions that they call are not
    covered, unless they are enclosed."""
    used = [f for call in graph.calls for f in _with_epilogue(call.function)]
    bodies = {id(function): function.body for function in used}
    parts = [part for body in bodies.values() for part in _parts(body)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _with_epilogue(function: DeviceFunction) -> Iterator[DeviceFunction]:
    yield function
    if function.epilogue is not None:
        yield from _with_epilogue(function.epilogue)


def _parts(body: Callable[..., Any], depth: int = 0) -> Iterator[str]:
    if not isinstance(body, FunctionType) or depth > DEEPEST:
        yield type(body).__name__
        return
    yield _text(body.__code__)
    defaults = (*(body.__defaults__ or ()), *(body.__kwdefaults__ or {}).items())
    yield repr(_plain(defaults))
    for cell in body.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            value = cell.cell_contents
            if isinstance(value, FunctionType):
                yield from _parts(value, depth + 1)
            else:
                yield repr(_plain(value))


def _plain(value: Any) -> Any:
    """A value whose `repr` is equal on ranks that have equal values."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value if isinstance(value, _PLAIN) else type(value).__name__


def _text(code: CodeType) -> str:
    """The source text, or the instructions where there is none."""
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):
        nested = [_text(one) for one in code.co_consts if isinstance(one, CodeType)]
        names = (code.co_names, code.co_varnames, code.co_freevars)
        return repr((code.co_code, names, _plain(code.co_consts), nested))
