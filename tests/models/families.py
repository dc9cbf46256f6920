"""Tiny models of transformers, one or more of each family, that exercise each field of
their configurations which changes results."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.models.gguf_keys import FIELDS
from tests.models.gguf_bytes import write

Array = np.ndarray[Any, Any]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 136,
    "max_position_embeddings": 128,
    "rms_norm_eps": 2**-10,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


@dataclass(frozen=True)
class Case:
    """kind: the model_type. fields: of its configuration, in addition to SIZES. drops:
    by name, changes to these that a test must notice. gguf: keys of a GGUF file that
    the fields are, beyond the sizes; None: it is not tested. name: beside the kind.
    fills: by the ends of names of arrays, numbers with which they have no effect, which
    a test must notice, too."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    drops: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    gguf: Mapping[str, Any] | None = None
    name: str = ""
    fills: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join(filter(None, (self.kind, self.name)))


BIAS = {"attention_bias": True}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
}
OTHER = {
    "factor": 2.0,
    "original_max_position_embeddings": 64,
    "attention_factor": 1.0,
    "beta_fast": 2.0,
    "truncate": False,
}
TYPES = ["sliding_attention", "full_attention"]
LOCAL = {"rope_type": "default", "rope_theta": 1000.0}
TWO_ROPES = {TYPES[0]: LOCAL, TYPES[1]: YARN}
GEMMA = {
    "layer_types": TYPES,
    "sliding_window": 9,
    "query_pre_attn_scalar": 40,
    "final_logit_softcapping": 2.0,
    "tie_word_embeddings": False,
    "attention_bias": True,
}
GEMMA_DROPS = {
    "window": {"sliding_window": 64},
    "types": {"layer_types": TYPES[::-1]},
    "full": {"rope_parameters": TWO_ROPES | {TYPES[1]: LOCAL}},
    "local": {"rope_parameters": TWO_ROPES | {TYPES[0]: YARN}},
    "scale": {"query_pre_attn_scalar": 64},
    "cap": {"final_logit_softcapping": None},
    "bias": {"attention_bias": False},
    "activation": {"hidden_activation": "silu"},
}
HUNYUAN = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 1.0, "alpha": 50.0}
MAGNITUDES = {"mscale": 2.0, "mscale_all_dim": 0.5}
PHI = {
    "hidden_size": 192,
    "num_attention_heads": 2,
    "head_dim": 96,
    "partial_rotary_factor": 0.5,
}
LONG = {
    "original_max_position_embeddings": 4,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "short_factor": [1.0] * 24,
        "long_factor": np.linspace(1, 9, 24).tolist(),
    },
}
SHORT = LONG["rope_parameters"] | {"long_factor": [1.0] * 24}
PHI_DROPS = {
    "partial": {"partial_rotary_factor": 1.0, "rope_parameters": None},
    "factors": {"rope_parameters": SHORT},
}
EXPERT = re.compile(r"(.*\.experts)\.(\d+)(\..*)")
MOST_GAP = 0.03
"""Of the scores of chosen experts, from those of the best."""
EXPERTS = {"num_experts": 9, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
DEFAULT = {"rope_type": "default", "partial_rotary_factor": 0.25}
GLM_MOE = {
    "attention_bias": True,
    "use_qk_norm": True,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 2,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
DOTS = {
    "n_routed_experts": 9,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "sliding_window": 9,
    "max_window_layers": 1,
    "attention_bias": True,
}
ERNIE_MOE = {
    "moe_num_experts": 9,
    "moe_k": 3,
    "moe_intermediate_size": 48,
    "moe_num_shared_experts": 2,
}
OSS_YARN = YARN | {"rope_theta": 1000.0, "truncate": False}
GPT_OSS = {
    "num_local_experts": 9,
    "num_experts_per_tok": 3,
    "swiglu_limit": 0.5,
    "sliding_window": 9,
    "rope_parameters": OSS_YARN,
}
CASES = (
    Case("llama", BIAS, {"biases": {"attention_bias": False}}),
    Case("qwen2", gguf={}),
    Case(
        "qwen2",
        {"rope_parameters": YARN},
        {"rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}}
        | {name: {"rope_parameters": YARN | {name: of}} for name, of in OTHER.items()},
        name="yarn",
    ),
    Case("llama", {"rope_parameters": YARN | MAGNITUDES, "head_dim": 96}, name="wide"),
    Case("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    Case("gemma3_text", GEMMA | {"rope_parameters": TWO_ROPES}, GEMMA_DROPS),
    Case(
        "gemma2",
        GEMMA | {"attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 4},
        {
            **{n: of for n, of in GEMMA_DROPS.items() if n not in ("full", "local")},
            "scores": {"attn_logit_softcapping": None},
        },
    ),
    Case(
        "gemma2",
        {"sliding_window": 9, "query_pre_attn_scalar": 64}
        | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
        gguf={"attention.sliding_window": 9}
        | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
        name="plain",
    ),
    Case(
        "gemma3_text",
        {"head_dim": 256, "hidden_size": 40, "sliding_window": 9},
        gguf={"attention.sliding_window": 9},
        name="wide",
    ),
    Case(
        "glm4",
        {"partial_rotary_factor": 0.25},
        {"partial": {"partial_rotary_factor": 0.5}, "bias": {"attention_bias": False}},
        {"rope.dimension_count": 16},
    ),
    Case(
        "hunyuan_v1_dense",
        BIAS | {"rope_parameters": HUNYUAN},
        {
            "biases": {"attention_bias": False},
            "alpha": {"rope_parameters": HUNYUAN | {"alpha": 1.0}},
        },
    ),
    Case("hunyuan_v1_dense", gguf={}, name="plain"),
    Case(
        "exaone4",
        {"sliding_window": 9, "layer_types": TYPES, "rope_parameters": YARN},
        {
            "window": {"sliding_window": 64},
            "types": {"layer_types": TYPES[::-1]},
            "rope": {"rope_parameters": LOCAL},
        },
    ),
    Case(
        "smollm3",
        {"no_rope_layers": [0, 1], "sliding_window": 9, "use_sliding_window": True},
        {
            "first": {"no_rope_layers": [1, 1]},
            "last": {"no_rope_layers": [0, 0]},
            "window": {"use_sliding_window": False, "layer_types": TYPES[1:] * 2},
        },
    ),
    Case("mistral", {"sliding_window": 9}, {"window": {"sliding_window": None}}),
    Case(
        "ministral",
        {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
        {
            "first": {"layer_types": ["full_attention"] * 2},
            "last": {"layer_types": ["sliding_attention"] * 2},
        },
    ),
    Case(
        "ministral3",
        {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.5}, "sliding_window": 9},
        {
            "beta": {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.0}},
            "window": {"sliding_window": None},
        },
    ),
    Case("olmo2", gguf={}),
    Case(
        "olmo3",
        {"sliding_window": 9, "layer_types": TYPES, "rope_parameters": TWO_ROPES},
        {
            "window": {"sliding_window": 64},
            "types": {"layer_types": TYPES[::-1]},
            "full": {"rope_parameters": TWO_ROPES | {TYPES[1]: LOCAL}},
            "local": {"rope_parameters": TWO_ROPES | {TYPES[0]: YARN}},
        },
    ),
    Case("olmo3", {"sliding_window": 256, "rope_parameters": TWO_ROPES}, name="long"),
    Case(
        "qwen2_moe",
        EXPERTS | {"shared_expert_intermediate_size": 80},
        {
            "normalize": {"norm_topk_prob": True},
            "bias": {"qkv_bias": False},
        },
    ),
    Case(
        "qwen2_moe",
        EXPERTS
        | {"norm_topk_prob": True, "num_experts_per_tok": 3, "hidden_size": 256}
        | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
        | {"shared_expert_intermediate_size": 16, "qkv_bias": False},
        {
            "normalize": {"norm_topk_prob": False},
            "window": {"max_window_layers": 0},
            "top": {"num_experts_per_tok": 2},
        },
        name="window",
    ),
    Case(
        "olmoe",
        EXPERTS | {"hidden_size": 256, "num_key_value_heads": 4},
        {"normalize": {"norm_topk_prob": True}},
        {"expert_feed_forward_length": 96},
    ),
    Case(
        "hunyuan_v1_moe",
        BIAS
        | {"rope_parameters": HUNYUAN}
        | {"num_experts": 9, "moe_topk": 3, "intermediate_size": 48},
        {
            "biases": {"attention_bias": False},
            "alpha": {"rope_parameters": HUNYUAN | {"alpha": 1.0}},
            "top": {"moe_topk": 2},
        },
    ),
    Case(
        "minimax_m2",
        {"num_local_experts": 9, "num_experts_per_tok": 3, "intermediate_size": 48}
        | {"rotary_dim": 16},
        {"top": {"num_experts_per_tok": 2}, "rotary": {"rotary_dim": 32}},
        {"expert_count": 9, "expert_gating_func": 2, "rope.dimension_count": 16},
    ),
    Case(
        "glm4_moe",
        GLM_MOE,
        {
            "norm": {"use_qk_norm": False},
            "bias": {"attention_bias": False},
            "normalize": {"norm_topk_prob": False},
            "scale": {"routed_scaling_factor": 1.0},
            "groups": {"n_group": 1, "topk_group": 1},
            "partial": {"rope_parameters": {"rope_theta": 1e4, **DEFAULT}},
        },
        {
            "expert_count": 12,
            "expert_gating_func": 2,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
            "expert_shared_count": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
            "leading_dense_block_count": 2,
            "nextn_predict_layers": 1,
            "rope.dimension_count": 32,
        },
    ),
    Case(
        "glm4_moe",
        GLM_MOE
        | {"first_k_dense_replace": 0, "use_qk_norm": False, "n_group": 1}
        | {"topk_group": 1, "n_shared_experts": 1, "norm_topk_prob": False},
        gguf={
            "expert_count": 12,
            "expert_shared_count": 1,
            "expert_weights_scale": 2.5,
            "rope.dimension_count": 32,
        },
        name="sparse",
    ),
    Case(
        "dots1",
        DOTS,
        {
            "biases": {"attention_bias": False},
            "normalize": {"norm_topk_prob": False},
            "scale": {"routed_scaling_factor": 1.0},
            "window": {"sliding_window": None},
            "top": {"num_experts_per_tok": 2},
        },
    ),
    Case("ernie4_5", gguf={}),
    Case(
        "ernie4_5_moe",
        ERNIE_MOE,
        {"top": {"moe_k": 2}, "shared": {"moe_num_shared_experts": 0}},
        {
            "expert_shared_count": 2,
            "expert_shared_feed_forward_length": 96,
            "interleave_moe_layer_step": 1,
            "leading_dense_block_count": 1,
        },
    ),
    Case(
        "ernie4_5_moe",
        ERNIE_MOE | {"moe_num_shared_experts": 0},
        gguf={"expert_shared_count": 0, "leading_dense_block_count": 1},
        name="300b",
    ),
    Case(
        "hy_v3",
        EXPERTS | {"num_shared_experts": 2, "num_hidden_layers": 3},
        {"scale": {"router_scaling_factor": 1.0}},
    ),
    Case(
        "gpt_oss",
        GPT_OSS,
        {
            "bias": {"attention_bias": False},
            "alpha": {"swiglu_alpha": 0.7},
            "limit": {"swiglu_limit": 7.0},
            "top": {"num_experts_per_tok": 2},
            "window": {"sliding_window": 64},
            "types": {"layer_types": TYPES[::-1]},
            "rope": {"rope_parameters": LOCAL},
            "truncate": {"rope_parameters": OSS_YARN | {"truncate": True}},
        },
        fills={
            "sinks": -1e4,
            "router.bias": 0,
            "gate_up_proj_bias": 0,
            "down_proj_bias": 0,
        },
    ),
    Case(
        "gpt_oss",
        GPT_OSS | {"swiglu_limit": 7.0},
        gguf={
            "attention.sliding_window": 9,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 16,
        },
        name="gguf",
    ),
    Case("phi3", PHI, gguf={"rope.dimension_count": 48}),
    Case("phi3", PHI | LONG, PHI_DROPS, name="long"),
    Case("qwen3", BIAS, {"biases": {"attention_bias": False}}, {}),
    Case(
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
        {"last": {"max_window_layers": 2}, "first": {"max_window_layers": 0}},
        name="window",
    ),
    Case(
        "seed_oss",
        {"attention_out_bias": True},
        {"qkv": {"attention_bias": False}, "o": {"attention_out_bias": False}},
        {},
    ),
)

FILES = (
    *(case for case in CASES if case.gguf is not None),
    Case(
        "qwen2_moe",
        EXPERTS | {"shared_expert_intermediate_size": 80, "qkv_bias": False},
        gguf={"expert_shared_feed_forward_length": 80},
    ),
    Case("smollm3", {"num_hidden_layers": 4, "attention_bias": True}, gguf={}),
    Case(
        "hunyuan_v1_moe",
        {"num_experts": 9, "moe_topk": 3, "attention_bias": True},
        gguf={
            "expert_feed_forward_length": 96,
            "expert_shared_count": 1,
            "expert_shared_feed_forward_length": 96,
            "expert_used_count": 3,
        },
    ),
    Case(
        "dots1",
        DOTS | {"sliding_window": None},
        gguf={
            "expert_count": 9,
            "expert_gating_func": 2,
            "expert_shared_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
            "leading_dense_block_count": 1,
        },
    ),
)
"""Cases of GGUF files, which have no `alpha` and no sliding windows of mixtures."""


@contextmanager
def choosing(experts: Array | None) -> Iterator[None]:
    """Meanwhile models of transformers choose these experts [layers, rows, top_k],
    which differ from the best only where values are almost equal."""
    import torch

    plain = torch.topk
    layers = iter([] if experts is None else experts)

    def topk(values: Any, k: int, **options: Any) -> Any:
        best = plain(values, k, **options)
        if experts is None or k != experts.shape[-1]:
            return best
        ids = torch.tensor(next(layers), dtype=torch.int64)
        gathers = values.gather(-1, ids)
        assert (best[0].sum(-1) - gathers.sum(-1)).max() < MOST_GAP
        return gathers, ids

    torch.topk = topk
    try:
        yield
    finally:
        torch.topk = plain


def _of_gpt_oss(name: str, array: Array) -> dict[str, Array]:
    """Gate and up of its experts apart, and matrices as of other families."""
    head, _, kind = name.rpartition(".")
    stem, end = kind.removesuffix("_bias"), "weight"
    if kind.endswith("bias"):
        end = "bias"
    if kind == "sinks":
        return {f"{name}.weight": array}
    if stem not in ("gate_up_proj", "down_proj"):
        return {name: array}
    array = array if end == "bias" else array.swapaxes(1, 2)
    parts = {"down": array}
    if stem == "gate_up_proj":
        parts = {"gate": array[:, ::2], "up": array[:, 1::2]}
    return {f"{head}.{part}_proj.{end}": of for part, of in parts.items()}


def _stacked(folder: Path) -> dict[str, Array]:
    """The tensors of a folder, with names as the package gguf knows them; those of all
    experts of a layer in one array."""
    from safetensors.torch import load_file

    arrays, experts = {}, defaultdict[str, dict[int, Array]](dict)
    for stored_name, of in load_file(folder / "model.safetensors").items():
        name = stored_name.replace("correction_bias", "correction.bias")
        if match := EXPERT.fullmatch(name):
            experts[match[1] + match[3]][int(match[2])] = of.float().numpy()
        else:
            arrays |= _of_gpt_oss(name, of.float().numpy().squeeze())
    stacked = {name: [of[n] for n in range(len(of))] for name, of in experts.items()}
    return arrays | {name: np.stack(of) for name, of in stacked.items()}


class Tiny:
    """A model of transformers with random weights, in fp32."""

    def __init__(self, case: Case, changes: Mapping[str, Any], weights: Any = None):
        """weights: those of another model, of which this one takes what it has."""
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        fields = {**SIZES, **case.fields, **changes}
        config = CONFIG_MAPPING[case.kind](**fields)
        self.model = AutoModelForCausalLM.from_config(config).float().eval()
        if weights is not None:
            self.model.load_state_dict(weights, strict=False)
            return
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, of in self.model.named_parameters():
                noise = torch.randn(of.shape, generator=generator)
                if name.endswith("bias"):
                    noise *= 0.5
                elif of.ndim > 1:
                    noise *= of.shape[-1] ** -0.5
                elif name.endswith("sinks"):
                    noise += 2
                else:
                    noise = of + noise / 8  # of the initial gain
                of.copy_(noise.bfloat16())
            for name, of in self.model.named_buffers():
                if name.endswith("correction_bias"):
                    of.copy_(torch.rand(of.shape, generator=generator))

    def filled(self, case: Case, end: str, number: float) -> Tiny:
        """The same model, but for the arrays with such names."""
        weights = {
            name: of.new_full(of.shape, number) if name.endswith(end) else of
            for name, of in self.model.state_dict().items()
        }
        return Tiny(case, {}, weights)

    def save(self, folder: Path) -> None:
        """A Hugging Face folder, in bf16."""
        self.model.bfloat16().save_pretrained(folder)
        self.model.float()

    def save_gguf(self, path: Path, kind: str, keys: Mapping[str, Any]) -> None:
        """A GGUF file of architecture `kind`, whose names of tensors are those of the
        package gguf, of the model that is saved beside it. keys: of this architecture,
        in addition to those of all."""
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        config = self.model.config
        [arch] = [arch for arch, name in MODEL_ARCH_NAMES.items() if name == kind]
        names = get_tensor_name_map(arch, config.num_hidden_layers)
        tensors = {}
        for name, array in _stacked(path.parent).items():
            stem, _, suffix = name.rpartition(".")
            if kind == "smollm3" and stem.endswith(("q_proj", "k_proj")):
                halves = array.reshape(-1, 2, config.head_dim // 2, *array.shape[1:])
                array = halves.swapaxes(1, 2).reshape(array.shape)
            if kind.startswith("gemma") and stem.endswith("norm"):
                array = array + 1
            if not (name == "lm_head.weight" and config.tie_word_embeddings):
                tensors[f"{names.get_name(stem)}.{suffix}"] = array
        of_all = {
            key: getattr(config, field)
            for key, field in FIELDS.items()
            if getattr(config, field, None) is not None
        }
        rope = config.rope_parameters
        rope = rope.get("full_attention", rope)["rope_theta"]
        if predicting := keys.get("nextn_predict_layers"):
            layers = config.num_hidden_layers
            of_all["block_count"] = layers + predicting
            tensors[f"blk.{layers}.nextn.enorm.weight"] = np.ones(64, np.float32)
        write(path, kind, tensors, **of_all | {"rope.freq_base": float(rope)} | keys)

    def logits(
        self, ids: Any, dtype: str = "float32", experts: Array | None = None
    ) -> Array:
        """Of all positions of a text, computed in `dtype`. experts: those that they
        choose, [layers, positions, top_k]; default: the best."""
        import torch

        self.model.to(getattr(torch, dtype))
        with torch.no_grad(), choosing(experts):
            output = self.model(torch.tensor([list(ids)]), use_cache=False)
        self.model.float()
        return output.logits[0].float().numpy()
