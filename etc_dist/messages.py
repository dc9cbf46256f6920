"""Messages to the user on stderr."""

from __future__ import annotations

import contextlib
import sys


def show_message(text: str) -> None:
    """Print `text`, ending with a newline, on stderr; nothing where that is closed,
    full or a broken pipe."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()


def flush_output() -> None:
    """Flush stdout and stderr, as far as they can be written."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
