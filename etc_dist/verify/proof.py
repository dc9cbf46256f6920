"""Proofs on record: a plan is verified once for each shape, also across processes."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.cache import Cache, Entry
from etc_dist.ir.dims import checked_dims
from etc_dist.messages import show_message
from etc_dist.schedule.plan import Plan
from etc_dist.settings import Settings
from etc_dist.verify.verify import Verified, verify

PACKAGE = Path(__file__).parent.parent
VERIFIER = ("errors.py", "ir", "schedule", "verify")
"""The sources that a proof depends on: all that `verify` imports."""


def prove(
    plan: Plan,
    dims: Mapping[str, int],
    workers: int,
    settings: Settings,
    known: Mapping[str, Mapping[str, Any]] | None = None,
) -> Verified:
    """Verify `plan` at `dims`, or return the result that is recorded in `known`, by
    `proof_key`, or in the cache; see `verify`."""
    cache = Cache(settings.cache)
    key = proof_key(plan, dims, workers)
    if known is not None and key in known:
        return _from_record(known[key])
    record = cache.load("proofs", key)
    if record is not None:
        return _from_record(record.facts)
    verified = verify(plan, dims, workers)
    if settings.timing or verified.seconds > 1.0:
        show_message(f"etc_dist: {verified.show()}")
    cache.store("proofs", key, Entry(asdict(verified)))
    return verified


def proof_record(
    plan: Plan, dims: Mapping[str, int], workers: int, settings: Settings
) -> tuple[str, dict[str, Any]]:
    """The key and the record of a proof, which is made if need be; for `known`."""
    verified = prove(plan, dims, workers, settings)
    return proof_key(plan, dims, workers), asdict(verified)


def _from_record(facts: Mapping[str, Any]) -> Verified:
    dims = tuple((name, size) for name, size in facts["dims"])
    return Verified(**{**facts, "dims": dims, "unchecked": tuple(facts["unchecked"])})


def proof_key(plan: Plan, dims: Mapping[str, int], workers: int) -> str:
    sizes = sorted(checked_dims(plan.graph, dims).items())
    digest = hashlib.sha256(verifier_digest())
    digest.update(repr((plan.graph.digest(), plan.show(), sizes, workers)).encode())
    return digest.hexdigest()[:32]


@functools.cache
def verifier_digest() -> bytes:
    """Of the verifier's sources: a changed verifier proves again."""
    digest = hashlib.sha256(np.__version__.encode())
    for name in VERIFIER:
        place = PACKAGE / name
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            content = path.read_bytes()
            digest.update(f"{path.relative_to(PACKAGE)} {len(content)} ".encode())
            digest.update(content)
    return digest.digest()
