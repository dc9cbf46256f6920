"""The cache on disk: stored entries are found only if they are intact."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from etc_dist import cache as caching
from etc_dist.cache import Cache, Entry, Recent

ENTRY = Entry({"registers": 168, "remarks": ["none"]}, {"cubin": b"code", "log": b""})
KEY = "0123456789abcdef"


@pytest.fixture
def cache(tmp_path) -> Cache:
    return Cache(tmp_path / "cache")


def files(cache: Cache, kind: str = "programs") -> list[str]:
    return sorted(path.name for path in (cache.root / kind).iterdir())


def test_a_stored_entry_is_found(cache):
    assert cache.load("programs", KEY) is None
    cache.store("programs", KEY, ENTRY)
    assert cache.load("programs", KEY) == ENTRY
    assert files(cache) == [f"{KEY}.{name}" for name in ("cubin", "json", "log")]


def test_folders_and_files_are_private_with_any_umask(cache):
    before = os.umask(0)
    try:
        cache.store("proofs", KEY, ENTRY)
    finally:
        os.umask(before)
    paths = [cache.root, *cache.root.rglob("*")]
    assert {path.stat().st_mode & 0o077 for path in paths} == {0}


def test_a_folder_of_this_users_that_others_read_is_made_private(cache):
    (cache.root / "programs").mkdir(parents=True, mode=0o755)
    cache.store("programs", KEY, ENTRY)
    assert (cache.root / "programs").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["cubin", "json", "log"])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove", "empty", "link", "folder"])
def test_a_damaged_entry_is_missing_and_can_be_stored_again(cache, name, damage):
    cache.store("programs", KEY, ENTRY if name != "log" else _with_log())
    entry = cache.load("programs", KEY)
    _damage(cache.root / "programs" / f"{KEY}.{name}", damage)
    assert cache.load("programs", KEY) is None
    cache.store("programs", KEY, entry)
    assert cache.load("programs", KEY) == entry


def _with_log() -> Entry:
    return Entry(ENTRY.facts, {**ENTRY.files, "log": b"said"})


def _damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    path.unlink()
    if how == "cut":
        path.write_bytes(content[:-2])
    elif how == "flip":
        path.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "link":
        path.with_suffix(".away").write_bytes(content)
        path.symlink_to(path.with_suffix(".away"))
    elif how == "folder":
        path.mkdir()
        (path / "file").write_bytes(content)


def test_an_entry_of_another_key_or_kind_does_not_count(cache):
    cache.store("programs", KEY, ENTRY)
    for kind, key in (("programs", "f" * 16), ("proofs", KEY)):
        cache.store(kind, key, Entry({}))
        for name in ("cubin", "json", "log"):
            content = (cache.root / "programs" / f"{KEY}.{name}").read_bytes()
            (cache.root / kind / f"{key}.{name}").write_bytes(content)
        assert cache.load(kind, key) is None


def test_an_entry_that_does_not_fit_is_made_again(cache):
    cache.store("programs", KEY, ENTRY)
    fits = lambda entry: entry.facts.get("registers") == 7  # noqa: E731
    assert cache.load("programs", KEY, fits) is None
    replacement = Entry({"registers": 7})
    for was_found in (False, True):
        result = cache.fetch("programs", KEY, lambda: replacement, fits, 1.0)
        assert result == (replacement, was_found)


@pytest.mark.parametrize("changes", [{"facts": [1]}, {"files": [1]}, {"files": None}])
def test_a_signed_manifest_with_odd_values_is_missing(cache, changes):
    cache.store("programs", KEY, Entry({}))
    path = cache.root / "programs" / f"{KEY}.json"
    document = {**json.loads(path.read_text()), **changes}
    document.pop("digest")
    document["digest"] = caching.sha256(caching.canonical(document))
    path.write_text(json.dumps(document))
    assert cache.load("programs", KEY) is None


@pytest.mark.parametrize("text", ["null", "3", "[" * 100_000, '{"digest": 1}', "\xff"])
def test_a_manifest_that_is_none_is_missing(cache, text):
    cache.store("programs", KEY, ENTRY)
    (cache.root / "programs" / f"{KEY}.json").write_text(text, encoding="latin-1")
    assert cache.load("programs", KEY) is None


def test_links_at_names_of_temporary_files_are_never_followed(cache, monkeypatch):
    victim = cache.root.parent / "victim"
    victim.write_text("precious")
    (cache.root / "proofs").mkdir(parents=True)
    names = iter(["taken", "free", "more"])
    monkeypatch.setattr(caching.tempfile, "_get_candidate_names", lambda: names)
    (cache.root / "proofs" / f"{KEY}.json.taken.part").symlink_to(victim)
    cache.store("proofs", KEY, Entry({}))
    assert victim.read_text() == "precious"
    assert cache.load("proofs", KEY) == Entry({})


def test_the_entries_used_longest_ago_are_removed(cache, monkeypatch):
    monkeypatch.setitem(caching.LIMITS, "programs", 5 * 4096)
    for number in range(4):
        cache.store("programs", f"{number}", Entry({}, {"cubin": b"x" * 4000}))
        for path in (cache.root / "programs").glob(f"{number}.*"):
            os.utime(path, (number, number))
        cache.load("programs", "0")
    assert files(cache) == ["0.cubin", "0.json", "3.cubin", "3.json"]
    assert cache.sizes()["programs"] == (2, 4 * 4096)


def test_the_entries_are_counted_once_for_many_small_ones(cache, monkeypatch):
    folders = []
    count = caching._entries
    monkeypatch.setattr(caching, "_entries", lambda f: folders.append(f) or count(f))
    for number in range(60):
        cache.store("proofs", f"{number}", Entry({}))
    assert len(folders) == 1
    monkeypatch.setitem(caching.LIMITS, "proofs", 10 * 4096)
    cache.store("proofs", "more", Entry({}))
    assert len(folders) == 2


def test_unfinished_files_of_ended_processes_are_removed(cache, monkeypatch):
    cache.store("programs", KEY, ENTRY)
    monkeypatch.setattr(caching, "_stored_bytes", {})  # as in another process
    for name, age in (("old", caching.ABANDONED_SECONDS + 1), ("young", 0.0)):
        path = cache.root / "programs" / f"{name}.cubin.x.part"
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age, time.time() - age))
    cache.store("programs", "other", ENTRY)
    assert [name for name in files(cache) if "part" in name] == ["young.cubin.x.part"]


# --------------------------------------------------------------------- many processes

MAKE = """
import os, sys, time
from pathlib import Path
from etc_dist.cache import Cache, Entry

def make():
    print("began", flush=True)
    {body}
    return Entry({{"made": os.getpid()}})

_, found = Cache(Path(sys.argv[1])).fetch(
    "programs", "{key}", make, bool, float(sys.argv[2])
)
print("found" if found else "made")
"""


def started(cache: Cache, body: str, limit: float = 30.0) -> "subprocess.Popen[str]":
    code = MAKE.format(body=body, key=KEY)
    command = [sys.executable, "-c", code, str(cache.root), str(limit)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def outcome(process: "subprocess.Popen[str]") -> str:
    return process.communicate(timeout=30)[0].splitlines()[-1]


def test_one_process_makes_an_entry_and_the_others_wait_for_it(cache):
    every = [started(cache, "time.sleep(1)") for _ in range(3)]
    assert sorted(map(outcome, every)) == ["found", "found", "made"]
    assert files(cache) == [f"{KEY}.json"]


def test_an_entry_whose_maker_was_killed_is_made_by_another(cache):
    with started(cache, "time.sleep(60)") as maker:
        assert maker.stdout.readline() == "began\n"
        waiting = started(cache, "pass")
        time.sleep(0.3)
        maker.kill()
        assert outcome(waiting) == "made"


def test_an_entry_whose_maker_has_stopped_is_made_after_the_limit(cache):
    with started(cache, "time.sleep(60)") as maker:
        assert maker.stdout.readline() == "began\n"
        assert outcome(started(cache, "pass", limit=0.2)) == "made"
        maker.kill()


def test_a_failed_maker_leaves_no_lock(cache):
    def fail() -> Entry:
        raise KeyError("body")

    for _ in range(2):
        with pytest.raises(KeyError):
            cache.fetch("programs", KEY, fail, bool, 0.1)
    assert files(cache) == []


def test_processes_of_equal_number_do_not_share_temporary_files(cache, monkeypatch):
    """As in two containers with one home folder, whose processes have equal ids."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    replace = os.replace
    second = Cache(cache.root)

    def overtaken(source: str, target: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        second.store("proofs", KEY, ENTRY)
        replace(source, target)

    monkeypatch.setattr(os, "replace", overtaken)
    cache.store("proofs", KEY, ENTRY)
    assert cache.load("proofs", KEY) == ENTRY


# ----------------------------------------------------------------------------- memory


def test_recent_values_are_kept():
    recent: Recent[int, str] = Recent(2)
    recent.put(1, "a")
    recent.put(2, "b")
    assert recent.get(1) == "a"
    recent.put(3, "c")
    assert [recent.get(key) for key in (1, 2, 3)] == ["a", None, "c"]
