"""The choice of the tiles of the MLP's two matmuls, by the model of their times.

Down reads activations, so that its tiles wait for those of their rows. If both matmuls
have as many rows of tiles, each of these is a block with its own event: see
`mlp_tiles_graph`. Otherwise down waits for all activations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

from etc_dist.functions.tile_shape import TileShape
from etc_dist.ops.tile_model import Prediction, Sizes, choices, predictions, text_of
from etc_dist.ops.tuning import Tuning
from etc_dist.schedule.plan import Choice

WAIT_US = 2.0
"""Added where down waits for all activations: from the end of the last tile of gate_up,
through the notification, to the first loads of its results. Assumed, as the time from a
launch to the first wgmma of a worker. Among several blocks, other tiles hide it if
workers have several, unless gate_up uses split-K: its sums, of all blocks, come last.
"""
SWITCH_US = 2.0
"""Added where the two matmuls have different tile shapes: the fetch of the second one's
code, which no instruction cache holds. Measured on an H200 only."""


class Pair(NamedTuple):
    """The tilings of a matmul and of one that reads its result, their time in one
    kernel in microseconds, and the number of blocks of rows."""

    first: Prediction
    second: Prediction
    us: float
    blocks: int


def fastest_pair(
    rankings: Sequence[Sequence[Prediction]], launch_us: float, workers: int
) -> Pair:
    """Of two rankings by `predictions` for equally many rows. launch_us: which two
    kernels take twice, and one only once."""

    def pair(first: Prediction, second: Prediction) -> Pair:
        num_blocks = first.tiles_down if first.tiles_down == second.tiles_down else 1
        is_switched = first.tiling.shape_idx != second.tiling.shape_idx
        is_wave = first.work.num_tiles <= workers
        is_exposed = num_blocks == 1 or is_wave or first.tiling.parts > 1
        us = first.us + second.us - launch_us
        us += WAIT_US * is_exposed + SWITCH_US * is_switched
        return Pair(first, second, us, num_blocks)

    # All else is equal for tilings of one shape, with split-K or without.
    fastest = (
        {
            (
                pair_predictions.tiling.shape_idx,
                pair_predictions.tiling.parts > 1,
            ): pair_predictions
            for pair_predictions in reversed(ranking)
        }
        for ranking in rankings
    )
    pairs = product(*(kinds.values() for kinds in fastest))
    return min(
        (pair(*pair_predictions) for pair_predictions in pairs),
        key=lambda pair_predictions: pair_predictions.us,
    )


def rankings_of(
    sizes: Sequence[Sizes],
    workers: int,
    shapes: Sequence[TileShape],
    tuning: Tuning,
    *,
    in_order: bool = False,
    ranks: int = 1,
) -> list[list[Prediction]]:
    """The rankings of gate_up and of down. sizes: M, N and K of each. in_order: only
    tilings that add over k in order. ranks: as for `work_of`."""
    return [
        predictions(
            shapes,
            layer_sizes,
            workers,
            tuning.tiles,
            gated=is_gated,
            in_order=in_order,
            ranks=ranks,
        )
        for layer_sizes, is_gated in zip(sizes, (True, False), strict=True)
    ]


def sizes_of(m: int, hidden: int, inner: int) -> tuple[Sizes, Sizes]:
    """M, N and K of gate_up and of down, for m rows of all ranks."""
    return (m, inner, hidden), (m, hidden, inner)


def choose_tiles(
    dims: Mapping[str, int],
    world_size: int,
    workers: int,
    shapes: Sequence[TileShape],
    *,
    in_order: bool = False,
    tuning: Tuning,
    of_one_rank: bool = False,
) -> list[Choice]:
    """The dims that select the tiles of a call; in_order as for `rankings_of`.
    of_one_rank: whether tiles have rows of one rank."""
    sizes = sizes_of(world_size * dims["rows"], dims["hidden"], dims["inner"])
    ranks = world_size if of_one_rank else 1
    kinds = {"in_order": in_order}
    rankings = rankings_of(sizes, workers, shapes, tuning, ranks=ranks, **kinds)
    pair = fastest_pair(rankings, tuning.tiles.call_us, workers)
    blocks = f"{pair.blocks} blocks of rows" if pair.blocks > 1 else "all rows"
    best_predictions, all_choices = (pair.first, pair.second), []
    up, down = (text_of(shapes, prediction.tiling) for prediction in best_predictions)
    texts = f"before down on {down}", f"after gate_up on {up}"
    for layer_idx, name in enumerate(("gate_up_", "down_")):
        ranking = [
            best_predictions[layer_idx],
            *(
                prediction
                for prediction in rankings[layer_idx]
                if prediction != best_predictions[layer_idx]
            ),
        ]
        notes = [
            f"{texts[layer_idx]}: {pair.us:.1f} us together; down waits for {blocks}"
        ]
        all_choices += choices(
            name, sizes[layer_idx], workers, shapes, ranking, tuning, notes
        )
    return all_choices
