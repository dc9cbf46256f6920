"""The constants of the model of matmul times, from measured times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import partial

import numpy as np

from etc_dist.ops.tile_model import Sizes, TileWork
from etc_dist.ops.tuning import TileConstants

SLOWER = 5.0
"""A time that is longer than the shortest at its size by a share s has the weight
exp(-SLOWER s): what counts is the order of the fastest."""
ERRORS = (1.0, 0.5, 0.25, 0.12)
"""Of logarithms. A solution for each begins at the one before; larger errors count as
much as these, so that a few tilings that the model does not describe change little."""
PULL = 0.01
"""The weight of the first constants, for those that no time depends on."""
ROUNDS = 40
"""Steps to a solution, at most."""
MOST_STEP = 0.5
"""Of the logarithm of a constant."""
LEAST_GAIN = 1e-6
"""The share of the squares by which the last step to a solution improves it at most."""
SLOPE_STEP = 1e-4

Numbers = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True)
class Time:
    """A measured time of a tiling. sizes: m, n and k."""

    sizes: Sizes
    work: TileWork
    us: float


def fit(times: Sequence[Time], first: TileConstants) -> TileConstants:
    """The constants whose times come closest to the measured ones, above all to the
    shortest at each size: least squares of the errors of logarithms."""
    works, measured = _works(times), _measured(times)
    weights = np.empty(len(times))
    for group in _groups(times):
        slower = measured[group] / measured[group].min() - 1
        weights[group] = np.exp(-SLOWER * slower) / len(group)
    roots = np.sqrt(weights / weights.sum())
    start = np.log(astuple(first))

    def errors(logs: Numbers, most: float) -> Numbers:
        us = np.asarray(works.us(TileConstants(*np.exp(logs))))
        clipped = np.clip(np.log(us / measured), -most, most)
        return np.concatenate([roots * clipped, PULL * (logs - start)])

    logs = start
    for most in ERRORS:
        logs = _least_squares(partial(errors, most=most), logs)
    return TileConstants(*(float(f"{log:.4g}") for log in np.exp(logs)))


def model_error(times: Sequence[Time], constants: TileConstants) -> float:
    """The mean relative error of the model."""
    us = _works(times).us(constants)
    return float(np.mean(np.abs(us / _measured(times) - 1)))


def lost_by_choice(times: Sequence[Time], constants: TileConstants) -> list[float]:
    """How much longer the model's tiles take than the fastest ones, as a share, at each
    size."""
    us, measured = np.asarray(_works(times).us(constants)), _measured(times)
    return [
        float(measured[group[us[group].argmin()]] / measured[group].min() - 1)
        for group in _groups(times)
    ]


def _works(times: Sequence[Time]) -> TileWork:
    """Of all times, as arrays."""
    return TileWork(*np.array([astuple(time.work) for time in times]).T)


def _measured(times: Sequence[Time]) -> Numbers:
    return np.array([time.us for time in times])


def _groups(times: Sequence[Time]) -> list[np.ndarray[tuple[int], np.dtype[np.intp]]]:
    """The positions of the times at each size."""
    time_idxs: dict[Sizes, list[int]] = {}
    for time_idx, time in enumerate(times):
        time_idxs.setdefault(time.sizes, []).append(time_idx)
    return [np.array(places) for places in time_idxs.values()]


def _least_squares(errors: Callable[[Numbers], Numbers], first: Numbers) -> Numbers:
    """Where the sum of the squares of `errors` is least, by the method of Levenberg and
    Marquardt, beginning at `first`."""
    place, residuals, damping = first, errors(first), 1e-2
    for _ in range(ROUNDS):
        moved = [
            errors(place + SLOPE_STEP * direction) for direction in np.eye(place.size)
        ]
        slopes = (np.array(moved) - residuals) / SLOPE_STEP
        squares = slopes @ slopes.T
        least = residuals @ residuals
        while damping < 1e6:
            damped = squares + damping * np.diag(squares.diagonal())
            step = np.linalg.solve(damped, -slopes @ residuals)
            there = place + np.clip(step, -MOST_STEP, MOST_STEP)
            next_residuals = errors(there)
            if next_residuals @ next_residuals < least:
                place, residuals, damping = there, next_residuals, damping / 4
                break
            damping *= 4
        if least - residuals @ residuals < LEAST_GAIN * least:
            break
    return place
