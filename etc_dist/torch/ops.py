"""The operations `torch.ops.etc_dist`; the collectives have the signatures of
`torch.ops.symm_mem` (torch/distributed/_symmetric_memory).

Of all of them: tensors are bfloat16 or float16 (all of one dtype), on the device of the
world; results have the dtype of the first argument. A group is named by
`group.group_name`; "" is the current world. All ranks of the group make the same calls.
Wrong arguments of any rank raise ArgumentError on all, before a launch; a group over
which no world was started raises WorldError. W is the number of ranks.

deterministic="batch": a row has the same bits for any M. The collectives and
moe_experts always have them.

A function below describes a call: what runs on which tensors. The operation launches
it; traced without data, the results have the shapes of its table of arguments.

NOTE: registered by torch.library.Library, since a call of a function that the decorator
`custom_op` has registered takes longer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, wraps
from itertools import chain
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import _get_group_size_by_name

from etc_dist.errors import ArgumentError, as_refusal
from etc_dist.functions.activation import SILU, Activation
from etc_dist.functions.router import Router
from etc_dist.layers.mlp import SharedMLP
from etc_dist.layers.moe import SharedMoE, mixture_and_arrays
from etc_dist.ops.all_gather_matmul import AllGatherMatmul
from etc_dist.ops.deterministic import BATCH
from etc_dist.ops.matmul import Matmul
from etc_dist.ops.matmul_reduce_scatter import MatmulReduceScatter
from etc_dist.ops.operation import Operation, kept
from etc_dist.ops.scaled_weight import ScaledWeight
from etc_dist.torch.tensors import as_array, as_rows, as_tensor, as_weight, from_rows
from etc_dist.world import World, current, of_group
from etc_dist.world.agreement import sign

REDUCTIONS = ("sum", "avg")
IN_BATCHES = {"deterministic": BATCH}
LIBRARY = torch.library.Library("etc_dist", "DEF")
DEVICES = ("CPU", "CUDA")
MOE = "torch.ops.etc_dist.moe"
SCHEMA_TYPES = {"Sequence[Tensor]": "Tensor[]", "Tensor | None": "Tensor?"}
"""Annotations that are written in another way in a schema."""
# The names that replace the other ones, where torch has them.
_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_router, _activation = lru_cache(Router), lru_cache(Activation)
"""Kept, since to make both takes longer than all else of a call."""
_open: dict[str, World] = {}
"""The worlds of the last calls, by the name of their group."""


class OperationCall(NamedTuple):
    """What a call of an operation runs: `kind` with `options` on each of `inputs`, then
    `finish` on the results. agreed: options that no program has, alike on all ranks; as
    text, empty for the defaults."""

    group_name: str
    kind: type[Operation]
    options: Mapping[str, Any]
    inputs: Sequence[tuple[Tensor | ScaledWeight, ...]]
    finish: Callable[..., Any]
    agreed: str = ""

    def arrays(self) -> list[list[Any]]:
        """The inputs as arrays of the backend."""
        return [[*map(_as_input, tensors)] for tensors in self.inputs]

    def launch(self, arrays: Sequence[Sequence[Any]]) -> Any:
        """Run it on `arrays()`, and return what the operation returns. Collective."""
        world = world_of(self.group_name)
        if self.agreed:
            world.match_call(sign(self.agreed), lambda: self.agreed)
        run = kept(world, self.kind, **self.options).call
        results = [run(arguments) for arguments in arrays]
        return self.finish(*map(as_tensor, _flat(results)))

    def trace(self) -> Any:
        """The same from the shapes alone."""
        table = self.kind.table(size_of(self.group_name), **self.options)
        return self.finish(
            *(
                cast(Tensor, tensors[0]).new_empty(shape)
                for tensors in self.inputs
                for shape in table.output_shapes([t.shape for t in tensors])
            )
        )


def _as_input(tensor: Tensor | ScaledWeight) -> Any:
    """An input of an operation, in the memory of a tensor, or of codes and scales."""
    if isinstance(tensor, ScaledWeight):
        return ScaledWeight(*map(as_array, tensor))
    return as_array(tensor)


def _weight(w: Any, scales: Tensor | None) -> Any:
    """A weight, or None; with its scales, if it has any."""
    return w if scales is None else ScaledWeight(w, scales)


def _flat(results: Sequence[Any]) -> list[Any]:
    """The outputs of all calls, of which each has one or a tuple of them."""
    return [
        output
        for result in results
        for output in (result if isinstance(result, tuple) else (result,))
    ]


def register(
    function: Callable[..., Any], fake: Callable[..., Any], returns: str = "Tensor"
) -> None:
    """Define an operation of the library by the signature of `function`, of which
    `fake` gives results without data. returns: their type in the schema."""
    parts: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        kind = SCHEMA_TYPES.get(parameter.annotation, parameter.annotation)
        text = f"{kind} {parameter.name}"
        if parameter.default is not parameter.empty:
            text += "=" + repr(parameter.default).replace("'", '"')
        parts.append(text)
    name = function.__name__
    schema = f"{name}({', '.join(parts)}) -> {returns}"
    LIBRARY.define(schema, tags=(torch.Tag.needs_exact_strides,))
    for device in DEVICES:
        LIBRARY.impl(name, function, device)
    torch.library.register_fake(f"{LIBRARY.ns}::{name}", fake, lib=LIBRARY)


def operation(
    returns: str = "Tensor",
) -> Callable[[Callable[..., OperationCall]], Callable[..., Any]]:
    """Make an operation of the library of a function that describes its calls."""

    def make(describe: Callable[..., OperationCall]) -> Callable[..., Any]:
        @wraps(describe)
        def launch(*arguments: Any, **options: Any) -> Any:
            try:
                call = describe(*arguments, **options)
                arrays = call.arrays()
            except Exception as error:
                bound = inspect.signature(describe).bind(*arguments, **options)
                world = world_of(bound.arguments.get("group_name", ""))
                refuse(world, error, describe.__name__)
            return call.launch(arrays)

        def trace(*arguments: Any, **options: Any) -> Any:
            return describe(*arguments, **options).trace()

        register(launch, trace, returns)
        return launch

    return make


@operation()
def fused_matmul_reduce_scatter(
    A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> OperationCall:
    """A [..., K] @ B [K, N], summed over the ranks ("sum") or averaged ("avg"). Returns
    this rank's part along `scatter_dim`, an axis of A but the last, in a multiple of W:
    A [M, K] and scatter_dim 0 give [M / W, N]. With gradients.

    B may be a transposed view; other strides of B, and a `scatter_dim` that is not the
    outermost axis of A in memory, cost a copy. A rank's product is rounded to the
    dtype; the products are added in fp32, in rank order. "avg" divides the rounded sum:
    in float16 that must be within +-65504."""
    op = "fused_matmul_reduce_scatter"
    check_dims(op, A, B, scatter_dim, "scatter_dim")
    rows, options = ("A", A), IN_BATCHES
    return scattered(
        op, rows, as_weight(B), reduce_op, scatter_dim, group_name, options
    )


def scattered(
    op: str,
    rows: tuple[str, Tensor],
    weight: Tensor | ScaledWeight,
    reduce_op: str,
    scatter_dim: int,
    group_name: str,
    options: Mapping[str, Any],
) -> OperationCall:
    """The call of `op`, a GEMM + Reduce-Scatter by a weight [N, K]. rows: the name of
    the other argument, and its tensor [..., K]."""
    (name, x), ranks = rows, size_of(group_name)
    if reduce_op not in REDUCTIONS:
        raise refusal(op, "reduce_op", " or ".join(REDUCTIONS), repr(reduce_op))
    if x.shape[scatter_dim] % ranks:
        got = str(x.shape[scatter_dim])
        wanted = f"a multiple of {ranks}, the number of ranks"
        raise refusal(op, f"{name}.shape[scatter_dim]", wanted, got)

    def finish(out: Tensor) -> Tensor:
        if reduce_op == "avg":
            out /= ranks
        return from_rows(out, x.shape, scatter_dim)

    inputs = [(as_rows(x, scatter_dim), weight)]
    agreed = agreed_text(op, scatter_dim, reduce_op)
    return OperationCall(
        group_name, MatmulReduceScatter, options, inputs, finish, agreed
    )


@operation("(Tensor?, Tensor[])")
def fused_all_gather_matmul(
    A: Tensor,
    Bs: Sequence[Tensor],
    gather_dim: int,
    group_name: str,
    *,
    return_A: bool = True,
) -> OperationCall:
    """The A [..., K] of all ranks, joined along `gather_dim` in rank order, @ each B
    [K, N] of Bs. Returns (joined A, products): A [M, K] and gather_dim 0 give products
    [W M, N]. `gather_dim` is an axis of A but the last. With gradients.

    Each B gathers A again, overlapped with its GEMM. The joined A is gathered by
    torch.distributed; without `return_A` it is None. Copies as for
    `fused_matmul_reduce_scatter`; accumulated in fp32, rounded once."""
    op = "fused_all_gather_matmul"
    for B in Bs:
        check_dims(op, A, B, gather_dim, "gather_dim")
    x, shape = as_rows(A, gather_dim), A.shape

    def finish(*outs: Tensor) -> tuple[Tensor | None, list[Tensor]]:
        all_rows = None
        if return_A:
            rows = torch.ops.etc_dist.gather_rows(x, group_name)
            all_rows = from_rows(rows, shape, gather_dim)
        return all_rows, [from_rows(out, shape, gather_dim) for out in outs]

    inputs = [(x, as_weight(B)) for B in Bs]
    agreed = agreed_text(op, gather_dim)
    return OperationCall(
        group_name, AllGatherMatmul, IN_BATCHES, inputs, finish, agreed
    )


@operation()
def matmul(
    A: Tensor, B: Tensor, group_name: str = "", *, deterministic: str = "run"
) -> OperationCall:
    """A [..., K] @ B [K, N] -> [..., N] on each rank, without communication. With
    gradients. Copies as for `fused_matmul_reduce_scatter`; accumulated in fp32, rounded
    once."""
    check_dims("matmul", A, B, 0, "A")
    return OperationCall(
        group_name,
        Matmul,
        {"deterministic": deterministic},
        [(as_rows(A, 0), as_weight(B))],
        lambda out: from_rows(out, A.shape, 0),
    )


@operation()
def mlp(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    group_name: str = "",
    *,
    deterministic: str = "run",
    activations: str = "16-bit",
    gate_scales: Tensor | None = None,
    up_scales: Tensor | None = None,
    down_scales: Tensor | None = None,
) -> OperationCall:
    """(silu(x @ gate.T) * (x @ up.T)) @ down.T of the rows of all ranks, as
    `etc_dist.MLP`. x [..., H]: this rank's rows, equally many on all ranks; gate and up
    [I / W, H], down [H, I / W]: its shards, contiguous. Returns [..., H], for the same
    rows. No gradients. Calls of one shape share a program and its buffers.

    gate_scales to down_scales: of weights in float8, as `etc_dist.ScaledWeight`.
    activations: as for `etc_dist.MLP`, "float8" with such weights."""
    weights = (gate, gate_scales), (up, up_scales), (down, down_scales)
    return OperationCall(
        group_name,
        SharedMLP,
        {"deterministic": deterministic, "activations": activations},
        [(as_rows(x, 0), *(_weight(*weight) for weight in weights))],
        lambda out: out.view(x.shape),
    )


@operation()
def moe(
    x: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    top_k: int,
    normalize: bool = True,
    parallel: str = "tensor",
    group_name: str = "",
    *,
    deterministic: str = "run",
    score: str = "softmax",
    scale: float = 1.0,
    num_groups: int = 1,
    topk_group: int = 1,
    group_score: str = "best_two",
    router_bias: Tensor | None = None,
    correction: Tensor | None = None,
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
    shared_gate: Tensor | None = None,
    activation: str = SILU,
    alpha: float = 1.0,
    limit: float = 0.0,
    shift: float = 0.0,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    count: Tensor | None = None,
    gate_up_scales: Tensor | None = None,
    down_scales: Tensor | None = None,
    shared_gate_up_scales: Tensor | None = None,
    shared_down_scales: Tensor | None = None,
) -> OperationCall:
    """A mixture of experts with its router, as `etc_dist.MoE`: router [E, H]. No
    gradients. Calls of one shape share a program and its buffers.

    parallel="tensor": gate_up [E, 2 I / W, H] and down [E, H, I / W] are shards of each
    expert; x [M, H] is the same on all ranks, M a multiple of W, and the result
    [M / W, H] this rank's part of the rows. parallel="expert": gate_up [E / W, 2 I, H]
    and down [E / W, H, I] are this rank's experts; x [..., H] are its tokens, whose
    number may differ between ranks, and the result has the shape of x. On one rank both
    give the shape of x. top_k, normalize and limits: as for `etc_dist.MoE`.

    score to correction: those of `etc_dist.Router`, and its biases [E] in float32.
    shared_gate_up [2 S, H], shared_down [H, S] and shared_gate [H]: the shared expert,
    with parallel="tensor" a shard of its inner width. activation to shift: those of
    `etc_dist.Activation`. gate_up_bias [E, 2 I] and down_bias [E, H]: of the routed
    experts, split as the weights; each rank adds its down_bias. count [1] in int32: how
    many of the rows of x are tokens, as for `etc_dist.MoE`. gate_up_scales to
    shared_down_scales: of weights in float8, as `etc_dist.ScaledWeight`."""
    is_part = parallel == "tensor" and size_of(group_name) > 1
    mixture, *arrays = mixture_and_arrays(
        MOE,
        _router(
            top_k,
            normalize,
            score,
            scale,
            num_groups,
            topk_group,
            group_score,
            has_bias=router_bias is not None,
            has_correction=correction is not None,
        ),
        None,
        router_bias,
        correction,
        _both(
            _weight(shared_gate_up, shared_gate_up_scales),
            _weight(shared_down, shared_down_scales),
        ),
        shared_gate,
        _activation(activation, alpha, limit, shift),
        _both(gate_up_bias, down_bias),
        router.shape[0],
    )
    rows = [as_rows(x, 0)] if count is None else [as_rows(x, 0), count]
    all_scales = gate_up_scales, down_scales, shared_gate_up_scales, shared_down_scales
    weights = _weight(gate_up, gate_up_scales), _weight(down, down_scales)
    options = {
        "mixture": mixture,
        "is_scaled": any(scales is not None for scales in all_scales),
        "hidden": gate_up.shape[2],
        "inner": gate_up.shape[1] // 2,
        "has_count": count is not None,
        "shared_inner": 0 if shared_down is None else shared_down.shape[1],
        "parallel": parallel,
        "deterministic": deterministic,
    }
    return OperationCall(
        group_name,
        SharedMoE,
        options,
        [(*rows, router, *weights, *chain(*arrays))],
        lambda out: out if is_part else out.view(x.shape),
    )


def _both(*tensors: Any) -> tuple[Any, ...] | None:
    """`tensors`; None if all are None."""
    return tensors if any(tensor is not None for tensor in tensors) else None


def world_of(group_name: str) -> World:
    """The world of a process group, by its name; "" for the current world."""
    world = _open.get(group_name)
    if world is None or world.broken:  # also if it was closed
        world = of_group(group_name) if group_name else current()
        _open[group_name] = world
    return world


def size_of(group_name: str) -> int:
    """The ranks of a group, by its name; "" for the current world."""
    world = _open.get(group_name)  # takes less time than torch's registry
    if world is not None and not world.broken:
        return world.size
    return _get_group_size_by_name(group_name) if group_name else current().size


def agreed_text(op: str, dim: int, reduce_op: str = REDUCTIONS[0]) -> str:
    """Options that no program has, as text. Empty for the defaults: a rank with these
    goes on to the launch, which is another call."""
    is_default = (dim, reduce_op) == (0, REDUCTIONS[0])
    return "" if is_default else f"{op}(along axis {dim}, {reduce_op})"


def gather_rows(rows: Tensor, group_name: str) -> Tensor:
    """The rows [M, K] of all ranks, in rank order, by torch.distributed.

    NOTE: not its functional collectives, which gloo does not serve on GPUs."""
    world = world_of(group_name)
    if world.size == 1:
        return rows.clone()
    return _exchange("gather_rows", _gather, rows, world, len(rows) * world.size)


def scatter_rows(rows: Tensor, group_name: str) -> Tensor:
    """This rank's part of the sum over ranks of rows [M, K], by torch.distributed."""
    world = world_of(group_name)
    if world.size == 1:
        return rows.clone()
    return _exchange("scatter_rows", _scatter, rows, world, len(rows) // world.size)


def _exchange(
    name: str, collective: Callable[..., Any], rows: Tensor, world: World, count: int
) -> Tensor:
    """`count` rows of a collective of torch.distributed."""
    rows = rows.contiguous()
    text = f"{name} of {list(rows.shape)} {rows.dtype}"
    world.match_call(sign(text), lambda: text)  # before a wait without our limit
    group = dist.distributed_c10d._resolve_process_group(world.group_name)
    out = rows.new_empty(count, *rows.shape[1:])
    collective(out, rows, group=group)
    return out


def _fake_gather(rows: Tensor, group_name: str) -> Tensor:
    return rows.new_empty(rows.shape[0] * size_of(group_name), *rows.shape[1:])


def _fake_scatter(rows: Tensor, group_name: str) -> Tensor:
    return rows.new_empty(rows.shape[0] // size_of(group_name), *rows.shape[1:])


register(gather_rows, _fake_gather)
register(scatter_rows, _fake_scatter)


def check_dims(op: str, A: Tensor, B: Tensor, dim: int, name: str) -> None:
    """Refuse an A without rows, a B that is not a matrix, and a dim that A lacks."""
    num_axes = A.dim()
    if num_axes < 2 or B.dim() != 2:
        shapes = f"A {list(A.shape)}, B {list(B.shape)}"
        wanted = "A [..., K] of two axes or more, and B [K, N]"
        raise refusal(op, "A, B", wanted, shapes)
    check_axis(op, "A", A, dim, name)


def check_axis(op: str, tensor_name: str, tensor: Tensor, dim: int, name: str) -> None:
    """Refuse a tensor without rows, and a value `dim` of the argument `name` that is
    not an axis of it but the last."""
    num_axes = tensor.dim()
    if num_axes < 2:
        wanted = "[..., K], of two axes or more"
        raise refusal(op, tensor_name, wanted, str(list(tensor.shape)))
    if not 0 <= dim < num_axes - 1:
        wanted = f"0 to {num_axes - 2}, an axis of {tensor_name} but the last"
        raise refusal(op, name, wanted, str(dim))


def refuse(world: World, error: Exception, name: str) -> NoReturn:
    """Raise the error on all ranks."""
    world.refuse(as_refusal(error, f"the arguments of {name}"))


def refusal(op: str, name: str, wanted: str, got: str) -> ArgumentError:
    """The error for the argument `name` of the operation `op`."""
    return ArgumentError(
        f"the argument {name} cannot be used",
        where=f"torch.ops.etc_dist.{op}",
        wanted=f"{name}: {wanted}",
        got=got,
        fix=f"correct {name}; nothing was launched on any rank",
    )
