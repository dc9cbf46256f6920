"""Runs with data that an earlier session has verified: on record, as proofs are.

A record has the digest of all that `verify` depends on: its sources, the plan, the
shape, and the values that index expressions load. A run that is refused has none."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from etc_dist.cache import Cache, Entry
from etc_dist.schedule.plan import Plan
from etc_dist.verify.proof import proof_key
from etc_dist.verify.verify import verify

LEAST_SECONDS = 0.005
"""Of a verification that is kept: others take about as long as to read a record."""

Loaded = Mapping[str, Sequence[Any]]


def verify_once(store: Cache) -> Callable[[Plan, Mapping[str, int], int, Loaded], None]:
    """`verify`, of whose results `store` keeps that there was no fault."""

    # NOTE: of now, since tests replace them to see what programs use.
    load, keep = store.load, store.store

    def verify_unless_known(
        plan: Plan, dims: Mapping[str, int], workers: int, tensors: Loaded
    ) -> None:
        key = _key(plan, dims, workers, tensors)
        if load("proofs", key) is None:
            verified = verify(plan, dims, workers, tensors)
            if verified.seconds > LEAST_SECONDS:
                keep("proofs", key, Entry({}))

    return verify_unless_known


def _key(plan: Plan, dims: Mapping[str, int], workers: int, tensors: Loaded) -> str:
    digest = hashlib.sha256(proof_key(plan, dims, workers).encode())
    for name, of_ranks in sorted(tensors.items()):
        for values in map(np.ascontiguousarray, of_ranks):
            digest.update(f"{name} {values.dtype} {values.shape} ".encode())
            digest.update(values.tobytes())
    return digest.hexdigest()[:32]
