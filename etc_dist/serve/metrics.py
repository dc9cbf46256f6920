"""Counters of a server, in the text format of Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from etc_dist.serve.jobs import TurnReport

FIRST_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
HELP = {
    "texts_running": "gauge: texts in the batch",
    "texts_waiting": "gauge: texts that wait for a place or for pages",
    "pages": "gauge: pages of the cache",
    "pages_free": "gauge: of these, pages that no text has",
    "steps_total": "counter: steps of the batch",
    "step_seconds_total": "counter: time of these",
    "prompt_tokens_total": "counter: tokens of prompts",
    "prompt_tokens_cached_total": "counter: of these, found in the cache",
    "generated_tokens_total": "counter: tokens of answers",
    "drafts_total": "counter: drafts of tokens that steps have checked",
    "drafts_accepted_total": "counter: of these, tokens of answers",
    "texts_total": "counter: texts that have ended, by reason",
    "refused_total": "counter: requests that were answered by an error, by status",
    "first_token_seconds": "histogram: from a request to the first token of a text",
    "token_seconds": "histogram: from a token of a text to the next one",
}
"""By name, the kind and the meaning."""


class Histogram:
    """Numbers counted by their size."""

    def __init__(self, limits: tuple[float, ...]) -> None:
        self._limits = limits
        self._counts = [0] * (len(limits) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Count a number."""
        self._counts[bisect_left(self._limits, value)] += 1
        self._sum += value

    def show(self, name: str) -> list[str]:
        """Its lines."""
        lines, total = [], 0
        for limit, count in zip([*self._limits, "+Inf"], self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{limit}"}} {total}')
        return [*lines, f"{name}_sum {self._sum}", f"{name}_count {total}"]


class Metrics:
    """The counters."""

    def __init__(self, pages: int) -> None:
        self._values = {**dict.fromkeys(HELP, 0), "pages": pages, "pages_free": pages}
        self._labelled: Counter[tuple[str, str]] = Counter()
        self._seconds: dict[str, float] = {"step_seconds_total": 0.0}
        self._histograms = {
            "first_token_seconds": Histogram(FIRST_SECONDS),
            "token_seconds": Histogram(TOKEN_SECONDS),
        }

    def add_turn(self, report: TurnReport) -> None:
        """What a turn of the engine gave."""
        if report.step_seconds is not None:
            self._values["steps_total"] += 1
            self._seconds["step_seconds_total"] += report.step_seconds
        self._values |= {
            "texts_running": report.num_running,
            "texts_waiting": report.num_waiting,
            "pages_free": report.num_free_pages,
            "drafts_total": report.drafts[0],
            "drafts_accepted_total": report.drafts[1],
        }

    def add_prompt(self, tokens: int, num_cached: int) -> None:
        """A text has its first token."""
        self._values["prompt_tokens_total"] += tokens
        self._values["prompt_tokens_cached_total"] += num_cached

    def add_tokens(self, count: int) -> None:
        """Tokens were generated."""
        self._values["generated_tokens_total"] += count

    def add_end(self, reason: str) -> None:
        """A text has ended: "stop", "length", "error", or "left" by its client."""
        self._labelled["texts_total", f'reason="{reason}"'] += 1

    def add_refusal(self, status: int) -> None:
        """A request was answered by an error."""
        self._labelled["refused_total", f'status="{status}"'] += 1

    def add_seconds(self, name: str, seconds: float) -> None:
        """Count a time in the histogram `name`."""
        self._histograms[name].add(seconds)

    def show(self) -> str:
        """The text of all."""
        lines = []
        for name, text in HELP.items():
            kind, _, meaning = text.partition(": ")
            full = f"etc_dist_{name}"
            lines += [f"# HELP {full} {meaning}", f"# TYPE {full} {kind}"]
            if kind == "histogram":
                lines += self._histograms[name].show(full)
            elif name in self._seconds:
                lines.append(f"{full} {self._seconds[name]}")
            elif name in ("texts_total", "refused_total"):
                counts = sorted(self._labelled.items())
                lines += [
                    f"{full}{{{label}}} {count}"
                    for (of, label), count in counts
                    if of == name
                ]
            else:
                lines.append(f"{full} {self._values[name]}")
        return "\n".join(lines) + "\n"
