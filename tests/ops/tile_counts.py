"""The number of tiles of a matmul: by the reasons for a choice, and in a graph."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

COUNTED = re.compile(r"  pairs of workers, (\d+) tiles?, ")


def tiles_in(reasons: Sequence[str]) -> int:
    [(count,)] = [found.groups() for one in reasons if (found := COUNTED.match(one))]
    return int(count)


def tiles_of(env: Mapping[str, int], name: str) -> int:
    return env[f"{name}_tiles_down"] * env[f"{name}_tiles_across"]
