"""Whether a part of a model computes what its class says, and nothing else.

No library is imported: parts are recognised by the names of their classes.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

LIBRARIES = ("torch", "transformers")
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
SILU = ("SiLU", "SiLUActivation")
PLACES = ("torch.nn.modules.", "transformers.")
"""Of plain classes; torch.ao has others of the same names."""


def oddity(part: Any, classes: Collection[str]) -> str:
    """What is unlike a module of one of these classes of torch or transformers: its
    class (an adapter, a quantised layer), its own forward, or hooks. Empty if the
    module runs the forward of its class alone."""
    kind, attributes = type(part), getattr(part, "__dict__", {})
    if kind.__name__ not in classes or not kind.__module__.startswith(PLACES):
        return f"the class {kind.__name__}"
    forward = attributes.get("forward") or getattr(kind, "forward", None)
    if "forward" in attributes or not _is_of_library(forward or kind):
        return "another forward"
    return "hooks" if any(attributes.get(name) for name in HOOKS) else ""


def odd_activation(activation: Any) -> str:
    """The name of a function other than SiLU; empty for SiLU, as a module or torch's
    function."""
    name = getattr(activation, "__name__", "")
    is_function = name == "silu"
    is_silu = (
        _is_of_library(activation) if is_function else not oddity(activation, SILU)
    )
    return "" if is_silu else str(name or type(activation).__name__).lower()


def _is_of_library(thing: Any) -> bool:
    return str(thing.__module__).partition(".")[0] in LIBRARIES
