"""Interrupts at given lines of a call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any


def interrupted(call: Callable[[], Any], codes: Sequence[CodeType], line: int) -> bool:
    """Raise KeyboardInterrupt at the `line`-th line that `call` executes of `codes`.
    Returns whether it has so many."""
    num_left = line

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal num_left
        if frame.f_code not in codes:
            return None
        num_left -= event == "line"
        if event == "line" and not num_left:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False
