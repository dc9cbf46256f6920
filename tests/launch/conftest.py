"""Fixtures of the tests of the launcher."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def default_signals() -> Iterator[None]:
    """Let jobs begin with default handlers. This process may ignore signals: under
    nohup, or in the background of a script."""
    ignored = [
        number
        for number in (signal.SIGHUP, signal.SIGINT)
        if signal.getsignal(number) == signal.SIG_IGN
    ]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
