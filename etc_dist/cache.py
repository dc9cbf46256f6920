"""The cache on disk of compiled programs, proofs and tunings, private to one user.

An entry is a manifest `KEY.json` and its files `KEY.NAME`. Each is written to a
temporary file and renamed. The manifest, which holds the SHA-256 of all, is last. So a
reader finds a complete entry or none. A damaged entry, or one whose facts have other
names or types than wanted, is made again. If the cache cannot be used, there is one
warning, and each process makes everything itself."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from etc_dist.files import open_file

FORMAT = 1
"""Of manifests: an entry of another format is made again."""
LIMITS = {
    "programs": 4 << 30,
    "libraries": 1 << 30,  # of the emulator
    "proofs": 16 << 20,
    "tunings": 1 << 20,
}
"""The kinds of entries, and the bytes on disk that each kind may take."""
FILE_BYTES = 4096
"""What a file takes on disk besides its content, at most."""
ABANDONED_SECONDS = 3600.0
"""An unfinished file that is older than this was left by a process that ended."""


@dataclass(frozen=True)
class Entry:
    """The content of a key: facts that JSON can hold, and files by name."""

    facts: Mapping[str, Any]
    files: Mapping[str, bytes] = field(default_factory=dict)


class Cache:
    """The cache in folder `root`; no method raises if that folder cannot be used."""

    def __init__(self, root: Path):
        self.root = root

    def load(
        self, kind: str, key: str, fits: Callable[[Entry], bool] = lambda entry: True
    ) -> Entry | None:
        """The entry, or None if it is missing, damaged, another's or does not fit."""
        try:
            folder = self._folder(kind)
            manifest = _checked(kind, key, _read(folder / f"{key}.json"))
            files = {}
            for name, digest in manifest["files"].items():
                files[name] = _read(folder / f"{key}.{name}")
                if sha256(files[name]) != digest:
                    return None
            with contextlib.suppress(OSError):
                os.utime(folder / f"{key}.json")  # trimming removes the oldest
            entry = Entry(manifest["facts"], files)
            return entry if fits(entry) else None
        except _Unusable as error:
            self._warn(str(error))
        except (OSError, ValueError, RecursionError):
            pass  # missing, or damaged: the caller makes it again
        return None

    def store(self, kind: str, key: str, entry: Entry) -> None:
        """Keep `entry`, in place of a damaged one. Now and then, remove the oldest
        entries of its kind that are beyond its limit."""
        try:
            folder = self._folder(kind)
            files = {**entry.files, "json": _manifest(kind, key, entry)}
            try:
                for name, content in files.items():
                    _write(folder / f"{key}.{name}", content)
            except OSError:
                _remove([str(folder / f"{key}.{name}") for name in files])
                raise
            size = sum(FILE_BYTES + len(content) for content in files.values())
            _trim_when_due(folder, LIMITS[kind], key, size)
        except OSError as error:
            self._warn(str(error))

    def fetch(
        self,
        kind: str,
        key: str,
        make: Callable[[], Entry],
        fits: Callable[[Entry], bool],
        limit: float,
    ) -> tuple[Entry, bool]:
        """The entry, and whether it was found, as by `load`. If not, one process makes
        and stores it. Others wait up to `limit` seconds, then make it themselves."""
        entry = self.load(kind, key, fits)
        if entry is not None:
            return entry, True
        with self._making(kind, key, limit):
            entry = self.load(kind, key, fits)
            if entry is not None:
                return entry, True
            entry = make()
            self.store(kind, key, entry)
            return entry, False

    def fault(self) -> str:
        """Why the cache cannot be used, or ""; creates and changes nothing."""
        root = self.root.absolute()
        existing = next(p for p in (root, *root.parents) if os.path.lexists(p))
        try:
            if existing == root:
                require_private(root, links=True)
                for folder in filter(os.path.lexists, map(root.joinpath, LIMITS)):
                    require_private(folder, links=False)
            elif not existing.is_dir():
                return f"{existing} is not a folder"
        except OSError as error:
            return str(error)
        writable = os.access(existing, os.W_OK | os.X_OK)
        return "" if writable else f"{existing} cannot be written"

    def sizes(self) -> dict[str, tuple[int, int]]:
        """For each kind the number of entries and their bytes on disk."""
        sizes = {}
        for kind in LIMITS:
            try:
                entries = _entries(self.root / kind).values()
            except OSError:
                entries = {}.values()
            sizes[kind] = (len(entries), sum(entry.size for entry in entries))
        return sizes

    def _folder(self, kind: str) -> Path:
        """The folder of one kind, private and made if missing; raises _Unusable."""
        folder = self.root / kind
        try:
            if not os.path.lexists(self.root):
                self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            require_private(self.root, links=True)
            if not os.path.lexists(folder):
                folder.mkdir(mode=0o700, exist_ok=True)
            if require_private(folder, links=False) & 0o077:
                folder.chmod(0o700)
        except OSError as error:
            raise _Unusable(str(error)) from error
        return folder

    @contextlib.contextmanager
    def _making(self, kind: str, key: str, limit: float) -> Iterator[None]:
        """A lock on making an entry: the first process enters at once, others when it
        leaves or ends, or after `limit` seconds."""
        try:
            path = self._folder(kind) / f"{key}.lock"
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError:
            yield
            return
        is_first = False
        try:
            is_first = _lock(lock, limit)
            yield
        finally:
            if is_first:
                _remove([str(path)])
            os.close(lock)

    def _warn(self, reason: str) -> None:
        if self.root not in _warned:
            _warned.add(self.root)
            text = (
                f"etc_dist cannot use its cache {self.root}: {reason}. Programs are "
                "compiled and proved again in each process. Set ETC_DIST_CACHE to a "
                "folder that only you can write"
            )
            # Where warnings are errors, the run still does not depend on the cache.
            with contextlib.suppress(RuntimeWarning):
                warnings.warn(text, RuntimeWarning, stacklevel=3)


_warned: set[Path] = set()
"""The caches that this process has warned of."""


class _Unusable(OSError):
    """The cache's folder cannot be used."""


# --------------------------------------------------------------------------- folders


def require_private(folder: Path, *, links: bool) -> int:
    """The mode of a folder of this user's that no other user can write; OSError for
    anything else. links: a link of this user's or of root may lead to it."""
    status = folder.lstat()
    user = os.geteuid()
    if links and stat.S_ISLNK(status.st_mode) and status.st_uid in (user, 0):
        status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise _Unusable(f"{folder} is not a folder")
    if status.st_uid != user:
        raise _Unusable(f"{folder} belongs to user {status.st_uid}, not to {user}")
    if status.st_mode & 0o022:
        mode = stat.S_IMODE(status.st_mode)
        raise _Unusable(f"other users can write {folder} (mode {mode:04o})")
    return status.st_mode


@dataclass
class _Use:
    """The files of one entry on disk."""

    paths: list[str]
    size: int = 0
    access_time: float = 0.0


def _entries(folder: Path) -> dict[str, _Use]:
    """The entries in a folder by key, finished or not."""
    entries: dict[str, _Use] = {}
    with os.scandir(folder) as items:
        for item in items:
            with contextlib.suppress(FileNotFoundError):  # removed by another process
                status = item.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    continue
                use = entries.setdefault(item.name.partition(".")[0], _Use([]))
                use.paths.append(item.path)
                use.size += status.st_blocks * 512
                use.access_time = max(use.access_time, status.st_mtime)
    return entries


_stored_bytes: dict[Path, int] = {}
"""The bytes that this process has stored in a folder since it has trimmed it."""


def _trim_when_due(folder: Path, limit: int, kept_key: str, num_bytes: int) -> None:
    """Trim by the first entry of this process, then by each 64th part of the limit: to
    look at all entries takes longer than to store one."""
    total = _stored_bytes.get(folder, limit) + num_bytes
    _stored_bytes[folder] = total if total < limit // 64 else 0
    if not _stored_bytes[folder]:
        _trim(folder, limit, kept_key)


def _trim(folder: Path, limit: int, kept_key: str) -> None:
    """Remove the entries used longest ago until `limit` holds, and unfinished files of
    ended processes. Another process that reads a removed entry makes it again."""
    entries = _entries(folder)
    total = sum(use.size for use in entries.values())
    for key, use in sorted(entries.items(), key=lambda item: item[1].access_time):
        parts = [path for path in use.paths if path.endswith(".part")]
        if total > limit and key != kept_key:
            total -= use.size
            # The manifest first: without it there is no entry.
            _remove(sorted(use.paths, key=lambda path: not path.endswith(".json")))
        elif time.time() - use.access_time > ABANDONED_SECONDS:
            _remove(parts)


def _remove(paths: list[str]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _lock(lock: int, limit: float) -> bool:
    """Lock a file, or wait up to `limit` seconds until it is not locked any more; True
    if it was not locked before."""
    end = time.monotonic() + limit
    nap = 0.005
    is_first = True
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            is_first = False
            if time.monotonic() > end:
                break
        except OSError:  # a file system without locks
            break
        time.sleep(nap)
        nap = min(2 * nap, 0.1)
    if not is_first:
        # NOTE: if the first process failed, so do the others, all at the same time.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)
    return is_first


# ----------------------------------------------------------------------------- files


def _read(path: Path) -> bytes:
    """A regular file of this user's; OSError for anything else."""
    with open_file(path, os.O_NOFOLLOW) as file:
        if os.fstat(file.fileno()).st_uid != os.geteuid():
            raise OSError(f"{path} is not a file of this user's")
        return file.read()


def _write(path: Path, content: bytes) -> None:
    """Write a file atomically: readers see all of it or the previous one."""
    # NOTE: mkstemp never opens an existing file or link.
    number, aside = tempfile.mkstemp(
        dir=path.parent, prefix=f"{path.name}.", suffix=".part"
    )
    try:
        with open(number, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)  # a damaged entry
        os.replace(aside, path)
    except BaseException:
        _remove([aside])
        raise


def sha256(content: bytes) -> str:
    """The hash of `content` in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def canonical(document: Mapping[str, Any]) -> bytes:
    """The document as JSON, the same bytes for equal documents."""
    return json.dumps(document, sort_keys=True).encode()


def signed(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with its own SHA-256, as `unsigned` expects it."""
    return {**document, "digest": sha256(canonical(document))}


def unsigned(document: Any, **expected: object) -> dict[str, Any]:
    """A signed document; ValueError if it is damaged, or has others than `expected`."""
    if isinstance(document, dict):
        digest = document.pop("digest", None)
        values = {name: document.get(name) for name in expected}
        if values == expected and digest == sha256(canonical(document)):
            return document
    raise ValueError(f"not a document with {expected} and its own SHA-256")


def _manifest(kind: str, key: str, entry: Entry) -> bytes:
    files = {name: sha256(content) for name, content in entry.files.items()}
    document = {"facts": dict(entry.facts), "files": files}
    whole = signed({"format": FORMAT, "kind": kind, "key": key, **document})
    return canonical(whole) + b"\n"


def _checked(kind: str, key: str, content: bytes) -> dict[str, Any]:
    """The manifest of this very entry; ValueError for anything else."""
    document = unsigned(json.loads(content), format=FORMAT, kind=kind, key=key)
    if all(isinstance(document.get(name), dict) for name in ("facts", "files")):
        return document
    raise ValueError("not the manifest of an entry")


# ---------------------------------------------------------------------------- memory

Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """A dictionary in memory that keeps its `limit` most recently used values."""

    def __init__(self, limit: int):
        self._limit = limit
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def get(self, key: Key) -> Value | None:
        """The value of `key`, which counts as used now."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key]

    def put(self, key: Key, value: Value) -> None:
        """Keep `value`; the least recently used one leaves a full dictionary."""
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._limit:
            self._values.popitem(last=False)

    def clear(self) -> None:
        """Forget all values."""
        self._values.clear()
