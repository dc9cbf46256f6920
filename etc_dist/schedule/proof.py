"""Proofs on record: a plan is verified once for each shape, also across processes."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from etc_dist.schedule.plan import Plan
from etc_dist.schedule.verify import verify
from etc_dist.settings import Settings


def prove(
    plan: Plan, dims: Mapping[str, int], workers: int, settings: Settings
) -> None:
    """Verify `plan` at `dims`, or find that this was done before; see `verify`."""
    record = _record(plan, dims, workers, settings)
    if record.exists():
        return
    verified = verify(plan, dims, workers)
    if settings.timing or verified.seconds > 1.0:
        print(f"etc_dist: {verified.show()}", end="", file=sys.stderr)
    record.parent.mkdir(parents=True, exist_ok=True)
    aside = record.with_suffix(f".{os.getpid()}")
    aside.write_text(verified.show())
    os.replace(aside, record)


def _record(
    plan: Plan, dims: Mapping[str, int], workers: int, settings: Settings
) -> Path:
    # The verifier's own text is part of the key: a better verifier proves again.
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in sources))
    digest.update(repr((plan.graph.show(), plan.show(), dims, workers)).encode())
    return settings.cache / "proofs" / digest.hexdigest()[:24]
