"""Messages on stderr, also where it cannot be written."""

import sys

import pytest

from etc_dist.messages import flush_output, show_message


class Full:
    """A stream whose device is full."""

    def write(self, text):
        raise OSError(28, "No space left on device")

    def flush(self):
        self.write("")


def test_messages_are_on_stderr(capsys):
    show_message("a line\n")
    assert capsys.readouterr() == ("", "a line\n")


@pytest.mark.parametrize("stream", [Full(), None])
def test_streams_that_cannot_be_written_are_ignored(stream, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream)
    show_message("a line\n")
    flush_output()
