"""The constants and factors of the model of matmul times, from measured times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import product
from math import exp, log
from statistics import fmean

import numpy as np

from etc_dist.ops.matmul_policy import Work, row_class
from etc_dist.ops.tuning import Constants, Tuning

ROUNDS = 40
"""Solutions for one beginning, at most."""
SCALES = (0.7, 1.4)
"""Of one of the first rates, of SMs, memory or tensor cores."""
PRIOR = 1e-5
"""The weight of the first constants, for those that no time depends on."""
ERROR_SHARE = 0.25
"""The weight of the model's error against the time that its choices lose."""
RATES = (2, 3, 5)
"""Places of the rates in `_numbers`."""
LEAST, MOST = 0.05, 20.0
"""Bounds of each constant, as multiples of the first one."""

Numbers = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True)
class Time:
    """A measured time. sizes: m, n and k. tile: the text of the tiles."""

    sizes: tuple[int, int, int]
    tile: str
    work: Work
    us: float

    @property
    def kind(self) -> tuple[str, str]:
        """Times of one kind have a common factor."""
        return self.tile, str(row_class(self.sizes[0]))

    def by_model(self, tuning: Tuning) -> float:
        """Microseconds of the same matmul by the model."""
        factor = tuning.factor(self.tile, self.sizes[0])
        return self.work.us(tuning.constants) * factor


def fit(times: Sequence[Time], first: Tuning) -> Tuning:
    """The constants and factors that choose the fastest tiles and come close to the
    times: of several solutions of least squares, and with the constants of `first`."""
    constants = first.constants
    candidates = [constants, *_improved(times, constants)]
    for place, scale in product(RATES, SCALES):
        numbers = _numbers(constants)
        numbers[place] *= scale
        candidates += _improved(times, _constants(numbers))
    rounded = [Constants(*map(_rounded, astuple(one))) for one in candidates]
    fitted = [
        replace(first, constants=one, factors=_factors(times, one)) for one in rounded
    ]
    return min(
        fitted,
        key=lambda one: (
            fmean(lost_by_choice(times, one)) + ERROR_SHARE * model_error(times, one)
        ),
    )


def model_error(times: Sequence[Time], tuning: Tuning) -> float:
    """The mean relative error of the model."""
    return fmean(abs(one.by_model(tuning) / one.us - 1) for one in times)


def lost_by_choice(times: Sequence[Time], tuning: Tuning) -> list[float]:
    """How much longer the model's tiles take than the fastest ones, as a share, for
    each m, n and k."""
    groups: dict[tuple[int, int, int], list[Time]] = {}
    for one in times:
        groups.setdefault(one.sizes, []).append(one)
    return [
        min(group, key=lambda one: one.by_model(tuning)).us
        / min(one.us for one in group)
        - 1
        for group in groups.values()
    ]


def _factors(
    times: Sequence[Time], constants: Constants
) -> Mapping[str, Mapping[str, float]]:
    """The mean of measured times, divided by the model's, of each kind; closer to 1 if
    there are few."""
    kinds: dict[tuple[str, str], list[float]] = {}
    for one in times:
        kinds.setdefault(one.kind, []).append(log(one.us / one.work.us(constants)))
    factors: dict[str, dict[str, float]] = {}
    for (tile, rows), logs in kinds.items():
        factor = _rounded(exp(sum(logs) / (len(logs) + 1)))
        factors.setdefault(tile, {})[rows] = factor
    return factors


def _improved(times: Sequence[Time], first: Constants) -> Iterator[Constants]:
    """Solutions of linear least squares. The model is linear in these numbers, given
    what bounds the stages of each time, which follows from the last solution."""
    constants, before = first, None
    for _ in range(ROUNDS):
        bounds = [int(np.argmax(one.work.stage_us(constants))) for one in times]
        ends = [one.work.ends(constants) for one in times]
        if (bounds, ends) == before:
            return
        before = bounds, ends
        rows = [_row(*each) for each in zip(times, bounds, ends, strict=True)]
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
    """The multiples of `_numbers` in the model's time, relative to the measured one."""
    work = one.work
    copied, read, cycles = (
        work.stages * size * (bound == place)
        for place, size in enumerate((work.copied, work.read, work.cycles))
    )
    ended = ends * work.swapped, ends * work.exchanged
    row = [1, work.started, copied, read, read * work.idle, cycles, *ended]
    return [value / one.us for value in row]


def _numbers(of: Constants) -> Numbers:
    launch, start, sm, memory, idle, cycles, *ends = astuple(of)
    return np.array(
        [launch, start, 1 / sm, 1 / memory, idle / memory, 1 / cycles, *ends]
    )


def _constants(numbers: Numbers) -> Constants:
    launch, start, copied, read, idle, cycle, *ends = map(float, numbers)
    return Constants(launch, start, 1 / copied, 1 / read, idle / read, 1 / cycle, *ends)


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")
