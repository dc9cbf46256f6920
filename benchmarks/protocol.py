"""The protocol: how a workload is checked and timed, see README.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from statistics import median
from typing import Any, cast

from benchmarks.device import WARM_UP, Call, Device, Gpu
from benchmarks.harness import SMALL, Result, Run, provenance
from benchmarks.workload import BLOCK, TOLERANCE, Calls, Make, Shapes, Workload
from etc_dist.ops.operation import Operation

HOST_CALLS, HOST_ROUNDS = 100, 5


# ------------------------------------------------------------------- check, then time


def benchmark(case: Workload, schedule: str, repeats: int) -> Result:
    """Check, then, on a GPU, time one shape."""
    with case.make(schedule) as ours:
        return compared(case, ours, repeats)


def compared(case: Workload, ours: Operation, repeats: int) -> Result:
    """`benchmark` with an operation of `case.make`, which stays open."""
    case.made["ours"] = ours
    values, references = check(case, ours)
    if isinstance(case.device, Gpu):
        values |= {**provenance(ours.program), "repeats": repeats}
        values |= compete(case.device, case, ours, references, repeats)
    shape = {"model": case.name, "dtype": case.dtype, **case.fields()}
    shape["schedule"] = ours.program.plan.schedule
    return {"op": case.op, **shape, **values}, failures(values, case)


def check(case: Workload, ours: Operation) -> tuple[dict[str, Any], list[Any]]:
    """Whether three runs on each input give equal bits, the error of the last one, and
    the references. Collective."""
    equal = [
        bitwise_equal(
            case.device,
            operation=ours,
            call=call,
            out=case.outs[input_idx],
            spoil=partial(case.spoil, ours, input_idx),
        )
        for input_idx, call in enumerate(case.calls(ours, case.outs))
    ]
    references = [case.reference(input_idx) for input_idx in range(case.inputs)]
    error = case.device.relative_error(case.results(), references)
    return {"error": error, "bitwise_equal": all(equal)}, references


def bitwise_equal(
    device: Device, operation: Operation, call: Call, out: Any, spoil: Call
) -> bool:
    """Whether three runs of a call give equal bits on all ranks; leaves the last in
    `out`, which the call fills.

    Before each run, the output and the operation's own symmetric memory are poisoned,
    and its local memory by `spoil`, where it can: an element there that a run does not
    write or wait for is NaN."""
    call()  # gives the operation memory of this size
    operation.synchronize()
    results = []
    for _ in range(3):
        spoil()
        device.poison(out)
        device.poison_staging(operation)
        device.synchronize()
        device.world.barrier()
        call()
        operation.synchronize()
        results.append(out.copy())
    is_same = not any(
        bool(device.differs(results[0], result)) for result in results[1:]
    )
    return all(cast(list[bool], device.world.gather(is_same)))


def compete(
    gpu: Gpu, case: Workload, ours: Operation, references: list[Any], repeats: int
) -> dict[str, Any]:
    """Check the rivals, release `references`, then time all."""
    rivals = case.rivals(gpu)
    if case.has_batch:
        rivals["batch"] = case.batch_rival(gpu)
    for rival in rivals.values():
        rival.fill()
        for call in rival.calls:
            call()
    gpu.synchronize()
    errors = {
        name: gpu.relative_error(rival.outs, references)
        for name, rival in rivals.items()
    }
    references.clear()
    times = measure_times(
        gpu, case.timed(gpu, ours, rivals), repeats, is_cold=case.is_cold
    )
    times_of_baselines = {name: times.pop(name) for name in case.baselines}
    if times_of_baselines:
        times["baseline"] = min(times_of_baselines.values(), key=median)
        errors["baseline"] = max(errors.pop(name) for name in times_of_baselines)
    for operation in (o for rival in rivals.values() for o in rival.operations):
        operation.close()
    values = case.durations(times)
    if times_of_baselines and case.baselines != Workload.baselines:
        values["baselines_ms"] = {
            n: round(median(t), 5) for n, t in times_of_baselines.items()
        }
    return {**values, **{f"{name}_error": error for name, error in errors.items()}}


def measure_times(
    gpu: Gpu, calls: Calls, repeats: int, is_cold: bool = False
) -> dict[str, list[float]]:
    """Milliseconds of each repeat, the slowest rank's. The calls are timed in blocks
    that alternate, so that heat slows all equally. is_cold: without operands in the L2
    cache."""
    for call in calls.values():
        for _ in range(WARM_UP):
            call()
    gpu.synchronize()
    own_times: dict[str, list[float]] = {name: [] for name in calls}
    for block_start in range(0, repeats, BLOCK):
        for name, call in calls.items():
            for _ in range(min(BLOCK, repeats - block_start)):
                if is_cold:
                    gpu.evict()
                own_times[name].append(gpu.time(call))
    rank_times = cast(list[dict[str, list[float]]], gpu.world.gather(own_times))
    return {
        name: [
            max(repeat_times)
            for repeat_times in zip(*(rank[name] for rank in rank_times), strict=True)
        ]
        for name in calls
    }


def failures(values: Mapping[str, Any], case: Workload) -> list[str]:
    """Failed checks, the same on all ranks."""
    allowed = {}
    for name in (name for name in values if name.endswith("error")):
        leeway = case.leeway if name == "error" else case.baseline_leeway
        allowed[name] = TOLERANCE[case.dtype] * leeway
    return wrong_results(values, allowed)


def wrong_results(values: Mapping[str, Any], allowed: Mapping[str, float]) -> list[str]:
    """What is wrong with errors and bits. allowed: the largest errors, by name."""
    wrong = [
        f"{name} {values[name]:.2e}, wanted {most:.1e}"
        for name, most in allowed.items()
        if not values[name] <= most  # also for NaN
    ]
    differing = [] if values["bitwise_equal"] else ["the bits of three runs differ"]
    return wrong + differing


def host_costs(gpu: Gpu, workload: Workload, schedule: str) -> dict[str, float]:
    """Microseconds of the host for an eager call of a small shape after the first, by
    array library."""
    costs = {}
    for library, convert in gpu.libraries().items():
        case = workload.converted(convert)
        with case.make(schedule) as operation:
            (call, *_) = case.calls(operation, case.outs)
            call()
            rounds = gpu.host_us(call, HOST_ROUNDS, HOST_CALLS)
            operation.synchronize()
            costs[library] = round(float(median(rounds)), 2)
    return costs


def measure_shapes(run: Run, make: Make, shapes: Shapes) -> Iterator[Result]:
    """The results of all shapes of the workload that `make` makes."""
    device, options = run.device, run.options
    if isinstance(device, Gpu):
        workload = make(device, SMALL, *shapes.small)
        costs = host_costs(device, workload, options.schedule)
        baseline = workload.libraries + device.baseline()
        run.shared |= {"protocol": workload.protocol, "baseline": baseline}
        run.shared["host_us"] = costs
        run.say(f"{workload.op}: host cost of a call {costs} us")
    for name, sizes, rows in shapes.of(run):
        case = make(device, name, sizes, rows)
        case.has_batch = getattr(options, "batch", False)
        yield benchmark(case, options.schedule, options.repeats)
        del case  # before the next one is made
