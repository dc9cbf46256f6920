"""What operations and layers are made with, checked before anything is compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from numbers import Integral
from typing import Any

import numpy as np

from etc_dist.errors import ArgumentError
from etc_dist.ir import GraphFunction
from etc_dist.world import World


def whole_number(name: str, value: Any, least: int = 0, most: int | None = None) -> int:
    """A whole number from `least` on, as an int; ArgumentError for others."""
    if not _is_whole(value) or value < least or (most is not None and value > most):
        kind = f"{least} on" if most is None else f"{least} to {most}"
        raise ArgumentError(
            f"{name} is no whole number from {kind}",
            where=f"argument {name}",
            wanted=f"{name}: an integer, from {kind}",
            got=f"{name} = {value!r}",
            fix="give such a number, or leave it out if it may be",
        )
    return int(value)


def truth(name: str, value: Any) -> bool:
    """True or False; ArgumentError for others."""
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentError(
            f"{name} is neither True nor False",
            where=f"argument {name}",
            wanted=f"{name}: True or False",
            got=f"{name} = {value!r}",
            fix="give one of these",
        )
    return bool(value)


def refuse_unknown(
    world: World, name: str, **options: tuple[Any, Sequence[str]]
) -> None:
    """Refuse, on every rank, an operation whose options are not among the known."""
    bad = {
        key: value
        for key, (value, known) in options.items()
        if not isinstance(value, str) or value not in known
    }
    if bad:
        world.refuse(
            ArgumentError(
                f"{name} cannot be made",
                where=f"{name}, rank {world.rank}",
                wanted=", ".join(f"{k} in {tuple(options[k][1])}" for k in bad),
                got=", ".join(f"{k} = {v!r}" for k, v in bad.items()),
                fix="choose among these",
            )
        )


def sizes_for(
    make_graph: Callable[..., GraphFunction],
    decided: Mapping[str, Any],
    sizes: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """`sizes`, if each is one that the graph function takes and nobody has `decided`:
    a whole number from 1 on, or as many of them as the default has."""
    name = getattr(make_graph, "__name__", "the graph function")
    given = {} if sizes is None else sizes
    known = {
        key: parameter.default
        for key, parameter in signature(make_graph).parameters.items()
        if parameter.kind is Parameter.KEYWORD_ONLY and key not in decided
    }
    unfit = f"{sizes!r}"
    if isinstance(given, Mapping):
        unfit = ", ".join(
            f"{key} = {value!r}"
            for key, value in given.items()
            if key not in known or not _is_size(value, known[key])
        )
    if unfit:
        raise ArgumentError(
            f"options that {name} does not take",
            where=f"options of {name}",
            wanted="whole numbers from 1 on, of "
            + ", ".join(key + _count(default) for key, default in known.items()),
            got=unfit,
            fix="leave them out, or choose among these",
        )
    return {key: _as_ints(value) for key, value in given.items()}


def _count(default: Any) -> str:
    return f" ({len(default)} of them)" if isinstance(default, tuple) else ""


def _as_ints(size: Any) -> Any:
    return tuple(map(int, size)) if isinstance(size, Sequence) else int(size)


def _is_size(value: Any, default: Any) -> bool:
    if isinstance(default, tuple):
        fits = isinstance(value, (tuple, list)) and len(value) == len(default)
        return fits and all(map(_is_size, value, default))
    return _is_whole(value) and value >= 1


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
