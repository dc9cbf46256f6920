"""All settings, each from one environment variable, read once by `Settings.load`.

Nothing else in the package reads the environment for its own behaviour.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

from etc_dist.errors import ArgumentError

Size = str
"""Bytes, with K, M, G or T at will."""
Seconds = float
"""A time limit, above 0 and at most `MAX_SECONDS`."""
MAX_SECONDS = 1e6
"""The longest limit, 11.5 days. The device counts waits in 32 bits of 1.05 ms steps, so
`2 * MAX_SECONDS`, the limit of hand-overs, must be below 52 days."""
Verify = bool | Literal[0, 1, "data"]
"""What is verified: nothing, programs before they run, or also each run's data."""
MAX_BYTES = 1024**5
"""More than any GPU has: a size beyond it is a slip."""


def default_cache() -> Path:
    """In the home folder; or in the temporary folder, for a user without a home."""
    try:
        return Path.home() / ".cache" / "etc_dist"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"etc_dist-{os.geteuid()}"


@dataclass(frozen=True)
class Settings:
    """The ten settings; `README.md` has the same table (a test compares both)."""

    backend: str = "auto"
    """ETC_DIST_BACKEND: "cuda", "cpu", or "auto" (cuda where there is a GPU)."""
    wait_limit: Seconds = 4.0
    """ETC_DIST_WAIT_LIMIT: seconds a wait inside a program may last."""
    world_limit: Seconds = 60.0
    """ETC_DIST_WORLD_LIMIT: seconds a host-side meeting of ranks may last."""
    symmetric_size: Size = "8G"
    """ETC_DIST_SYMMETRIC_SIZE: size of each rank's symmetric heap on GPUs."""
    cache: Path = field(default_factory=default_cache)
    """ETC_DIST_CACHE: folder of compiled programs and of proofs, private to a user."""
    verify: Verify = 1
    """ETC_DIST_VERIFY: 1 proves a program before its first run at a shape, and what
    depends on data after each run on the CPU backend; "data" on GPUs, too; 0 none."""
    trace: bool = False
    """ETC_DIST_TRACE: record every task's start and end (slower; see docs)."""
    timing: bool = False
    """ETC_DIST_TIMING: print the time of each stage of a compilation."""
    cpu_workers: int = 4
    """ETC_DIST_CPU_WORKERS: simulated workers a rank on the CPU backend (even for
    matrix products)."""
    share_gpu: bool = False
    """ETC_DIST_SHARE_GPU: ranks of a host may share GPUs; for tests, not for speed."""

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the settings from `environ` (default: the process's own), checked."""
        environ = os.environ if environ is None else environ
        known = {_variable(field.name): field for field in fields(Settings)}
        unknown = sorted(
            k for k in environ if k.startswith("ETC_DIST_") and k not in known
        )
        if unknown:
            raise ArgumentError(
                "an environment variable is not a setting",
                where="Settings.load",
                wanted=", ".join(sorted(known)),
                got=", ".join(unknown),
                fix="correct the spelling or unset it",
            )
        given = {
            field.name: _read(environ[name], str(field.type))
            for name, field in known.items()
            if name in environ
        }
        return cls(**given).checked()

    def checked(self) -> Settings:
        """These settings, each of the type that it is declared with; ArgumentError for
        what is not within its limits."""
        kinds = {field.name: _KINDS[str(field.type)] for field in fields(Settings)}
        values = {name: getattr(self, name) for name in kinds}
        bad = [name for name, value in values.items() if not kinds[name].fits(value)]
        if bad:
            raise ArgumentError(
                "settings cannot be used",
                where="Settings, or " + ", ".join(map(_variable, bad)),
                wanted="; ".join(f"{name}: {kinds[name].wanted}" for name in bad),
                got="; ".join(f"{name} = {values[name]!r}" for name in bad),
                fix="correct them, or leave them out",
            )
        made = copy(self)
        for name, value in values.items():
            object.__setattr__(made, name, kinds[name].make(value))
        return made

    @property
    def symmetric_bytes(self) -> int:
        """`symmetric_size` as a number, for settings that are checked."""
        return _bytes_of(self.symmetric_size)


@dataclass(frozen=True)
class _Kind:
    """What values of a type must be; `make` gives them exactly this type, and reads
    most of them from text."""

    make: Callable[[Any], Any]
    fits: Callable[[Any], bool]
    wanted: str


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _folder(name: str | Path) -> Path:
    """The folder of that name; ValueError for a text that names none."""
    if not str(name).strip() or "\0" in str(name):
        raise ValueError("an empty name, or one with a zero byte")
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def _is_folder(value: Any) -> bool:
    with suppress(ValueError):
        return isinstance(value, (str, Path)) and bool(_folder(value))
    return False


def _is_verify(value: Any) -> bool:
    is_whole = isinstance(value, Integral) and value in (0, 1)
    return is_whole or (isinstance(value, str) and value == "data")


def _bytes_of(size: Any) -> int:
    """A size as a number; 0 for what is not a size."""
    text = size.strip().upper() if isinstance(size, str) else ""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([KMGT]?)", text)
    if match is None:
        return 0
    number, suffix = match.groups()
    return int(float(number) * 1024 ** (" KMGT".index(suffix) if suffix else 0))


_KINDS = {
    "str": _Kind(str.__str__, lambda value: isinstance(value, str), "a text"),
    "Size": _Kind(
        str.__str__,
        lambda value: 1 <= _bytes_of(value) <= MAX_BYTES,
        "a text: a number of bytes from 1 to 1024T, with K, M, G or T at will, such as "
        '"8G"',
    ),
    "Path": _Kind(
        _folder,
        _is_folder,
        "a folder, not an empty text; ~ is the home folder, if there is one",
    ),
    "Seconds": _Kind(
        float,
        lambda value: _is_number(value, Real) and 0 < value <= MAX_SECONDS,
        f"a number of seconds above 0 and at most {MAX_SECONDS:.0f}",
    ),
    "int": _Kind(
        int,
        lambda value: _is_number(value, Integral) and value >= 1,
        "a whole number from 1 on",
    ),
    "bool": _Kind(
        bool,
        lambda value: isinstance(value, bool),
        "True or False; as a variable 0, 1, true or false",
    ),
    "Verify": _Kind(
        lambda value: "data" if isinstance(value, str) else int(value),
        lambda value: _is_verify(value),
        '0, 1 or "data"; or False for 0 and True for 1',
    ),
}
_TRUTHS = {"1": True, "true": True, "0": False, "false": False}


def _variable(name: str) -> str:
    return f"ETC_DIST_{name.upper()}"


def _read(text: str, type_name: str) -> Any:
    """The value that `text` stands for; the text itself, which is then refused, where
    it stands for none."""
    kind = _KINDS[type_name]
    try:
        truth = type_name in ("bool", "Verify")
        value = _TRUTHS.get(text.lower(), text) if truth else kind.make(text)
    except ValueError:
        return text
    return value if kind.fits(value) else text
