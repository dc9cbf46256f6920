"""Tables of refusals: what is done, and words of the message."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from etc_dist.errors import GraphError


def refused(
    act: Callable[[], object],
    words: str,
    kind: type[Exception] | tuple[type[Exception], ...] = GraphError,
) -> Exception:
    """The error of `act`, whose message has all `words`, separated by "|"; "got: 3 to
    do" has all of what was got."""
    with pytest.raises(kind) as caught:
        act()
    text = " ".join(str(caught.value).split())
    lacking = [part for part in words.split("|") if part.strip() not in text]
    assert not lacking, f"{text!r} lacks {lacking}"
    return caught.value
