"""The tables of the README and of docs/layers.md, made from the records.

python benchmarks/table.py            # write them
python benchmarks/table.py --check    # exit code 1 if one is stale

In a text, a table of an operation on a number of ranks lies between two lines:

    <!-- table: matmul_reduce_scatter 8 -->
    <!-- end -->
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.records import (
    RESULTS,
    ROOT,
    FusedRecord,
    LayerRecord,
    Record,
    load,
)

TEXTS = (ROOT / "README.md", ROOT / "docs" / "layers.md")
MARKED = re.compile(
    r"(?P<begin><!-- table: (?P<name>[^\n]+?) -->\n).*?(?P<end><!-- end -->)", re.S
)


def newest(records: Iterable[Record]) -> list[FusedRecord]:
    """The last GPU record of each operation, model, world size and M, by size."""
    last: dict[tuple[str, str, int, int], FusedRecord] = {}
    for record in records:
        if isinstance(record, FusedRecord) and record.backend == "cuda":
            key = (record.op, record.model, record.world_size, record.M)
            if key not in last or last[key].date <= record.date:
                last[key] = record
    return sorted(last.values(), key=lambda r: (r.op, r.world_size, r.M, r.N * r.K))


def table(records: Sequence[FusedRecord]) -> str:
    """Markdown of records with one operation, world size and M."""
    first = records[0]
    model, *rest = cells(first)
    speedup = geometric_mean(r.speedup for r in records)
    of_limit = geometric_mean(r.of_limit for r in records)
    means = {"speed-up": f"{speedup:.2f}", "% of limit": f"{of_limit:.0%}"}
    lines = [
        line([model, *rest]),
        "|---|" + "--:|" * len(rest),
        *(line(cells(r).values()) for r in records),
        line(["geometric mean", *(means.get(name, "") for name in rest)]),
    ]
    return (
        f"M = {first.M}, {first.world_size} ranks, {first.dtype}; milliseconds.\n\n"
        + "\n".join(lines)
        + f"\n\n{origin(records)}\n"
    )


def cells(r: FusedRecord) -> dict[str, str]:
    """A record's row, by the words above it."""
    sizes, between = "N x K", {}
    if isinstance(r, LayerRecord):
        sizes, between = "hidden x inner", {"two operations": f"{r.two_ops_ms:.3f}"}
    return {
        f"model ({sizes})": f"{r.model} ({r.N} x {r.K})",
        "limit": f"{r.limit_ms:.3f}",
        "cuBLAS + NCCL": f"{r.baseline_ms:.3f}",
        **between,
        "ours": f"{r.ours_ms:.3f}",
        "speed-up": f"{r.speedup:.2f}",
        "% of limit": f"{r.of_limit:.0%}",
        "error": re.sub(r"e-0*", "e-", f"{r.error:.2e}"),
    }


def line(texts: Iterable[str]) -> str:
    return "|" + "".join(f" {text} |" if text else " |" for text in texts)


def origin(records: Sequence[FusedRecord]) -> str:
    """Where, when and with which code the records were measured."""
    devices = sorted({r.device for r in records})
    dates = sorted({r.date[:10] for r in records})
    commits = sorted({short(r.commit) for r in records})
    baselines = sorted({r.baseline for r in records})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return (
        f"{', '.join(devices)}; {when}; commit {', '.join(commits)}; "
        f"baseline: {'; '.join(baselines)}."
    )


def short(commit: str) -> str:
    head, dash, state = commit.partition("-")
    return head[:10] + dash + state


def section(name: str, records: Sequence[FusedRecord]) -> str:
    """What stands between the markers of `name`, "<operation> <world size>": a table
    for each M. Raises ValueError where there is no such record."""
    mine = [r for r in records if f"{r.op} {r.world_size}" == name]
    if not mine:
        raise ValueError(f"no records for the table {name!r}")
    sizes = sorted({r.M for r in mine})
    tables = (table([r for r in mine if size == r.M]) for size in sizes)
    return "\n" + "\n".join(tables) + "\n"


def render(text: str, records: Sequence[FusedRecord]) -> str:
    """A text with all its tables made anew."""

    def make(match: re.Match[str]) -> str:
        return match["begin"] + section(match["name"], records) + match["end"]

    return MARKED.sub(make, text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make the tables of the texts.")
    add = parser.add_argument
    add("--check", action="store_true", help="write nothing; 1 if a table would change")
    add("--texts", type=Path, nargs="+", default=TEXTS)
    add("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    try:
        records = newest(load(options.results))
    except ValueError as fault:
        parser.error(str(fault))
    settled = [settle(path, records, options.check) for path in options.texts]
    return int(not all(settled))


def settle(path: Path, records: Sequence[FusedRecord], check: bool) -> bool:
    """Write a text's tables, or check that they are as they should be."""
    text = path.read_text()
    try:
        fresh = render(text, records)
    except ValueError as fault:
        print(f"{path}: {fault}", file=sys.stderr)
        return False
    if check and fresh != text:
        print(f"{path} is stale: run python benchmarks/table.py", file=sys.stderr)
        return False
    if not check:
        path.write_text(fresh)
    return True


if __name__ == "__main__":
    sys.exit(main())
