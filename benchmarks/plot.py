"""Draws the figures of docs/results.md from the records. decode.png corresponds to
figures 14 and 17 of the paper, decode_ranks.png to figure 18.

.venv/bin/python benchmarks/plot.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.cells import latest, ranks
from benchmarks.decode_tables import greedy
from benchmarks.records import RESULTS, ROOT, DecodeRecord, Record, load
from benchmarks.table import is_uniform, newest

SCHEDULES = ("static", "dynamic")
COMPARED = {"moe": 1, "mlp": 4}
"""Operations whose schedules the picture compares, and on how many ranks."""


def draw_all(records: Sequence[Record], folder: Path) -> None:
    draw(records, folder / "schedules.png")
    draw_decode(records, folder / "decode.png")
    if greedy(records, on_ranks=True):
        draw_decode(records, folder / "decode_ranks.png", on_ranks=True)


def panels(count: int) -> tuple[Any, Any]:
    """A figure with a row of panels, and these."""
    figure = Figure(figsize=(5.6 * count, 4.0), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, count, squeeze=False)[0]


def finish(axes: Any, title: str, x: str, y: str, columns: int = 1) -> None:
    """The axes, title and legend of a panel whose curves are drawn."""
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", ncols=columns)


def draw(records: Sequence[Record], path: Path) -> None:
    """Draw a panel for each operation whose schedules are compared."""
    figure, row = panels(len(COMPARED))
    for axes, (op, world) in zip(row, COMPARED.items(), strict=True):
        mine = [
            r
            for r in newest(records)
            if (r.op, r.world_size) == (op, world) and is_uniform(r)
        ]
        for number, (model, found) in enumerate(groupby(mine, lambda r: r.model)):
            known = list(found)
            for schedule, style in zip(SCHEDULES, ("o-", "s--"), strict=True):
                some = [r for r in known if r.schedule == schedule]
                xs, ys = [r.M for r in some], [r.speedup for r in some]
                label = f"{model}, {schedule}"
                axes.plot(xs, ys, style, color=f"C{number}", label=label)
        axes.axhline(1.0, color="grey", linewidth=0.8)
        title = f"{op}, {ranks(mine[0])}, {mine[0].device}"
        x = "tokens" if op == "moe" else "rows of all ranks"
        finish(axes, title, x, "speed-up over unfused", columns=2)
    figure.savefig(path)


def draw_decode(records: Sequence[Record], path: Path, on_ranks: bool = False) -> None:
    """Draw a panel for each model: its greedy steps' times by batch, and vLLM's."""
    found = greedy(records, on_ranks)
    models = sorted({r.model for r in found})
    figure, row = panels(len(models))
    for axes, model in zip(row, models, strict=True):
        mine = [r for r in found if r.model == model]

        def curve(r: DecodeRecord) -> tuple[Any, ...]:
            return r.world_size, r.device, r.context, r.schedule

        last = latest(mine, lambda r: (*curve(r), r.batch))
        for number, (_, points) in enumerate(groupby(last, curve)):
            known, color = list(points), f"C{number}"
            xs, first = [r.batch for r in known], known[0]
            label = f"{ranks(first)}, context {first.context}, {first.schedule}"
            axes.plot(xs, [r.ours_ms for r in known], "o-", color=color, label=label)
            axes.plot(xs, [r.limit_ms for r in known], ":", color=color)
            timed = [r for r in known if r.baseline_ms is not None]
            xs, ys = [r.batch for r in timed], [r.baseline_ms for r in timed]
            axes.plot(xs, ys, "x--", color=color)
        if any(r.baseline_ms is not None for r in last):
            axes.plot([], [], "x--", color="grey", label="vLLM")
        axes.plot([], [], ":", color="grey", label="the bytes that are read")
        finish(axes, model, "batch", "ms a step")
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw the figures of the results.")
    add = parser.add_argument
    add("--folder", type=Path, default=ROOT / "docs", help="of the figures")
    add("--results", type=Path, default=RESULTS, help="the folder of the records")
    options = parser.parse_args(arguments)
    draw_all(list(load(options.results)), options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
