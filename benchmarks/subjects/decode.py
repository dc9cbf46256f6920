"""A decode step of a whole model with random weights, split over the ranks, against
vLLM's. Ranks that share a GPU are checked, not timed.

Its ids are compared with fp32, with torch in the same dtype, and 1000 times bit by bit.
The limit is one read of the cache and of the weights that the step used. --vllm FILE
adds times of vLLM of the same day and kind of GPU as baseline_ms."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeGuard, cast

import numpy as np

from benchmarks import records
from benchmarks.decoder import ROUTINGS, Decoder
from benchmarks.decoder_launches import model_calls, single_launches
from benchmarks.decoder_models import MODELS, SMALL_MODELS
from benchmarks.decoder_reference import Fp32, Torch, step_logits
from benchmarks.device import WARM_UP, Call, Device, Gpu, captured_ours, wide
from benchmarks.harness import (
    SMALL,
    Result,
    Run,
    Subject,
    add_batch,
    add_shapes,
    provenance,
)
from benchmarks.protocol import measure_times
from benchmarks.workload import DTYPE, limited, medians
from etc_dist.models import Sampling

Shapes = dict[tuple[int, str, int, int, str | None], float]
"""Milliseconds by ranks, model, context, batch, and the seed of drawn lengths."""
CHECKED_LAYERS = 2
SAMPLING = Sampling(temperature=0.6, top_k=20, top_p=0.95)
"""The sampling that Qwen3 recommends."""
ERROR, GAP = 0.016, 0.12
"""For CHECKED_LAYERS, the allowed relative error of the logits; and how far the chosen
id's logit may be below the largest in the reference, relative to the root mean square
of all logits."""
MOST_OF_TORCH = 1.1
"""The allowed error relative to torch's in the same dtype."""
ROUTER_GAP = 0.06
"""For CHECKED_LAYERS, how far a chosen expert's logit may be below one that was not
chosen, relative to the root mean square."""
ON_GPU = {"models": ["qwen3-32b"], "batches": (1, 8, 32), "context": 512, "steps": 1000}
ON_CPU = {"models": [SMALL], "batches": (1, 3), "context": 70, "steps": 3}
"""Defaults of options."""
PROTOCOL = (
    "2 ms device sleep, event, replayed CUDA graph, event; median after "
    f"{WARM_UP} warm-ups"
)


def check(
    decoder: Decoder, batch: int, layers: int = CHECKED_LAYERS
) -> tuple[dict[str, float], list[str]]:
    """Runs a step of the first `layers` layers. Returns its errors, and a text for each
    check that failed."""
    device, xp = decoder.device, decoder.device.xp
    arrays = decoder.arrays(batch, layers)
    logits, ids = arrays["logits"][:batch], arrays["next_ids"][0, :batch]
    for out in (logits, ids):
        device.poison(out)
    decoder.call(arrays)()
    decoder.program.synchronize()
    whole = decoder.whole(batch, layers)
    whole |= {name: whole[name][:batch] for name in ("ids", "position")}
    if decoder.config.mixture is not None:
        whole["experts"] = xp.ascontiguousarray(arrays["experts"][:, :batch])
    expected, below = step_logits(Fp32(xp), decoder.config, whole)
    error = device.relative_error([logits], [expected[:, decoder.columns]])
    errors, wrong, most_error = {"error": error}, [], 0.0
    if isinstance(device, Gpu) and device.torch is not None and device.world.size == 1:
        tensors = {name: device.as_torch(array) for name, array in whole.items()}
        math = Torch(device.torch, device.torch.bfloat16)
        theirs, _ = step_logits(math, decoder.config, tensors)
        torchs = xp.asarray(theirs.float())
        errors["row_error"] = row_error(xp, wide(logits), expected)
        allowed = errors["torch_row_error"] = row_error(xp, torchs, expected)
        if not errors["row_error"] <= MOST_OF_TORCH * allowed:
            wrong.append(f"the median error of a row is above torch's, {allowed:.2e}")
        most_error = MOST_OF_TORCH * device.relative_error([torchs], [expected])
    del whole
    gap = float(
        (expected.max(axis=1) - expected[xp.arange(batch), ids]).max()
        / xp.sqrt((expected**2).mean())
    )
    # The rounding errors of layers add up at least like independent ones.
    most_error = max(most_error, max(layers / CHECKED_LAYERS, 1.0) ** 0.5 * ERROR)
    leeway = most_error / ERROR
    if not error <= most_error:  # also for NaN
        wrong.append(f"error {error:.2e}, wanted {most_error:.1e}")
    is_greedy = decoder.sampling is None
    errors |= {"id_gap": gap} if is_greedy else {}
    errors |= {"router_gap": below} if decoder.config.mixture is not None else {}
    if is_greedy and not are_best(decoder, wide(logits), ids):
        wrong.append("an id is not that of the largest logit")
    if not below <= leeway * ROUTER_GAP:
        wrong.append(f"an expert whose logit is {below:.2e} below one not chosen")
    if is_greedy and not gap <= leeway * GAP:
        wrong.append(f"an id whose logit is {gap:.2e} below the largest")
    return errors, wrong


def row_error(xp: Any, logits: Any, expected: Any) -> float:
    """The relative error of a row, the median of all."""
    squares = ((a * a).sum(axis=1) for a in (logits - expected, expected))
    error, norm = squares
    return float(xp.median(xp.sqrt(error / norm)))


def are_best(decoder: Decoder, logits: Any, ids: Any) -> bool:
    """Whether each id has the largest logit of its row, of all ranks' columns, and all
    ranks have the same ids. Collective."""
    first, columns = decoder.columns.start, decoder.columns
    id_list = ids.tolist()
    id_logits = [
        float(row[n - first]) if first <= n < columns.stop else -np.inf
        for row, n in zip(logits, id_list, strict=True)
    ]
    own_values = logits.max(axis=1).tolist(), id_logits, id_list
    rank_values = cast(list[Any], decoder.device.world.gather(own_values))
    best, id_logits = (
        np.max([rank[n] for rank in rank_values], axis=0) for n in range(2)
    )
    return bool((best == id_logits).all()) and all(
        rank[2] == id_list for rank in rank_values
    )


def mismatches(device: Device, call: Call, outs: Sequence[Any], steps: int) -> int:
    """How many of `steps` steps give other bits than `outs` has."""
    flags = device.xp.zeros(steps, "int8")
    firsts = [out.copy() for out in outs]
    for number in range(steps):
        for out in outs:
            device.poison(out)
        call()
        for out, first in zip(outs, firsts, strict=True):
            device.mark(flags, number, out, first)
    device.synchronize()
    return sum(cast(list[int], device.world.gather(int(flags.sum()))))


def vllm_steps(path: Path, device: str, op: str = "decode_vllm") -> Shapes:
    """Milliseconds of vLLM's last step, or other `op`, of each shape, of the records in
    `path` that are of today and of this kind of GPU."""
    steps_ms: Shapes = {}
    for r in records.read(path):
        is_today = r.date[:10] == records.now()[:10]
        if r.op == op and r.device == device and is_today:
            shape = r.world_size, r.model, r.context, r.batch, r.seed
            steps_ms[shape] = r.baseline_ms
    return steps_ms


def is_timed(device: Device) -> TypeGuard[Gpu]:
    return isinstance(device, Gpu) and device.world.ranks_per_gpu == 1


def benchmark(decoder: Decoder, batch: int, options: Namespace) -> Result:
    """Check, then, on a GPU, time a step."""
    device, program = decoder.device, decoder.program
    layers = min(options.checked_layers, decoder.config.layers)
    values: dict[str, Any] = {"model": decoder.name, "batch": batch}
    values |= {"context": decoder.context, "dtype": DTYPE}
    values |= {"schedule": program.plan.schedule, "policy": decoder.policy_text(batch)}
    errors, wrong = check(decoder, batch, layers)
    values |= {**errors, "checked_layers": layers}
    arrays = decoder.arrays(batch, decoder.config.layers, decoder.steps)
    call = decoder.call(arrays)
    call()
    program.synchronize()
    outs = [arrays["logits"][:batch], arrays["next_ids"][:, :batch]]
    calls = {"ours": call}
    if decoder.steps > 1:
        calls["single_launches"], faults = single_launches(decoder, arrays, batch)
        wrong += faults
    if decoder.sampling is not None:
        calls["greedy"] = decoder.call(arrays, is_greedy=True)
        calls["greedy"]()
        call()
        program.synchronize()
    if options.batch:
        calls["batch"] = decoder.call(arrays, in_order=True)
    timed = {n: captured_ours(device, c) for n, c in calls.items() if is_timed(device)}
    num_launches = -(-(options.steps or default_of(device, "steps")) // decoder.steps)
    different = mismatches(device, {**calls, **timed}["ours"], outs, num_launches)
    program.synchronize()
    values |= {"steps": num_launches * decoder.steps, "bitwise_equal": not different}
    values |= {"steps_per_launch": decoder.steps, "sampling": str(decoder.sampling)}
    if decoder.config.mixture is not None:
        values |= {"routing": decoder.routing}
        values |= {"active_experts": decoder.active_experts(arrays, batch)}
    if different:
        wrong.append(f"the bits of {different} of {num_launches} launches differ")
    if is_timed(device):
        measured = measure_times(device, timed, options.repeats)
        times = {n: [t / decoder.steps for t in ts] for n, ts in measured.items()}
        limit = decoder.bytes_read(arrays, batch) / device.rates[0] * 1e3
        values |= {**provenance(program), "repeats": options.repeats}
        values |= {**medians(times), **limited(times["ours"], limit)}
    if decoder.steps > 1:
        of_calls, faults = model_calls(decoder, batch, options.repeats)
        values, wrong = values | of_calls, wrong + faults
    return values, wrong


def default_of(device: Device, name: str) -> Any:
    """The default of an option on this backend."""
    is_on_gpu = isinstance(device, Gpu)
    return (ON_GPU if is_on_gpu else ON_CPU)[name]


def measure(run: Run) -> Iterator[Result]:
    device, options = run.device, run.options
    run.shared["protocol"] = PROTOCOL
    run.is_timed = is_timed(device)
    baselines: Shapes = {}
    if isinstance(device, Gpu) and options.vllm is not None:
        baselines = vllm_steps(options.vllm, device.machine["device"])
    batches = options.rows or default_of(device, "batches")
    context = options.context or default_of(device, "context")
    for name in options.models or default_of(device, "models"):
        decoder = Decoder(
            device,
            name,
            most=max(batches),
            context=context,
            schedule=options.schedule,
            steps=options.per_launch,
            routing=options.routing,
            sampling=SAMPLING if options.sample else None,
        )
        # NOTE: memory that was captured is kept: first run each batch once.
        for batch in batches:
            arrays = decoder.arrays(batch, decoder.config.layers, decoder.steps)
            for in_order in {False, options.batch}:
                decoder.call(arrays, in_order=in_order)()
        decoder.program.synchronize()
        for batch in batches:
            values, wrong = benchmark(decoder, batch, options)
            shape = device.world.size, name, context, batch, None
            if decoder.is_plain and shape in baselines:
                values = {**values, "baseline_ms": baselines[shape]}
            yield values, wrong
        decoder.program.close()
        del decoder, arrays  # before the next one is made


def add_options(parser: ArgumentParser) -> None:
    add_shapes(parser, {**MODELS, **SMALL_MODELS})
    add = parser.add_argument
    add("--context", type=int, help="512, or 70 on the CPU backend")
    add("--steps", type=int, help="compared bit by bit: 1000, or 3 on the CPU backend")
    add("--sample", action="store_true", help=f"choose ids by {SAMPLING}")
    add("--per-launch", type=int, default=1, help="steps of a launch; times are of one")
    add("--checked-layers", type=int, default=CHECKED_LAYERS, help="against fp32")
    add("--vllm", type=Path, help="file of decode_vllm's records on this machine")
    add_batch(parser)
    add("--routing", choices=ROUTINGS, default=ROUTINGS[0], help="of models of experts")


SUBJECTS = {"decode": Subject("Check and time a decode step.", measure, add_options)}
