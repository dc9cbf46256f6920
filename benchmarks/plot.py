"""The picture of static and dynamic schedules, drawn from the records.

.venv/bin/python benchmarks/plot.py    # writes docs/schedules.png

A panel for each operation and number of ranks that was measured with a dynamic
schedule: how much faster than the unfused baseline, over tokens or rows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.records import RESULTS, ROOT, FusedRecord, load
from benchmarks.table import newest, ranks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = {"static": ("-", "o"), "dynamic": ("--", "s")}
"""Line and marker of a schedule; a colour is a model."""
TITLES = {"moe": "Mixture of experts", "mlp": "Dense MLP"}
PANEL = 5.6, 4.0
"""Inches."""


def panels(records: Sequence[FusedRecord]) -> list[list[FusedRecord]]:
    """The records of each operation and world size with a dynamic schedule."""
    names = list(TITLES)
    mine = [r for r in records if r.op in names]
    mine.sort(key=lambda r: (names.index(r.op), r.world_size, r.N * r.K, r.M))
    found = [list(of) for _, of in groupby(mine, lambda r: (r.op, r.world_size))]
    return [of for of in found if any(r.schedule == "dynamic" for r in of)]


def draw(found: Sequence[Sequence[FusedRecord]], path: Path) -> None:
    """Write the panels as one PNG."""
    width, height = PANEL
    size = (width * len(found), height)
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, records in zip(
        figure.subplots(1, len(found), squeeze=False)[0], found, strict=True
    ):
        panel(axes, records)
    figure.savefig(path)


def panel(axes: Axes, records: Sequence[FusedRecord]) -> None:
    first = records[0]
    models = list(dict.fromkeys(r.model for r in records))
    for number, model in enumerate(models):
        for schedule, (dashes, marker) in STYLES.items():
            line = [r for r in records if (r.model, r.schedule) == (model, schedule)]
            if not line:
                continue
            axes.plot(
                [r.M for r in line],
                [r.speedup for r in line],
                color=f"C{number}",
                linestyle=dashes,
                marker=marker,
                label=f"{model}, {schedule}",
            )
    axes.axhline(1.0, color="grey", linewidth=0.8)
    sizes = sorted({r.M for r in records})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.tick_params(axis="x", labelsize="small")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel("tokens" if first.op == "moe" else "rows of all ranks")
    axes.set_ylabel("speed-up over unfused")
    axes.set_title(f"{TITLES[first.op]}, {ranks(first)}, {first.device}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", ncols=2)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw the schedules' speed-ups.")
    add = parser.add_argument
    add("--results", type=Path, default=RESULTS)
    add("--path", type=Path, default=ROOT / "docs" / "schedules.png")
    options = parser.parse_args(arguments)
    found = panels(newest(load(options.results)))
    if not found:
        print("no records of a dynamic schedule", file=sys.stderr)
        return 1
    draw(found, options.path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
