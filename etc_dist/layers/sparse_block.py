"""The weights of a mixture of experts from a block of a Hugging Face model.

No library is imported: parts of a block are recognised by the names of their classes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from etc_dist.errors import ArgumentError
from etc_dist.functions.activation import SWIGLU, Activation
from etc_dist.functions.router import Router
from etc_dist.layers.block_families import FAMILIES, MLP, BlockFamily
from etc_dist.layers.plain import odd_activation, oddity

LINEARS = (MLP, ("w1", "w3", "w2"))
"""An expert's gate, up and down, as Qwen3-MoE and Mixtral name them."""
LOOKED_FOR = (
    "gate.weight [E, H]; experts.gate_up_proj [E, 2 I, H] and experts.down_proj "
    "[E, H, I], or a list of experts with gate_proj, up_proj, down_proj or w1, w3, w2; "
    "top_k or num_experts_per_tok of the block or its gate"
)
SHOWN_NAMES = 12


@dataclass(frozen=True)
class SparseBlock:
    """The arguments of MoE: router [E, H], gate_up [E, 2 I, H], down [E, H, I], the
    description of the choice, its correction [E], and the shared expert, gate_up
    [2 S, H] and down [H, S], with its gate [H]; the activation, and the biases of the
    router [E], of gate_up [E, 2 I] and of down [E, H]. returns_pair: whether the block
    returns its result and something else."""

    router: Any
    gate_up: Any
    down: Any
    choice: Router
    correction: Any = None
    shared: tuple[Any, Any] | None = None
    shared_gate: Any = None
    activation: Activation = SWIGLU
    router_bias: Any = None
    expert_biases: tuple[Any, Any] | None = None
    returns_pair: bool = False

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of MoE."""
        names = "correction", "shared", "shared_gate", "router_bias", "expert_biases"
        arrays = {name: getattr(self, name) for name in names}
        return {"top_k": self.choice, "activation": self.activation, **arrays}

    def share(self, parallel: str, rank: int, world: int) -> SparseBlock:
        """A rank's shard. "tensor": a copy of a part of the inner width of all experts;
        "expert": some experts, by reference, and the shared one. Raises ArgumentError
        if it cannot be split evenly."""
        if world == 1:
            return self
        shared, biases = self.shared, self.expert_biases
        if parallel == "expert":
            part = _own("experts", len(self.down), rank, world)
            gate_up, down = self.gate_up[part], self.down[part]
            biases = biases and (biases[0][part], biases[1][part])
        else:
            part = _own("inner width", self.down.shape[2], rank, world)
            gate_up, down = _rows(self.gate_up, part, 1), _columns(self.down, part)
            # One rank adds the bias of down.
            biases = biases and (_rows(biases[0], part, 1), biases[1] * (rank == 0))
            if shared is not None:
                what, width = "inner width of the shared expert", shared[1].shape[1]
                part = _own(what, width, rank, world)
                shared = _rows(shared[0], part, 0), _columns(shared[1], part)
        return replace(
            self, gate_up=gate_up, down=down, shared=shared, expert_biases=biases
        )


def _rows(gate_up: Any, part: slice, axis: int) -> Any:
    """A copy of the same part of gate and of up, which share an axis."""
    before, after = gate_up.shape[:axis], gate_up.shape[axis + 1 :]
    halves = gate_up.reshape((*before, 2, -1, *after))
    rows = halves[(..., part, *[slice(None)] * len(after))]
    return rows.reshape((*before, -1, *after))


def _columns(down: Any, part: slice) -> Any:
    """A copy of a part of the last axis."""
    columns = down[..., part]
    return columns.reshape(-1).reshape(columns.shape)


def _own(what: str, whole: int, rank: int, world: int) -> slice:
    """A rank's part."""
    if whole % world:
        wanted = f"{what} in a multiple of {world}, the number of ranks"
        raise _refusal(wanted, f"{what} {whole}")
    part_size = whole // world
    return slice(rank * part_size, (rank + 1) * part_size)


def read_sparse_block(block: Any) -> SparseBlock:
    """The weights and the router of a sparse block of transformers, of a class in
    `FAMILIES`.

    Fused weights are referred to; those of a list of experts are stacked, and those of
    a shared expert joined, a copy. Raises ArgumentError where a part has another class
    or its own forward (an adapter, a quantised layer, a hook), since it may compute
    something else, and for biases and other activations than SiLU."""
    if oddity(block, FAMILIES):
        wanted = f"a {', '.join(FAMILIES)} of transformers"
        raise _refusal(wanted, f"block: {_describe(block)}")
    family = FAMILIES[type(block).__name__]
    gate = getattr(block, family.gate_name, None)
    experts = getattr(block, "experts", None)
    top_k = _first((block, gate), "top_k", "num_experts_per_tok")
    router = _at(gate, family.weight)
    weights = _fused(experts) or _stacked(experts)
    biases = None
    if family.has_biases and weights is not None:
        weights, biases = _rearranged(experts)
    if router is None or weights is None or top_k is None:
        first = _first_expert(experts)
        parts = [("block", block), ("gate", gate), ("experts", experts)]
        parts += [("experts[0]", first)] if weights is None and first else []
        raise _refusal(LOOKED_FOR, "; ".join(f"{n}: {_describe(p)}" for n, p in parts))
    unsupported = list(_unsupported(family, block))
    if unsupported:
        wanted = "the classes of transformers, no hooks, no bias, SiLU"
        raise _refusal(wanted, ", ".join(unsupported[:SHOWN_NAMES]))
    shared_gate = _at(block, f"{family.shared_gate}.weight")
    return SparseBlock(
        _in_dtype("router", _detached(router), weights[0]),
        *weights,
        _choice(family, (gate, block), int(top_k)),
        _correction(family, (gate, block)),
        _joined(getattr(block, family.shared or "_", None)),
        None if shared_gate is None else _detached(shared_gate)[0],
        _activation(family, experts),
        _in_fp32(_known((gate, block), "bias")) if family.has_biases else None,
        biases,
        family.has_biases,
    )


def _activation(family: BlockFamily, experts: Any) -> Activation:
    numbers: dict[str, Any] = {
        field: float(getattr(experts, name))
        for field, name in (("limit", family.limit), ("alpha", family.alpha))
        if name
    }
    return replace(SWIGLU, **{**numbers, "shift": family.shift})


def _rearranged(experts: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """The weights and biases of experts whose weights are transposed, with gate and up
    interleaved."""

    def halves(array: Any) -> Any:
        return _library(array).concatenate([array[:, ::2], array[:, 1::2]], 1)

    gate_up, gate_up_bias, down, down_bias = (
        _detached(getattr(experts, name))
        for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
    )
    weights = halves(gate_up.transpose(1, 2)), down.transpose(1, 2).contiguous()
    return weights, (halves(gate_up_bias), down_bias)


def _choice(family: BlockFamily, holders: Sequence[Any], top_k: int) -> Router:
    """How a block of this family chooses."""
    normalize = family.normalize
    if isinstance(normalize, str):
        value = _first(holders, normalize)
        normalize = True if value is None else bool(value)
    is_grouped = family.is_grouped
    if family.method:
        is_grouped = _known(holders, family.method) == "group_limited_greedy"
    return Router(
        top_k,
        normalize,
        family.score,
        float(_known(holders, family.scale)) if family.scale else 1.0,
        int(_known(holders, "num_group")) if is_grouped else 1,
        int(_known(holders, "topk_group")) if is_grouped else 1,
        family.group_score,
        has_bias=family.has_biases,
        has_correction=bool(family.correction),
    )


def _known(holders: Sequence[Any], name: str) -> Any:
    """An attribute of the gate or the block, which exists."""
    value = _first(holders, name)
    if value is None:
        gate, block = holders
        got = f"block: {_describe(block)}; gate: {_describe(gate)}"
        raise _refusal(f"{name} of the gate or the block", got)
    return value


def _joined(mlp: Any) -> tuple[Any, Any] | None:
    """gate_up and down of a shared expert."""
    if mlp is None:
        return None
    gate, up, down = (_detached(getattr(mlp, name).weight) for name in MLP)
    return _library(gate).concatenate([gate, up]), down


def _in_dtype(name: str, weight: Any, like: Any) -> Any:
    """The weight in the dtype of another, if that is exact."""
    if weight.dtype == like.dtype:
        return weight
    rounded = weight.to(like.dtype)
    if bool((rounded.to(weight.dtype) != weight).any()):
        got = f"{name} of {weight.dtype} with further digits"
        raise _refusal(f"{name} of {like.dtype}, or exact in it", got)
    return rounded


def _correction(family: BlockFamily, holders: Sequence[Any]) -> Any:
    """In fp32, or None."""
    if not family.correction:
        return None
    return _in_fp32(_known(holders, family.correction))


def _in_fp32(bias: Any) -> Any:
    bias = _detached(bias)
    return bias if "float32" in str(bias.dtype) else bias.float()


def _at(part: Any, path: str) -> Any:
    """The attribute of a part at a path of names, or None."""
    for name in path.split("."):
        part = getattr(part, name, None)
    return part


def _fused(experts: Any) -> tuple[Any, Any] | None:
    names = ("gate_up_proj", "down_proj")
    gate_up, down = (getattr(experts, name, None) for name in names)
    if not hasattr(gate_up, "shape") or not hasattr(down, "shape"):
        return None
    return _detached(gate_up), _detached(down)


def _stacked(experts: Any) -> tuple[Any, Any] | None:
    """Weights [E, 2 I, H] and [E, H, I] of a list of experts."""
    for gate, up, down in LINEARS:
        if _length(experts) and all(hasattr(e, down) for e in experts):
            pairs = [getattr(e, name).weight for e in experts for name in (gate, up)]
            halves = _stack(pairs)
            count, inner, hidden = halves.shape
            gate_up = halves.reshape((count // 2, 2 * inner, hidden))
            return gate_up, _stack([getattr(e, down).weight for e in experts])
    return None


def _stack(weights: Sequence[Any]) -> Any:
    """Weights of one shape stacked into a new array of their library."""
    shapes = sorted({tuple(weight.shape) for weight in weights})
    if len(shapes) > 1:
        raise _refusal(
            "experts of one shape", ", ".join(str(list(shape)) for shape in shapes)
        )
    plain = [_detached(weight) for weight in weights]
    return _library(plain[0]).stack(plain)


def _library(array: Any) -> Any:
    return sys.modules[type(array).__module__.partition(".")[0]]


def _unsupported(family: BlockFamily, block: Any) -> Iterator[str]:
    """Parts of the block that may compute what MoE does not."""
    parts: list[tuple[str, Any, Sequence[str]]]
    gate, experts = getattr(block, family.gate_name), block.experts
    parts = [("gate", gate, family.gate), ("experts", experts, family.experts)]
    mlps = [(f"experts[{n}]", experts[n]) for n in range(_length(experts))]
    if family.shared:
        mlps.append((family.shared, getattr(block, family.shared, None)))
    for name, mlp in mlps:
        parts.append((name, mlp, family.mlp))
        linears = [n for names in LINEARS for n in names if hasattr(mlp, n)]
        parts += [(f"{name}.{n}", getattr(mlp, n), ("Linear",)) for n in linears]
    if family.score == "sqrt_softplus":
        score = getattr(gate, "score_fn", None)
        parts.append(("gate.score_fn", score, ("SqrtSoftplusActivation",)))
    for path in (family.shared_gate, "gate." + family.weight.removesuffix(".weight")):
        if path and path != "gate.weight":
            parts.append((path, _at(block, path), ("Linear",)))
    for name, part, classes in parts:
        if oddity(part, classes):
            yield f"{name}: {_describe(part)}"
        has_bias = getattr(part, "bias", None) is not None
        if has_bias and not (family.has_biases and part is gate):
            yield f"{name}.bias"
        activation = getattr(part, "act_fn", None)
        if activation is not None and (odd := odd_activation(activation)):
            yield f"{name}.act_fn {odd}"


def _detached(tensor: Any) -> Any:
    """The same memory without gradients."""
    return tensor.detach() if hasattr(tensor, "detach") else tensor


def _first(holders: Sequence[Any], *names: str) -> Any:
    """The first of these attributes that exists."""
    values = (getattr(holder, name, None) for holder in holders for name in names)
    return next((value for value in values if value is not None), None)


def _first_expert(experts: Any) -> Any:
    return experts[0] if _length(experts) else None


def _length(experts: Any) -> int:
    return len(experts) if hasattr(experts, "__len__") else 0


def _describe(part: Any) -> str:
    """A part of a block for an error: its class and attributes."""
    if part is None:
        return "none"
    attributes = vars(part) if hasattr(part, "__dict__") else {}
    names = {
        *attributes,
        *attributes.get("_parameters", ()),
        *attributes.get("_modules", ()),
    }
    public_names = sorted(name for name in names if not name.startswith("_"))[
        :SHOWN_NAMES
    ]
    count = f" of {_length(part)}" if _length(part) else ""
    return f"{type(part).__name__}{count} with {', '.join(public_names) or 'no names'}"


def _refusal(wanted: str, got: str) -> ArgumentError:
    return ArgumentError(
        "the block cannot be read as a mixture of experts",
        where="MoE.from_torch",
        wanted=wanted,
        got=got,
        fix="pass a block of one of the classes in docs/layers.md, or, if another one "
        "computes the same, make MoE of the weights themselves",
    )
