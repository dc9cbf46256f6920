"""A mixture of experts over many ranks as one program, against torch and NCCL.

launch/mpirun -n 4 benchmarks/moe_parallel.py --parallel expert --routing zipf
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import records
from benchmarks.device import Call, Device, Gpu, open_device
from benchmarks.harness import (
    DTYPE,
    LINK_BYTES_PER_S,
    PROTOCOL,
    REPEATS,
    SCHEDULES,
    Times,
    may_record,
    measure,
    provenance,
    start,
    teller,
)
from benchmarks.moe import (
    CPU_MODELS,
    INPUTS,
    MODELS,
    Case,
    Model,
    Torch,
    faults,
    host_cost,
    in_turn,
    limit_ms,
    make_case,
    reference,
)
from etc_dist.layers.moe import MoE
from etc_dist.layers.moe_graph import PARALLEL
from etc_dist.layers.sparse_block import SparseBlock
from etc_dist.world import World

TOKENS = (128, 512, 2048, 8192)
"""Of a rank."""
CPU_TOKENS = (16,)
ROUTINGS = ("uniform", "zipf")


@dataclass(frozen=True)
class Share:
    """What a rank has of a case: its weights, its tokens or all, and its outputs."""

    whole: Case
    own: Case
    parallel: str
    rank: int
    world: int

    @classmethod
    def of(cls, torch: Any, case: Case, parallel: str, world: World) -> Share:
        model, rank, size = case.model, world.rank, world.size
        block = SparseBlock(*case.weights, model.top_k, True)
        share = block.share(parallel, rank, size)
        weights = share.router, share.gate_up, share.down
        outs = [torch.empty_like(x.chunk(size)[rank]) for x in case.xs]
        xs = case.xs
        if parallel == "expert":
            xs = [x.chunk(size)[rank].contiguous() for x in xs]
        own = Case(replace(model, inner=share.down.shape[2]), *weights, xs, outs)
        return cls(case, own, parallel, rank, size)

    @property
    def experts(self) -> int:
        """Those that this rank has."""
        return int(self.own.down.shape[0])


class TensorParallel(Torch):
    """One rank's layer by torch, and a reduce-scatter by NCCL."""

    def __init__(self, torch: Any, device: Device, share: Share):
        super().__init__(torch, device, share.own)
        self._partial = torch.empty_like(share.own.xs[0])

    def __call__(self, x: Any, out: Any) -> None:
        super().__call__(x, self._partial)
        self.collective_alone(x, out)()

    def collective_alone(self, x: Any, out: Any) -> Call:
        device = self._device
        if isinstance(device, Gpu):
            arrays = map(device.from_torch, (self._partial, out))
            return device.reduce_scatter(*arrays)

        def call() -> None:
            whole = self._partial.float().numpy()
            total = self._torch.empty(out.shape)
            device.reduce_scatter(whole, total.numpy())()
            out.copy_(total)

        return call


class AllToAll(Torch):
    """Each choice's row to its expert's rank and back, by NCCL.

    Sorted by expert, exchanged after the ranks have told each other how many there are,
    sorted by expert again, multiplied, sent back the same way, added."""

    def __init__(self, torch: Any, device: Device, share: Share):
        super().__init__(torch, device, share.own)
        self._share = share

    def __call__(self, x: Any, out: Any) -> None:
        weights, ids = self.choose(x)
        token, order, ends = self.sort(ids)
        sent, received, by_expert = self.agree(ends)
        came = x.new_empty(sum(received), x.shape[1])
        self.exchange(x[token], came, sent, received)
        place, own_ends = self.regroup(by_expert)
        product = self.multiply(came[place], own_ends)
        back = self._torch.empty_like(came)
        back[place] = product
        home = x.new_empty(len(token), x.shape[1])
        self.exchange(back, home, received, sent)
        weight = weights.view(-1)[order].to(home.dtype)
        out.zero_().index_add_(0, token, home.mul_(weight[:, None]))

    def agree(self, ends: Any) -> tuple[list[int], list[int], Any]:
        """Rows to and from each rank, and those from each rank of each own expert; the
        host waits for them."""
        share, device = self._share, self._device
        counts = ends.diff(prepend=ends.new_zeros(1))
        every = counts.new_empty(share.world * len(counts))
        arrays = map(device.from_torch, (counts, every))
        device.all_gather(*arrays)()
        every = every.view(share.world, share.world, share.experts)
        rows = every.sum(dim=2).tolist()
        sent = rows[share.rank]
        return sent, [row[share.rank] for row in rows], every[:, share.rank]

    def regroup(self, by_expert: Any) -> tuple[Any, Any]:
        """The places of received rows by expert, and where each expert's end."""
        share, torch = self._share, self._torch
        experts = self._experts[: share.experts].repeat(share.world)
        expert = experts.repeat_interleave(by_expert.reshape(-1).long())
        ends = by_expert.sum(dim=0).cumsum(dim=0).to(torch.int32)
        return expert.argsort(stable=True), ends

    def exchange(
        self, source: Any, out: Any, sent: Sequence[int], received: Sequence[int]
    ) -> None:
        rows, target = map(self._device.from_torch, (source, out))
        self._device.all_to_all(rows, target, sent, received)()

    def alone(self, x: Any) -> tuple[Call, Call]:
        """Both products, and both exchanges, of rows that are there already."""
        token, _, ends = self.sort(self.choose(x)[1])
        sent, received, by_expert = self.agree(ends)
        rows, came = x[token], x.new_empty(sum(received), x.shape[1])
        self.exchange(rows, came, sent, received)
        place, own_ends = self.regroup(by_expert)
        came = came[place]
        active = self._swiglu(self.up(came, own_ends))

        def products() -> None:
            self.up(came, own_ends)
            self.below(active, own_ends)

        def exchanges() -> None:
            self.exchange(rows, came, sent, received)
            self.exchange(came, rows, received, sent)

        return products, exchanges


class Gathered(AllToAll):
    """All ranks' tokens gathered; own experts' choices of them multiplied, added, and
    the sums reduce-scattered, by NCCL."""

    def __call__(self, x: Any, out: Any) -> None:
        share, device, torch = self._share, self._device, self._torch
        gathered = x.new_empty(share.world * len(x), x.shape[1])
        device.all_gather(*map(device.from_torch, (x, gathered)))()
        weights, ids = self.choose(gathered)
        # Own experts come first: rows behind theirs are left out.
        turned = (ids - share.rank * share.experts) % share.whole.model.experts
        token, order, ends = self.sort(turned)
        ends = ends[: share.experts].contiguous()
        count = int(ends[-1])
        token, order = token[:count], order[:count]
        product = self.multiply(gathered[token], ends)
        weight = weights.view(-1)[order].to(product.dtype)
        partial = torch.zeros_like(gathered)
        partial.index_add_(0, token, product.mul_(weight[:, None]))
        if isinstance(device, Gpu):
            device.reduce_scatter(*map(device.from_torch, (partial, out)))()
            return
        total = torch.empty(out.shape)
        device.reduce_scatter(partial.float().numpy(), total.numpy())()
        out.copy_(total)


def route(torch: Any, case: Case, routing: str) -> None:
    """Make some experts more likely, by Zipf's law, wherever they are: the first column
    of x is 1, and that of the router the logarithm of the odds."""
    if routing == "uniform":
        return
    experts = case.model.experts
    place = torch.randperm(experts, generator=torch.Generator().manual_seed(experts))
    odds = -(1 + place).float().log()
    case.router[:, 0] = odds.to(case.router)
    for x in case.xs:
        x[:, 0] = 1


def limits(torch: Any, theirs: Torch, share: Share) -> tuple[float, float, float]:
    """Milliseconds that the busiest rank must multiply, or read weights, and that its
    links are busy; and the experts that some token chose: means over the inputs."""
    model, size = share.whole.model, share.world
    owned = model.experts // size
    found = []
    for x in share.whole.xs:
        ids = theirs.choose(x)[1]
        active = len(ids.unique())
        if share.parallel == "tensor":
            moved = len(x) * (size - 1) / size
            found.append((limit_ms(share.own.model, len(x), active), moved, active))
            continue
        owners = (ids // owned).cpu()
        rows = owners.flatten().bincount(minlength=size)
        chosen = ids.unique().cpu()
        reads = (chosen // owned).bincount(minlength=size)
        pairs = zip(rows.tolist(), reads.tolist(), strict=True)
        busy = max(limit_ms(model, n / model.top_k, e) for n, e in pairs)
        goes = torch.zeros(len(x), size, dtype=torch.bool)
        goes.scatter_(1, owners, torch.ones_like(owners, dtype=torch.bool))
        by_rank = goes.view(size, -1, size).sum(dim=1)
        by_rank.fill_diagonal_(0)
        # What a rank sends away, and what it sends back.
        moved = float((by_rank.sum(dim=0) + by_rank.sum(dim=1)).max())
        found.append((busy, moved, active))
    busy, moved, active = map(mean, zip(*found, strict=True))
    return busy, 1e3 * moved * model.hidden * 2 / LINK_BYTES_PER_S, active


def benchmark(
    world: World, device: Device, torch: Any, name: str, tokens: int, options: Any
) -> dict[str, Any]:
    """Check, then time one shape, with so many tokens a rank: the part of a record that
    belongs to the shape. Its M is the number of rows of the layer's x: a rank's tokens
    if expert-parallel, those of all ranks if tensor-parallel."""
    model = {**MODELS, **CPU_MODELS}[name]
    place = "cpu" if device.world.backend == "cpu" else f"cuda:{world.device}"
    whole = make_case(torch, place, model, tokens * world.size)
    route(torch, whole, options.routing)
    share = Share.of(torch, whole, options.parallel, world)
    own = share.own
    moe = MoE(
        *own.weights,
        top_k=model.top_k,
        parallel=options.parallel,
        world=world,
        schedule=options.schedule,
    )
    equal = bitwise_equal(torch, device, moe, own)
    expected = [
        reference(torch, whole, x.chunk(world.size)[world.rank])[0] for x in whole.xs
    ]
    error = relative_error(world, own.outs, expected)
    outs = [torch.empty_like(out) for out in own.outs]
    pairs = list(zip(own.xs, outs, strict=True))
    rivals: dict[str, Torch] = (
        {"reduce_scatter": TensorParallel(torch, device, share)}
        if options.parallel == "tensor"
        else {
            "all_to_all": AllToAll(torch, device, share),
            "gathered": Gathered(torch, device, share),
        }
    )
    first = next(iter(rivals.values()))
    baseline_errors = []
    for rival in rivals.values():
        for pair in pairs:
            rival(*pair)
        baseline_errors.append(relative_error(world, outs, expected))
    del expected
    if isinstance(first, AllToAll):
        alone = [first.alone(x) for x in own.xs]
    else:
        assert isinstance(first, TensorParallel)
        alone = [
            (first.products_alone(x), first.collective_alone(x, out))
            for x, out in pairs
        ]
    busy, wire, active = limits(torch, first, share)
    host_us = host_cost(device, moe, own)
    calls = {
        "ours": in_turn([partial(moe, *p) for p in zip(own.xs, own.outs, strict=True)]),
        **{
            name: in_turn([partial(rival, *pair) for pair in pairs])
            for name, rival in rivals.items()
        },
        "gemm": in_turn([products for products, _ in alone]),
        "collective": in_turn([collectives for _, collectives in alone]),
    }
    times = measure(device, calls, options.repeats)
    values = {
        "model": name,
        "M": len(own.xs[0]),
        "N": model.hidden,
        "K": own.model.inner,
        "dtype": DTYPE,
        "experts": model.experts,
        "top_k": model.top_k,
        "active_experts": round(active, 2),
        "routing": options.routing,
        "schedule": moe.program.plan.schedule,
        **provenance(world, moe),
        **durations(times, rivals, busy, wire),
        "error": error,
        "baseline_error": max(baseline_errors),
        "bitwise_equal": equal,
        "repeats": options.repeats,
        "host_us": host_us,
    }
    moe.synchronize()
    moe.close()
    return values


def bitwise_equal(torch: Any, device: Device, moe: MoE, case: Case) -> bool:
    """Whether three runs on each input give equal bits on all ranks; leaves the last in
    the outs. Before each run, the output and what peers write to are poisoned."""
    same = True
    for x, out in zip(case.xs, case.outs, strict=True):
        moe(x, out)  # gives the layer memory of this size
        seen = []
        for _ in range(3):
            moe.synchronize()
            out.fill_(float("nan"))
            device.poison_staging(moe)
            device.synchronize()
            device.world.barrier()
            moe(x, out)
            moe.synchronize()
            seen.append(out.view(torch.int16).clone())
        same &= all(torch.equal(seen[0], other) for other in seen[1:])
    return all(device.world.gather(same))


def relative_error(world: World, outs: Sequence[Any], expected: Sequence[Any]) -> float:
    """The relative Frobenius norm over all inputs and ranks; NaN if any is."""
    pairs = list(zip(outs, expected, strict=True))
    off = sum(float((o.double() - r).square().sum()) for o, r in pairs)
    norm = sum(float(r.double().square().sum()) for _, r in pairs)
    every: Any = world.gather((off, norm))
    return float((sum(o for o, _ in every) / sum(n for _, n in every)) ** 0.5)


def durations(
    times: Mapping[str, Times], rivals: Mapping[str, Any], busy: float, wire: float
) -> dict[str, Any]:
    ms = {name: each.median for name, each in times.items()}
    baselines = {name: round(ms.pop(name), 5) for name in rivals}
    ms["baseline"] = min(baselines.values())
    limit = max(busy, wire)
    return {
        **{f"{name}_ms": round(value, 5) for name, value in ms.items()},
        "baselines_ms": baselines,
        "wire_ms": round(wire, 5),
        "limit_ms": round(limit, 5),
        "of_limit": round(limit / ms["ours"], 4),
        "speedup": round(ms["baseline"] / ms["ours"], 4),
        "ours_spread_ms": tuple(round(q, 5) for q in times["ours"].quartiles),
    }


def main() -> int:
    options = _parse()
    world = start(options.cpu)
    on_gpu = world.backend == "cuda"
    tell = teller(world)
    tell(world.show())
    if not on_gpu:
        tell("the CPU backend is no performance path: its times mean nothing")
    device = open_device(world)
    torch = import_module("torch")
    facts = device.facts()
    facts["baseline"] = f"torch {torch.__version__}, _grouped_mm; {facts['baseline']}"
    models = options.models or list(MODELS if on_gpu else CPU_MODELS)
    op, failed = f"moe_{options.parallel}_parallel", False
    for model in models:
        for tokens in options.tokens_per_rank or (TOKENS if on_gpu else CPU_TOKENS):
            values = benchmark(world, device, torch, model, tokens, options)
            wrong = faults(values)
            failed = failed or bool(wrong)
            tell(_line(values) + "".join(f"\n  FAILED: {fault}" for fault in wrong))
            if not wrong and may_record(world, options.record):
                stamp = {"commit": records.commit(), "date": records.now()}
                shared = {"op": op, "protocol": protocol(), **facts, **stamp}
                records.append(records.parse({**shared, **values}), options.record)
    world.close()
    return int(failed)


def protocol() -> str:
    return f"{PROTOCOL}; {INPUTS} inputs take turns; the faster of baselines_ms"


def _parse() -> argparse.Namespace:
    models: Mapping[str, Model] = {**MODELS, **CPU_MODELS}
    parser = argparse.ArgumentParser(description="Time a mixture of experts on ranks.")
    add = parser.add_argument
    add("--parallel", choices=PARALLEL, default="expert")
    add("--routing", choices=ROUTINGS, default="uniform")
    text = f"some of {','.join(models)}, with commas between"
    add("--models", type=lambda names: names.split(","), help=text)
    text = f"numbers of tokens of a rank, with commas between; default: {TOKENS}"
    add("--tokens-per-rank", type=lambda counts: [*map(int, counts.split(","))], help=text)
    add("--schedule", choices=SCHEDULES, default="static")
    add("--repeats", type=int, default=REPEATS)
    add("--record", type=Path, help="default: benchmarks/results/<op>.jsonl")
    add("--cpu", action="store_true", help="the CPU backend: no performance path")
    options = parser.parse_args()
    unknown = set(options.models or ()) - models.keys()
    if unknown:
        parser.error(f"unknown models {', '.join(sorted(unknown))}")
    return options


def _line(values: Mapping[str, Any]) -> str:
    return (
        "{model:14s} M {M:5d} {routing}, {active_experts:g} experts: ours {ours_ms:.3f}"
        ", baselines {baselines_ms}, products {gemm_ms:.3f}, collectives "
        "{collective_ms:.3f}, limit {limit_ms:.3f} (wire {wire_ms:.3f}) ms; speed-up "
        "{speedup:.2f}, of limit {of_limit:.2f}, error {error:.2e} (baseline "
        "{baseline_error:.2e}), equal bits {bitwise_equal}, host {host_us} us"
    ).format(**values)


if __name__ == "__main__":
    sys.exit(main())
