"""Blocks of Hugging Face models, and similar objects, as mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace as Part
from typing import Any

import numpy as np
import pytest

from etc_dist.errors import ArgumentError
from etc_dist.functions.router import Router
from etc_dist.layers.moe import MoE
from etc_dist.layers.sparse_block import SparseBlock, read_sparse_block
from tests.layers.reference import (
    TOLERANCE,
    draw,
    draw_experts,
    moe_reference,
    own_experts,
)

EXPERTS, HIDDEN, INNER, TOP_K = 8, 40, 24, 2
Weights = Any


def part(kind: str, base: type = Part, **attributes: Any) -> Any:
    """An object whose class has this name, in torch or transformers."""
    is_of_torch = kind in ("Linear", "ModuleList", "SiLU")
    library = "torch.nn.modules.linear" if is_of_torch else "transformers.models"
    thing = type(kind, (base,), {"__module__": library, "forward": None})()
    vars(thing).update(attributes)
    return thing


class List(list[Any]):
    """A list with attributes, as torch's ModuleList."""


def fused(weights: Weights, **options: Any) -> Any:
    """As transformers 5: the router has the parameters of routing."""
    router, gate_up, down = weights
    experts = part(
        "Qwen3MoeExperts", gate_up_proj=gate_up, down_proj=down, act_fn=part("SiLU")
    )
    gate = part("Qwen3MoeTopKRouter", weight=router, top_k=TOP_K, **options)
    return part("Qwen3MoeSparseMoeBlock", gate=gate, experts=experts)


def listed(weights: Weights, names: tuple[str, ...], **options: Any) -> Any:
    """As transformers 4: a list of experts, each with linear layers."""
    router, gate_up, down = weights
    halves = [np.split(matrix, 2) for matrix in gate_up]
    experts = part("ModuleList", List)
    for half, matrix in zip(halves, down, strict=True):
        weights = zip(names, (*half, matrix), strict=True)
        linears = {name: part("Linear", weight=w) for name, w in weights}
        experts.append(part("Qwen3MoeMLP", act_fn=part("SiLU"), **linears))
    gate = part("Linear", weight=router, bias=None)
    return part("MixtralSparseMoeBlock", gate=gate, experts=experts, **options)


def qwen3(weights: Weights) -> Any:
    names = ("gate_proj", "up_proj", "down_proj")
    return listed(weights, names, num_experts_per_tok=TOP_K, norm_topk_prob=False)


def mixtral(weights: Weights) -> Any:
    return listed(weights, ("w1", "w3", "w2"), top_k=TOP_K)


def of_transformers(model: str, weights: Weights) -> Any:
    """A block of the installed transformers with these weights, in bfloat16."""
    import torch
    from transformers import MixtralConfig, Qwen3MoeConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    sizes: dict[str, int] = {"hidden_size": HIDDEN, "num_experts_per_tok": TOP_K}
    if model == "qwen3":
        sizes |= {"num_experts": EXPERTS, "moe_intermediate_size": INNER}
        block = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**sizes))
    else:
        sizes |= {"num_local_experts": EXPERTS, "intermediate_size": INNER}
        block = MixtralSparseMoeBlock(MixtralConfig(**sizes))
    router, gate_up, down = (torch.tensor(w.astype(np.float32)) for w in weights)
    values = {"gate.weight": router}
    if hasattr(block.experts, "gate_up_proj"):
        values |= {"experts.gate_up_proj": gate_up, "experts.down_proj": down}
    else:
        names = ("gate_proj", "up_proj", "down_proj")
        names = names if model == "qwen3" else ("w1", "w3", "w2")
        for expert_idx, half in enumerate(gate_up):
            parts = zip(names, (*half.chunk(2), down[expert_idx]), strict=True)
            values |= {f"experts.{expert_idx}.{n}.weight": part for n, part in parts}
    block.load_state_dict(values)
    return block.to(torch.bfloat16).eval()


# name: a block of given weights, and whether its weights are normalised
BLOCKS: dict[str, tuple[Callable[[Weights], Any], bool]] = {
    "fused": (fused, True),
    "fused, not normalised": (lambda w: fused(w, norm_topk_prob=False), False),
    "list as in Qwen3": (qwen3, False),
    "list as in Mixtral": (mixtral, True),
}


@pytest.fixture
def weights(rng):
    return draw_experts(rng, EXPERTS, HIDDEN, INNER)


@pytest.mark.parametrize("name", BLOCKS)
def test_weights_and_routing_are_found(name, weights):
    make, normalize = BLOCKS[name]
    parts = read_sparse_block(make(weights))
    assert parts.choice == Router(TOP_K, normalize)
    for array, weight in zip(
        (parts.router, parts.gate_up, parts.down), weights, strict=True
    ):
        assert array.dtype == weight.dtype
        np.testing.assert_array_equal(array, weight)


def test_fused_weights_are_not_copied(weights):
    parts = read_sparse_block(fused(weights))
    for array, weight in zip(
        (parts.router, parts.gate_up, parts.down), weights, strict=True
    ):
        assert array is weight


@pytest.mark.mpi(ranks=[1])
@pytest.mark.parametrize("name", BLOCKS)
def test_layer_of_a_block_gives_the_reference(name, weights, one_rank, arrays, rng):
    make, normalize = BLOCKS[name]
    block = make([arrays.put(weight) for weight in weights])
    many, few = "moe_graph", "moe_few_tokens_graph"
    for options, of_few in (({}, few), ({"few_tokens": 0}, many)):
        moe = MoE.from_torch(block, world=one_rank, **options)
        for tokens, name in ((37, many), (2, of_few)):
            x = draw(rng, (tokens, HIDDEN), "bfloat16")
            y = moe(arrays.put(x))
            moe.synchronize()
            moe_reference(x, weights, TOP_K, normalize).check(arrays.get(y))
            assert moe.program.plan.graph.name == name
        moe.close()


@pytest.mark.torch
@pytest.mark.mpi(ranks=[1])
@pytest.mark.parametrize("model", ["qwen3", "mixtral"])
def test_layer_of_a_real_block_gives_what_it_gives(model, weights, one_rank, rng):
    import torch

    device = "cpu" if one_rank.backend == "cpu" else f"cuda:{one_rank.device}"
    block = of_transformers(model, weights).to(device)
    x = torch.tensor(rng.standard_normal((37, HIDDEN))).to(device, torch.bfloat16)
    moe = MoE.from_torch(block, world=one_rank)
    y = moe(x)
    moe.synchronize()
    moe.close()
    with torch.no_grad():
        theirs = block.float()(x.float()[None])
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    error = (y.float() - theirs.reshape(y.shape)).norm() / theirs.norm()
    assert type(y) is torch.Tensor
    assert float(error) < 2 * TOLERANCE["bfloat16"]


# ---------------------------------------------------------------------- the refusals


def refused(block: Any) -> ArgumentError:
    with pytest.raises(ArgumentError) as caught:
        read_sparse_block(block)
    return caught.value


def test_what_was_looked_for_and_found_is_said():
    error = refused(part("MixtralSparseMoeBlock", w1=Part()))
    assert error.wanted.startswith("gate.weight [E, H]; experts.gate_up_proj")
    assert "block: MixtralSparseMoeBlock with w1" in error.got
    assert "gate: none; experts: none" in error.got


def test_blocks_of_other_classes_are_refused(weights):
    mlp = Part(gate_proj=Part(), up_proj=Part(), down_proj=Part())
    error = refused(mlp)
    assert error.wanted.startswith("a Qwen3MoeSparseMoeBlock, Olmoe")
    assert error.got == "block: SimpleNamespace with down_proj, gate_proj, up_proj"
    for name in ("Routed", "MixtralSparseMoeBlock"):  # also of the name of a known one
        kind = type(name, (type(fused(weights)),), {})
        text = refused(kind(**vars(fused(weights)))).got
        assert text.startswith(f"block: {name} with")


def test_experts_with_other_names_are_shown(weights):
    block = listed(weights, ("linear", "linear_v", "linear_1"), top_k=2)
    error = refused(block)
    assert (
        "experts[0]: Qwen3MoeMLP with act_fn, linear, linear_1, linear_v" in error.got
    )


def test_a_block_that_does_not_say_top_k_is_refused(weights):
    block = listed(weights, ("w1", "w3", "w2"))
    assert "top_k or num_experts_per_tok" in refused(block).wanted


def test_experts_of_two_shapes_are_refused(weights):
    block = mixtral(weights)
    block.experts[3].w2.weight = np.zeros((HIDDEN, INNER + 8))
    error = refused(block)
    assert (error.wanted, error.got) == ("experts of one shape", "[40, 24], [40, 32]")


def test_a_bias_of_the_router_is_refused(weights):
    block = fused(weights)
    block.gate.bias = np.zeros(8)
    assert refused(block).got == "gate.bias"


@pytest.mark.parametrize("activation", ["GELU", "ClippedSiLU", "SwishOfBeta"])
def test_other_activations_are_refused(activation, weights):
    block = fused(weights)
    block.experts.act_fn = part(activation)
    assert refused(block).got == f"experts.act_fn {activation.lower()}"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"bias": np.zeros(INNER)}, "experts[3].up_proj.bias"),
        ({"forward": print}, "experts[3].up_proj: Linear with forward, weight"),
        ({"_forward_hooks": {0: print}}, "experts[3].up_proj: Linear with weight"),
        ({"_backward_hooks": {0: print}}, "experts[3].up_proj: Linear with weight"),
    ],
)
def test_a_linear_that_may_compute_more_is_refused(change, text, weights):
    block = qwen3(weights)
    vars(block.experts[3].up_proj).update(change)
    assert refused(block).got == text


def test_a_linear_of_another_class_is_refused(weights):
    block = qwen3(weights)
    block.experts[3].up_proj = Part(weight=block.experts[3].up_proj.weight)
    text = "experts[3].up_proj: SimpleNamespace with weight"
    assert refused(block).got == text


@pytest.mark.mpi
def test_a_refused_block_is_refused_on_every_rank(world):
    with pytest.raises(ArgumentError, match="cannot be read as a mixture of experts"):
        MoE.from_torch(Part(), world=world)


# -------------------------------------------------------------------- on many ranks


@pytest.mark.parametrize("parallel", ["tensor", "expert"])
@pytest.mark.parametrize("name", BLOCKS)
def test_shares_of_all_ranks_are_contiguous_and_even(name, parallel, weights):
    block = read_sparse_block(BLOCKS[name][0](weights))
    assert block.share(parallel, 0, 1) is block
    for rank in range(4):
        share = block.share(parallel, rank, 4)
        expected = own_experts(weights, parallel, rank, 4)
        arrays = (share.router, share.gate_up, share.down)
        for array, reference in zip(arrays, expected, strict=True):
            np.testing.assert_array_equal(array, reference)
            assert array.flags.c_contiguous


def test_a_tensor_share_has_parts_of_biases_and_of_the_shared_expert(weights, rng):
    shared = rng.random((2 * 12, 40)), rng.random((40, 12))
    biases = rng.random((8, 2 * 24)), rng.random((8, 40))
    block = SparseBlock(*weights, Router(2), shared=shared, expert_biases=biases)
    for rank in range(2):
        share, part = block.share("tensor", rank, 2), slice(6 * rank, 6 * rank + 6)
        halves = [half[part] for half in np.split(shared[0], 2)]
        np.testing.assert_array_equal(share.shared[0], np.concatenate(halves))
        np.testing.assert_array_equal(share.shared[1], shared[1][:, part])
        part = slice(12 * rank, 12 * rank + 12)
        halves = [half[:, part] for half in np.split(biases[0], 2, axis=1)]
        reference = np.concatenate(halves, axis=1)
        np.testing.assert_array_equal(share.expert_biases[0], reference)
        np.testing.assert_array_equal(share.expert_biases[1], biases[1] * (rank == 0))


def test_experts_of_a_rank_are_not_copied(weights):
    share = read_sparse_block(fused(weights)).share("expert", 1, 2)
    assert np.shares_memory(share.gate_up, weights[1])


@pytest.mark.parametrize(
    ("parallel", "requirement", "text"),
    [
        ("tensor", "inner width in a multiple of 5, the number of ranks", "24"),
        ("expert", "experts in a multiple of 5, the number of ranks", "8"),
    ],
)
def test_a_block_that_cannot_be_split_evenly_is_refused(
    parallel, requirement, text, weights
):
    with pytest.raises(ArgumentError) as caught:
        read_sparse_block(fused(weights)).share(parallel, 0, 5)
    assert caught.value.wanted == requirement
    assert caught.value.got.endswith(f" {text}")


@pytest.mark.mpi(ranks=[4])
@pytest.mark.parametrize("parallel", ["tensor", "expert"])
def test_ranks_take_their_shares_of_a_block(parallel, world, arrays, rng):
    weights = draw_experts(rng, EXPERTS, HIDDEN, 8 * 24)
    block = fused([arrays.put(weight) for weight in weights])
    moe = MoE.from_torch(block, parallel=parallel, world=world)
    x = draw(rng, (8 * world.size, HIDDEN), "bfloat16")
    rank_rows = np.split(x, world.size)[world.rank]
    y = moe(arrays.put(x if parallel == "tensor" else rank_rows))
    moe.synchronize()
    moe_reference(rank_rows, weights, TOP_K).check(arrays.get(y))
    moe.close()
