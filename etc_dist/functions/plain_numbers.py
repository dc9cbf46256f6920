"""The numbers of options as Python's: ranks compare calls by the text of their options,
which is then the same for equal ones."""

from __future__ import annotations

from dataclasses import fields
from math import inf
from numbers import Integral, Real
from typing import Any


def use_plain_numbers(options: Any) -> None:
    """Convert the integers and floats of a frozen dataclass, also those of NumPy.
    Values of other types stay, for its check."""
    for field in fields(options):
        value = getattr(options, field.name)
        if field.type == "int" and isinstance(value, Integral):
            number: float = int(value)
        elif field.type == "float" and isinstance(value, Real):
            number = _as_float(value)
        else:
            continue
        if not isinstance(value, bool):
            object.__setattr__(options, field.name, number)


def _as_float(value: Any) -> float:
    """As a literal, an integer that is too large is infinite."""
    try:
        return float(value)
    except OverflowError:
        return inf if value > 0 else -inf
