"""Reading the files that `Trace.perfetto` writes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etc_dist.errors import ArgumentError
from etc_dist.files import open_file
from etc_dist.runtime.trace import TaskRecord, Trace

OTHER_FILE = (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError)
"""What reading a file of another kind raises."""
ROW = re.compile(r"worker (\d+) · (\w+) lane(?:, warp (\d+))?")
LOOP = re.compile(r"(\w+)=\d+[,\]]")


def read_trace(path: str | Path) -> Trace:
    """The trace in a file; its times begin with the first task. ArgumentError for
    other files."""
    try:
        with open_file(path) as file:
            document = json.loads(file.read())
        events = document["traceEvents"]
        rows = {
            (event["pid"], event["tid"]): ROW.fullmatch(event["args"]["name"])
            for event in events
            if event["name"] == "thread_name"
        }
        records = [
            _record(event, rows[event["pid"], event["tid"]])
            for event in events
            if event["ph"] == "X"
        ]
        more = document.get("otherData", {})
        return Trace.of(records, more.get("notes", ()), more.get("workers", 0))
    except OTHER_FILE as error:
        raise ArgumentError(
            "a trace cannot be read",
            where=str(path),
            wanted="a file that program.trace().perfetto(path) wrote",
            got=f"{type(error).__name__}: {error}",
            fix="run with ETC_DIST_TRACE=1, and write the file again",
        ) from error


def _record(event: Mapping[str, Any], row: re.Match[str] | None) -> TaskRecord:
    if row is None:
        raise ValueError("a thread outside of the lanes of a worker")
    worker, lane, warp = row.groups()
    start, args = round(event["ts"] * 1e3), event["args"]
    return TaskRecord(
        event["pid"],
        int(worker),
        lane if warp is None else f"{lane}.{warp}",
        start,
        start + round(event["dur"] * 1e3),
        args["call"],
        args["task"],
        tuple(args["tile"]),
        tuple(LOOP.findall(event["name"])),
        args.get("empty_ns", 0),
    )
