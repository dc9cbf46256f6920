"""The list of tables of docs/results.md: which records each one shows, and the texts
of its columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.records import FEW, FUSED, Record

H200 = "H200"
"""The GPUs of the README's table."""
BATCH = 'deterministic="batch"'
MEANS = {"matmul"}
"""Operations of which the page shows means over models, by M."""
AGAINST_GEMMS = {"matmul_reduce_scatter", "all_gather_matmul", "mlp"}
"""Operations whose limit is not the roofline."""
Key = Callable[[Record], tuple[Any, ...]]
Row = Mapping[str, str]
"""Cells by the titles of their columns."""


# ---------------------------------------------------------------- which records


def latest(records: Iterable[Record], key: Key) -> list[Record]:
    """The last record for each key, sorted by key."""
    last = {key(r): r for r in sorted(records, key=lambda r: str(r.date))}
    return [last[k] for k in sorted(last)]


def by(names: str) -> Key:
    """The key of some fields, in order; "" for one that is None or absent."""
    return lambda r: tuple(r.get(name) or "" for name in names.split())


def by_size(r: Record) -> tuple[Any, ...]:
    """The key of a fused operation: by device, size, rows and schedule."""
    size_key = (r.op, r.device, r.world_size, r.N * r.K, r.M, r.schedule)
    return *size_key, r.model, r.N, r.get("routing") or ""


def newest(records: Iterable[Record]) -> list[Record]:
    """The last GPU records of fused operations, by size."""
    fused = (r for r in records if r.op in FUSED and r.backend == "cuda")
    return latest(fused, by_size)


def greedy(records: Iterable[Record], on_ranks: bool) -> list[Record]:
    """The plain decode steps on one rank, or on several: statically scheduled, no
    uneven experts, sampling or several steps a launch."""
    return [
        r
        for r in records
        if r.op == "decode"
        and (r.world_size > 1) == on_ranks
        and r.is_uniform
        and r.sampling in (None, "None")
        and (r.schedule, r.steps_per_launch) == ("static", 1)
    ]


# ------------------------------------------------------------------------- cells


def decoder_name(r: Record) -> str:
    routing = "" if r.is_uniform else f", {r.routing} routing"
    is_one = r.steps_per_launch == 1
    steps = "" if is_one else f", {r.steps_per_launch} steps a launch"
    sampled = "" if r.sampling in (None, "None") else f", {r.sampling}"
    return f"{r.model}{routing}{steps}{sampled}"


def vllm_texts(r: Record, digits: int) -> tuple[str, str]:
    """The texts of vLLM's time and of its ratio to ours, if there is a time."""
    ms = r.baseline_ms
    return ("-", "-") if ms is None else (f"{ms:.{digits}f}", f"{ms / r.ours_ms:.2f}")


def rounded(value: float | None, digits: int) -> str:
    """A number; "-" for none."""
    return "-" if value is None else f"{value:.{digits}f}"


def num_rows(r: Record) -> int:
    """Requests of a decode step, rows of another operation."""
    return int(r.get("batch") or r.M)


def limit_name(r: Record) -> str:
    """What the limit of an operation is."""
    return "GEMMs" if r.op in AGAINST_GEMMS else "roofline"


CELLS: Mapping[str, Callable[[Record], Any]] = {
    "ranks": lambda r: r.ranks,
    "commit": lambda r: r.code,
    "decoder": decoder_name,
    "vllm": lambda r: vllm_texts(r, 3)[0],
    "vllm_of_ours": lambda r: vllm_texts(r, 3)[1],
    "vllm_first_token": lambda r: rounded(r.baseline_first_token_ms, 0),
    "vllm_token": lambda r: rounded(r.baseline_token_ms, 2),
    "of_vllm_tokens": lambda r: rounded(
        r.baseline_tokens_per_s and r.tokens_per_s / r.baseline_tokens_per_s, 2
    ),
    "of_roofline": lambda r: r.ours_ms / r.limit_ms,
    "num_rows": num_rows,
    "limit_name": limit_name,
    "batch_cost": lambda r: r.batch_ms / r.ours_ms,
    "task_us": lambda r: r.task_ns / 1000,
    "compiled_for": lambda r: "no GPU" if r.device == "none" else r.device,
    "compiled_schedule": lambda r: r.path.split()[0],
    "build_s": lambda r: r.build_ms / 1000,
    "of_bf16": lambda r: r.error / r.bf16_error,
    "cubin_kib": lambda r: r.cubin_bytes // 1024,
}
"""What a column may name in addition to the fields of records, or instead."""


class Values(dict[str, Any]):
    """The values that the columns of a record may name."""

    def __init__(self, r: Record):
        super().__init__(vars(r))
        self.record = r
        self.pop("commit", None)

    def __missing__(self, name: str) -> Any:
        return CELLS[name](self.record)


# ------------------------------------------------------------------------ tables


@dataclass(frozen=True)
class Table:
    """A section with the last record of each key, a row each, sorted by key. columns:
    "title: format | ...", where formats name fields and CELLS. A title alone is a
    name, too."""

    title: str
    ops: str
    key: Key
    columns: str
    where: Callable[[Record], Any] = lambda r: True
    """Which of the records are shown."""
    pivot: str = ""
    """More columns, "{title}: format", in place of the commit; the rows of the same
    `columns` are one."""
    after: Callable[[Sequence[Record]], str] = lambda records: ""
    """The text that follows the rows, of all records."""

    def __call__(self, records: Sequence[Record]) -> str:
        """Markdown; "" without rows."""
        rows = self.rows(records)
        section = f"\n## {self.title}\n{markdown(rows)}" if rows else ""
        return section + self.after(records)

    def rows(self, records: Sequence[Record]) -> list[Row]:
        ops = self.ops.split()
        shown_records = [r for r in records if r.op in ops and self.where(r)]
        rows: dict[Any, dict[str, str]] = {}
        for row_idx, r in enumerate(latest(shown_records, self.key)):
            cells = cells_of(self.columns, r)
            name = tuple(cells.values()) if self.pivot else row_idx
            more = cells_of(self.pivot or "commit", r)
            rows.setdefault(name, cells).update(more)
        return list(rows.values())


def cells_of(columns: str, r: Record) -> dict[str, str]:
    values = Values(r)
    cells = {}
    for column in columns.split(" | ") if columns else []:
        title, _, cell = column.partition(": ")
        cells[title.format_map(values)] = (cell or f"{{{title}}}").format_map(values)
    return cells


def markdown(rows: Sequence[Row]) -> str:
    """Markdown of `rows`. Columns of numbers are aligned to the right."""
    titles = list(rows[0])
    is_left = [not re.match(r"[\d.]|-$", rows[0][title]) for title in titles]
    lines = [
        line(titles),
        "|" + "".join("---|" if aligned else "--:|" for aligned in is_left),
        *(line(row.values()) for row in rows),
    ]
    return "\n".join(["", *lines, ""])


def line(texts: Iterable[str]) -> str:
    return "|" + "".join(f" {text} |" if text else " |" for text in texts)


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
SCHEDULES_PICTURE = """
## Static and dynamic schedules

![Speed-up over the unfused baseline, over tokens for the mixture of experts and over \
rows for the MLP](schedules.png)
"""


def decode_pictures(records: Sequence[Record]) -> str:
    pictures = DECODE_PICTURES.items()
    return "".join(text for on_ranks, text in pictures if greedy(records, on_ranks))


STEP = "device | ranks | schedule | batch | context"
"""The columns that name a decode step, after the model."""
STEP_KEY = by(
    "model world_size device schedule routing context batch steps_per_launch sampling"
)
ACCURACY = Table(
    "Accuracy of float8 weights",
    "float8_accuracy",
    by("model outliers"),
    "model | outliers: x {outliers} | float8: {error:.2e} | bf16: {bf16_error:.2e} | "
    "float8 / bf16: {of_bf16:.2f} | quantization: {codes_error:.2e}",
)
"""Of docs/float8.md."""
TABLES = (
    Table(
        "Decode step",
        "decode",
        lambda r: (decoder_name(r), *by("world_size device schedule context batch")(r)),
        f"model: {{decoder}} | {STEP} | roofline: {{limit_ms:.3f}} | ours: "
        f"{{ours_ms:.3f}} | % of roofline: {{of_limit:.0%}} | vLLM: {{vllm}} | "
        f"vLLM / ours: {{vllm_of_ours}}",
        after=decode_pictures,
    ),
    Table(
        "Several steps in a launch, against single launches: ms per step",
        "decode",
        STEP_KEY,
        f"model | {STEP} | steps: {{steps_per_launch}} | one launch: {{ours_ms:.3f}} "
        f"| single launches: {{single_launches_ms:.3f}} | one call: {{call_ms:.3f}} | "
        f"single calls: {{single_calls_ms:.3f}}",
        where=lambda r: r.single_launches_ms is not None,
    ),
    Table(
        "Sampling: ms per step",
        "decode",
        STEP_KEY,
        f"model | {STEP} | with sampling: {{ours_ms:.3f}} | greedy: {{greedy_ms:.3f}} "
        "| sampling",
        where=lambda r: r.greedy_ms is not None,
    ),
    Table(
        "From weights in memory to the first token, with a bundle",
        "first_token",
        by("model device"),
        "model | device | first token: {first_token_s:.2f} s",
    ),
    Table(
        "First token of a prompt",
        "prompt",
        by("model world_size device schedule context most_rows"),
        "model | device | ranks | schedule | prompt: {context} | rows of a step: "
        "{most_rows} | ours: {ours_ms:.1f} ms | vLLM: {vllm} | vLLM / ours: "
        "{vllm_of_ours}",
    ),
    Table(
        "Attention of 128 requests of drawn lengths: ms a layer",
        "attention",
        by("model device schedule"),
        "model | device | schedule | positions: {num_positions} | roofline: "
        "{limit_ms:.3f} | ours: {ours_ms:.3f} | FlashAttention-3: {vllm} | "
        "FlashAttention-3 / ours: {vllm_of_ours}",
    ),
    Table(
        "A server with many clients: ms",
        "serve",
        by("model device clients"),
        "model | device | clients | prompt: {prompt_tokens} | tokens | first token: "
        "{first_token_ms:.0f} | without a server: {bare_first_token_ms:.0f} | vLLM's: "
        "{vllm_first_token} | a token: {token_ms:.2f} | of the model: "
        "{bare_token_ms:.2f} | of vLLM: {vllm_token} | tokens a second: "
        "{tokens_per_s:.0f} | of vLLM's: {of_vllm_tokens}",
    ),
    Table(
        "Drafts of the next tokens, of one request: ms per token",
        "speculation",
        by("model device text drafts"),
        "model | device | text | drafts | without: {baseline_ms:.3f} | with: "
        "{ours_ms:.3f} | speed-up: {speedup:.2f} | accepted in a step: "
        "{accepted_per_step:.2f}",
    ),
    Table(
        "Eight matrix multiplications one after the other in one program",
        "chain",
        by_size,
        "model | device | M | roofline: {limit_ms:.3f} | cuBLAS: {baseline_ms:.3f} | "
        "ours: {ours_ms:.3f} | % of roofline: {of_limit:.0%} | tiles: {policy} | "
        "schedule",
    ),
    Table(
        "Many tokens on few experts",
        "moe",
        by_size,
        "model | device | tokens: {M} | all choose from: {routing} | roofline: "
        "{limit_ms:.3f} | baseline: {baseline_ms:.3f} | ours: {ours_ms:.3f} | ours / "
        "roofline: {of_roofline:.2f} | schedule",
        where=lambda r: r.routing.endswith(FEW) and H200 in r.device,  # as the limit
    ),
    Table(
        "Epilogues of the examples",
        "epilogue",
        by("model device M N K"),
        "epilogue: {model} | device | M | NxK: {N}x{K} | store: {store_ms:.4f} | "
        "ours: {ours_ms:.4f} | ours / store: {of_store:.3f} | tiles: {policy}",
    ),
    Table(
        "The same bits for any number of rows",
        " ".join({*FUSED, "decode"} - MEANS),
        lambda r: (*by("op model device")(r), num_rows(r)),
        f"operation: {{op}} {{model}} | device | rows: {{num_rows}} | ours: "
        f"{{ours_ms:.3f}} ms | {BATCH}: {{batch_ms:.3f}} ms | cost: x "
        f"{{batch_cost:.2f}}",
        where=lambda r: r.batch_ms and r.is_uniform,
        after=lambda records: SCHEDULES_PICTURE,
    ),
    Table(
        "Soak",
        "soak soak_hosts routings",
        by("op device world_size ranks_per_gpu"),
        "soak: {op} | device | ranks: {world_size} | calls: {runs} | wrong bits: "
        "{mismatches} | hangs",
        where=lambda r: r.backend == "cuda",
    ),
    Table(
        "Cost of a task",
        "task_cost",
        by("device lane schedule"),
        "lane | device",
        pivot="{schedule}: {task_us:.2f} us",
    ),
    Table(
        "Cost of a model's step on the host, without the launch",
        "step_cost",
        by("device rows"),
        "rows | device | host: {host_us:.1f} us",
    ),
    Table(
        "Cost of a custom operation of torch on the host, without the launch",
        "torch_cost",
        by("device call"),
        "operation: `{call}` | device | its object: {object_us:.1f} us | added: "
        "{added_us:.1f} us",
    ),
    Table(
        "Compilation",
        "compile",
        by("device program path"),
        "program | device: {compiled_for} | schedule: {compiled_schedule} | build: "
        "{build_s:.1f} s | from the cache: {cached_ms:.0f} ms | cubin: {cubin_kib} "
        "KiB | registers | spills: {spill_bytes} B",
    ),
)
