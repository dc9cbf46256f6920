"""The records of the benchmarks: one JSON object per line, appended by rank 0."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FEW = " experts"
"""The end of the name of a routing, after the number of experts that it chooses from.
"""


@dataclass(frozen=True, kw_only=True)
class Record:
    """The fields of every record: where, when and with which code it was measured."""

    op: str
    world_size: int
    device: str
    driver: str
    cuda: str
    backend: str
    path: str
    """The graph, schedule, backend and workers."""
    commit: str
    date: str
    """UTC, ISO 8601."""


@dataclass(frozen=True, kw_only=True)
class FusedRecord(Record):
    """A fused collective at one shape against its unfused baseline."""

    model: str
    M: int
    N: int
    K: int
    dtype: str
    schedule: str
    ours_ms: float
    baseline_ms: float
    gemm_ms: float
    collective_ms: float
    wire_ms: float
    """The bytes that leave a rank, at the measured rate of the links."""
    limit_ms: float
    """max(gemm_ms, wire_ms): no fusion can be faster."""
    of_limit: float
    speedup: float
    error: float
    """Relative Frobenius norm over all ranks, against fp32."""
    baseline_error: float
    bitwise_equal: bool
    repeats: int
    ours_spread_ms: tuple[float, float]
    """First and third quartile."""
    host_us: Mapping[str, float]
    """Host cost of an eager call after the first, by array library."""
    protocol: str
    baseline: str
    batch_ms: float | None = None
    """With deterministic="batch", if that was measured."""
    batch_error: float | None = None


@dataclass(frozen=True, kw_only=True)
class LayerRecord(FusedRecord):
    """A layer as one program. N is the hidden size, K a rank's shard of the inner one;
    gemm_ms, collective_ms and wire_ms are those of all GEMMs and collectives."""

    two_ops_ms: float
    """The fused collectives and the steps between them, one after the other."""
    two_ops_error: float


@dataclass(frozen=True, kw_only=True)
class MatmulRecord(FusedRecord):
    """A matrix multiplication on one GPU; gemm_ms is the baseline's, limit_ms that of
    memory or tensor cores."""

    w_layout: str
    policy: str
    """The tiles that the program chose."""
    batch_policy: str | None = None
    """The tiles with deterministic="batch"."""


@dataclass(frozen=True, kw_only=True)
class ChainRecord(FusedRecord):
    """Matrix multiplications one after the other on one GPU, from N to K elements of a
    row and back; gemm_ms is the baseline's, limit_ms that of memory or tensor cores."""

    policy: str
    """The two tile shapes that the program chose."""


@dataclass(frozen=True, kw_only=True)
class MoERecord(FusedRecord):
    """A mixture of experts on one GPU. M is the number of tokens, N the hidden size, K
    the inner one; ours_ms, baseline_ms and gemm_ms are those of replayed CUDA graphs;
    limit_ms is that of memory or tensor cores; nothing is on the wire."""

    experts: int
    top_k: int
    active_experts: float
    """Experts with at least one token: the mean over the inputs."""
    routing: str = "uniform"
    """As in MoEParallelRecord; "N experts": all tokens choose from N."""
    ours_eager_ms: float
    baseline_eager_ms: float
    triton: str | None = None
    """The version of the Triton kernel, if one was timed."""
    triton_ms: float | None = None
    """The time of a replayed CUDA graph."""
    triton_error: float | None = None


@dataclass(frozen=True, kw_only=True)
class MoEParallelRecord(FusedRecord):
    """A mixture of experts over the ranks. M is the number of tokens of all ranks, of
    one rank if expert-parallel, N the hidden size, K a rank's inner one; baseline_ms is
    the fastest of the baselines, gemm_ms and collective_ms are those of the first one,
    wire_ms those of the busiest rank, and limit_ms is at least its memory's or tensor
    cores'."""

    experts: int
    top_k: int
    active_experts: float
    """Experts with at least one token: the mean over the inputs."""
    routing: str
    """The distribution of tokens over experts: "uniform", "zipf" or "N experts"."""
    baselines_ms: Mapping[str, float]
    """By the collectives that they use."""


@dataclass(frozen=True, kw_only=True)
class DecodeRecord(Record):
    """A step of a whole model: the next token of each request."""

    model: str
    batch: int
    """Requests, each with a row of the step."""
    context: int
    """Positions that each row attends to, its own included."""
    dtype: str
    schedule: str
    policy: str
    """The tile shapes, slices and KV heads per task that the step policy chose."""
    ours_ms: float
    limit_ms: float
    """One read of the weights and the cache that a step uses, at the memory rate."""
    of_limit: float
    error: float
    """Of the logits, after `checked_layers` layers and the output head: the relative
    Frobenius norm against fp32."""
    steps: int
    """Steps whose logits and ids were compared bit for bit with those of the first."""
    bitwise_equal: bool
    repeats: int
    ours_spread_ms: tuple[float, float]
    """First and third quartile."""
    protocol: str
    checked_layers: int | None = None
    """The layers that were run for `error`, `row_error` and `torch_row_error`."""
    row_error: float | None = None
    """The median over the rows of a row's relative error."""
    torch_row_error: float | None = None
    """The same for torch's logits in the same dtype."""
    id_gap: float | None = None
    """How far the logit of a chosen id is below the largest one in fp32, at most,
    relative to the root mean square of all logits."""
    router_gap: float | None = None
    """How far the router's logit of a chosen expert is below that of one that was not
    chosen in fp32, at most, relative to the root mean square of the router's logits."""
    steps_per_launch: int = 1
    """All times are of one step."""
    single_launches_ms: float | None = None
    """With several steps in a launch: the time of a step with a launch for each, all in
    one replayed CUDA graph. Measured in turn with ours_ms."""
    call_ms: float | None = None
    """The time of a step in a call of a model for all steps of a launch, until the ids
    are on the host, by the host's clock."""
    single_calls_ms: float | None = None
    """The time of a step with a call for each, which gets the ids of the one before.
    Measured in turn with call_ms."""
    sampling: str | None = None
    """How ids are chosen; "None": the most likely ones."""
    greedy_ms: float | None = None
    """With sampling: the time of the same step without. Measured in turn with ours_ms.
    """
    batch_ms: float | None = None
    """With deterministic="batch", if measured: in turn with ours_ms."""
    baseline_ms: float | None = None
    """vLLM's step, if decode_vllm.py measured it on the same day and kind of GPU."""
    routing: str | None = None
    """How rows choose experts."""
    active_experts: float | None = None
    """Experts that a step reads in a layer: the mean over the layers."""


@dataclass(frozen=True, kw_only=True)
class DecodeVllmRecord(Record):
    """The same step by vLLM itself, tensor-parallel on several ranks."""

    model: str
    batch: int
    context: int
    """Positions at the middle of the timed steps."""
    dtype: str
    baseline_ms: float
    """The median of the slopes."""
    slopes_ms: tuple[float, ...]
    """Sorted. A slope: the difference of the times for two output lengths, divided by
    the difference of the lengths."""
    engine: str
    """Its version, attention and CUDA graphs."""
    ready_s: float
    """From the start of its process until it can generate."""
    protocol: str


@dataclass(frozen=True, kw_only=True)
class SoakRecord(Record):
    """Many runs in a row; their outputs compared bit by bit with the first ones."""

    cases: int
    runs: int
    mismatches: int
    hangs: int
    seconds: float
    error: float | None
    """The largest of all cases; None where it was not computed."""
    ranks_per_gpu: int = 1
    mps: bool = False
    """Whether CUDA MPS served the GPU."""
    growth_bytes: int | None = None
    """Growth of the memory in use on a GPU during the runs; None: not measured."""
    host_growth_bytes: int | None = None
    """Growth of the resident memory of a rank's process."""


@dataclass(frozen=True, kw_only=True)
class TaskCostRecord(Record):
    """The time that an almost empty task takes one of `workers` workers."""

    schedule: str
    lane: str
    workers: int
    task_ns: float
    protocol: str


@dataclass(frozen=True, kw_only=True)
class StepCostRecord(Record):
    """The host's part of a model's step: all but the launch."""

    rows: int
    host_us: float
    protocol: str


@dataclass(frozen=True, kw_only=True)
class EpilogueRecord(Record):
    """A matrix multiplication with the epilogue of an example, `model`, and one that
    only stores, on the same tiles."""

    model: str
    M: int
    N: int
    K: int
    dtype: str
    schedule: str
    policy: str
    """The tiles."""
    ours_ms: float
    store_ms: float
    of_store: float
    """ours_ms / store_ms."""
    error: float
    """Relative Frobenius norm, against fp32."""
    bitwise_equal: bool
    repeats: int
    protocol: str


@dataclass(frozen=True, kw_only=True)
class TorchCostRecord(Record):
    """The host's part of a call of torch.ops.etc_dist."""

    call: str
    added_us: float
    """The host's time without that of the object that it calls."""
    object_us: float
    """The host's time of that object, without the launch."""
    torch: str
    """Its version."""
    protocol: str


@dataclass(frozen=True, kw_only=True)
class CompileRecord(Record):
    """From graph to loaded program, on one process."""

    program: str
    schedule_ms: float
    generate_ms: float
    build_ms: float
    cached_ms: float
    """The same build again, found in the cache."""
    load_ms: float | None
    """Cubin to GPU; None without a GPU."""
    source_lines: int
    cubin_bytes: int
    registers: int
    spill_bytes: int


@dataclass(frozen=True, kw_only=True)
class ProofRecord(Record):
    """The proof of a step of a model, on one process."""

    program: str
    model: str
    rows: int
    steps: int
    """Steps of one launch."""
    positions: int
    """The most positions of a request."""
    tasks: int
    proof_ms: float


@dataclass(frozen=True, kw_only=True)
class FirstTokenRecord(Record):
    """The start of a model with a bundle."""

    model: str
    batch: int
    positions: int
    """The most positions of a request."""
    first_token_s: float
    """From the weights in the GPU's memory to the first id on the host."""
    protocol: str


@dataclass(frozen=True, kw_only=True)
class PredictRecord(Record):
    """A predicted and a measured run over pretended hosts that share a GPU."""

    program: str
    dims: Mapping[str, int]
    setting: str
    delay_us: float
    """The delay that was added to the transport's own."""
    rate_gbs: float
    """The limit of the transport; 0: none."""
    link_gbs: float
    latency_us: float
    message_us: float
    """The parameters of the prediction's link: link_gbs, latency_us and message_us."""
    workers: int
    measured_us: float
    predicted_us: float
    ratio: float
    """Predicted over measured."""
    bounds_us: Mapping[str, float]
    bound_by: str
    """The largest of the bounds."""
    bitwise_equal: bool
    protocol: str


KINDS: Mapping[str, type[Record]] = {
    "proof": ProofRecord,
    "matmul": MatmulRecord,
    "chain": ChainRecord,
    "epilogue": EpilogueRecord,
    "matmul_reduce_scatter": FusedRecord,
    "all_gather_matmul": FusedRecord,
    "mlp": LayerRecord,
    "moe": MoERecord,
    "moe_tensor_parallel": MoEParallelRecord,
    "moe_expert_parallel": MoEParallelRecord,
    "decode": DecodeRecord,
    "decode_vllm": DecodeVllmRecord,
    "first_token": FirstTokenRecord,
    "soak": SoakRecord,
    "soak_hosts": SoakRecord,
    "routings": SoakRecord,
    "task_cost": TaskCostRecord,
    "step_cost": StepCostRecord,
    "torch_cost": TorchCostRecord,
    "compile": CompileRecord,
    "predict": PredictRecord,
}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def commit() -> str:
    """BENCH_COMMIT, for copies without history, else git's HEAD, "-dirty" if changed;
    the results themselves do not count as a change."""
    named = os.environ.get("BENCH_COMMIT")
    if named:
        return named
    try:
        head = _git("rev-parse", "HEAD")
        changes = _git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changes else head


def stamp() -> dict[str, Any]:
    """The measured code, and the time."""
    return {"commit": commit(), "date": now()}


def append(record: Record, path: Path | None = None) -> None:
    """Add a record to `path`, by default benchmarks/results/<op>.jsonl."""
    path = path or RESULTS / f"{record.op}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def load(folder: Path = RESULTS) -> Iterator[Record]:
    """Every record in `folder`, oldest first in each file. Raises ValueError as
    `read`."""
    for path in sorted(folder.glob("*.jsonl")):
        yield from read(path)


def read(path: Path) -> Iterator[Record]:
    """The records of a file, in order. Raises ValueError, with the file and line, for a
    line that is not a record."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            yield parse(json.loads(line))
        except (ValueError, KeyError) as fault:
            raise ValueError(f"{path}:{number}: {fault}") from fault


def parse(values: Mapping[str, Any]) -> Record:
    """The record that `values` holds; ValueError unless it has its kind's fields, of
    which those with a default may be absent."""
    kind = KINDS[values["op"]]
    known = {field.name for field in fields(kind)}
    wanted = {field.name for field in fields(kind) if field.default is MISSING}
    if not wanted <= set(values) <= known:
        missing, strange = sorted(wanted - set(values)), sorted(set(values) - known)
        raise ValueError(f"missing {missing or 'nothing'}, unknown {strange or 'none'}")
    return kind(**values)


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()
