"""The command `etc-dist predict`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from etc_dist.errors import ArgumentError, expect_range
from etc_dist.ops.tuning import default_tuning
from etc_dist.predict.machine import (
    FAR_GBS,
    FAR_LATENCY_US,
    MESSAGE_US,
    NEAR_GBS,
    NEAR_LATENCY_US,
    Link,
    Machine,
)
from etc_dist.predict.simulation import PredictedRun
from etc_dist.predict.table import (
    HOSTS,
    OPERATIONS,
    draw,
    predict_hosts,
    show_heading,
    show_line,
    show_machine,
)
from etc_dist.runtime.trace_file import read_trace

MOST = 2**31 - 1
"""The most that a dim can be."""
NUMBER = re.compile(r"[0-9]{1,99}")
PLOTS = (".pdf", ".png", ".svg")
"""The kinds of files that a picture is drawn to."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command, with units and defaults."""
    add = parser.add_argument
    add("operation", metavar="OPERATION", help=", ".join(OPERATIONS))
    text = "of each rank, such as rows=256 n=8192 k=3584"
    add("dims", nargs="+", metavar="DIM=N", help=text)
    hosts = ",".join(map(str, HOSTS))
    text = "numbers of hosts; default: %(default)s"
    add("--hosts", default=hosts, metavar="N,N,...", help=text)
    for name, kind, default, text in (
        ("local-size", int, 8, "ranks of a host"),
        ("workers", int, 132, "SMs of a rank"),
        ("far-gbs", float, FAR_GBS, "GB/s from a rank to other hosts"),
        ("far-latency-us", float, FAR_LATENCY_US, "of a message to another host"),
        ("message-us", float, MESSAGE_US, "of the link for a message, at least"),
        ("near-gbs", float, NEAR_GBS, "GB/s from a rank to those of its host"),
    ):
        text += "; default: %(default)s"
        add(f"--{name}", type=kind, default=default, metavar="N", help=text)
    text = "take the times of tasks from a traced run on several hosts, at the same "
    text += "sizes of tensors but for the number of ranks, written by "
    text += "program.trace().perfetto(FILE); default: a model of the GPU"
    add("--trace", metavar="FILE", help=text)
    add("--plot", type=Path, metavar="FILE", help="draw the times to this file")


def run(options: argparse.Namespace) -> int:
    """Print a line for each number of hosts."""
    if options.plot is not None:
        check_plot(options.plot)
    far = Link("far", options.far_gbs, options.far_latency_us, options.message_us)
    near = Link("near", options.near_gbs, NEAR_LATENCY_US)
    machine = Machine(options.workers, near, far)
    trace, origin, notes = None, f"by a model of {default_tuning().device}", ""
    if options.trace is not None:
        trace = read_trace(options.trace)
        origin = f"of the trace {options.trace}"
        notes = "".join(f"note of the trace: {note}\n" for note in trace.notes)
    counts = predict_hosts(
        options.operation,
        parse_dims(options.dims),
        parse_hosts(options.hosts),
        options.local_size,
        machine,
        trace,
    )
    title = f"{options.operation}({', '.join(options.dims)})"
    runs: list[PredictedRun] = []
    for predicted_run in counts:
        if not runs:
            print(
                f"{title}, {options.local_size} ranks a host: predicted, not measured"
            )
            print(f"{show_machine(machine, origin)}{notes}{show_heading()}")
        print(show_line(predicted_run), flush=True)
        runs.append(predicted_run)
    if options.plot is not None:
        draw(runs, f"{title}, {options.local_size} ranks a host", options.plot)
    return 0


def parse_dims(texts: Sequence[str]) -> dict[str, int]:
    """Texts such as "rows=256", of other names each; ArgumentError for others."""
    dims: dict[str, int] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not (name and NUMBER.fullmatch(value)) or name in dims:
            raise ArgumentError(
                "the dims of a prediction cannot be read",
                where="etc-dist predict",
                wanted="each name once, with a number, as in rows=256 n=8192 k=3584",
                got=repr(text),
                fix="correct it",
            )
        dims[name] = expect_range(int(value), 1, MOST, name)
    return dims


def check_plot(path: Path) -> None:
    """ArgumentError for a file that no picture can be drawn to."""
    if path.suffix not in PLOTS or path.is_dir() or not path.parent.is_dir():
        raise ArgumentError(
            "the picture of a prediction cannot be drawn",
            where="etc-dist predict --plot",
            wanted=f"a file in an existing folder: {', '.join(PLOTS)}",
            got=repr(str(path)),
            fix="name another file",
        )


def parse_hosts(text: str) -> list[int]:
    """Numbers of hosts, separated by commas; ArgumentError for other texts."""
    parts = text.split(",")
    if not all(map(NUMBER.fullmatch, parts)):
        raise ArgumentError(
            "the numbers of hosts cannot be read",
            where="etc-dist predict",
            wanted="--hosts N,N,..., each at least 1",
            got=repr(text),
            fix="separate numbers by commas",
        )
    return [expect_range(int(part), 1, None, "--hosts") for part in parts]
