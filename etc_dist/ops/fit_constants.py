"""The constants of the model of matmul times, from measured times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from etc_dist.ops.matmul_policy import Work
from etc_dist.ops.tuning import Constants

ROUNDS = 40
"""Solutions for one beginning, at most."""
SCALES = (0.7, 1.4)
"""Of one of the first rates, of SMs, memory or tensor cores."""
PRIOR = 1e-3
"""The weight of the first constants, for those that no time depends on."""
ERROR_SHARE = 0.25
"""The weight of the model's error against the time that its choices lose."""
RATES = (2, 3, 5)
"""Places of the rates in `_numbers`."""
LEAST, MOST = 0.05, 20.0
"""Bounds of each constant, as multiples of the first one."""


@dataclass(frozen=True)
class Time:
    """A measured time. group: equal for the same matrices on other tiles."""

    group: tuple[int, int, int]
    work: Work
    us: float


def fit_constants(times: Sequence[Time], first: Constants) -> Constants:
    """The constants that choose the fastest tiles and come close to the times: of
    several solutions of least squares, and `first`."""
    candidates = [first, *_improved(times, first)]
    for place, scale in product(RATES, SCALES):
        numbers = _numbers(first)
        numbers[place] *= scale
        candidates += _improved(times, _constants(numbers))

    def fault(one: Constants) -> float:
        lost = float(np.mean(lost_by_choice(times, one)))
        return lost + ERROR_SHARE * model_error(times, one)

    return min(candidates, key=fault)


def model_error(times: Sequence[Time], constants: Constants) -> float:
    """The mean relative error of the model."""
    errors = [abs(one.work.us(constants) / one.us - 1) for one in times]
    return float(np.mean(errors))


def lost_by_choice(times: Sequence[Time], constants: Constants) -> list[float]:
    """How much longer the model's tiles take than the fastest ones, as a share, for
    each group."""
    groups: dict[tuple[int, int, int], list[Time]] = {}
    for one in times:
        groups.setdefault(one.group, []).append(one)
    chosen = (
        (min(group, key=lambda one: one.work.us(constants)).us, group)
        for group in groups.values()
    )
    return [us / min(one.us for one in group) - 1 for us, group in chosen]


def _improved(times: Sequence[Time], first: Constants) -> Iterator[Constants]:
    """Solutions of linear least squares. The model is linear in these numbers, given
    what bounds the stages of each time, which follows from the last solution."""
    constants, before = first, None
    for _ in range(ROUNDS):
        bounds = [np.argmax(one.work.stage_us(constants)) for one in times]
        ends = [one.work.ends(constants) for one in times]
        if (bounds, ends) == before:
            return
        before = bounds, ends
        rows = [
            _row(one, int(bound), count)
            for one, bound, count in zip(times, bounds, ends, strict=True)
        ]
        unit = _numbers(constants)
        matrix = np.array(rows) * unit
        pull = PRIOR * len(times) ** 0.5 * np.eye(len(unit))
        wanted = np.concatenate([np.ones(len(rows)), pull.diagonal()])
        found = np.linalg.lstsq(np.concatenate([matrix, pull]), wanted, rcond=None)[0]
        first_unit = _numbers(first)
        numbers = np.clip(found * unit, LEAST * first_unit, MOST * first_unit)
        constants = _constants(numbers)
        yield constants


def _row(one: Time, bound: int, ends: int) -> list[float]:
    """The factors of `_numbers` in the model's time, relative to the measured one."""
    work = one.work
    copied, read, cycles = (
        work.stages * size * (bound == place)
        for place, size in enumerate((work.copied, work.read, work.cycles))
    )
    ended = ends * work.swapped, ends * work.splits_k
    row = [1, work.started, copied, read, read * work.idle, cycles, *ended]
    return [value / one.us for value in row]


def _numbers(of: Constants) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    per_byte = 1 / of.memory_bytes_per_us
    return np.array(
        [
            of.launch_us,
            of.start_us,
            1 / of.sm_bytes_per_us,
            per_byte,
            of.idle * per_byte,
            1 / of.cycles_per_us,
            of.swapped_us,
            of.exchange_us,
        ]
    )


def _constants(
    numbers: Sequence[float] | np.ndarray[tuple[int], np.dtype[np.float64]],
) -> Constants:
    launch, start, copied, read, idle, cycle, swapped, exchange = map(float, numbers)
    return Constants(
        launch, start, 1 / copied, 1 / read, idle / read, 1 / cycle, swapped, exchange
    )
