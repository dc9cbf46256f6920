"""Benchmark records: JSON, one per line, appended by rank 0. FIELDS explains their
fields."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FEW = " experts"
"""The end of the name of a routing, after the number of experts that it chooses from.
"""

FIELDS: Mapping[str, str] = {
    # Every record: where, when and with which code it was measured.
    "op": "its kind, which names its file",
    "world_size": "ranks",
    "backend": "cuda or cpu",
    "path": "the graph, schedule, backend and workers",
    "commit": "BENCH_COMMIT, or git's",
    "date": "UTC, ISO 8601",
    "run": "the id of the run that measured it",
    "seed": "of random sizes, from the commit",
    # What ran.
    "model": "or the sizes' name, or the example's",
    "M": "rows of x on all ranks; expert-parallel, on one",
    "N": "columns of the result; of a layer or chain the hidden size",
    "K": "columns of x; of a layer or chain one rank's inner size",
    "policy": "tile shapes, and for decoders slices and KV heads a task",
    "w_layout": "nk, or kn for a transposed view",
    "gated": "whether N columns are gate and up, and the result has N / 2",
    "compared": "tiles that were timed for the regret",
    "regret": "how much longer the chosen tiles take than best_policy, as a share",
    "best_policy": "the fastest tiles of those within 1.5 times the least prediction",
    "protocol": "how a time is measured",
    "baseline": "the unfused libraries and their versions",
    "repeats": "timed calls",
    # Times: medians in ms of the slowest rank, unless they are named otherwise.
    "ours_ms": "one call of ours",
    "ours_spread_ms": "its first and third quartile",
    "baseline_ms": "the unfused steps, the fastest of several; of decoders vLLM's step",
    "baselines_ms": "by the collectives that they use",
    "num_bytes": "of the sum",
    "gemm_ms": "the baseline's GEMMs alone",
    "collective_ms": "the baseline's collectives alone",
    "wire_ms": "the bytes that leave a rank, at the measured rate of the links",
    "limit_ms": "the lower bound: of memory, tensor cores, GEMMs alone, or wire",
    "of_limit": "limit_ms / ours_ms",
    "speedup": "baseline_ms / ours_ms",
    "batch_ms": 'with deterministic="batch", in turn with ours_ms',
    "scaled_mm_ms": "torch's quantization of x and scaled product of float8",
    "batch_policy": 'the tiles with deterministic="batch"',
    "host_us": "the host's time of an eager call after the first, by array library; of "
    "a model's step without the launch",
    "two_ops_ms": "the fused collectives and the steps between them, in a row",
    "triton_ms": "vLLM's Triton kernel",
    "triton": "its version and tiles",
    "store_ms": "on the same tiles with the plain store",
    "of_store": "ours_ms / store_ms",
    # Checks.
    "error": "relative Frobenius norm over all ranks, against fp32",
    "bitwise_equal": "whether all runs gave the same bits",
    "outliers": "how many times as large one weight in 1,000 is",
    "bf16_error": "of the same model with its dequantized weights in bf16",
    "codes_error": "of the dequantized weights against those that were quantized, both "
    "in fp32",
    # Mixtures of experts.
    "active_experts": "that have a token: the mean over inputs, or of decoders layers",
    "router": "the score of a logit, and how it chooses",
    "routing": 'uniform, zipf, one set, or "N experts": all tokens choose from N',
    # Decode steps; all times are of one step.
    "batch": "requests, each with a row of the step",
    "context": "positions that each row attends to, its own included; of drawn "
    "lengths the most",
    "num_positions": "those of all rows",
    "steps": "whose bits were compared; of a proof, those of a launch",
    "single_launches_ms": "a launch for each step, all in one CUDA graph",
    "call_ms": "a call of a model for all steps, by the host's clock",
    "single_calls_ms": "a call for each step, with the ids of the one before",
    "sampling": 'how ids are chosen; "None": the most likely ones',
    "greedy_ms": "the same step without sampling",
    "layers": "of a call",
    "checked_layers": "layers that were run for the errors",
    "row_error": "the median over the rows of a row's relative error",
    "torch_row_error": "the same for torch's logits in the same dtype",
    "id_gap": "how far the logit of a chosen id is below the largest one in fp32, at "
    "most, relative to the root mean square",
    "router_gap": "the same of an expert, below one that was not chosen",
    "slopes_ms": "sorted: the difference of the times of two output lengths, divided "
    "by that of the lengths",
    "engine": "vLLM's version, attention and CUDA graphs",
    "ready_s": "from the start of its process until it can generate",
    "first_token_s": "from the weights in the GPU's memory to the first id on the host",
    "positions": "the most of a request",
    # Servers. Times in ms are medians of waves, in these of streams; bare_: the same of
    # the model without a server, baseline_: of vLLM's server.
    "clients": "whose requests begin together",
    "prompt_tokens": "of each request",
    "tokens": "of each answer",
    "first_token_ms": "from a request to the first token",
    "token_ms": "from one token to the next, on average over an answer",
    "step_ms": "the same while all clients have tokens, if there is such a time",
    "tokens_per_s": "of all answers of a wave",
    # Drafts of the next tokens.
    "text": "repeats, or random",
    "most_rows": "positions of a prompt that a step computes, at most",
    "drafts": "of a step, at most",
    "drafted_per_step": "drafts that a step has checked, on average",
    "accepted_per_step": "drafts that were tokens of the text",
    # Soaks.
    "cases": "operations at a shape",
    "runs": "calls",
    "mismatches": "results with other bits than the first",
    "growth_bytes": "of the memory in use on a GPU; None: not measured",
    "host_growth_bytes": "of the resident memory of a rank's process",
    # Costs of the host and of scheduling; compilation, proofs, predictions.
    "workers": "of a rank",
    "task_ns": "the time that an almost empty task takes one worker",
    "added_us": "the host's time without that of the object that it calls",
    "object_us": "the host's time of that object, without the launch",
    "generate_ms": "of the source",
    "build_ms": "of the cubin",
    "cached_ms": "the same build again, found in the cache",
    "setting": "of the transport",
    "delay_us": "added to the transport's own",
    "rate_gbs": "the limit of the transport; 0: none",
    "link_gbs": "of the predicted link, as the next two",
    "ratio": "predicted_us / measured_us",
    "bounds_us": "lower bounds by name",
    "bound_by": "the largest of the bounds",
    # A run of a benchmark: a record when it starts, and one when it ends.
    "state": "started, or ended",
    "options": "of its command line",
    "recorded": "shapes with a record",
    "failed": "shapes whose check failed, and how",
}
"""The meaning of fields whose names do not say it."""


@dataclass(frozen=True)
class Kind:
    """The fields of records: those that each must have, and defaults of others."""

    required: tuple[str, ...]
    defaults: Mapping[str, Any]


def _kind(names: str, optional: str = "", **defaults: Any) -> Kind:
    """optional: fields whose default is None."""
    absent = dict.fromkeys([*optional.split(), "run", "seed"])
    return Kind(tuple(names.split()), {**absent, **defaults})


_BASE = "op world_size device driver cuda backend path commit date "
_FUSED = _BASE + (
    "model M N K dtype schedule ours_ms baseline_ms gemm_ms collective_ms wire_ms "
    "limit_ms of_limit speedup error baseline_error bitwise_equal repeats "
    "ours_spread_ms host_us protocol baseline "
)
_RANDOM = _BASE + (
    "seed model M N K dtype w_layout schedule ours_ms baseline_ms speedup error "
    "baseline_error bitwise_equal repeats protocol baseline "
)
_BATCH = "batch_ms batch_error "
_MOE = _FUSED + "experts top_k active_experts "
_DECODE = _BASE + (
    "model batch context dtype schedule policy ours_ms limit_ms of_limit error steps "
    "bitwise_equal repeats ours_spread_ms protocol "
)
_DECODE_OPTIONS = (
    "checked_layers row_error torch_row_error id_gap router_gap single_launches_ms "
    "call_ms single_calls_ms sampling greedy_ms batch_ms baseline_ms routing "
    "active_experts "
)
_SERVED = "{0}first_token_ms {0}token_ms {0}tokens_per_s "
_COLLECTIVE = _kind(_FUSED, _BATCH)
_PARALLEL = _kind(_MOE + "routing baselines_ms", _BATCH)
_SOAK = _kind(
    _BASE + "cases runs mismatches hangs seconds error",
    "growth_bytes host_growth_bytes",
    ranks_per_gpu=1,
    mps=False,
)
KINDS: Mapping[str, Kind] = {
    "matmul_reduce_scatter": _COLLECTIVE,
    "all_gather_matmul": _COLLECTIVE,
    "matmul": _kind(_FUSED + "w_layout policy", _BATCH + "batch_policy"),
    "matmul_float8": _kind(_FUSED + "w_layout", _BATCH),
    "matmul_float8_activations": _kind(
        _FUSED + "w_layout policy", _BATCH + "scaled_mm_ms scaled_mm_error"
    ),
    "chain": _kind(_FUSED + "policy", _BATCH),
    "mlp": _kind(_FUSED + "two_ops_ms two_ops_error", _BATCH),
    "moe": _kind(
        _MOE + "ours_eager_ms baseline_eager_ms",
        _BATCH + "triton triton_ms triton_error",
        routing="uniform",
    ),
    "moe_tensor_parallel": _PARALLEL,
    "moe_expert_parallel": _PARALLEL,
    "epilogue": _kind(
        _BASE + "model M N K dtype schedule policy ours_ms store_ms of_store error "
        "bitwise_equal repeats protocol"
    ),
    "decode": _kind(_DECODE, _DECODE_OPTIONS, steps_per_launch=1),
    "random_decode": _kind(
        _DECODE + "seed num_positions baseline",
        _DECODE_OPTIONS + "speedup",
        steps_per_launch=1,
    ),
    "decode_vllm": _kind(
        _BASE + "model batch context dtype baseline_ms slopes_ms engine ready_s "
        "protocol"
    ),
    "prompt": _kind(
        _BASE + "model batch context dtype schedule ours_ms error id_gap "
        "checked_layers bitwise_equal repeats ours_spread_ms protocol most_rows",
        "router_gap baseline_ms speedup",
    ),
    "prompt_vllm": _kind(
        _BASE + "model batch context dtype baseline_ms repeats engine ready_s protocol"
    ),
    "attention": _kind(
        _BASE + "seed model batch context num_positions layers dtype schedule ours_ms "
        "limit_ms of_limit error bitwise_equal repeats ours_spread_ms protocol "
        "baseline",
        "baseline_ms baselines_ms baseline_error speedup",
    ),
    "random_matmul": _kind(
        _RANDOM + "gated", "policy predicted_us regret best_policy compared"
    ),
    **dict.fromkeys(
        (
            "random_mlp",
            "random_reduce_scatter",
            "random_all_gather",
            "random_mlp_ranks",
            "float8_all_gather",
            "float8_reduce_scatter",
        ),
        _kind(_RANDOM, "policy predicted_us"),
    ),
    "random_mixture": _kind(
        _RANDOM + "experts top_k active_experts routing router limit_ms of_limit "
        "ours_spread_ms",
        "policy predicted_us",
    ),
    "mixture_float8": _kind(
        _RANDOM + "experts top_k active_experts routing router limit_ms of_limit "
        "ours_spread_ms",
        "policy predicted_us",
    ),
    "mlp_float8": _kind(_RANDOM, "policy predicted_us"),
    **dict.fromkeys(
        ("all_reduce", "all_reduce_norm", "matmul_all_reduce"),
        _kind(_RANDOM + "num_bytes baselines_ms", "policy predicted_us"),
    ),
    "serve": _kind(
        _BASE + "model clients prompt_tokens tokens dtype protocol "
        f"{_SERVED.format('')}{_SERVED.format('bare_')}",
        _SERVED.format("baseline_") + "step_ms bare_step_ms baseline_step_ms",
    ),
    "speculation": _kind(
        _BASE + "model text drafts tokens dtype protocol ours_ms baseline_ms speedup "
        "drafted_per_step accepted_per_step"
    ),
    "first_token": _kind(_BASE + "model batch positions first_token_s protocol"),
    "float8_accuracy": _kind(
        _BASE + "model dtype outliers rows error bf16_error codes_error protocol"
    ),
    "soak": _SOAK,
    "soak_hosts": _SOAK,
    "routings": _SOAK,
    "task_cost": _kind(_BASE + "schedule lane workers task_ns protocol"),
    "step_cost": _kind(_BASE + "rows host_us protocol"),
    "torch_cost": _kind(_BASE + "call added_us object_us torch protocol"),
    "compile": _kind(
        _BASE + "program schedule_ms generate_ms build_ms cached_ms load_ms "
        "source_lines cubin_bytes registers spill_bytes"
    ),
    "proof": _kind(_BASE + "program model rows steps positions tasks proof_ms"),
    "predict": _kind(
        _BASE + "program dims setting delay_us rate_gbs link_gbs latency_us message_us "
        "workers measured_us predicted_us ratio bounds_us bound_by bitwise_equal "
        "protocol"
    ),
    "run": _kind("op world_size commit date state subject options", "recorded failed"),
}
FUSED = frozenset(op for op, kind in KINDS.items() if "gemm_ms" in kind.required)
"""The kinds that have an unfused baseline at named sizes."""


class Record(SimpleNamespace):
    """A record; its attributes are the fields of its kind."""

    def get(self, name: str) -> Any:
        """A field; None where its kind has no such field."""
        return vars(self).get(name)

    @property
    def code(self) -> str:
        """The start of the commit, and whether the code was changed."""
        head, dash, state = str(self.commit).partition("-")
        return f"{head[:10]}{dash}{state}"

    @property
    def ranks(self) -> str:
        return f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"

    @property
    def is_uniform(self) -> bool:
        """Whether experts, if it has any, are chosen evenly."""
        return self.get("routing") in (None, "", "uniform")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def commit() -> str:
    """BENCH_COMMIT, for copies without history, else git's HEAD, "-dirty" if changed;
    the results themselves do not count as a change."""
    text = os.environ.get("BENCH_COMMIT")
    if text:
        return text
    try:
        head = _git("rev-parse", "HEAD")
        changes = _git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changes else head


def append(values: Mapping[str, Any], path: Path | None = None) -> None:
    """Add a record of this code and time to `path`, by default
    benchmarks/results/<op>.jsonl. Raises ValueError as `parse`."""
    record = parse({"commit": commit(), "date": now(), **values})
    path = path or RESULTS / f"{record.op}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(vars(record)) + "\n")


def load(folder: Path = RESULTS) -> Iterator[Record]:
    """Every record in `folder`, oldest first in each file. Raises ValueError as
    `read`."""
    for path in sorted(folder.glob("*.jsonl")):
        yield from read(path)


def read(path: Path) -> Iterator[Record]:
    """The records of a file, in order. Raises ValueError, with the file and line, for a
    line that is not a record."""
    for line_number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            yield parse(json.loads(line))
        except (ValueError, KeyError) as fault:
            raise ValueError(f"{path}:{line_number}: {fault}") from fault


def parse(values: Mapping[str, Any]) -> Record:
    """The record that `values` holds; ValueError unless it has its kind's fields, of
    which those with a default may be absent."""
    kind = KINDS[values["op"]]
    missing = sorted(set(kind.required) - set(values))
    faults = sorted(set(values) - {*kind.required, *kind.defaults})
    if missing or faults:
        raise ValueError(f"missing {missing or 'nothing'}, unknown {faults or 'none'}")
    return Record(**{**kind.defaults, **values})


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    return process.stdout.strip()
