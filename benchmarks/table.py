"""The tables of the README and of docs/layers.md, made from the records.

.venv/bin/python benchmarks/table.py            # write them
.venv/bin/python benchmarks/table.py --check    # exit code 1 if one is stale

In a text, a table of an operation on a number of ranks, of its schedules side by side,
or of the Triton kernel beside it, lies between two lines:

    <!-- table: matmul_reduce_scatter 8 -->        <!-- table: schedules mlp 4 -->
    <!-- end -->                                   <!-- end -->
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.records import (
    KINDS,
    RESULTS,
    ROOT,
    FusedRecord,
    LayerRecord,
    MoEParallelRecord,
    MoERecord,
    Record,
    load,
)

TEXTS = (ROOT / "README.md", ROOT / "docs" / "layers.md")
MARKED = re.compile(
    r"(?P<begin><!-- table: (?P<name>[^\n]+?) -->\n).*?(?P<end><!-- end -->)", re.S
)
NAME = re.compile(r"((?P<compares>schedules|triton) )?(?P<op>\w+) (?P<ranks>\d+)")
SCHEDULES = ("static", "dynamic")
NOT_MEASURED = "Not measured yet.\n"

Row = Mapping[str, FusedRecord]
"""The records of one model and M, by schedule."""


def newest(records: Iterable[Record]) -> list[FusedRecord]:
    """The last GPU record of each operation, model, world size, M, schedule and
    routing, by size."""
    last: dict[tuple[object, ...], FusedRecord] = {}
    for record in records:
        if isinstance(record, FusedRecord) and record.backend == "cuda":
            r = record
            routing = r.routing if isinstance(r, MoEParallelRecord) else ""
            key = (r.op, r.model, r.world_size, r.M, r.schedule, routing)
            if key not in last or last[key].date <= r.date:
                last[key] = r
    return sorted(
        last.values(), key=lambda r: (r.op, r.world_size, r.M, r.N * r.K, r.schedule)
    )


# ------------------------------------------------------------- an operation on ranks


def tables(records: Sequence[FusedRecord]) -> list[str]:
    """A table of static schedules for each M."""
    static = [r for r in records if r.schedule == "static"]
    sizes = sorted({r.M for r in static})
    return [table([r for r in static if size == r.M]) for size in sizes]


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
        f"M = {first.M}, {ranks(first)}, {first.dtype}; milliseconds.\n\n"
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
        "error": error(r),
    }


# ------------------------------------------------------------- mixtures of experts


def moe_tables(records: Sequence[FusedRecord]) -> list[str]:
    """A table for each model, by tokens."""
    mine = [r for r in records if isinstance(r, MoERecord)]
    models = sorted({(r.N * r.K, r.model) for r in mine})
    return [moe_table([r for r in mine if r.model == model]) for _, model in models]


def moe_table(records: Sequence[MoERecord]) -> str:
    """Markdown of one model's records on one world size."""
    first, rows = records[0], by_schedule(records)
    sides = " / ".join(SCHEDULES)
    cells = [moe_cells(row) for row in rows]
    lines = [
        line([*cells[0]]),
        "|" + "--:|" * len(cells[0]),
        *(line(row.values()) for row in cells),
    ]
    return (
        f"{first.model}: hidden {first.N}, inner {first.K}, {first.experts} experts, "
        f"{first.top_k} a token; {ranks(first)}, {first.dtype}; milliseconds. Speed-up "
        f"and % of roofline: {sides}, each within its own run.\n\n"
        + "\n".join(lines)
        + f"\n\n{origin(records)}\n"
    )


def moe_cells(row: Row) -> dict[str, str]:
    """The row of one number of tokens, by the words above it."""
    r = next(row[schedule] for schedule in SCHEDULES if schedule in row)
    ours = {
        f"ours, {schedule}": each(row, lambda r: f"{r.ours_ms:.3f}", schedule)
        for schedule in SCHEDULES
    }
    return {
        "tokens": f"{r.M}",
        "roofline": f"{r.limit_ms:.3f}",
        "baseline": f"{r.baseline_ms:.3f}",
        **ours,
        "speed-up": each(row, lambda r: f"{r.speedup:.2f}", *SCHEDULES),
        "% of roofline": each(row, lambda r: f"{r.of_limit:.0%}", *SCHEDULES),
        "error": error(max(row.values(), key=lambda r: r.error)),
    }


def triton_tables(records: Sequence[FusedRecord]) -> list[str]:
    """The static schedule and the Triton kernel of the same run: one table of the
    newest such records, which may be older than those of ours alone."""
    rows = [row["static"] for row in by_schedule(records) if "static" in row]
    mine = [r for r in rows if isinstance(r, MoERecord)]
    if not mine:
        return []
    lines = [
        line(["model", "tokens", "Triton", "ours", "Triton by ours", "commit"]),
        "|---|" + "--:|" * 4 + "---|",
        *(
            line(
                [
                    r.model,
                    f"{r.M}",
                    f"{r.triton_ms:.3f}",
                    f"{r.ours_ms:.3f}",
                    f"{(r.triton_ms or 0) / r.ours_ms:.2f}",
                    short(r.commit),
                ]
            )
            for r in mine
        ),
    ]
    names = "; ".join(sorted({r.triton or "" for r in mine}))
    return [
        f"{ranks(mine[0])}, {mine[0].dtype}; milliseconds, both of one run.\n\n"
        + "\n".join(lines)
        + f"\n\n{origin(mine)} Triton: {names}.\n"
    ]


def parallel_tables(records: Sequence[FusedRecord]) -> list[str]:
    """A table of a mixture of experts over ranks, for each model; static schedules
    alone."""
    mine = [r for r in records if isinstance(r, MoEParallelRecord)]
    mine = [r for r in mine if r.schedule == "static"]
    models = sorted({(r.N, r.model) for r in mine})
    return [parallel_table([r for r in mine if r.model == m]) for _, m in models]


def parallel_table(records: Sequence[MoEParallelRecord]) -> str:
    """Markdown of one model's records on one world size."""
    first = records[0]
    mine = sorted(records, key=lambda r: (r.routing, r.M))
    names = sorted({name for r in mine for name in r.baselines_ms})
    lines = [
        line(
            ["routing", "M", "limit", *names, "ours", "speed-up", "% of limit", "error"]
        ),
        "|---|" + "--:|" * (6 + len(names)),
        *(
            line(
                [
                    r.routing,
                    f"{r.M}",
                    f"{r.limit_ms:.3f}",
                    *(f"{r.baselines_ms[name]:.3f}" for name in names),
                    f"{r.ours_ms:.3f}",
                    f"{r.speedup:.2f}",
                    f"{r.of_limit:.0%}",
                    error(r),
                ]
            )
            for r in mine
        ),
    ]
    return (
        f"{first.model}: {first.experts} experts, {first.top_k} a token; "
        f"{ranks(first)}, {first.dtype}; milliseconds; speed-up over the faster "
        "baseline.\n\n" + "\n".join(lines) + f"\n\n{origin(mine)}\n"
    )


# --------------------------------------------------------------- schedules compared


def schedule_tables(records: Sequence[FusedRecord]) -> list[str]:
    """How much faster than the unfused baseline each schedule is: one table of all
    shapes that were measured with both."""
    rows = [row for row in by_schedule(records) if len(row) == len(SCHEDULES)]
    if not rows:
        return []
    used = [row[schedule] for row in rows for schedule in SCHEDULES]
    first = used[0]
    size = "tokens" if isinstance(first, MoERecord) else "M"
    speedups = {s: [row[s].speedup for row in rows] for s in SCHEDULES}
    ratios = [b / a for a, b in zip(*speedups.values(), strict=True)]
    columns = [*speedups.values(), ratios]
    lines = [
        line(["model", size, *SCHEDULES, "dynamic by static"]),
        "|---|" + "--:|" * 4,
        *(
            line([row["static"].model, f"{row['static'].M}", *map("{:.2f}".format, of)])
            for row, *of in zip(rows, *columns, strict=True)
        ),
        line(["geometric mean", "", *(f"{geometric_mean(c):.2f}" for c in columns)]),
    ]
    return [
        f"Speed-up over the unfused baseline of the same run; {ranks(first)}, "
        f"{first.dtype}.\n\n" + "\n".join(lines) + f"\n\n{origin(used)}\n"
    ]


def by_schedule(records: Iterable[FusedRecord]) -> list[Row]:
    """Records of one operation and world size: a row for each model and M, by size."""
    rows: dict[tuple[int, str, int], dict[str, FusedRecord]] = {}
    for r in records:
        rows.setdefault((r.N * r.K, r.model, r.M), {})[r.schedule] = r
    return [rows[key] for key in sorted(rows)]


# --------------------------------------------------------------------------- the text


def each(row: Row, text: Callable[[FusedRecord], str], *schedules: str) -> str:
    """The text of each schedule's record, "-" where there is none."""
    return " / ".join(text(row[s]) if s in row else "-" for s in schedules)


def error(r: FusedRecord) -> str:
    return re.sub(r"e-0*", "e-", f"{r.error:.2e}")


def ranks(r: FusedRecord) -> str:
    return f"{r.world_size} rank" + "s" * (r.world_size > 1)


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


def section(name: str, records: Sequence[Record]) -> str:
    """What stands between the markers of `name`: its tables, or that the operation has
    not been measured yet. Raises ValueError where it has, but not on so many ranks, and
    where there is no such operation."""
    found = NAME.fullmatch(name)
    op, compares = (found["op"], found["compares"]) if found else ("", None)
    if compares == "triton":
        records = [r for r in records if isinstance(r, MoERecord) and r.triton]
    known = newest(r for r in records if r.op == op)
    mine = [r for r in known if found and r.world_size == int(found["ranks"])]
    if not issubclass(KINDS.get(op, Record), FusedRecord) or (known and not mine):
        raise ValueError(f"no records for the table {name!r}")
    make = COMPARED.get(compares or "", TABLES.get(KINDS[op], tables))
    return "\n" + "\n".join(make(mine) or [NOT_MEASURED]) + "\n"


TABLES: Mapping[type[Record], Callable[[Sequence[FusedRecord]], list[str]]] = {
    MoERecord: moe_tables,
    MoEParallelRecord: parallel_tables,
}
COMPARED = {"schedules": schedule_tables, "triton": triton_tables}


def render(text: str, records: Sequence[Record]) -> str:
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
        records = list(load(options.results))
    except ValueError as fault:
        parser.error(str(fault))
    settled = [settle(path, records, options.check) for path in options.texts]
    return int(not all(settled))


def settle(path: Path, records: Sequence[Record], check: bool) -> bool:
    """Write a text's tables, or check that they are as they should be."""
    text = path.read_text()
    try:
        fresh = render(text, records)
    except ValueError as fault:
        print(f"{path}: {fault}", file=sys.stderr)
        return False
    if check and fresh != text:
        print(f"{path} is stale: run benchmarks/table.py", file=sys.stderr)
        return False
    if not check:
        path.write_text(fresh)
    return True


if __name__ == "__main__":
    sys.exit(main())
