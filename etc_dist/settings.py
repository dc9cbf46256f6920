"""All settings, each from one environment variable, read once by `Settings.load`.

Nothing else in the package reads the environment for its own behaviour.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from etc_dist.errors import ArgumentError


@dataclass(frozen=True)
class Settings:
    """The nine settings; `README.md` has the same table (a test compares both)."""

    backend: str = "auto"
    """ETC_DIST_BACKEND: "cuda", "cpu", or "auto" (cuda where there is a GPU)."""
    wait_limit: float = 4.0
    """ETC_DIST_WAIT_LIMIT: seconds a wait inside a program may last."""
    world_limit: float = 60.0
    """ETC_DIST_WORLD_LIMIT: seconds a host-side meeting of ranks may last."""
    symmetric_size: str = "8G"
    """ETC_DIST_SYMMETRIC_SIZE: size of each rank's symmetric heap on GPUs."""
    cache: Path = Path.home() / ".cache" / "etc_dist"
    """ETC_DIST_CACHE: folder of compiled programs."""
    verify: bool = True
    """ETC_DIST_VERIFY: prove a program before its first run at a shape."""
    trace: bool = False
    """ETC_DIST_TRACE: record every task's start and end (slower; see docs)."""
    timing: bool = False
    """ETC_DIST_TIMING: print the time of each stage of a compilation."""
    cpu_workers: int = 4
    """ETC_DIST_CPU_WORKERS: simulated workers a rank on the CPU backend (even)."""

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the settings from `environ` (default: the process's own)."""
        environ = os.environ if environ is None else environ
        values: dict[str, object] = {}
        for field in fields(cls):
            name = f"ETC_DIST_{field.name.upper()}"
            if name in environ:
                values[field.name] = _parse(name, environ[name], field.type)
        known = {f"ETC_DIST_{field.name.upper()}" for field in fields(cls)}
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
        return cls(**values)  # type: ignore[arg-type]


def _parse(name: str, text: str, kind: object) -> object:
    try:
        if kind == "bool":
            return {"1": True, "true": True, "0": False, "false": False}[text.lower()]
        if kind == "float":
            if not 0 < float(text) < float("inf"):
                raise ValueError(text)
            return float(text)
        if kind == "int":
            return int(text)
    except (KeyError, ValueError):
        raise ArgumentError(
            f"setting {name} cannot be read",
            where="Settings.load",
            wanted={
                "bool": "0, 1, true or false",
                "float": "a number of seconds above 0",
                "int": "a whole number",
            }[str(kind)],
            got=repr(text),
            fix=f"correct {name} or unset it",
        ) from None
    return Path(text) if kind == "Path" else text
