"""Replacing the blocks of a model of Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from etc_dist.errors import ArgumentError, EtcDistError
from etc_dist.layers.block_families import FAMILIES
from etc_dist.ops.deterministic import check_deterministic
from etc_dist.torch.blocks import PROJECTIONS
from etc_dist.torch.modules import MLP, MoE
from etc_dist.torch.ranks import Group, refusing

Model = TypeVar("Model", bound=nn.Module)

DTYPES = torch.bfloat16, torch.float16


def replace(
    model: Model,
    *,
    group: Group = None,
    parallel: str = "tensor",
    deterministic: str = "run",
) -> Model:
    """Replace the MLPs and the mixtures of experts of a model of transformers: Llama,
    Qwen3, Qwen3-MoE, Mixtral and others with known blocks (docs/layers.md). Returns the
    model.

    Every rank passes the whole model, and runs it on the same tokens. On one rank the
    weights are kept by reference, and the names of parameters stay the same, except for
    those of shared experts and of gpt-oss, which are copied; on several each rank keeps
    its shard of the replaced weights. group: a ProcessGroup or its name; default:
    torch's default group. parallel: how experts are split over its ranks: "tensor" (a
    shard of each) or "expert" (some of them). deterministic="batch": in the replaced
    blocks a token has the same bits for any number of tokens.

    Raises ArgumentError, and changes nothing, if the model has no such block, one of
    another class or with an adapter, a quantised layer, a hook, a bias, another
    activation than SiLU or another dtype than bfloat16 and float16, if the ranks do not
    divide its sizes, or if its config has output_router_logits, which replaced blocks
    do not record."""
    with refusing(group, "replace"):
        check_deterministic(deterministic)
        blocks = _blocks(model)
    modules: list[tuple[nn.Module, str, nn.Module]] = []
    options: dict[str, Any] = {
        "group": group,
        "replicated": True,
        "deterministic": deterministic,
    }
    for parent, name, block in blocks:
        if hasattr(block, "experts"):
            new: nn.Module = MoE.from_block(block, parallel=parallel, **options)
        else:
            new = MLP.from_block(block, **options)
        with refusing(group, "replace"):
            _check_dtype(new)
        modules.append((parent, name, new.train(block.training)))
    for parent, name, new in modules:
        setattr(parent, name, new)
    return model


def _blocks(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """The blocks, at least one: (parent, name, block)."""
    config = getattr(model, "config", None)
    if getattr(config, "output_router_logits", False):
        raise _refusal("a model with config.output_router_logits False", "True")
    blocks = list(_find(model))
    if not blocks:
        raise _refusal("a model with MLPs or mixtures of experts", _describe(model))
    return blocks


def _find(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """The blocks: (parent, name, block), without those inside others."""
    for name, child in model.named_children():
        is_known = type(child).__name__ in FAMILIES
        is_sparse = is_known or (hasattr(child, "gate") and hasattr(child, "experts"))
        if is_sparse or all(hasattr(child, part) for part in PROJECTIONS):
            yield model, name, child
        else:
            yield from _find(child)


def _check_dtype(block: nn.Module) -> None:
    dtypes = {parameter.dtype for parameter in block.parameters()}
    if len(dtypes) != 1 or not dtypes <= set(DTYPES):
        wanted = "weights of bfloat16 or float16"
        raise _refusal(wanted, ", ".join(sorted(map(str, dtypes))))


def _describe(model: nn.Module) -> str:
    children = ", ".join(name for name, _ in model.named_children())
    return f"{type(model).__name__} with {children or 'no children'}"


def _refusal(wanted: str, got: str) -> EtcDistError:
    return ArgumentError(
        "the blocks of this model cannot be replaced",
        where="etc_dist.torch.replace",
        wanted=wanted,
        got=got,
        fix="leave the model as it is, or build modules of etc_dist.torch from its "
        "weights; nothing was replaced",
    )
