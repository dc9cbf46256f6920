"""The baselines of a mixture of experts on GPUs: torch's grouped GEMMs, NCCL, and
vLLM's Triton kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from benchmarks.device import Call, Gpu

if TYPE_CHECKING:
    from benchmarks.subjects.moe import MoEWorkload

VLLM = "vllm.model_executor.layers.fused_moe"


class Torch:
    """The layer by torch on one rank: each step a kernel or a few.

    Router, softmax, top-k, sort, grouped GEMM, SwiGLU, grouped GEMM, weighted
    index_add. Logits in fp32, as ours, so that both choose the same experts."""

    def __init__(
        self, gpu: Gpu, case: MoEWorkload, weights: Sequence[Any] | None = None
    ):
        """weights: in place of those of `case`."""
        self._torch, self._gpu = import_module("torch"), gpu
        self._top_k, self._choice = case.model.top_k, case.router
        self.router, self.gate_up, self.down, *self._correction = map(
            gpu.as_torch, weights or case.weights
        )
        self._xs = [gpu.as_torch(x) for x in case.xs]
        num_experts = len(self.router)
        self._experts = self._torch.arange(num_experts, device=self.router.device)
        self._world, self._rank = case.world.size, case.world.rank
        # Those of a rank, if expert-parallel.
        self._num_own_experts = num_experts // self._world

    def __call__(self, x: Any, out: Any) -> None:
        weights, ids = self.choose(x)
        token, order, ends = self.sort(ids)
        rows = self.multiply(x[token], ends)
        weight = weights.view(-1)[order].to(rows.dtype)
        out.zero_().index_add_(0, token, rows.mul_(weight[:, None]))

    def alone(self, x: Any) -> tuple[Call, ...]:
        """Both grouped GEMMs, on sorted rows, and the collectives of the layer."""
        token, _, ends = self.sort(self.choose(x)[1])
        return (self.gemms(x[token], ends),)

    def choose(self, x: Any) -> tuple[Any, Any]:
        """Weights and ids [tokens, top_k]."""
        logits, score = self.logits(x), self._choice.score
        if score == "softmax_chosen":
            logits, ids = logits.topk(self._top_k, dim=1)
            return logits.softmax(dim=1), ids
        if score == "sqrt_softplus":
            scores = self._torch.nn.functional.softplus(logits).sqrt()
        else:
            scores = logits.sigmoid() if score == "sigmoid" else logits.softmax(dim=1)
        if self._correction:
            ids = self.best(scores + self._correction[0])
            weights = scores.gather(1, ids)
        else:
            weights, ids = scores.topk(self._top_k, dim=1)
        if self._choice.normalize:
            weights = weights / weights.sum(dim=1, keepdim=True)
        scale = self._choice.scale
        return weights if scale == 1 else weights * scale, ids

    def best(self, values: Any) -> Any:
        """The ids of the largest values, of the groups whose best two have the largest
        sums."""
        choice = self._choice
        if choice.has_groups:
            groups = values.view(len(values), choice.num_groups, -1)
            sums = groups.topk(2, dim=2).values.sum(dim=2)
            best_groups = sums.topk(choice.topk_group, dim=1).indices
            is_out = self._torch.ones_like(sums).scatter(1, best_groups, 0).bool()
            values = groups.masked_fill(is_out[:, :, None], -math.inf).view_as(values)
        return values.topk(self._top_k, dim=1).indices

    def logits(self, x: Any) -> Any:
        """The router's, in fp32."""
        return self._torch.mm(x, self.router.t(), out_dtype=self._torch.float32)

    def sort(self, ids: Any) -> tuple[Any, Any, Any]:
        """Choices by expert: their tokens, their places in ids, the experts' ends."""
        sorted_ids, order = ids.view(-1).sort(stable=True)
        ends = self._torch.searchsorted(
            sorted_ids, self._experts, right=True, out_int32=True
        )
        return order // self._top_k, order, ends

    def multiply(self, rows: Any, ends: Any) -> Any:
        return self.project_down(self.swiglu(self.project_up(rows, ends)), ends)

    def project_up(self, rows: Any, ends: Any) -> Any:
        return self._torch._grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends)

    def project_down(self, active: Any, ends: Any) -> Any:
        return self._torch._grouped_mm(active, self.down.transpose(1, 2), offs=ends)

    def gemms(self, rows: Any, ends: Any) -> Call:
        active = self.swiglu(self.project_up(rows, ends))

        def call() -> None:
            self.project_up(rows, ends)
            self.project_down(active, ends)

        return call

    def swiglu(self, gate_and_up: Any) -> Any:
        active = gate_and_up.new_empty(gate_and_up.shape[0], gate_and_up.shape[1] // 2)
        self._gpu.swiglu(*map(self._gpu.from_torch, (gate_and_up, active)))()
        return active

    def reduce_scatter(self, source: Any, out: Any) -> Call:
        return self._gpu.reduce_scatter(*map(self._gpu.from_torch, (source, out)))


class TensorParallel(Torch):
    """One rank's layer by torch, and a reduce-scatter by NCCL."""

    def __init__(self, gpu: Gpu, case: MoEWorkload):
        super().__init__(gpu, case)
        self._partial = self._torch.empty_like(self._xs[0])

    def __call__(self, x: Any, out: Any) -> None:
        super().__call__(x, self._partial)
        self.reduce_scatter(self._partial, out)()

    def alone(self, x: Any) -> tuple[Call, ...]:
        out = self._torch.empty_like(x[: len(x) // self._world])
        return *super().alone(x), self.reduce_scatter(self._partial, out)


class AllToAll(Torch):
    """Each choice's row to its expert's rank and back, by NCCL.

    Sorted by expert, exchanged after an all-gather of their counts, sorted by expert
    again, multiplied, sent back the same way, added."""

    def __call__(self, x: Any, out: Any) -> None:
        weights, ids = self.choose(x)
        token, order, ends = self.sort(ids)
        num_sent, num_received, by_expert = self.agree(ends)
        came = x.new_empty(sum(num_received), x.shape[1])
        self.exchange(x[token], came, num_sent, num_received)
        place, own_ends = self.regroup(by_expert)
        rows = self.multiply(came[place], own_ends)
        back = self._torch.empty_like(came)
        back[place] = rows
        home = x.new_empty(len(token), x.shape[1])
        self.exchange(back, home, num_received, num_sent)
        weight = weights.view(-1)[order].to(home.dtype)
        out.zero_().index_add_(0, token, home.mul_(weight[:, None]))

    def agree(self, ends: Any) -> tuple[list[int], list[int], Any]:
        """Rows to and from each rank, and those from each rank of each own expert; the
        host waits for them."""
        counts = ends.diff(prepend=ends.new_zeros(1))
        every = counts.new_empty(self._world * len(counts))
        self._gpu.all_gather(*map(self._gpu.from_torch, (counts, every)))()
        every = every.view(self._world, self._world, self._num_own_experts)
        rows = every.sum(dim=2).tolist()
        num_sent = rows[self._rank]
        return num_sent, [row[self._rank] for row in rows], every[:, self._rank]

    def regroup(self, by_expert: Any) -> tuple[Any, Any]:
        """The places of received rows by expert, and where each expert's end."""
        experts = self._experts[: self._num_own_experts].repeat(self._world)
        expert = experts.repeat_interleave(by_expert.reshape(-1).long())
        ends = by_expert.sum(dim=0).cumsum(dim=0).to(self._torch.int32)
        return expert.argsort(stable=True), ends

    def exchange(
        self,
        source: Any,
        out: Any,
        num_sent: Sequence[int],
        num_received: Sequence[int],
    ) -> None:
        rows, target = map(self._gpu.from_torch, (source, out))
        self._gpu.all_to_all(rows, target, num_sent, num_received)()

    def alone(self, x: Any) -> tuple[Call, ...]:
        """Both GEMMs, and both exchanges."""
        token, _, ends = self.sort(self.choose(x)[1])
        num_sent, num_received, by_expert = self.agree(ends)
        rows, came = x[token], x.new_empty(sum(num_received), x.shape[1])
        self.exchange(rows, came, num_sent, num_received)
        place, own_ends = self.regroup(by_expert)
        came = came[place]

        def exchanges() -> None:
            self.exchange(rows, came, num_sent, num_received)
            self.exchange(came, rows, num_received, num_sent)

        return self.gemms(came, own_ends), exchanges


class Gathered(AllToAll):
    """All ranks' tokens gathered; own experts' choices of them multiplied, added, and
    the sums reduce-scattered, by NCCL."""

    def __call__(self, x: Any, out: Any) -> None:
        gpu, torch = self._gpu, self._torch
        all_x = x.new_empty(self._world * len(x), x.shape[1])
        gpu.all_gather(*map(gpu.from_torch, (x, all_x)))()
        weights, ids = self.choose(all_x)
        # Own experts come first: later rows are dropped.
        turned = (ids - self._rank * self._num_own_experts) % len(self._experts)
        token, order, ends = self.sort(turned)
        ends = ends[: self._num_own_experts].contiguous()
        count = int(ends[-1])
        token, order = token[:count], order[:count]
        rows = self.multiply(all_x[token], ends)
        weight = weights.view(-1)[order].to(rows.dtype)
        partial = torch.zeros_like(all_x)
        partial.index_add_(0, token, rows.mul_(weight[:, None]))
        self.reduce_scatter(partial, out)()


LAYERS = {
    "baseline": Torch,
    "reduce_scatter": TensorParallel,
    "all_to_all": AllToAll,
    "gathered": Gathered,
}


class FusedMoE:
    """The layer by vLLM: its routing, and its Triton kernel for each grouped GEMM, with
    vLLM's tile sizes for the device. Logits in fp32, as ours."""

    def __init__(self, torch: Torch, top_k: int):
        self._layers = import_module(VLLM)
        self._logits, self._top_k = torch.logits, top_k
        self._weights = torch.gate_up, torch.down

    def __call__(self, x: Any) -> Any:
        """The result for x, in new memory."""
        layers = self._layers
        scores = self._logits(x)
        weights, ids, *_ = layers.fused_topk(x, scores, self._top_k, renormalize=True)
        return layers.fused_experts(x, *self._weights, weights, ids)

    def name(self) -> str:
        """The versions, and the origin of the tile sizes."""
        kernel = import_module(f"{VLLM}.fused_moe")
        experts, _, inner = self._weights[1].shape
        tuned = kernel.get_moe_configs(experts, inner, None)
        file = kernel.get_config_file_name(experts, inner, None)
        vllm, triton = (import_module(n).__version__ for n in ("vllm", "triton"))
        tiles = f"tuned tiles {file}" if tuned else "default tiles"
        return f"vLLM {vllm} fused_experts, Triton {triton}, {tiles}"
