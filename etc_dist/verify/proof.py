"""Proofs on record: a plan is verified once for each shape, also across processes."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import asdict, fields
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
VERIFIER = ("errors.py", "ir", "schedule", "settings.py", "verify")
"""The sources that a proof depends on: all that `verify` imports."""


def prove(
    plan: Plan,
    dims: Mapping[str, int],
    workers: int,
    settings: Settings,
    records: Mapping[str, Mapping[str, Any]] | None = None,
) -> Verified:
    """Verify `plan` at `dims`, or return the result that is recorded in `records`, by
    `proof_key`, or in the cache; see `verify`. If several ranks verify it, one of them
    does, and the others wait. For each of `records`, `is_record` is true."""
    key = proof_key(plan, dims, workers)
    if records is not None and key in records:
        return _from_record(records[key])

    def make() -> Entry:
        verified = verify(plan, dims, workers)
        if settings.timing or verified.seconds > 1.0:
            show_message(f"etc_dist: {verified.show()}")
        return Entry(_record(key, verified))

    entry, _ = Cache(settings.cache).fetch(
        "proofs",
        key,
        make,
        fits=lambda entry: is_record(entry.facts, key),
        limit=settings.world_limit / 2,  # before other ranks time out
    )
    return _from_record(entry.facts)


def proof_record(
    plan: Plan, dims: Mapping[str, int], workers: int, settings: Settings
) -> tuple[str, dict[str, Any]]:
    """The key and the record of a proof, which is made if need be; for `known`."""
    key = proof_key(plan, dims, workers)
    return key, _record(key, prove(plan, dims, workers, settings))


def _record(key: str, verified: Verified) -> dict[str, Any]:
    return {"key": key, **asdict(verified)}


def is_record(record: Any, key: str) -> bool:
    """Whether `record`, as JSON returns it, is of the proof with this key, and has its
    values of the right types."""
    names = {"key", *(field.name for field in fields(Verified))}
    if not isinstance(record, dict) or record.keys() != names or record["key"] != key:
        return False
    counts = (record[name] for name in ("workers", "tasks", "events", "accesses"))
    has_sizes = isinstance(record["dims"], list) and all(
        isinstance(size, list) and [*map(type, size)] == [str, int]
        for size in record["dims"]
    )
    return (
        has_sizes
        and all(type(count) is int for count in counts)
        and type(record["seconds"]) is float
        and type(record["by_events"]) is bool
        and is_texts([record["graph"]])
        and is_texts(record["unchecked"])
    )


def is_texts(value: Any) -> bool:
    """Whether it is a list of strings."""
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _from_record(record: Mapping[str, Any]) -> Verified:
    values = {field.name: record[field.name] for field in fields(Verified)}
    values["dims"] = tuple((name, size) for name, size in record["dims"])
    return Verified(**{**values, "unchecked": tuple(record["unchecked"])})


def proof_key(plan: Plan, dims: Mapping[str, int], workers: int) -> str:
    """The name of a proof on record, from the verifier, plan, dims and workers."""
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
