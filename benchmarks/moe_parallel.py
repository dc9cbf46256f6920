"""A mixture of experts over many ranks as one program, against torch and NCCL.

launch/mpirun -n 4 benchmarks/moe_parallel.py --parallel expert --routing zipf
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import begin, numbers, parser_for, provenance
from benchmarks.device import Call, Device, Gpu
from benchmarks.harness import DTYPE, LINK_BYTES_PER_S, PROTOCOL, durations, measure
from benchmarks.moe import (
    CPU_MODELS,
    INPUTS,
    MODELS,
    Case,
    Torch,
    all_equal,
    host_costs,
    in_turn,
    limit_ms,
    make_case,
    measure_all,
    reference,
    relative_error,
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
        return reduce_scatter(self._torch, self._device, self._partial, out)


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
        reduce_scatter(torch, device, partial, out)()


def reduce_scatter(torch: Any, device: Device, source: Any, out: Any) -> Call:
    """Of tensors; in fp32 on the CPU, where MPI adds."""
    if isinstance(device, Gpu):
        return device.reduce_scatter(*map(device.from_torch, (source, out)))

    def call() -> None:
        total = torch.empty(out.shape)
        device.reduce_scatter(source.float().numpy(), total.numpy())()
        out.copy_(total)

    return call


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
    device: Device, torch: Any, options: Any, name: str, tokens: int
) -> dict[str, Any]:
    """Check, then time one shape, with so many tokens a rank: the part of a record that
    belongs to the shape. Its M is the number of rows of the layer's x: a rank's tokens
    if expert-parallel, those of all ranks if tensor-parallel."""
    model, world = {**MODELS, **CPU_MODELS}[name], device.world
    whole = make_case(torch, device, model, tokens * world.size)
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
    equal = all_equal(device, moe, own)
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
    host_us = host_costs(device, moe, own)
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
    baselines = {name: times.pop(name) for name in rivals}
    times["baseline"] = min(baselines.values(), key=attrgetter("median"))
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
        **provenance(moe.program),
        **durations(times, busy, wire),
        "baselines_ms": {n: round(each.median, 5) for n, each in baselines.items()},
        "error": error,
        "baseline_error": max(baseline_errors),
        "bitwise_equal": equal,
        "repeats": options.repeats,
        "host_us": host_us,
    }
    moe.synchronize()
    moe.close()
    return values


def main() -> int:
    parser = parser_for("a mixture of experts on ranks", {**MODELS, **CPU_MODELS})
    add = parser.add_argument
    add("--parallel", choices=PARALLEL, default="expert")
    add("--routing", choices=ROUTINGS, default="uniform")
    text = f"numbers of tokens of a rank, with commas between; default: {TOKENS}"
    add("--tokens-per-rank", type=numbers, help=text)
    options = parser.parse_args()
    device = begin(options.cpu)
    torch, facts = import_module("torch"), device.facts()
    shared = {
        "op": f"moe_{options.parallel}_parallel",
        "protocol": f"{PROTOCOL}; {INPUTS} inputs take turns; the faster of "
        "baselines_ms",
        **facts,
        "baseline": f"torch {torch.__version__}, _grouped_mm; {facts['baseline']}",
    }
    default = TOKENS if isinstance(device, Gpu) else CPU_TOKENS
    counts = options.tokens_per_rank or default
    measured = partial(benchmark, device, torch, options)
    return measure_all(device, options, shared, counts, measured, _line)


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
