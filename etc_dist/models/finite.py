"""The error for a step whose logits are not finite."""

from __future__ import annotations

from typing import Any

import numpy as np

from etc_dist.errors import NotFiniteError
from etc_dist.functions.best_column import NOT_FINITE
from etc_dist.models.rows import POSITIONS, REQUESTS, StepRows

Array = np.ndarray[Any, Any]
BYTES = np.int32(NOT_FINITE).tobytes()
SHOWN = 4
"""Rows that one error names."""
FIXES = {
    "float16": 'use bfloat16, with load(..., dtype="bfloat16"): float16 ends at 65504',
    "bfloat16": "compare the weights and config.json with those that were published",
}
"""By the dtype of the weights."""


def expect_finite(rows: StepRows, ids: Array, dtype: str) -> None:
    """Raises NotFiniteError if the steps of `rows`, which found `ids` [steps, rows],
    ended at a row whose logits are not finite. Of a model of `dtype`."""
    if BYTES not in ids.tobytes():  # takes less than a comparison of the ids
        return
    steps, places = np.nonzero(ids == NOT_FINITE)
    if len(steps) == 0:  # the bytes of two ids
        return
    requests = rows.numbers[REQUESTS, places]
    positions = rows.numbers[POSITIONS, places] + steps
    numbers_of_rows = np.stack([places, requests, positions], axis=1)[:SHOWN].tolist()
    where = [f"step {steps[0] + 1} of {len(ids)} of a launch"]
    where += [f"row {r} (request {q}, position {p})" for r, q, p in numbers_of_rows]
    if len(places) > SHOWN:
        where.append(f"{len(places) - SHOWN} more rows")
    raise NotFiniteError(
        "the logits of a step are not finite",
        where=", ".join(where),
        wanted="a finite logit in each row, no NaN and no +inf, also after the "
        "division by a temperature",
        got=f"other logits in {len(places)} of {ids.shape[1]} rows",
        fix=FIXES[dtype],
        requests=tuple(sorted(set(requests.tolist()))),
    )
