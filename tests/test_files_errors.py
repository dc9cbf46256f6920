"""Files that are refused before they are read."""

import os
import socket

import pytest

from etc_dist import files
from etc_dist.files import open_file, parse_object, read_file, read_object


@pytest.fixture
def listener(tmp_path):
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(tmp_path / "socket"))
        yield tmp_path / "socket"


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_other_than_regular_files_are_refused_at_once(tmp_path, listener):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "fifo")
    before = descriptors()
    for path in (tmp_path, tmp_path / "fifo", tmp_path / "link", "/dev/zero", listener):
        with pytest.raises(OSError, match="not a regular file|No such device"):
            open_file(path)
    assert descriptors() == before


def test_a_link_to_a_file_is_followed_unless_flags_forbid_it(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    assert read_file(tmp_path / "link") == b"abc"
    with pytest.raises(OSError, match="symbolic link"):
        open_file(tmp_path / "link", os.O_NOFOLLOW)


def test_a_file_beyond_the_limit_is_not_read(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(b"")
    os.truncate(path, files.MOST_BYTES + 1)
    with pytest.raises(OSError, match="268435457 bytes instead of at most 268435456"):
        read_file(path)


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b'"a"', b"\xff{}", b"[" * 10**5])
def test_texts_that_are_not_of_a_json_object_are_a_value_error(text):
    with pytest.raises(ValueError):
        parse_object(text)


def test_a_name_with_two_values_is_refused():
    assert parse_object(b'{"a": {"b": 1, "c": 2, "b": 1}}') == {"a": {"b": 1, "c": 2}}
    with pytest.raises(ValueError, match="'b' has two values"):
        parse_object(b'{"a": {"b": 1, "c": 2, "b": 3}}')


def test_an_object_is_read_whatever_the_locale_is(tmp_path):
    (tmp_path / "file").write_bytes('{"a": "é"}'.encode())
    assert read_object(tmp_path / "file") == {"a": "é"}
