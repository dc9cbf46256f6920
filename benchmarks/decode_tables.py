"""The tables of decode steps, and of the time to the first token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from benchmarks.cells import latest, ranks, short, table, titled
from benchmarks.records import DecodeRecord, FirstTokenRecord, Record

DECODE_PICTURES = {
    False: """
![Time of a decode step by batch: ours, vLLM's, and the limit of its reads]\
(decode.png)
""",
    True: """
![The same on several ranks, tensor parallel](decode_ranks.png)
""",
}
"""The pictures of decode steps on one GPU, and on several."""
VLLM = "vLLM", "vLLM / ours"
"""The columns of vLLM's decode step."""
BY_BATCH = """
## Decode step by batch

One greedy step in ms, as one kernel on one GPU. In parentheses: the time to read its \
weights and cache. *vLLM*: its step at the same batches, measured on the same day and \
kind of GPU. Empty cells were not measured.
"""


def decode_table(records: Sequence[Record]) -> str:
    """The last step of each model, device, batch and context."""
    found = [r for r in records if isinstance(r, DecodeRecord)]

    def model(r: DecodeRecord) -> str:
        routing = "" if r.routing in (None, "uniform") else f", {r.routing} routing"
        is_one = r.steps_per_launch == 1
        steps = "" if is_one else f", {r.steps_per_launch} steps a launch"
        sampled = "" if r.sampling in (None, "None") else f", {r.sampling}"
        return f"{r.model}{routing}{steps}{sampled}"

    pictures = [DECODE_PICTURES[of] for of in (False, True) if greedy(records, of)]
    rows = [
        step_names(r)
        | {
            "model": model(r),
            "limit": f"{r.limit_ms:.3f}",
            "ours": f"{r.ours_ms:.3f}",
            "% of limit": f"{r.of_limit:.0%}",
            **dict(zip(VLLM, vllm_texts(r, digits=3), strict=True)),
            "commit": short(r.commit),
        }
        for r in latest(
            found,
            lambda r: (
                model(r),
                r.world_size,
                r.device,
                r.schedule,
                r.context,
                r.batch,
            ),
        )
    ]
    return titled("Decode step", rows) + "".join(pictures)


def launches_table(records: Sequence[Record]) -> str:
    """The last step of several in a launch, against a launch for each."""
    rows = [
        names
        | {
            "steps": f"{r.steps_per_launch}",
            "one launch": f"{r.ours_ms:.3f}",
            "single launches": f"{r.single_launches_ms:.3f}",
            "one call": f"{r.call_ms:.3f}",
            "single calls": f"{r.single_calls_ms:.3f}",
            "commit": short(r.commit),
        }
        for names, r in last_steps(records, "single_launches_ms")
    ]
    title = "Several steps in a launch, against single launches: ms per step"
    return titled(title, rows)


def sampling_table(records: Sequence[Record]) -> str:
    """The last step with sampling, against one without."""
    rows = [
        names
        | {
            "with sampling": f"{r.ours_ms:.3f}",
            "greedy": f"{r.greedy_ms:.3f}",
            "sampling": f"{r.sampling}",
            "commit": short(r.commit),
        }
        for names, r in last_steps(records, "greedy_ms")
    ]
    return titled("Sampling: ms per step", rows)


def last_steps(
    records: Iterable[Record], field: str
) -> list[tuple[dict[str, str], DecodeRecord]]:
    """The last decode records that have a field, and the cells of their names."""
    found = [
        r
        for r in records
        if isinstance(r, DecodeRecord) and getattr(r, field) is not None
    ]
    last = latest(
        found,
        lambda r: (
            *(r.model, r.world_size, r.device, r.schedule, r.routing or ""),
            *(r.context, r.batch, r.steps_per_launch, r.sampling or ""),
        ),
    )
    return [(step_names(r), r) for r in last]


def step_names(r: DecodeRecord) -> dict[str, str]:
    """The cells that name a step."""
    return {
        "model": r.model,
        "device": r.device,
        "ranks": ranks(r),
        "schedule": r.schedule,
        "batch": f"{r.batch}",
        "context": f"{r.context}",
    }


def vllm_texts(r: DecodeRecord, digits: int) -> tuple[str, str]:
    """The texts of vLLM's time and of its ratio to ours, if there is a time."""
    ms = r.baseline_ms
    return ("-", "-") if ms is None else (f"{ms:.{digits}f}", f"{ms / r.ours_ms:.2f}")


def decode_summary(records: Sequence[Record]) -> str:
    """The last greedy steps on one GPU: a row for each model and context, a column for
    each batch, and vLLM's for these batches, in order."""
    found = greedy(records, on_ranks=False)
    last = latest(found, lambda r: (r.model, r.context, r.device, r.batch))
    batches = sorted({r.batch for r in last})
    rows = []
    for (model, context, device), some in groupby(
        last, lambda r: (r.model, r.context, r.device)
    ):
        of = {r.batch: r for r in some}
        row = {"model": model, "context": f"{context}", "GPU": device}
        for b in batches:
            ours = f"{of[b].ours_ms:.2f} ({of[b].limit_ms:.2f})" if b in of else ""
            row[f"batch {b}"] = ours
        texts = [vllm_texts(r, digits=2) for r in of.values()]
        for title, column in zip(VLLM, zip(*texts, strict=True), strict=True):
            row[title] = ", ".join(column) if set(column) != {"-"} else "-"
        rows.append(row)
    return BY_BATCH + table(rows) if rows else ""


def greedy(records: Sequence[Record], on_ranks: bool) -> list[DecodeRecord]:
    """The plain steps of decoders, on one rank or on several: statically scheduled, no
    uneven experts, sampling or several a launch."""
    return [
        r
        for r in records
        if isinstance(r, DecodeRecord)
        and (r.world_size > 1) == on_ranks
        and (r.routing or "uniform", r.sampling or "None") == ("uniform", "None")
        and (r.schedule, r.steps_per_launch) == ("static", 1)
    ]


def first_token_table(records: Sequence[Record]) -> str:
    """The last start of each model and device with a bundle."""
    found = [r for r in records if isinstance(r, FirstTokenRecord)]
    rows = [
        {
            "model": r.model,
            "device": r.device,
            "first token": f"{r.first_token_s:.2f} s",
            "commit": short(r.commit),
        }
        for r in latest(found, lambda r: (r.model, r.device))
    ]
    title = "From weights in memory to the first token, with a bundle"
    return titled(title, rows)
