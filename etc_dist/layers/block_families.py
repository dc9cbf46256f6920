"""The sparse blocks of transformers that `MoE` computes, by the names of their classes:
where each has its router's parameters, and its shared expert."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

MLP = ("gate_proj", "up_proj", "down_proj")
"""The linear layers of a shared expert."""


@dataclass(frozen=True)
class BlockFamily:
    """A form of blocks. classes: of the block, its gate, its experts, a list of experts
    or its shared expert, and the linear layers. Attributes are of the gate, else of the
    block; an empty name stands for none.

    weight: the router. normalize: whether weights are, or the attribute that says it,
    if there is one.
    is_grouped: the gate has num_group and topk_group; method: the attribute that is
    "group_limited_greedy" where they are used. shared, shared_gate: of the block.
    gate_name: the attribute of the block. has_biases: as gpt-oss, the router and the
    experts have biases, whose weights are transposed, and gate and up interleaved; and
    the block returns a pair. limit, alpha: attributes of the experts, of their
    `Activation`, as the shift is."""

    block: str
    gate: tuple[str, ...]
    experts: tuple[str, ...]
    mlp: tuple[str, ...]
    weight: str = "weight"
    score: str = "softmax"
    normalize: bool | str = True
    scale: str = ""
    correction: str = ""
    is_grouped: bool = False
    method: str = ""
    group_score: str = "best_two"
    shared: str = ""
    shared_gate: str = ""
    gate_name: str = "gate"
    has_biases: bool = False
    limit: str = ""
    alpha: str = ""
    shift: float = 0.0


def _of(
    prefixes: str, block: str, gate: str, form: BlockFamily
) -> Iterator[BlockFamily]:
    """Families of this form whose classes have these prefixes."""
    for prefix in prefixes.split():
        yield replace(
            form,
            block=prefix + block,
            gate=(prefix + gate, *form.gate),
            experts=(f"{prefix}Experts", *form.experts),
            mlp=(f"{prefix}MLP", *form.mlp),
        )


_PLAIN = BlockFamily("", (), (), ())
_LISTED = replace(
    _PLAIN, gate=("Linear",), experts=("ModuleList",), normalize="norm_topk_prob"
)
"""Also as in transformers 4: a list of experts."""
_SIGMOID = replace(_PLAIN, score="sigmoid", correction="e_score_correction_bias")
_DEEPSEEK = replace(
    _SIGMOID,
    normalize="norm_topk_prob",
    scale="routed_scaling_factor",
    is_grouped=True,
    shared="shared_experts",
)
_DEEPSEEK_NAMES = """
    DeepseekV3 DeepseekV32 Dots1 Glm4Moe Glm4MoeLite Glm4vMoeText GlmMoeDsa KimiLinear
    SolarOpen"""
_ALL = (
    *_of("Qwen3Moe Olmoe FlexOlmo", "SparseMoeBlock", "TopKRouter", _LISTED),
    *_of(
        "Mixtral",
        "SparseMoeBlock",
        "TopKRouter",
        replace(
            _LISTED,
            mlp=(
                "Qwen3MoeMLP",
                "MixtralBlockSparseTop2MLP",
                "MixtralBLockSparseTop2MLP",  # as before transformers 4.38
            ),
        ),
    ),
    *_of("MiniMax Qwen3VLMoeText", "SparseMoeBlock", "TopKRouter", _PLAIN),
    *_of("MiniMaxM2", "SparseMoeBlock", "TopKRouter", _SIGMOID),
    *_of(
        "Qwen2Moe Qwen3Next Qwen3_5Moe",
        "SparseMoeBlock",
        "TopKRouter",
        replace(
            _PLAIN,
            normalize="norm_topk_prob",
            shared="shared_expert",
            shared_gate="shared_expert_gate",
        ),
    ),
    *_of(
        "HunYuanMoEV1",
        "Moe",
        "Gate",
        replace(_PLAIN, weight="wg.weight", shared="shared_mlp"),
    ),
    *_of(
        "HYV3",
        "MoE",
        "TopKRouter",
        replace(_SIGMOID, scale="router_scaling_factor", shared="shared_experts"),
    ),
    *_of(_DEEPSEEK_NAMES, "MoE", "TopkRouter", _DEEPSEEK),
    *_of("ExaoneMoe", "SparseMoEBlock", "TopkRouter", _DEEPSEEK),
    *_of("Glm5NextText", "MoE", "TopkRouter", replace(_DEEPSEEK, limit="swiglu_limit")),
    *_of(
        "DeepseekV4",
        "SparseMoeBlock",
        "TopKRouter",
        replace(
            _SIGMOID,
            score="sqrt_softplus",
            scale="routed_scaling_factor",
            shared="shared_experts",
            limit="limit",
        ),
    ),
    replace(
        _PLAIN,
        block="GptOssMLP",
        gate=("GptOssTopKRouter",),
        experts=("GptOssExperts",),
        score="softmax_chosen",
        gate_name="router",
        has_biases=True,
        limit="limit",
        alpha="alpha",
        shift=1.0,
    ),
    *_of("MiMoV2Flash", "MoE", "TopkRouter", replace(_DEEPSEEK, shared="")),
    *_of(
        "Mistral4",
        "MoE",
        "TopkRouter",
        replace(_DEEPSEEK, score="softmax", correction=""),
    ),
    *_of(
        "DeepseekV2",
        "Moe",
        "TopkRouter",
        replace(
            _DEEPSEEK,
            score="softmax",
            correction="",
            normalize=False,
            method="topk_method",
            group_score="best",
        ),
    ),
)
FAMILIES = {family.block: family for family in _ALL}
"""The families, by the class of the block."""
