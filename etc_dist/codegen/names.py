"""Names in generated code for the names of a graph. Each kind has a prefix, so that no
name clashes with C++ keywords or the library's names."""

from __future__ import annotations


def address_name(tensor: str) -> str:
    """The argument for a tensor's address."""
    return f"address_{tensor}"


def tensor_function(tensor: str) -> str:
    """The name of the function that makes tiles of a tensor."""
    return f"tensor_{tensor}"


def dim_name(dim: str) -> str:
    """The argument for a dim or a number of `g.let`."""
    return f"dim_{dim}"


def axis_name(coordinate: str) -> str:
    """The member of a task's or an element's coordinate."""
    return f"axis_{coordinate}"


def events_name(events: str) -> str:
    """The argument for the position of an event tensor's first counter."""
    return f"events_{events}"


def period_name(lane: str, loop: str) -> str:
    """The argument for the number of units of one turn of a loop."""
    return f"period_{lane}_{loop}"


def pace_name(call: str) -> str:
    """The argument for a call's pace, in nanoseconds per task."""
    return f"pace_{call}"


def queue_name(owner: str, word: str) -> str:
    """The argument for the position of a queue's words among the counters: the `head`,
    `tail`, `surplus` or `slots` of a lane, or the `states` of a call's groups; for the
    `total` and the `initial` units of a lane."""
    return f"{word}_{owner}"


def call_type(call: str) -> str:
    """The type of a call in generated text."""
    return f"Call_{call}"


def loop_type(lane: str, loop: str) -> str:
    """The type of a lane's loop in generated text."""
    return f"Loop_{lane}_{loop}"


def event_function(events: str) -> str:
    """The name of the function that makes references to an event's elements."""
    return f"event_{events}"


def event_type(events: str) -> str:
    """The type of an event tensor in generated text."""
    return f"Event_{events}"
