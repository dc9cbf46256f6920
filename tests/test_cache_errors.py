"""A cache that cannot be used costs one warning, and nothing else."""

import errno
import os
import warnings

import pytest

from etc_dist.cache import LIMITS, Cache, Entry

KEY = "0123456789abcdef"
ENTRY = Entry({"n": 1}, {"cubin": b"code"})


def test_no_use_fails_where_warnings_are_errors(tmp_path):
    (tmp_path / "file").touch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Cache(tmp_path / "file").load("programs", KEY) is None


def warned(cache: Cache) -> str:
    """The one warning of several uses of a cache, which all go through."""
    with pytest.warns(RuntimeWarning) as caught:
        for _ in range(2):
            outcome = cache.fetch("programs", KEY, lambda: ENTRY, bool, 1.0)
            cache.store("proofs", KEY, ENTRY)
            assert outcome == (ENTRY, False)
    (warning,) = caught
    message = str(warning.message)
    assert f"cannot use its cache {cache.root}: " in message
    assert "Set ETC_DIST_CACHE to a folder that only you can write" in message
    return message


def test_a_cache_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("kept")
    assert "file is not a folder" in warned(Cache(tmp_path / "file"))
    assert "Not a directory" in warned(Cache(tmp_path / "file" / "below"))
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("mode", [0o1777, 0o770, 0o702])
@pytest.mark.parametrize("place", [".", "programs"])
def test_a_folder_that_others_can_write(tmp_path, mode, place):
    cache = Cache(tmp_path / "cache")
    (cache.root / place).mkdir(parents=True)
    (cache.root / place).chmod(mode)
    reason = f"other users can write {cache.root / place} (mode {mode:04o})"
    assert cache.fault() == reason
    with pytest.warns(RuntimeWarning) as caught:
        assert cache.fetch("programs", KEY, lambda: ENTRY, bool, 1.0) == (ENTRY, False)
    assert reason in str(caught[0].message)
    assert not list(cache.root.rglob("*.json"))


def test_a_folder_of_another_user(tmp_path, monkeypatch):
    cache = Cache(tmp_path / "cache")
    cache.store("programs", KEY, ENTRY)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    reason = f"{cache.root} belongs to user {user}, not to {user + 1}"
    assert cache.fault() == reason
    assert reason in warned(cache)


def test_a_link_of_another_user(tmp_path, monkeypatch):
    (tmp_path / "target").mkdir()
    cache = Cache(tmp_path / "link")
    cache.root.symlink_to(tmp_path / "target")
    assert cache.fault() == ""
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert ("link" in cache.fault()) or os.getuid() == 0
    assert warned(cache)
    assert list((tmp_path / "target").iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_full_or_unwritable_file_system(tmp_path, monkeypatch, number):
    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    cache = Cache(tmp_path / "cache")
    monkeypatch.setattr(os, "fsync", full)
    assert os.strerror(number) in warned(cache)
    assert [path for path in cache.root.rglob("*") if not path.is_dir()] == []


def test_a_full_file_system_keeps_what_it_has(tmp_path, monkeypatch):
    cache = Cache(tmp_path / "cache")
    cache.store("proofs", KEY, ENTRY)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        cache.store("proofs", "other", ENTRY)
    assert cache.load("proofs", KEY) == ENTRY


@pytest.mark.parametrize("place", ["missing/below", "there"])
def test_a_cache_without_fault_is_neither_made_nor_changed(tmp_path, place):
    (tmp_path / "there").mkdir()
    before = sorted(tmp_path.rglob("*"))
    cache = Cache(tmp_path / place)
    assert cache.fault() == ""
    assert cache.sizes() == dict.fromkeys(LIMITS, (0, 0))
    assert sorted(tmp_path.rglob("*")) == before
