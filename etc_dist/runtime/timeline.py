"""The picture of a trace, drawn by Matplotlib without a display."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from etc_dist.runtime.trace import TaskRecord, Trace

Row = tuple[int, int, str]

WIDTH = 14.0
"""Inches; the height follows from the rows, within these bounds."""
LEAST_HEIGHT, GREATEST_HEIGHT = 2.5, 18.0
ROW_HEIGHT = 0.22
"""Inches a row where there is room for it."""
LABELLED_ROWS = 80
"""Beyond so many rows, workers are too thin to name and slices to outline."""


def draw(trace: Trace, path: str | Path) -> None:
    """Write `trace` as a PNG: rows by rank, then lane; a colour for each call."""
    places = _places(trace.rows)
    bottom = max(places.values(), default=0.0) + 1.0
    thin = len(places) > LABELLED_ROWS
    height = min(max(1.0 + bottom * ROW_HEIGHT, LEAST_HEIGHT), GREATEST_HEIGHT)
    figure = Figure(figsize=(WIDTH, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    begin, end = trace.span
    colours = _colours(trace.calls)
    for call, colour in colours.items():
        tasks = [record for record in trace.records if record.call == call]
        boxes = PolyCollection(
            _boxes(tasks, places, begin, 0.5 if thin else 0.42),
            facecolors=[colour],
            edgecolors=[colour] if thin else "white",
            linewidths=0.2 if thin else 0.4,
        )
        axes.add_collection(boxes)
    _label(axes, places, thin)
    length = max((end - begin) / 1e3, 1e-3)
    axes.set_xlim(-0.002 * length, 1.002 * length)
    axes.set_ylim(bottom, -1.0)
    axes.set_xlabel("microseconds since the first task began")
    axes.legend(
        handles=[Patch(color=colours[call], label=call) for call in colours],
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=6,
        frameon=False,
        borderaxespad=0.3,
    )
    figure.savefig(path)


def _colours(calls: tuple[str, ...]) -> dict[str, Any]:
    table = matplotlib.colormaps["tab10" if len(calls) <= 10 else "tab20"]
    return {call: table(number % table.N) for number, call in enumerate(calls)}


def _band(row: Row) -> tuple[int, str]:
    """What is drawn together: the rank's workers of one lane."""
    return row[0], row[2]


def _places(rows: tuple[Row, ...]) -> dict[Row, float]:
    """Each row's height in the picture: lane under lane, a gap between ranks."""
    gap = max(1.0, len(rows) / 60)
    places: dict[Row, float] = {}
    place, rank = 0.0, None
    for (at, _), band in groupby(sorted(rows, key=lambda r: (_band(r), r[1])), _band):
        if rank is not None:
            place += gap if at != rank else gap / 4
        rank = at
        for row in band:
            places[row] = place
            place += 1.0
    return places


def _boxes(
    tasks: list[TaskRecord], places: dict[Row, float], begin: int, half: float
) -> Any:
    """Corners [tasks, 4, 2] of the slices, in microseconds and rows."""
    x0 = np.array([r.start_ns - begin for r in tasks]) / 1e3
    x1 = np.array([r.end_ns - begin for r in tasks]) / 1e3
    y = np.array([places[r.row] for r in tasks])
    y0, y1 = y - half, y + half
    corners = [(x0, y0), (x0, y1), (x1, y1), (x1, y0)]
    return np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)


def _label(axes: Axes, places: dict[Row, float], thin: bool) -> None:
    """Name ranks at the right; rows, or lanes where rows are thin, at the left."""
    names: dict[str, float] = {}
    across = axes.get_yaxis_transform()
    ticks, texts = [], []
    for (_, lane), band in groupby(places, _band):
        rows = list(band)
        ys = [places[row] for row in rows]
        axes.axhspan(ys[0] - 0.6, ys[-1] + 0.6, color="#f2f2f2", zorder=-2)
        ticks += [(ys[0] + ys[-1]) / 2] if thin else ys
        texts += [lane] if thin else [f"{lane} {worker}" for _, worker, _ in rows]
    for rank, group in groupby(places, lambda row: row[0]):
        ys = [places[row] for row in group]
        names[f"rank {rank}"] = (ys[0] + ys[-1]) / 2
    for name, y in names.items():
        axes.text(1.006, y, name, transform=across, rotation=-90, va="center")
    axes.set_yticks(ticks, texts, fontsize=8)
    axes.set_ylabel("lane" if thin else "lane, worker")
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="x", color="white", linewidth=0.8, zorder=-1)
    axes.set_axisbelow(True)
