"""All settings, each from one environment variable, read once by `Settings.load`.

Nothing else in the package reads the environment for its own behaviour."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from etc_dist.errors import ArgumentError, expect_type

MAX_SECONDS = 1e6
"""The longest limit, 11.5 days. The device counts waits in 32 bits of 1.05 ms steps, so
`2 * MAX_SECONDS`, the limit of hand-overs, must be below 52 days."""
MAX_BYTES = 1024**5
"""The largest size; no GPU has as much memory."""
MAX_WORKERS = 1024
"""More than any GPU has."""
AUTO = "auto"


def default_cache() -> Path:
    """In the home folder; or in the temporary folder, where the user has none."""
    try:
        return Path.home() / ".cache" / "etc_dist"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"etc_dist-{os.geteuid()}"


@dataclass(frozen=True)
class Settings:
    """The twelve settings, as in docs/settings.md (a test compares both)."""

    backend: str = "auto"
    """ETC_DIST_BACKEND: "cuda", "cpu", or "auto" (cuda where there is a GPU)."""
    wait_limit: float = 4.0
    """ETC_DIST_WAIT_LIMIT: seconds a wait inside a program may last."""
    world_limit: float = 60.0
    """ETC_DIST_WORLD_LIMIT: seconds a collective call may wait for the other ranks."""
    symmetric_size: str = "8G"
    """ETC_DIST_SYMMETRIC_SIZE: size of each rank's symmetric heap on GPUs, at most the
    memory of the GPU."""
    cache: Path = field(default_factory=default_cache)
    """ETC_DIST_CACHE: folder of programs, the emulator's libraries, proofs and tunings,
    private to a user."""
    tuning: str = AUTO
    """ETC_DIST_TUNING: "auto" (of `etc-dist tune`, else of the package for this kind of
    GPU), "package" (never of `etc-dist tune`), the name of one of the package, such as
    "h200", or a file."""
    verify: bool | Literal[0, 1, "data"] = 1
    """ETC_DIST_VERIFY: 1 proves a program before its first run at a shape, and what
    depends on data after each run on the CPU backend; "data" on GPUs, too; 0 none."""
    trace: bool = False
    """ETC_DIST_TRACE: record every task's start and end (slower; see docs)."""
    timing: bool = False
    """ETC_DIST_TIMING: print the time of each stage of a compilation."""
    cpu_workers: int = 4
    """ETC_DIST_CPU_WORKERS: simulated workers of a rank on the CPU backend, at most
    1024."""
    share_gpu: bool = False
    """ETC_DIST_SHARE_GPU: ranks of a host may share GPUs; for tests, not for speed."""
    host: str = ""
    """ETC_DIST_HOST: a name of this rank's host; ranks with different names count as
    ranks on different hosts, to test programs for several hosts on one."""

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the settings from `environ` (default: the process's own), checked.
        Raises ArgumentError for unknown variables and values that cannot be read."""
        environ = os.environ if environ is None else environ
        names = {_variable(field.name): field.name for field in fields(Settings)}
        bad_names = {v for v in environ if v.startswith("ETC_DIST_")} - names.keys()
        if bad_names:
            raise ArgumentError(
                "an environment variable is not a setting",
                where="Settings.load",
                wanted=", ".join(sorted(names)),
                got=", ".join(sorted(bad_names)),
                fix="correct the spelling or unset it",
            )
        values, bad = {}, {}
        for variable in filter(environ.__contains__, names):
            name, text = names[variable], environ[variable]
            try:
                values[name] = _RULES[name].parse(text)
            except ValueError:
                bad[name] = text
        if bad:
            raise _refusal(bad)
        return cls(**values).checked()

    def checked(self) -> Settings:
        """Internal: these settings, converted to the declared types. Raises TypeError
        for a value of another type, ArgumentError for values out of range."""
        settings, bad = copy(self), {}
        for name in (setting.name for setting in fields(Settings)):
            value, rule = getattr(self, name), _RULES[name]
            expect_type(value, rule.types, name)
            try:
                object.__setattr__(settings, name, rule.convert(value))
            except ValueError:
                bad[name] = value
        if bad:
            raise _refusal(bad)
        return settings

    @property
    def symmetric_bytes(self) -> int:
        """Internal: `symmetric_size` as a number, for settings that are checked."""
        return _bytes_of(self.symmetric_size)


def describe_sharing(ranks: int, mps: bool | None) -> str:
    """How `ranks` ranks share a GPU; 0 and None if unknown."""
    if mps is None:
        mode = "unknown whether under CUDA MPS"
    else:
        mode = "under CUDA MPS" if mps else "time-sliced (no CUDA MPS)"
    return f"shared by {ranks or 'several'} ranks, {mode}: times mean nothing"


@dataclass(frozen=True)
class _Rule:
    """The values of a setting. `parse` reads text, `convert` returns the declared type;
    both raise ValueError for other values than `wanted`."""

    types: type | tuple[type, ...]
    parse: Callable[[str], Any]
    convert: Callable[[Any], Any]
    wanted: str


def _plain(text: str) -> str:
    """The text of a number, which Python would also read in digits of other scripts
    and with "_" between them."""
    return str(_in_range(text.isascii() and "_" not in text, text))


def _parse_flag(text: str) -> bool:
    flags = {"1": True, "true": True, "0": False, "false": False}
    if text.lower() not in flags:
        raise ValueError(text)
    return flags[text.lower()]


def _in_range(is_good: bool, value: Any) -> Any:
    if not is_good:
        raise ValueError(value)
    return value


def _verify(value: int | str) -> int | str:
    _in_range(value in (0, 1, "data"), value)
    return value if isinstance(value, str) else int(value)


def _size(value: str) -> str:
    return str.__str__(_in_range(1 <= _bytes_of(value) <= MAX_BYTES, value))


def _bytes_of(size: str) -> int:
    """A size as a number; 0 for text that is not a size."""
    match = re.fullmatch(
        r"(\d{1,18}(?:\.\d+)?)\s*([KMGT]?)", size.strip().upper(), re.ASCII
    )
    if match is None:
        return 0
    number, suffix = match.groups()
    return int(float(number) * 1024 ** (" KMGT".index(suffix) if suffix else 0))


def _name(text: str) -> str:
    _in_range(bool(text.strip()) and "\0" not in text, text)
    try:
        Path(text).expanduser()
    except RuntimeError as error:  # no home
        raise ValueError(str(error)) from error
    return str.__str__(text)


def _folder(name: str | Path) -> Path:
    _in_range(bool(str(name).strip()) and "\0" not in str(name), name)
    try:
        return Path(name).expanduser().absolute()
    except (OSError, RuntimeError) as error:  # no home, or no current folder
        raise ValueError(str(error)) from error


_SECONDS = _Rule(
    (int, float),
    lambda text: float(_plain(text)),
    lambda value: float(_in_range(0 < value <= MAX_SECONDS, value)),
    f"a number of seconds above 0 and at most {MAX_SECONDS:.0f}",
)
_FLAG = _Rule(bool, _parse_flag, bool, "0, 1, true or false")
_RULES = {
    "backend": _Rule(str, str, str.__str__, "a string"),
    "wait_limit": _SECONDS,
    "world_limit": _SECONDS,
    "symmetric_size": _Rule(
        str,
        str,
        _size,
        'a number of bytes from 1 to 1024T, optionally with K, M, G or T, such as "8G"',
    ),
    "cache": _Rule(
        (str, Path),
        str,
        _folder,
        "a folder, not an empty string; ~ is the home folder, if there is one",
    ),
    "tuning": _Rule(
        str, str, _name, "auto, a name of the package, or a file; ~ is the home folder"
    ),
    "verify": _Rule(
        (bool, int, str),
        lambda text: text if text == "data" else _parse_flag(text),
        _verify,
        '0, 1 or "data"',
    ),
    "trace": _FLAG,
    "timing": _FLAG,
    "cpu_workers": _Rule(
        int,
        lambda text: int(_plain(text)),
        lambda value: int(_in_range(1 <= value <= MAX_WORKERS, value)),
        f"an integer from 1 to {MAX_WORKERS}",
    ),
    "share_gpu": _FLAG,
    "host": _Rule(str, str, str.__str__, "a string"),
}


def _variable(name: str) -> str:
    return f"ETC_DIST_{name.upper()}"


def _refusal(bad: Mapping[str, Any]) -> ArgumentError:
    """The error for settings with values that their rules do not allow."""
    return ArgumentError(
        "settings cannot be used",
        where="Settings, or " + ", ".join(map(_variable, bad)),
        wanted="; ".join(f"{name}: {_RULES[name].wanted}" for name in bad),
        got="; ".join(f"{name} = {value!r}" for name, value in bad.items()),
        fix="correct them, or omit them",
    )
