"""The digest of NumPy bodies: equal on ranks that compute the same."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from tokenize import TokenError
from types import CodeType, FunctionType
from typing import Any

from etc_dist.cache import Recent
from etc_dist.ir.function import DeviceFunction
from etc_dist.ir.graph import GraphFunction

_PLAIN = (int, float, complex, str, bytes, type(None))


def digest_bodies(graph: GraphFunction) -> str:
    """A hash of the bodies of the graph's device functions and epilogues: of their
    source texts, defaults and enclosed values. Functions that they call are not
    covered, unless they are enclosed."""
    functions = [f for call in graph.calls for f in _with_epilogue(call.function)]
    body_ids: set[int] = set()
    parts = [part for function in functions for part in _parts(function.body, body_ids)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _with_epilogue(function: DeviceFunction) -> Iterator[DeviceFunction]:
    yield function
    if function.epilogue is not None:
        yield from _with_epilogue(function.epilogue)


def _parts(body: Callable[..., Any], body_ids: set[int]) -> Iterator[str]:
    """The parts of a function that is not among `body_ids`, and of enclosed ones."""
    if not isinstance(body, FunctionType) or id(body) in body_ids:
        yield type(body).__name__
        return
    body_ids.add(id(body))
    yield _text(body.__code__)
    defaults = (*(body.__defaults__ or ()), *(body.__kwdefaults__ or {}).items())
    yield repr(_plain(defaults))
    for cell in body.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            value = cell.cell_contents
            if isinstance(value, FunctionType):
                yield from _parts(value, body_ids)
            else:
                yield repr(_plain(value))


def _plain(value: Any) -> Any:
    """A value whose `repr` is equal on ranks that have equal values."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value if isinstance(value, _PLAIN) else type(value).__name__


def _text(code: CodeType) -> str:
    """The source text, or the instructions: its file may have changed since."""
    entry = _texts.get(id(code))
    if entry is None:
        _texts.put(id(code), entry := (code, _read(code)))
    return entry[1]


_texts: Recent[int, tuple[CodeType, str]] = Recent(1024)
"""The texts of code by its id: code that is equal may have another text."""


def _read(code: CodeType) -> str:
    try:
        return inspect.getsource(code)
    except (OSError, SyntaxError, TokenError, TypeError):
        nested = [
            _text(const) for const in code.co_consts if isinstance(const, CodeType)
        ]
        names = (code.co_names, code.co_varnames, code.co_freevars)
        return repr((code.co_code, names, _plain(code.co_consts), nested))
