"""Layers as modules of torch: a rank's shard of their weights, and its group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn

from etc_dist.errors import ArgumentError, expect_choice, expect_type
from etc_dist.functions.activation import SWIGLU, Activation
from etc_dist.functions.router import Router
from etc_dist.layers.moe import mixture_and_arrays
from etc_dist.layers.moe_graph import PARALLEL
from etc_dist.layers.sparse_block import read_sparse_block
from etc_dist.ops.deterministic import check_deterministic
from etc_dist.ops.scaled_weight import ScaledWeight
from etc_dist.torch.blocks import check_linear, check_mlp
from etc_dist.torch.gradients import matmul_all_reduce_replicated
from etc_dist.torch.ranks import Group, Ranks, ranks_of, refusing

OPS = torch.ops.etc_dist
REDUCE = ("scatter", "all")
Map: TypeAlias = Callable[[Tensor, Ranks], Tensor]
Weight: TypeAlias = Tensor | ScaledWeight


def _split(extent: int, ranks: Ranks, what: str) -> slice:
    """The part of this rank of an axis of the weights."""
    if extent % ranks.size:
        raise ArgumentError(
            "the weights cannot be split evenly",
            where="a module of etc_dist.torch",
            wanted=f"{what}: a multiple of {ranks.size}, the number of ranks",
            got=f"{what} = {extent}",
            fix="use another number of ranks",
        )
    extent_of_rank = extent // ranks.size
    return slice(ranks.rank * extent_of_rank, (ranks.rank + 1) * extent_of_rank)


def _parameter(source: Tensor, part: Tensor | None = None) -> nn.Parameter:
    """A part of a parameter as a contiguous parameter: by reference if that is one."""
    if part is None or part.shape == source.shape:
        return source if isinstance(source, nn.Parameter) else nn.Parameter(source)
    return nn.Parameter(part.detach().contiguous(), source.requires_grad)


class _ParallelLinear(nn.Module):
    """weight: this rank's shard, as in nn.Linear. group: a ProcessGroup or its name;
    default: torch's default group. dim: the axis of x and y that is gathered or
    scattered, not the last, counted from 0."""

    _features: str
    """The size of an nn.Linear that the ranks split."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        group: Group = None,
        dim: int = 0,
    ):
        super().__init__()
        with refusing(group, type(self).__name__):
            # torch would repeat a bias of one element.
            if bias is not None and bias.shape != weight.shape[:1]:
                raise ArgumentError(
                    "the bias does not fit the weight",
                    where=type(self).__name__,
                    wanted=f"bias {list(weight.shape[:1])}",
                    got=f"bias {list(bias.shape)}",
                    fix="pass those of one nn.Linear",
                )
            self.weight = _parameter(weight)
            self.bias = None if bias is None else _parameter(bias)
            self.ranks, self.dim = ranks_of(group), dim

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, group: Group = None, dim: int = 0
    ) -> Self:
        """This rank's shard of a whole nn.Linear: on several ranks a copy, but for a
        bias that each rank has whole. ArgumentError for other modules, adapters and
        hooks, and unless the number of ranks divides the size that is split."""
        with refusing(group, f"{cls.__name__}.from_linear"):
            check_linear(linear)
            weight, bias = linear.weight, linear.bias
            is_row = cls._features == "in_features"
            own_slice = _split(weight.shape[is_row], ranks_of(group), cls._features)
            part = _parameter(
                weight, weight[:, own_slice] if is_row else weight[own_slice]
            )
            if bias is not None and not is_row:
                bias = _parameter(bias, bias[own_slice])
        return cls(part, bias, group=group, dim=dim)


class ColumnParallelLinear(_ParallelLinear):
    """AllGather + GEMM, as Megatron-LM's with sequence parallelism: each rank has its
    part of x along `dim`, and gets its N / W columns of x @ weight.T + bias for all of
    x: [M / W, K] -> [M, N / W] with dim 0. bfloat16 or float16. With gradients. A row
    has the same bits for any M.

    weight [N / W, K] and bias [N / W] are kept by reference. group: a process group, or
    its name; default: torch's default group, or the current world where
    torch.distributed is not initialised."""

    _features = "out_features"

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K], a part along `dim`, to y [..., N / W] of all. Collective."""
        weights, dim, name = [self.weight.t()], self.dim, self.ranks.name
        _, (y,) = OPS.fused_all_gather_matmul(x, weights, dim, name, return_A=False)
        return y if self.bias is None else y + self.bias


class RowParallelLinear(_ParallelLinear):
    """GEMM + Reduce-Scatter, as Megatron-LM's with sequence parallelism: of the sum
    over ranks of x [..., K / W] @ weight.T, each rank gets its part along `dim`, +
    bias: [M, K / W] -> [M / W, N] with dim 0. bfloat16 or float16. With gradients; that
    of bias is summed over the ranks, whose rows all use it. A row has the same bits for
    any M.

    reduce: "scatter", or "all" for GEMM + All-Reduce, as Megatron-LM's without sequence
    parallelism: each rank gets the whole sum [..., N], N a multiple of 8. What follows
    is the same on all ranks, and so is its gradient, which is not added.

    weight [N, K / W] and the whole bias [N] are kept by reference. group: as for
    `ColumnParallelLinear`."""

    _features = "in_features"

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        group: Group = None,
        dim: int = 0,
        reduce: str = "scatter",
    ):
        with refusing(group, type(self).__name__):
            expect_choice(reduce, REDUCE, "reduce")
        super().__init__(weight, bias, group=group, dim=dim)
        self.reduce = reduce

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        group: Group = None,
        dim: int = 0,
        reduce: str = "scatter",
    ) -> Self:
        """As of `ColumnParallelLinear`."""
        with refusing(group, f"{cls.__name__}.from_linear"):
            expect_choice(reduce, REDUCE, "reduce")
        layer = super().from_linear(linear, group=group, dim=dim)
        layer.reduce = reduce
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K / W] to y [..., N], a part along `dim` or whole. Collective."""
        if self.reduce == "all":
            weight, name = self.weight.t(), self.ranks.name
            whole = matmul_all_reduce_replicated(x, weight, name)
            return whole if self.bias is None else whole + self.bias
        y = OPS.fused_matmul_reduce_scatter(
            x, self.weight.t(), "sum", self.dim, self.ranks.name
        )
        if self.bias is None:
            return y
        if self.ranks.size == 1:
            return y + self.bias
        return y + _Linked.apply(self.bias, self.ranks, _same, _sum)


class _Linear(nn.Module):
    """A weight under the name that it has in an nn.Linear."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = _parameter(weight)


class MLP(nn.Module):
    """`etc_dist.MLP` as a module: (silu(x @ gate.T) * (x @ up.T)) @ down.T as one
    kernel per rank, x [..., H] -> [..., H]. bfloat16 or float16.

    gate, up [I / W, H] and down [H, I / W]: this rank's shard, kept by reference. x has
    this rank's rows, equally many on all ranks. replicated: x is the same on all ranks,
    and so is the result: each rank computes a part of the rows, which are then
    gathered. group: as for `ColumnParallelLinear`.

    Where a gradient is needed, it runs the two collectives instead: their sums are
    rounded at other places. deterministic: as for `etc_dist.MLP`."""

    def __init__(
        self,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        *,
        group: Group = None,
        replicated: bool = False,
        deterministic: str = "run",
    ):
        super().__init__()
        with refusing(group, type(self).__name__):
            check_deterministic(deterministic)
            self.gate_proj, self.up_proj = _Linear(gate), _Linear(up)
            self.down_proj = _Linear(down)
            self.ranks, self.replicated = ranks_of(group), replicated
            self.deterministic = deterministic

    @classmethod
    def from_block(
        cls,
        block: nn.Module,
        *,
        group: Group = None,
        replicated: bool = False,
        deterministic: str = "run",
    ) -> Self:
        """This rank's shard of a known MLP of transformers, with gate_proj, up_proj and
        down_proj: a copy on several ranks. ArgumentError for other classes, adapters,
        hooks, a bias and other activations than SiLU (blocks.py), and unless the number
        of ranks divides the inner size."""
        with refusing(group, f"{cls.__name__}.from_block"):
            check_mlp(block)
            gate, up, down = (
                getattr(block, f"{part}_proj").weight for part in ("gate", "up", "down")
            )
            own_slice = _split(gate.shape[0], ranks_of(group), "intermediate_size")
            narrow = _parameter(down, down[:, own_slice])
        return cls(
            _parameter(gate, gate[own_slice]),
            _parameter(up, up[own_slice]),
            narrow,
            group=group,
            replicated=replicated,
            deterministic=deterministic,
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] to the result of the same shape and dtype. Collective."""
        rows = _own_rows(x, self.ranks) if self.replicated else x.flatten(0, -2)
        weights = self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
        if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights)):
            gate, up, down = (weight.t() for weight in weights)
            name = self.ranks.name
            _, (gated, scaled) = OPS.fused_all_gather_matmul(
                rows, [gate, up], 0, name, return_A=False
            )
            active = nn.functional.silu(gated) * scaled
            y = OPS.fused_matmul_reduce_scatter(active, down, "sum", 0, name)
        else:
            name, deterministic = self.ranks.name, self.deterministic
            y = OPS.mlp(rows, *weights, name, deterministic=deterministic)
        return _all_rows(y, x, self.ranks) if self.replicated else y.view(x.shape)


SCALES = "_scale_inv"
"""What follows the name of a weight in that of its scales, as in transformers."""


def _hold(module: nn.Module, name: str, weight: Weight) -> None:
    """Set a parameter of a module; of a ScaledWeight those of its codes and scales."""
    if not isinstance(weight, ScaledWeight):
        setattr(module, name, _parameter(weight))
        return
    for suffix, part in zip(("", SCALES), weight, strict=True):
        is_held = isinstance(part, nn.Parameter)
        parameter = part if is_held else nn.Parameter(part, requires_grad=False)
        setattr(module, name + suffix, parameter)


class _Experts(nn.Module):
    """Weights, and perhaps biases, under the names that they have in transformers."""

    def __init__(self, gate_up: Weight, down: Weight, biases: list[Tensor]):
        super().__init__()
        _hold(self, "gate_up_proj", gate_up)
        _hold(self, "down_proj", down)
        for name, bias in zip(BIASES, biases, strict=False):
            setattr(self, name, _parameter(bias))


BIASES = "gate_up_proj_bias", "down_proj_bias"
"""Of experts, as transformers names them."""


class _Gate(nn.Module):
    """A router, and its biases in fp32."""

    def __init__(self, weight: Tensor, bias: Tensor | None, correction: Tensor | None):
        super().__init__()
        self.weight = _parameter(weight)
        self.register_buffer("bias", bias)
        self.register_buffer("e_score_correction_bias", correction)


class _SharedExpert(nn.Module):
    """The weights of a shared expert, and its gate [H], if it has one."""

    def __init__(self, gate_up: Weight, down: Weight, gate: Tensor | None = None):
        super().__init__()
        _hold(self, "gate_up_proj", gate_up)
        _hold(self, "down_proj", down)
        self.gate = None if gate is None else _parameter(gate)


class MoE(nn.Module):
    """`etc_dist.MoE` as a module, one kernel per rank, without gradients: x [..., H] ->
    [..., H]. bfloat16 or float16.

    router [E, H], gate_up and down, this rank's shard of the experts, are kept by
    reference; their shapes and the options are those of `torch.ops.etc_dist.moe`.
    Weights of experts may all be `etc_dist.ScaledWeight`s.
    replicated: x and the result are the same on all ranks. Otherwise, with
    parallel="tensor" on several ranks, x [M, H] is the same and the result [M / W, H]
    this rank's part of the rows; with parallel="expert" each rank has its own rows.
    group: as for `ColumnParallelLinear`. The other options: as for `etc_dist.MoE`."""

    def __init__(
        self,
        router: Tensor,
        gate_up: Weight,
        down: Weight,
        *,
        top_k: int | Router,
        normalize: bool | None = None,
        router_bias: Tensor | None = None,
        correction: Tensor | None = None,
        shared: tuple[Weight, Weight] | None = None,
        shared_gate: Tensor | None = None,
        activation: Activation = SWIGLU,
        expert_biases: tuple[Tensor, Tensor] | None = None,
        parallel: str = "tensor",
        group: Group = None,
        replicated: bool = False,
        deterministic: str = "run",
    ):
        super().__init__()
        name = type(self).__name__
        with refusing(group, name):
            check_deterministic(deterministic)
            expect_choice(parallel, PARALLEL, "parallel")
            expect_type(activation, Activation, "activation")
            mixture, _, of_experts, of_shared = mixture_and_arrays(
                name,
                top_k,
                normalize,
                router_bias,
                correction,
                shared,
                shared_gate,
                activation,
                expert_biases,
            )
            self.router = mixture.router
            self.gate = _Gate(router, router_bias, correction)
            self.experts = _Experts(gate_up, down, of_experts)
            self.activation, self.returns_pair = activation, False
            self.shared = _SharedExpert(*of_shared) if of_shared else None
            self.parallel = parallel
            self.ranks, self.replicated = ranks_of(group), replicated
            self.deterministic = deterministic

    @classmethod
    def from_block(
        cls,
        block: nn.Module,
        *,
        parallel: str = "tensor",
        group: Group = None,
        replicated: bool = False,
        deterministic: str = "run",
    ) -> Self:
        """This rank's shard of a sparse block of transformers, of a family of
        docs/layers.md: a copy if `parallel` is "tensor" on several ranks. ArgumentError
        for blocks that compute something else."""
        with refusing(group, f"{cls.__name__}.from_block"):
            ranks = ranks_of(group)
            sparse_block = read_sparse_block(block)
            own_share = sparse_block.share(parallel, ranks.rank, ranks.size)
        module = cls(
            own_share.router,
            own_share.gate_up,
            own_share.down,
            **own_share.arguments(),
            parallel=parallel,
            group=group,
            replicated=replicated,
            deterministic=deterministic,
        )
        module.returns_pair = own_share.returns_pair
        return module

    def forward(self, x: Tensor, input_ids: Tensor | None = None) -> Any:
        """x [..., H] to the result: of the same shape, or [M / W, H]. Collective. In
        place of a block that also returns the weights, it returns the result and None.
        input_ids: not used."""
        y = self._forward(x)
        return (y, None) if self.returns_pair else y

    def _forward(self, x: Tensor) -> Tensor:
        router, shared = self.router, self.shared
        rows = x.flatten(0, -2)
        if self.replicated:
            is_tensor = self.parallel == "tensor"
            rows = _padded(rows, self.ranks) if is_tensor else _own_rows(x, self.ranks)
        options = {
            "score": router.score,
            "scale": router.scale,
            "num_groups": router.num_groups,
            "topk_group": router.topk_group,
            "group_score": router.group_score,
            "router_bias": _in_fp32(self.gate.bias),
            "correction": _in_fp32(self.gate.e_score_correction_bias),
        }
        act = self.activation
        options |= {"activation": act.function, "alpha": act.alpha}
        options |= {"limit": act.limit, "shift": act.shift}
        for name in BIASES:
            option = name.replace("_proj", "")
            options[option] = getattr(self.experts, name, None)
        for name in ("gate_up", "down"):
            proj = f"{name}_proj"
            options[f"{name}_scales"] = getattr(self.experts, proj + SCALES, None)
            if shared is not None:
                scales = getattr(shared, proj + SCALES, None)
                options[f"shared_{name}"] = getattr(shared, proj)
                options[f"shared_{name}_scales"] = scales
        if shared is not None:
            options["shared_gate"] = shared.gate
        y = OPS.moe(
            rows,
            self.gate.weight,
            self.experts.gate_up_proj,
            self.experts.down_proj,
            router.top_k,
            router.normalize,
            self.parallel,
            self.ranks.name,
            deterministic=self.deterministic,
            **options,
        )
        if self.replicated:
            return _all_rows(y, x, self.ranks)
        return y.view(x.shape) if y.shape[0] == rows.shape[0] else y


def _in_fp32(bias: Tensor | None) -> Tensor | None:
    """A bias, also of a model that was converted to another dtype."""
    return None if bias is None else bias.float()


def _padded(rows: Tensor, ranks: Ranks) -> Tensor:
    """Rows in a multiple of the number of ranks: zeros are added."""
    return nn.functional.pad(rows, (0, 0, 0, -rows.shape[0] % ranks.size))


def _own_rows(x: Tensor, ranks: Ranks) -> Tensor:
    """This rank's part of the rows of x, which are the same on all ranks."""
    rows = x.flatten(0, -2)
    if ranks.size == 1:
        return rows
    part: Tensor = _Linked.apply(_padded(rows, ranks), ranks, _part, _whole)
    return part


def _all_rows(part: Tensor, x: Tensor, ranks: Ranks) -> Tensor:
    """The parts of all ranks as a result for x."""
    if ranks.size > 1:
        part = _Linked.apply(part, ranks, _whole, _part)
    return part[: x.shape[:-1].numel()].view(x.shape)


class _Linked(torch.autograd.Function):
    """A linear map `one` and its adjoint `other`: each is the gradient of the other."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ranks: Ranks, forward_map: Map, backward_map: Map
    ) -> Tensor:
        ctx.adjoint = ranks, backward_map, forward_map
        return forward_map(x, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Linked.apply(grad, *ctx.adjoint), None, None, None


def _part(rows: Tensor, ranks: Ranks) -> Tensor:
    """This rank's part of rows that are the same on all ranks, as their gradients."""
    num_rows = rows.shape[0] // ranks.size
    return rows.narrow(0, ranks.rank * num_rows, num_rows).clone()


def _whole(part: Tensor, ranks: Ranks) -> Tensor:
    """The parts of all ranks."""
    whole: Tensor = OPS.gather_rows(part, ranks.name)
    return whole


def _same(vector: Tensor, ranks: Ranks) -> Tensor:
    """A vector that all ranks use for rows of their own: its gradient is `_sum`."""
    return vector.view_as(vector)


def _sum(vector: Tensor, ranks: Ranks) -> Tensor:
    return _whole(vector[None], ranks).sum(0)
