"""The probabilities of tokens, from the logits of a step."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from etc_dist.models import Model
from etc_dist.serve.jobs import TokenLogprobs

Array = np.ndarray[Any, Any]


class RankLogits(NamedTuple):
    """What a rank's columns say of some rows, all [rows] or [rows, most]: the largest
    logit, the sum of exp(logit - largest), the largest logits in descending order with
    their ids, and the logits of the chosen ids, -inf where another rank has them."""

    largest: Array
    total: Array
    most_likely: Array
    ids: Array
    own_logits: Array


def find_logprobs(
    model: Model, rows: Sequence[int], ids: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """Of each of these rows of the last step: the log-probability of its id, and of its
    `counts` most likely tokens. Sums are in fp32. Collective."""
    most = max(counts)
    world = model.world
    if world.size == 1:
        parts = [own_part(model, rows, ids, most)]
    else:
        parts = world.agree(lambda: own_part(model, rows, ids, most))
    largest = np.max([part.largest for part in parts], axis=0)
    total = sum(part.total * np.exp(part.largest - largest) for part in parts)
    norm = largest + np.log(total)
    chosen_logprobs = np.max([part.own_logits for part in parts], axis=0) - norm
    logits = np.concatenate([part.most_likely for part in parts], axis=1)
    of_logits = np.concatenate([part.ids for part in parts], axis=1)
    logprobs = []
    for row, count in enumerate(counts):
        # Ranks have ascending ids: of equal logits, the first id is first.
        order = np.argsort(-logits[row], kind="stable")[:count]
        values = (logits[row, order] - norm[row]).tolist()
        pairs = zip(of_logits[row, order].tolist(), values, strict=True)
        logprobs.append(TokenLogprobs(float(chosen_logprobs[row]), tuple(pairs)))
    return logprobs


def own_part(
    model: Model, rows: Sequence[int], ids: Sequence[int], most: int
) -> RankLogits:
    """The part of this rank's columns."""
    xp = np if model.world.backend == "cpu" else import_module("cupy")
    logits = model.logits[list(rows)].astype(np.float32)
    first = model.part.ids(model.config.vocabulary).start
    width = logits.shape[1]
    largest = logits.max(axis=1, initial=-np.inf)
    total = xp.exp(logits - largest[:, None]).sum(axis=1)
    order = xp.argsort(-logits, axis=1, kind="stable")[:, :most]
    best = xp.take_along_axis(logits, order, axis=1)
    chosen_logits = np.full(len(rows), -np.inf, np.float32)
    for row, number in enumerate(ids):
        if first <= number < first + width:
            chosen_logits[row] = logits[row, number - first]
    arrays = largest, total, best, order + first
    if xp is not np:
        arrays = tuple(array.get() for array in arrays)
    return RankLogits(*arrays, chosen_logits)
