"""The sparse blocks of the installed transformers, small and with random weights, and
the layers that are made of them."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etc_dist.functions.activation import SWIGLU
from etc_dist.functions.router import Router
from etc_dist.layers.block_families import FAMILIES
from etc_dist.layers.moe import MoE
from etc_dist.layers.sparse_block import SparseBlock, read_sparse_block
from tests.layers.reference import TOLERANCE, moe_reference

HIDDEN, INNER, EXPERTS, TOKENS = 40, 32, 16, 23
GROUPS = {"n_group": 4, "topk_group": 2}
CLAMPED = {"swiglu_limit": 0.7}
SCALED = {"routed_scaling_factor": 2.5}
# model in transformers: class of its block, prefix of its config, its fields
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeSparseMoeBlock", "Qwen3Moe", {"norm_topk_prob": False}),
    "mixtral": ("MixtralSparseMoeBlock", "Mixtral", {}),
    "minimax": ("MiniMaxSparseMoeBlock", "MiniMax", {}),
    "olmoe": ("OlmoeSparseMoeBlock", "Olmoe", {"norm_topk_prob": False}),
    "flex_olmo": ("FlexOlmoSparseMoeBlock", "FlexOlmo", {"norm_topk_prob": False}),
    "qwen3_vl_moe": ("Qwen3VLMoeTextSparseMoeBlock", "Qwen3VLMoeText", {}),
    "qwen2_moe": ("Qwen2MoeSparseMoeBlock", "Qwen2Moe", {"norm_topk_prob": False}),
    "qwen3_next": ("Qwen3NextSparseMoeBlock", "Qwen3Next", {"norm_topk_prob": False}),
    "qwen3_5_moe": ("Qwen3_5MoeSparseMoeBlock", "Qwen3_5MoeText", {}),
    "minimax_m2": ("MiniMaxM2SparseMoeBlock", "MiniMaxM2", {}),
    "hunyuan_v1_moe": ("HunYuanMoEV1Moe", "HunYuanMoEV1", {"moe_topk": 3}),
    "hy_v3": ("HYV3MoE", "HYV3", {"router_scaling_factor": 2.5}),
    "glm4_moe": ("Glm4MoeMoE", "Glm4Moe", GROUPS | SCALED),
    "glm4_moe_lite": ("Glm4MoeLiteMoE", "Glm4MoeLite", GROUPS | SCALED),
    "glm4v_moe": ("Glm4vMoeTextMoE", "Glm4vMoeText", GROUPS | SCALED),
    "glm_moe_dsa": ("GlmMoeDsaMoE", "GlmMoeDsa", GROUPS | SCALED),
    "deepseek_v3": ("DeepseekV3MoE", "DeepseekV3", GROUPS | SCALED),
    "deepseek_v32": ("DeepseekV32MoE", "DeepseekV32", GROUPS | SCALED),
    "dots1": ("Dots1MoE", "Dots1", GROUPS | SCALED),
    "kimi_linear": ("KimiLinearMoE", "KimiLinear", GROUPS | SCALED),
    "solar_open": ("SolarOpenMoE", "SolarOpen", GROUPS | SCALED),
    "exaone_moe": ("ExaoneMoeSparseMoEBlock", "ExaoneMoe", GROUPS | SCALED),
    "glm5_next": ("Glm5NextTextMoE", "Glm5NextText", GROUPS | SCALED | CLAMPED),
    "deepseek_v4": (
        *("DeepseekV4SparseMoeBlock", "DeepseekV4"),
        SCALED | CLAMPED,
    ),
    "gpt_oss": ("GptOssMLP", "GptOss", CLAMPED),
    "mimo_v2_flash": ("MiMoV2FlashMoE", "MiMoV2Flash", GROUPS | SCALED),
    "mistral4": ("Mistral4MoE", "Mistral4", GROUPS | SCALED),
    "deepseek_v2": (
        *("DeepseekV2Moe", "DeepseekV2"),
        GROUPS | SCALED | {"topk_method": "group_limited_greedy"},
    ),
}
SIZES = {
    "hidden_size": HIDDEN,
    "num_experts_per_tok": 3,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_intermediate_size": INNER,
    "intermediate_size": INNER,
    "shared_expert_intermediate_size": 2 * INNER,
    "n_shared_experts": 2,
    "num_shared_experts": 2,
    "hidden_act": "silu",
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def block_of(model: str, rng: np.random.Generator) -> Any:
    """A block whose weights are exact in bfloat16, in fp32."""
    import torch

    kind, prefix, changes = MODELS[model]
    folder = f"transformers.models.{model}"
    config = getattr(
        import_module(f"{folder}.configuration_{model}"), f"{prefix}Config"
    )
    module = import_module(f"{folder}.modeling_{model}")
    settings = config(**{**SIZES, **changes})
    layer = {"layer_idx": 3} if model == "deepseek_v4" else {}
    block = getattr(module, kind)(settings, **layer)
    for name, tensor in {
        **dict(block.named_parameters()),
        **dict(block.named_buffers()),
    }.items():
        size = 0.3 if "bias" in name else 3 / np.sqrt(tensor.shape[-1])
        drawn = torch.tensor(rng.standard_normal(tuple(tensor.shape)) * size)
        tensor.data = drawn.to(torch.bfloat16).float()
    return block.eval()


def outputs_of(block: Any, x: Any) -> tuple[Any, Any]:
    """The block's result for rows x, in fp32, and the experts of each row, sorted."""
    import torch

    choices = []
    gate = getattr(block, FAMILIES[type(block).__name__].gate_name)
    hook = gate.register_forward_hook(lambda *call: choices.append(call[2][2]))
    with torch.no_grad():
        y = block(torch.tensor(x.astype(np.float32))[None])
    hook.remove()
    y = y[0] if isinstance(y, tuple) else y
    return y.reshape(x.shape).numpy(), np.sort(choices[0].numpy(), axis=1)


def read(block: Any) -> SparseBlock:
    """In NumPy, of a copy in bfloat16."""
    import torch

    sparse_block = read_sparse_block(block.to(torch.bfloat16))
    block.float()
    return sparse_block


def expected(parts: SparseBlock, x: Any) -> Any:
    """The result in NumPy."""
    weights = [a.float().numpy() for a in (parts.router, parts.gate_up, parts.down)]
    optional_biases = (parts.router_bias, parts.correction)
    biases = [bias.float().numpy() for bias in optional_biases if bias is not None]
    shared = [] if parts.shared is None else [*parts.shared, parts.shared_gate]
    arrays = [a.float().numpy() for a in shared if a is not None]
    of_experts = [bias.float().numpy() for bias in parts.expert_biases or ()]
    return moe_reference(
        *(x, weights, parts.choice),
        biases=biases,
        shared=arrays,
        activation=parts.activation,
        expert_biases=of_experts,
    ).expected


def off(y: Any, reference: Any) -> Any:
    """The relative error of each row."""
    return np.linalg.norm(y - reference, axis=1) / np.linalg.norm(reference, axis=1)


def draw_rows(rng: np.random.Generator) -> Any:
    from ml_dtypes import bfloat16

    return rng.standard_normal((TOKENS, HIDDEN)).astype(bfloat16)


@pytest.mark.torch
@pytest.mark.mpi(ranks=[1])
@pytest.mark.parametrize("model", MODELS)
def test_a_layer_of_a_block_gives_what_it_gives(model, one_rank, rng):
    import torch

    block, x = block_of(model, rng), draw_rows(rng)
    reference, _ = outputs_of(block, x)
    rows = torch.tensor(x.astype(np.float32)).to(torch.bfloat16)
    moe = MoE.from_torch(block.to(torch.bfloat16), world=one_rank)
    y = moe(rows)
    moe.synchronize()
    moe.close()
    assert off(y.float().numpy(), reference).max() < 4 * TOLERANCE["bfloat16"]


@pytest.mark.torch
@pytest.mark.mpi(ranks=[1])
@pytest.mark.parametrize("model", MODELS)
def test_each_field_of_a_block_has_an_effect(model, one_rank, rng):
    block, x = block_of(model, rng), draw_rows(rng)
    (reference, ids), parts = outputs_of(block, x), read(block)
    logits = x.astype(np.float32) @ parts.router.float().numpy().T
    optional_biases = (parts.router_bias, parts.correction)
    biases = [bias.float().numpy() for bias in optional_biases if bias is not None]
    own_ids, _ = parts.choice.choose(logits, *biases)
    np.testing.assert_array_equal(np.sort(own_ids, axis=1), ids)
    assert off(expected(parts, x), reference).max() < 2 * TOLERANCE["bfloat16"]
    family, choice = FAMILIES[MODELS[model][0]], parts.choice
    plain = Router(choice.top_k, normalize=not choice.normalize)
    dropped = {
        name: replace(parts, choice=replace(choice, **{name: getattr(plain, name)}))
        for name in ("normalize", "score", "scale", "group_score")
        if getattr(choice, name) != getattr(plain, name)
    }
    if choice.score == "softmax_chosen":  # the normalized softmax
        dropped = {}
    if choice.num_groups > 1:
        ungrouped = replace(choice, num_groups=1, topk_group=1)
        dropped["groups"] = replace(parts, choice=ungrouped)
    if parts.correction is not None:
        none = replace(choice, has_correction=False)
        dropped["correction"] = replace(parts, choice=none, correction=None)
    if parts.router_bias is not None:
        none = replace(choice, has_bias=False)
        dropped["router_bias"] = replace(parts, choice=none, router_bias=None)
        dropped["biases"] = replace(parts, expert_biases=None)
    for name in ("alpha", "limit", "shift"):
        if getattr(parts.activation, name) != getattr(SWIGLU, name):
            plain = {name: getattr(SWIGLU, name)}
            activation = replace(parts.activation, **plain)
            dropped[name] = replace(parts, activation=activation)
    if parts.shared is not None:
        dropped["shared"] = replace(parts, shared=None, shared_gate=None)
    if parts.shared_gate is not None:
        dropped["shared_gate"] = replace(parts, shared_gate=None)
    assert bool(parts.shared) == bool(family.shared)
    for name, activation in dropped.items():
        error = off(expected(activation, x), reference).max()
        assert error > 10 * TOLERANCE["bfloat16"], f"{name} has no effect"


def table() -> str:
    """The families as a table of docs/layers.md."""
    head = "model of transformers", "score", "correction", "groups", "shared expert"
    lines = [f"| {' | '.join(head)} | experts |", "| --- " * 6 + "|"]
    rows: dict[tuple[str, ...], list[str]] = {}
    for model, (kind, *_) in MODELS.items():
        family = FAMILIES[kind]
        shared = "with a gate" if family.shared_gate else "yes" if family.shared else ""
        groups = family.group_score.replace("_", " ") if family.is_grouped else ""
        correction = "yes" if family.correction else ""
        experts = "clamped, biases" if family.has_biases else ""
        experts = experts or ("clamped" if family.limit else "")
        key = family.score.replace("_", " "), correction, groups, shared, experts
        rows.setdefault(key, []).append(f"`{model}`")
    lines += [
        f"| {', '.join(names)} | {' | '.join(key)} |" for key, names in rows.items()
    ]
    return "\n".join(lines).replace("  ", " ")


def test_the_page_has_the_families_that_are_tested():
    page = Path(__file__).parents[2] / "docs" / "layers.md"
    assert table() in page.read_text()
    assert {kind for kind, *_ in MODELS.values()} == set(FAMILIES)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("ernie4_5_moe", "Ernie4_5_MoeSparseMoeBlock"),
        ("openai_privacy_filter", "OpenAIPrivacyFilterMLP"),
        ("hy_v4", "HYV4MoE"),
        ("longcat_flash", "LongcatFlashMoE"),
    ],
)
def test_other_blocks_are_refused_by_name(model, kind):
    from etc_dist.errors import ArgumentError

    module = import_module(f"transformers.models.{model}.modeling_{model}")
    block = getattr(module, kind).__new__(getattr(module, kind))
    with pytest.raises(ArgumentError, match=f"block: {kind}"):
        read_sparse_block(block)


@pytest.mark.torch
@pytest.mark.parametrize(
    "name", ["routed_scaling_factor", "num_group", "e_score_correction_bias"]
)
def test_a_block_without_a_field_of_its_family_is_refused(name, rng):
    from etc_dist.errors import ArgumentError

    block = block_of("deepseek_v3", rng)
    delattr(block.gate, name)
    with pytest.raises(ArgumentError, match=f"wanted: {name} of the gate or the block"):
        read(block)


@pytest.mark.torch
def test_a_router_with_more_digits_than_the_experts_is_refused(rng):
    import torch

    from etc_dist.errors import ArgumentError

    block = block_of("glm4_moe", rng).to(torch.bfloat16)
    block.gate.weight.data = block.gate.weight.data.float()
    assert read_sparse_block(block).router.dtype == torch.bfloat16
    block.gate.weight.data += 1e-6
    with pytest.raises(ArgumentError, match="router of torch.float32 with further dig"):
        read_sparse_block(block)


@pytest.mark.torch
@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("parallel", ["tensor", "expert"])
@pytest.mark.parametrize("model", ["deepseek_v3", "qwen3_next", "gpt_oss"])
def test_ranks_share_a_block(model, parallel, world, rng):
    import torch

    block, x = block_of(model, rng), draw_rows(rng)[:20]
    reference, _ = outputs_of(block, x)
    rows = torch.tensor(x.astype(np.float32)).to(torch.bfloat16)
    part = slice(10 * world.rank, 10 * world.rank + 10)
    moe = MoE.from_torch(block.to(torch.bfloat16), parallel=parallel, world=world)
    y = moe(rows if parallel == "tensor" else rows[part].contiguous())
    moe.synchronize()
    moe.close()
    assert off(y.float().numpy(), reference[part]).max() < 4 * TOLERANCE["bfloat16"]
