"""The figures of docs/results.md. decode.png corresponds to figures 14 and 17 of the
paper, decode_ranks.png to figure 18."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.records import Record
from benchmarks.tables import greedy, latest, newest

STYLES = {"static": "o-", "dynamic": "s--"}
COMPARED = {"moe": 1, "mlp": 4}
"""Operations whose schedules the picture compares, and on how many ranks."""


def draw_all(records: Sequence[Record], folder: Path) -> None:
    draw_schedules(records, folder / "schedules.png")
    draw_decode(records, folder / "decode.png")
    if greedy(records, on_ranks=True):
        draw_decode(records, folder / "decode_ranks.png", on_ranks=True)


@contextmanager
def panels(path: Path, num_panels: int) -> Iterator[Any]:
    """A row of panels, which is written to `path` at the end."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6 * num_panels, 4.0), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    yield figure.subplots(1, num_panels, squeeze=False)[0]
    figure.savefig(path)


def finish(axes: Any, title: str, x: str, y: str, columns: int = 1) -> None:
    """The axes, title and legend of a panel whose curves are drawn."""
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", ncols=columns)


def draw_schedules(records: Sequence[Record], path: Path) -> None:
    """Draw a panel for each operation whose schedules are compared."""
    with panels(path, len(COMPARED)) as row:
        for axes, case in zip(row, COMPARED.items(), strict=True):
            uniform = [r for r in newest(records) if r.is_uniform]
            of_op = [r for r in uniform if (r.op, r.world_size) == case]
            models = groupby(of_op, lambda r: r.model)
            for model_idx, (model, group) in enumerate(models):
                of_model = list(group)
                for schedule, style in STYLES.items():
                    points = [r for r in of_model if r.schedule == schedule]
                    xs, ys = [r.M for r in points], [r.speedup for r in points]
                    label = f"{model}, {schedule}"
                    axes.plot(xs, ys, style, color=f"C{model_idx}", label=label)
            axes.axhline(1.0, color="grey", linewidth=0.8)
            title = f"{case[0]}, {of_op[0].ranks}, {of_op[0].device}"
            x = "tokens" if case[0] == "moe" else "rows of all ranks"
            finish(axes, title, x, "speed-up over unfused", columns=2)


def draw_decode(records: Sequence[Record], path: Path, on_ranks: bool = False) -> None:
    """Draw a panel for each model of several batches, if there is any, else for each
    model: its greedy steps' times by batch, and vLLM's."""

    def curve(r: Record) -> tuple[Any, ...]:
        return r.world_size, r.device, r.context, r.schedule

    steps = greedy(records, on_ranks)
    batches = {(r.model, r.batch) for r in steps}
    counts = Counter(model for model, _ in batches)
    models = sorted(m for m, count in counts.items() if count > 1) or sorted(counts)
    with panels(path, len(models)) as row:
        for axes, model in zip(row, models, strict=True):
            of_model = [r for r in steps if r.model == model]
            last = latest(of_model, lambda r: (*curve(r), r.batch))
            for curve_idx, (_, group) in enumerate(groupby(last, curve)):
                points, color = list(group), f"C{curve_idx}"
                xs, first = [r.batch for r in points], points[0]
                label = f"{first.ranks}, context {first.context}, {first.schedule}"
                axes.plot(
                    xs, [r.ours_ms for r in points], "o-", color=color, label=label
                )
                axes.plot(xs, [r.limit_ms for r in points], ":", color=color)
                timed = [r for r in points if r.baseline_ms is not None]
                xs, ys = [r.batch for r in timed], [r.baseline_ms for r in timed]
                axes.plot(xs, ys, "x--", color=color)
            if any(r.baseline_ms is not None for r in last):
                axes.plot([], [], "x--", color="grey", label="vLLM")
            axes.plot([], [], ":", color="grey", label="the bytes that are read")
            finish(axes, model, "batch", "ms a step")
