"""Measuring a tuning: the constants of a GPU, and where other tiles are faster."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from operator import itemgetter
from statistics import fmean, median
from typing import Any, NamedTuple, cast

import numpy as np

from etc_dist.compiler import compile
from etc_dist.errors import ArgumentError, WorldError
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.ops.fit_constants import Time, fit, lost_by_choice, model_error
from etc_dist.ops.matmul import matmul_graph
from etc_dist.ops.tile_model import (
    FAMILY,
    Prediction,
    Sizes,
    Tiling,
    dims_of,
    predictions,
    text_of,
)
from etc_dist.ops.tuning import KeptTiles, Tuning, device_of, parse, shipped_for
from etc_dist.world import World

STEP, LEAST = 64, 768
"""N and K at which constants are fitted are multiples of STEP, from LEAST on."""
MOST_N, MOST_K, MOST_ROWS = 20480, 16640, 8192
MOST_WEIGHTS, MOST_PRODUCTS = 2e8, 8e10
"""Of N K, and of M N K."""
NUM_SIZES = 48
LIKELY = 1.35
"""Times the least prediction: the tilings that are measured for a fit."""
MOST_LIKELY = 24
"""The most of them at one size."""
ROWS = tuple(1 << number for number in range(14))
"""For which `--sizes` looks for faster tilings."""
BEST = 3
"""Tilings that it measures: the fastest ones by the model."""
LEAST_GAIN = 0.02
"""The share of a time by which measured tiles have to be faster than the model's."""
WARM_UP, REPEATS = 2, 11
PATTERN = 1 << 20
"""Random elements, which fill the arrays by repetition."""
MOST_ELEMENTS = 1 << 31
"""Of a weight: 4 GiB, of which a measurement takes several."""
BEYOND_CACHE = 1 << 28
"""Bytes that are read between two calls, at least: more than an L2 cache has."""


class Sample(NamedTuple):
    """x [m, k] @ w [n, k].T on tiles of FAMILY."""

    m: int
    n: int
    k: int
    tiling: Tiling


Timer = Callable[[Sequence[Sample]], list[float]]
"""The microseconds of each sample, equal on all ranks: of the slowest one."""


def tune(
    measure: Timer,
    before: Tuning,
    sizes: Sequence[tuple[int, int]] = (),
    say: Callable[[str], object] = print,
) -> Tuning:
    """The tuning that `measure` gives, for GPUs as those of `before`. `sizes`: pairs of
    N and K for which it also keeps the tiles that are faster than the model's."""
    times: list[Time] = []
    for drawn in drawn_sizes():
        candidates = likely(before, drawn)
        times_us = measure(
            [Sample(*drawn, prediction.tiling) for prediction in candidates]
        )
        times += [
            Time(drawn, prediction.work, us)
            for prediction, us in zip(candidates, times_us, strict=True)
        ]
    result = replace(before, tiles=fit(times, before.tiles), kept=())
    for title, constants in (("before", before.tiles), ("fitted", result.tiles)):
        losses = lost_by_choice(times, constants)
        say(
            f"{title}: {constants}\n"
            f"  mean error {model_error(times, constants):.1%} of {len(times)} times; "
            f"its tiles take {fmean(losses):.2%} more than the fastest ones, "
            f"at most {max(losses):.1%}"
        )
    return replace(result, kept=tuple(_faster(measure, result, sizes, say)))


def drawn_sizes() -> list[Sizes]:
    """M, N and K at which constants are fitted, the same at each call: M uniform in its
    logarithm, then N and K, uniform, until they are within the limits."""
    rng, sizes = np.random.default_rng(0), list[Sizes]()
    for _ in range(NUM_SIZES):
        m = round(math.exp(rng.uniform(0, math.log(MOST_ROWS))))
        n, k = MOST_N, MOST_K
        while n * k > MOST_WEIGHTS or m * n * k > MOST_PRODUCTS:
            n, k = (
                STEP * int(rng.integers(LEAST // STEP, most // STEP + 1))
                for most in (MOST_N, MOST_K)
            )
        sizes.append((m, n, k))
    return sizes


def likely(tuning: Tuning, sizes: Sizes) -> list[Prediction]:
    """The tilings that may be the fastest, by the model."""
    ranking = predictions(FAMILY, sizes, tuning.workers, tuning.tiles)
    return [
        prediction
        for prediction in ranking[:MOST_LIKELY]
        if prediction.us <= LIKELY * ranking[0].us
    ]


def _faster(
    measure: Timer,
    tuning: Tuning,
    sizes: Sequence[tuple[int, int]],
    say: Callable[[str], object],
) -> Iterator[KeptTiles]:
    """The tiles that `measure` finds to be faster than the model's, of its best ones,
    for ROWS of each pair of N and K."""
    for (n, k), m in product(sizes, ROWS):
        ranking = predictions(FAMILY, (m, n, k), tuning.workers, tuning.tiles)
        samples = [Sample(m, n, k, prediction.tiling) for prediction in ranking[:BEST]]
        fast = confirm(measure, samples, measure(samples))
        if fast:
            us_of_tiles = {text_of(FAMILY, sample.tiling): us for us, sample in fast}
            say(f"{m} x {n} x {k}: {shown(fast, us_of_tiles)}")
            yield KeptTiles(m, n, k, next(iter(us_of_tiles)))


def tune_world(
    world: World, sizes: Sequence[tuple[int, int]], say: Callable[[str], object]
) -> Tuning:
    """Measure the GPUs of all ranks, each on its own; the same result on all ranks.
    Collective. WorldError without a GPU for each rank, or if GPUs differ."""
    _check_world(world)
    devices = [str(device) for device in world.gather(device_of(world))]
    if len(set(devices)) > 1:
        raise _refused(
            "GPUs of one kind", ", ".join(devices), "choose GPUs of one kind"
        )
    with compile(matmul_graph(world.size), world, trace=False) as program:
        # NOTE: not the user's own, which may be damaged.
        shipped_tuning = shipped_for(devices[0])
        before = replace(shipped_tuning, device=devices[0], workers=program.workers)
        timer = MatmulTimer(world, program, _most_elements(sizes))
        result = tune(timer, before, sizes, say)
    # One rank's, since other hosts may round a solution in another way.
    first = world.gather(result.document() if world.rank == 0 else None)[0]
    return parse(first, "rank 0", f"{devices[0]}, by etc-dist tune")


class MatmulTimer:
    """Times calls of a program on this rank's GPU: events around a call whose launch is
    enqueued while another kernel reads memory, so that no operand is in the L2 cache.
    elements: at most those of x and w together, and of y."""

    def __init__(self, world: World, program: Any, elements: int) -> None:
        import cupy

        self._cupy, self._world, self._program = cupy, world, program
        normal = np.random.default_rng(0).standard_normal(PATTERN, np.float32) / 10
        pattern = normal.astype(numpy_dtype("bfloat16")).view(np.uint16)
        count = -(-(elements + BEYOND_CACHE // 2) // PATTERN)
        self._data = cupy.empty((count, PATTERN), np.uint16)
        self._data[...] = cupy.asarray(pattern)
        self._out = cupy.empty(elements, np.uint16)
        self._maxima = cupy.empty(16 * count, np.uint32)
        self._events = [cupy.cuda.Event() for _ in range(2)]

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        # NOTE: the first one once more, since calls after other work of the host are
        # slower.
        own_times = [self._time(sample) for sample in (*samples[:1], *samples)][1:]
        rank_times = cast(list[list[float]], self._world.gather(own_times))
        return [max(sample_times) for sample_times in zip(*rank_times, strict=True)]

    def _time(self, sample: Sample) -> float:
        """The microseconds of a sample on this rank."""
        m, n, k, tiling = sample
        flat, dims = self._data.reshape(-1), dims_of(tiling)
        operands = {
            "x": _matrix(flat, m, k),
            "w": _matrix(flat[m * k :], n, k),
            "y": _matrix(self._out, m, n),
        }
        times: list[float] = []
        start, end = self._events
        with self._world.exclusive:
            bound, _ = self._program.bind_arrays(operands, dims, None)
            for _ in range(WARM_UP + REPEATS):
                self._read_all()
                start.record()
                self._program.launch(bound)
                end.record()
                end.synchronize()
                times.append(1e3 * self._cupy.cuda.get_elapsed_time(start, end))
        return median(times[WARM_UP:])

    def _read_all(self) -> None:
        rows = self._data.view(np.uint32).reshape(self._maxima.size, -1)
        rows.max(axis=1, out=self._maxima)


def _matrix(flat: Any, rows: int, columns: int) -> Any:
    """The first elements of an array of 16-bit numbers."""
    part = flat[: rows * columns].view(numpy_dtype("bfloat16"))
    return part.reshape(rows, columns)


def confirm(
    measure: Timer, samples: Sequence[Sample], times: Sequence[float]
) -> list[tuple[float, Sample]]:
    """The samples that took no longer than the first one, the model's choice, with
    their times, the fastest first; none if that gains too little. times: the times of
    `samples`, measured here once more, since one may be an accident."""
    if _gain(times) > LEAST_GAIN:
        again = zip(times, measure(samples), strict=True)
        times = [round(fmean(time_pair), 2) for time_pair in again]
    if _gain(times) <= LEAST_GAIN:
        return []
    fast = sorted(zip(times, samples, strict=True), key=itemgetter(0))
    return [(us, sample) for us, sample in fast if us <= times[0]]


def shown(
    fast: Sequence[tuple[float, object]], us_of_tiles: Mapping[str, float]
) -> str:
    """The fastest tiles, and the times of the model's choice and of these."""
    return f"{next(iter(us_of_tiles))}, {fast[-1][0]} to {fast[0][0]} us"


def _gain(times: Sequence[float]) -> float:
    """How much longer the first time is than the shortest one, as a share."""
    return times[0] / min(times) - 1


def _most_elements(sizes: Sequence[tuple[int, int]]) -> int:
    """The most elements of an input or an output of one call."""
    every = [*drawn_sizes(), *((max(ROWS), n, k) for n, k in sizes)]
    return max(max(m * k + n * k, m * n) for m, n, k in every)


def _check_world(world: World) -> None:
    if world.backend == "cpu":
        fix = "run it where etc-dist doctor finds a GPU and all it needs"
        raise _refused("a GPU", world.show(), fix)
    if world.ranks_per_gpu > 1:
        fix = "start as many ranks as there are GPUs, or one"
        raise _refused("a GPU for each rank", world.show(), fix)


def _refused(wanted: str, got: str, fix: str) -> WorldError:
    return WorldError(
        "nothing can be measured",
        where="etc-dist tune",
        wanted=wanted,
        got=got,
        fix=fix,
    )


def parse_sizes(text: str) -> list[tuple[int, int]]:
    """N and K of "5120x25600,4096x4096". Raises ArgumentError for another text."""
    try:
        sizes = [tuple(map(int, size.split("x"))) for size in text.split(",")]
        is_good = all(
            len(size) == 2 and min(size) > 0 and max(size) % 8 == 0 for size in sizes
        )
        is_good = is_good and all(n * k <= MOST_ELEMENTS for n, k in sizes)
        if is_good and all(number % 8 == 0 for size in sizes for number in size):
            return [(n, k) for n, k in sizes]
    except ValueError:
        pass
    raise ArgumentError(
        "sizes cannot be read",
        where="etc-dist tune --sizes",
        wanted="N and K, multiples of 8, as in 5120x25600,4096x4096, and at most "
        f"{MOST_ELEMENTS} elements",
        got=text,
        fix="correct them",
    )
