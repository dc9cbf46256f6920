"""The picture of a trace, drawn by Matplotlib without a display."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from etc_dist.ir.function import TENSOR
from etc_dist.runtime.trace import lane_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from etc_dist.runtime.trace import TaskRecord, Trace

Row = tuple[int, int, str]
Meanings = Mapping[str, str]

WIDTH, DPI = 14.0, 120
"""Inches, and pixels an inch; the height follows from the rows, within bounds."""
LEAST_HEIGHT, GREATEST_HEIGHT = 3.5, 18.0
ROW_HEIGHT = 0.22
"""Inches a row where there is room for it."""
LABELLED_ROWS = 80
"""With more rows, workers have no labels and bars no outlines."""
LEAST_BAR = 1 / 400
"""Width of the shortest bar, as a share of the whole time."""
CAPTION_COLUMNS = 205

COMPUTE = ("#1f77b4", "#2ca02c", "#7b61c4", "#17becf", "#0b3d6b", "#8fbcd4", "#5b7c99")
TRANSFER = ("#ff7f0e", "#d62728", "#e6b800", "#e377c2", "#8c564b", "#ffb07c", "#a50f4a")
"""Colours of the calls that mostly run on tensor lanes, and of the others."""

SHADES = ("#dbe8f3", "#fdeadb")
"""Background of tensor lanes and of transfer lanes, from the first task to the last."""

LANES = (
    "Every bar is a task. A worker is a resident thread block: its tensor lane "
    "computes tiles with all compute warps, its transfer lane copies and adds with "
    "single warps. Shaded: from the first to the last task of a rank's lane."
)
UNITS = ((1e9, "s"), (1e6, "ms"), (1e3, "us"))
"""Nanoseconds of each unit, the longest first."""


def draw(
    trace: Trace, path: str | Path, title: str, caption: str, meanings: Meanings
) -> None:
    """Write `trace` as a PNG: rows by rank, then lane; a colour for each call."""
    places = _places(trace.rows)
    bottom = max(places.values(), default=0.0) + 1.0
    is_thin = len(places) > LABELLED_ROWS
    height = min(max(2.2 + bottom * ROW_HEIGHT, LEAST_HEIGHT), GREATEST_HEIGHT)
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    begin, end = trace.span
    length = max(end - begin, 1)
    divisor, unit = next((u for u in UNITS if length >= 2 * u[0]), UNITS[-1])
    colours = _colours(trace)
    for call, colour in colours.items():
        tasks = [record for record in trace.records if record.call == call]
        corners = _boxes(tasks, places, 0.5 if is_thin else 0.42, LEAST_BAR * length)
        corners[..., 0] = (corners[..., 0] - begin) / divisor
        boxes = PolyCollection(
            corners,
            facecolors=[colour],
            edgecolors=[colour] if is_thin else "white",
            linewidths=0.2 if is_thin else 0.4,
        )
        axes.add_collection(boxes)
    _shade(axes, trace, places, begin, divisor)
    _label(axes, places, is_thin)
    axes.set_xlim(-0.002 * length / divisor, (1.002 + LEAST_BAR) * length / divisor)
    axes.set_ylim(bottom, -1.0)
    axes.set_xlabel(f"{unit} since the first task began")
    if colours:
        _add_legend(axes, colours, meanings)
    least = f"Bars below {LEAST_BAR * length / divisor:.2g} {unit} are drawn that wide."
    text = _wrapped([caption, " ".join([LANES, *trace.notes, least])])
    alignment: dict[str, Any] = {"x": 0.01, "ha": "left", "parse_math": False}
    figure.suptitle(title, fontsize=14, fontweight="bold", **alignment)
    figure.supxlabel(text, fontsize=9, color="#444444", **alignment)
    figure.savefig(path)


def _wrapped(notes: Iterable[str]) -> str:
    """One paragraph for each note."""
    return "\n".join(textwrap.fill(note, CAPTION_COLUMNS) for note in notes if note)


def _colours(trace: Trace) -> dict[str, str]:
    """Cool colours compute and warm ones transfer; the same in every run."""
    colours = {}
    for lane_colours, calls in zip((COMPUTE, TRANSFER), _families(trace), strict=True):
        for call_idx, call in enumerate(calls):
            colours[call] = lane_colours[call_idx % len(lane_colours)]
    return colours


def _families(trace: Trace) -> tuple[Sequence[str], Sequence[str]]:
    """Calls by name: those with most of their tasks on tensor lanes, and the rest."""
    balance = dict.fromkeys(sorted(trace.calls), 0)
    for record in trace.records:
        balance[record.call] += 1 if record.lane == TENSOR else -1
    computing = [call for call, count in balance.items() if count >= 0]
    return computing, [call for call, count in balance.items() if count < 0]


def _add_legend(axes: Axes, colours: Mapping[str, str], meanings: Meanings) -> None:
    labels = {
        call: f"{call}: {meanings[call]}" if call in meanings else call
        for call in colours
    }
    axes.legend(
        handles=[Patch(color=colours[call], label=labels[call]) for call in colours],
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=2 if any(len(label) > 30 for label in labels.values()) else 6,
        frameon=False,
        borderaxespad=0.3,
    )


def _band(row: Row) -> tuple[int, str]:
    """The rows that are drawn together: a rank's workers of one lane."""
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
    tasks: list[TaskRecord], places: dict[Row, float], half: float, least: float
) -> Any:
    """Corners [tasks, 4, 2] of the bars, in nanoseconds and rows."""
    x0 = np.array([r.start_ns for r in tasks], np.float64)
    x1 = np.maximum([r.end_ns for r in tasks], x0 + least)
    y = np.array([places[r.row] for r in tasks])
    y0, y1 = y - half, y + half
    corners = [(x0, y0), (x0, y1), (x1, y1), (x1, y0)]
    return np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)


def _shade(
    axes: Axes, trace: Trace, places: dict[Row, float], begin: int, divisor: float
) -> None:
    """Show when each lane of a rank was in use, to make overlap visible."""
    for (_, lane), band in groupby(places, _band):
        rows = set(band)
        times = [(r.start_ns, r.end_ns) for r in trace.records if r.row in rows]
        start, end = min(t for t, _ in times), max(t for _, t in times)
        top, bottom = (f(places[row] for row in rows) for f in (min, max))
        corner = ((start - begin) / divisor, top - 0.6)
        width, height = (end - start) / divisor, bottom - top + 1.2
        colour = SHADES[lane != TENSOR]
        axes.add_patch(Rectangle(corner, width, height, color=colour, zorder=-1.5))


def _label(axes: Axes, places: dict[Row, float], is_thin: bool) -> None:
    """Name ranks at the right; rows, or lanes where rows are thin, at the left."""
    names: dict[str, float] = {}
    across = axes.get_yaxis_transform()
    ticks, texts = [], []
    for (_, lane), band in groupby(places, _band):
        rows, name = list(band), lane_name(lane)
        ys = [places[row] for row in rows]
        axes.axhspan(ys[0] - 0.6, ys[-1] + 0.6, color="#f2f2f2", zorder=-2)
        if is_thin:
            ticks.append((ys[0] + ys[-1]) / 2)
            texts.append(f"{name}\n({len(rows)} workers)")
        else:
            ticks += ys
            texts += [f"worker {worker} · {name}" for _, worker, _ in rows]
    for rank, group in groupby(places, lambda row: row[0]):
        ys = [places[row] for row in group]
        names[f"rank {rank}"] = (ys[0] + ys[-1]) / 2
    for name, y in names.items():
        axes.text(1.006, y, name, transform=across, rotation=-90, va="center")
    axes.set_yticks(ticks, texts, fontsize=8)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="x", color="white", linewidth=0.8, zorder=-1)
    axes.set_axisbelow(True)
