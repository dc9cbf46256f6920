"""The weights of a mixture of experts from a block of a Hugging Face model.

No library is imported: parts of a block are recognised by the names of their classes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from etc_dist.errors import ArgumentError
from etc_dist.layers.plain import odd_activation, oddity

LINEARS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""An expert's gate, up and down, as Qwen3-MoE and Mixtral name them."""
LOOKED_FOR = (
    "gate.weight [E, H]; experts.gate_up_proj [E, 2 I, H] and experts.down_proj "
    "[E, H, I], or a list of experts with gate_proj, up_proj, down_proj or w1, w3, w2; "
    "top_k or num_experts_per_tok of the block or its gate"
)
BLOCKS = ("Qwen3MoeSparseMoeBlock", "MixtralSparseMoeBlock", "OlmoeSparseMoeBlock")
GATES = ("Linear", "Qwen3MoeTopKRouter", "MixtralTopKRouter", "OlmoeTopKRouter")
EXPERTS = ("ModuleList", "Qwen3MoeExperts", "MixtralExperts", "OlmoeExperts")
EXPERT = (
    "Qwen3MoeMLP",
    "MixtralMLP",
    "MixtralBlockSparseTop2MLP",
    "MixtralBLockSparseTop2MLP",  # as transformers spelled it before 4.38
    "OlmoeMLP",
)
"""Classes of torch and transformers that compute what MoE does."""
SHOWN_NAMES = 12


@dataclass(frozen=True)
class SparseBlock:
    """The arguments of MoE: router [E, H], gate_up [E, 2 I, H], down [E, H, I], and the
    parameters of routing."""

    router: Any
    gate_up: Any
    down: Any
    top_k: Any  # as the block has them
    normalize: Any

    def share(self, parallel: str, rank: int, world: int) -> SparseBlock:
        """A rank's shard. "tensor": a copy of a part of the inner width of all experts;
        "expert": some experts, by reference. Raises ArgumentError if it cannot be split
        evenly."""
        if world == 1:
            return self
        experts, hidden, inner = self.down.shape
        whole = experts if parallel == "expert" else inner
        if whole % world:
            what = "experts" if parallel == "expert" else "inner width"
            wanted = f"{what} in a multiple of {world}, the number of ranks"
            raise _refusal(wanted, f"{what} {whole}")
        each = whole // world
        own = slice(rank * each, (rank + 1) * each)
        if parallel == "expert":
            return replace(self, gate_up=self.gate_up[own], down=self.down[own])
        halves = self.gate_up.reshape((experts, 2, inner, hidden))[:, :, own]
        return replace(
            self,
            gate_up=halves.reshape((experts, 2 * each, hidden)),
            down=self.down[:, :, own].reshape(-1).reshape((experts, hidden, each)),
        )


def read_sparse_block(block: Any) -> SparseBlock:
    """The weights of a Qwen3-MoE, Mixtral or OLMoE block of transformers.

    Fused weights are referred to; those of a list of experts are stacked, a copy. A
    block that does not say whether it normalises, as Mixtral's, does. Raises
    ArgumentError where a part has another class or its own forward (an adapter, a
    quantised layer, a hook), since it may compute something else, and for biases and
    other activations than SiLU."""
    if oddity(block, BLOCKS):
        wanted = f"a {', '.join(BLOCKS)} of transformers"
        raise _refusal(wanted, f"block: {_describe(block)}")
    gate, experts = getattr(block, "gate", None), getattr(block, "experts", None)
    top_k = _first((block, gate), "top_k", "num_experts_per_tok")
    router = getattr(gate, "weight", None)
    weights = _fused(experts) or _stacked(experts)
    if router is None or weights is None or top_k is None:
        first = _first_expert(experts)
        parts = [("block", block), ("gate", gate), ("experts", experts)]
        parts += [("experts[0]", first)] if weights is None and first else []
        raise _refusal(LOOKED_FOR, "; ".join(f"{n}: {_describe(p)}" for n, p in parts))
    unsupported = list(_unsupported(gate, experts))
    if unsupported:
        wanted = "the classes of transformers, no hooks, no bias, SiLU"
        raise _refusal(wanted, ", ".join(unsupported[:SHOWN_NAMES]))
    normalize = _first((block, gate), "norm_topk_prob")
    return SparseBlock(
        _detached(router), *weights, top_k, True if normalize is None else normalize
    )


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
    library = sys.modules[type(plain[0]).__module__.partition(".")[0]]
    return library.stack(plain)


def _unsupported(gate: Any, experts: Any) -> Iterator[str]:
    """Parts of the block that may compute what MoE does not."""
    parts: list[tuple[str, Any, Sequence[str]]]
    parts = [("gate", gate, GATES), ("experts", experts, EXPERTS)]
    for number in range(_length(experts)):
        name, expert = f"experts[{number}]", experts[number]
        parts.append((name, expert, EXPERT))
        linears = [n for names in LINEARS for n in names if hasattr(expert, n)]
        parts += [(f"{name}.{n}", getattr(expert, n), ("Linear",)) for n in linears]
    for name, part, classes in parts:
        if oddity(part, classes):
            yield f"{name}: {_describe(part)}"
        if getattr(part, "bias", None) is not None:
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
    held = vars(part) if hasattr(part, "__dict__") else {}
    names = {*held, *held.get("_parameters", ()), *held.get("_modules", ())}
    shown = sorted(name for name in names if not name.startswith("_"))[:SHOWN_NAMES]
    count = f" of {_length(part)}" if _length(part) else ""
    return f"{type(part).__name__}{count} with {', '.join(shown) or 'no names'}"


def _refusal(wanted: str, got: str) -> ArgumentError:
    return ArgumentError(
        "the block cannot be read as a mixture of experts",
        where="MoE.from_torch",
        wanted=wanted,
        got=got,
        fix="pass the sparse block of a Qwen3-MoE, Mixtral or OLMoE layer, or, if it "
        "computes the same, make MoE of the weights themselves",
    )
