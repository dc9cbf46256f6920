"""Models of random weights in Hugging Face folders, and references for their logits: in
plain NumPy, and by transformers where it is installed. `start` gives what a request
keeps between calls; experts [layers, positions, top_k]: those to choose."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

from etc_dist.ir.tensor import numpy_dtype
from etc_dist.models.config import ModelConfig, read_config
from etc_dist.models.families import FAMILIES
from etc_dist.models.family import MLP_NAMES
from etc_dist.models.safetensors_file import PACKED, SCALED, STORED

Array = np.ndarray[Any, Any]
KINDS = {**STORED, **PACKED, **SCALED}
SMALL = {dtype: kind for kind, dtype in (PACKED | SCALED).items()}

QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 424,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 504,
}
LLAMA = QWEN | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 192,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}

QWEN_MOE = QWEN | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 136,
    "norm_topk_prob": True,
    "num_experts": 32,
    "num_experts_per_tok": 4,
}
QWEN_2_MOE = {k: v for k, v in QWEN_MOE.items() if k != "head_dim"} | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "norm_topk_prob": False,
    "qkv_bias": False,
    "shared_expert_intermediate_size": 72,
}
HY = QWEN_MOE | {
    "architectures": ["HYV3ForCausalLM"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "model_type": "hy_v3",
    "norm_topk_prob": None,
    "num_shared_experts": 2,
    "router_scaling_factor": 1.5,
}
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "sliding_window": None,
    "tie_word_embeddings": False,
}


def draw_folder(
    folder: Path,
    rng: np.random.Generator,
    settings: Mapping[str, Any],
    preference: Sequence[float] = (),
) -> ModelConfig:
    """Write a model of random bf16 weights with the config.json `settings`. preference:
    about what the logits of each expert have more than at random."""
    (folder / "config.json").write_text(json.dumps(settings))
    config = read_config(folder)
    hidden, dim = config.hidden, config.head_dim
    heads, kv_heads = config.heads * dim, config.kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads),
    }
    if config.normalizes_heads:
        shapes |= {"self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)}
    names = {
        f"model.layers.{layer}.{name}": shape
        for layer in range(config.layers)
        for name, shape in (shapes | _mlp_shapes(config, layer)).items()
    }
    names |= {"model.embed_tokens": (config.vocabulary, hidden)}
    names |= {"model.norm": (hidden,)}
    if not config.is_tied:
        names["lm_head"] = config.vocabulary, hidden
    tensors = {}
    for name, shape in names.items():
        numbers = rng.standard_normal(shape)
        is_gain = len(shape) == 1
        numbers = 1 + numbers / 8 if is_gain else numbers * shape[-1] ** -0.5
        tensors[f"{name}.weight"] = numbers
    form = FAMILIES[config.architecture].mixture
    if form is not None and form.correction:
        for layer in range(config.dense_layers, config.layers):
            name = f"model.layers.{layer}.{form.block}.{form.correction}"
            tensors[name] = rng.random(config.mixture.experts) if config.mixture else 0
    if preference:
        _prefer(tensors, preference)
    save(folder / "model.safetensors", tensors)
    return config


def _mlp_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    form = FAMILIES[config.architecture].mixture
    if form is None or layer < config.dense_layers:
        return _shapes("mlp", MLP_NAMES, config, config.dense_inner or config.inner)
    assert config.mixture is not None
    shapes = {f"{form.block}.{form.gate}": (config.mixture.experts, config.hidden)}
    for expert in range(config.mixture.experts):
        name = f"{form.block}.experts.{expert}"
        shapes |= _shapes(name, form.names, config, config.inner)
    if config.mixture.shared:
        name = f"{form.block}.{form.shared}"
        shapes |= _shapes(name, MLP_NAMES, config, config.shared_inner)
    if form.shared_gate:
        shapes[f"{form.block}.{form.shared_gate}"] = 1, config.hidden
    return shapes


def _shapes(
    of: str, names: Sequence[str], config: ModelConfig, inner: int
) -> dict[str, tuple[int, ...]]:
    """Of gate, up and down."""
    wide, tall = (inner, config.hidden), (config.hidden, inner)
    pairs = zip(names, (wide, wide, tall), strict=True)
    return {f"{of}.{name}": shape for name, shape in pairs}


def _prefer(tensors: Mapping[str, Array], preference: Sequence[float]) -> None:
    """All embeddings have a part in common, by which the router prefers experts."""
    embedding = tensors["model.embed_tokens.weight"]
    embedding[:, 0] = 1
    for name, router in tensors.items():
        if name.endswith((".mlp.gate.weight", ".block_sparse_moe.gate.weight")):
            router[:, 0] = np.array(preference) * (2 / embedding.shape[1]) ** 0.5
        if name.endswith("post_attention_layernorm.weight"):
            router[0] = 1


def save(file: Path, tensors: Mapping[str, Array], dtype_name: str = "BF16") -> None:
    """Write a safetensors file; stored: the dtype there, except of bytes and float8."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in tensors.items():
        kind = SMALL.get(array.dtype.name, dtype_name)
        part = array.astype(numpy_dtype(KINDS[kind])).tobytes()
        offsets = [len(data), len(data) + len(part)]
        header[name] = dict(dtype=kind, shape=array.shape, data_offsets=offsets)
        data += part
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


class Plain:
    """A model in fp32, by NumPy."""

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        tensors: Mapping[str, Array] | None = None,
    ):
        """tensors: instead of those in the folder."""
        self.config = config
        self.gap = 0.0
        """By how much the value of an expert that was to be chosen was below one that
        was not, at most."""
        self.biases: list[Array] = []
        """Of the router, [layers, experts] each."""
        self.tensors = tensors or _read(folder / "model.safetensors")
        self.cos_sin = config.cos_sin(config.positions)

    def start(self) -> list[list[Array]]:
        """For each layer, keys and values [positions, kv_heads, head_dim]."""
        empty = np.empty((0, self.config.kv_heads, self.config.head_dim), np.float32)
        return [[empty, empty] for _ in range(self.config.layers)]

    def logits(
        self, ids: Sequence[int], cache: list[list[Array]], experts: Array | None = None
    ) -> Array:
        x = self._weight("model.embed_tokens")[ids]
        for layer_idx, keys_values in enumerate(cache):
            name = f"model.layers.{layer_idx}."
            y = self._norm(x, f"{name}input_layernorm")
            attended = self._attend(y, f"{name}self_attn.", keys_values)
            x = x + attended @ self._weight(f"{name}self_attn.o_proj").T
            y = self._norm(x, f"{name}post_attention_layernorm")
            if self.config.mixture is None or layer_idx < self.config.dense_layers:
                x = x + self._mlp(y, f"{name}mlp.", MLP_NAMES)
            else:
                x = x + self._mix(
                    y, name, None if experts is None else experts[layer_idx]
                )
        tied = self.config.is_tied
        head = self._weight("model.embed_tokens" if tied else "lm_head")
        return self._norm(x, "model.norm") @ head.T

    def _mlp(self, x: Array, name: str, names: Sequence[str]) -> Array:
        gate, up, down = (self._weight(f"{name}{n}") for n in names)
        gate_rows = x @ gate.T
        return (gate_rows / (1 + np.exp(-gate_rows)) * (x @ up.T)) @ down.T

    def _mix(self, x: Array, name: str, ids: Array | None) -> Array:
        mixture, form = self.config.mixture, FAMILIES[self.config.architecture].mixture
        assert mixture is not None and form is not None
        block = f"{name}{form.block}."
        logits = x @ self._weight(f"{block}{form.gate}").T
        router, layer = mixture.router, int(name.split(".")[2])
        biases = [bias[layer] for bias in self.biases]
        if form.correction:
            biases = [self.tensors[f"{block}{form.correction}"]]
        best, _ = router.choose(logits, *biases)
        ids = best if ids is None else ids
        values = router.values(logits, *biases)
        values_of_ids, best_values = (
            np.take_along_axis(values, c, axis=1) for c in (ids, best)
        )
        self.gap = max(self.gap, float((best_values - values_of_ids).max()))
        weights = router.weights(logits, ids, *biases)
        y = np.zeros_like(x)
        for expert in np.unique(ids):
            rows, k = np.nonzero(ids == expert)
            part = self._mlp(x[rows], f"{block}experts.{expert}.", form.names)
            y[rows] += weights[rows, k, None] * part
        if mixture.shared:
            part = self._mlp(x, f"{block}{form.shared}.", MLP_NAMES)
            if form.shared_gate:
                gate = x @ self._weight(f"{block}{form.shared_gate}").T
                part = part / (1 + np.exp(-gate))
            y += part
        return y

    def _attend(self, x: Array, name: str, keys_values: list[Array]) -> Array:
        num_rows, dim = len(x), self.config.head_dim
        q, k, v = (
            (x @ self._weight(f"{name}{n}_proj").T).reshape(num_rows, -1, dim)
            for n in "qkv"
        )
        if f"{name}q_norm.weight" in self.tensors:
            q, k = self._norm(q, f"{name}q_norm"), self._norm(k, f"{name}k_norm")
        num_before = len(keys_values[0])
        q, k = self._rotate(q, num_before), self._rotate(k, num_before)
        for part_idx, new in enumerate((k, v)):
            keys_values[part_idx] = np.concatenate([keys_values[part_idx], new])
        group = self.config.heads // self.config.kv_heads
        keys, values = (np.repeat(a, group, 1).swapaxes(0, 1) for a in keys_values)
        scores = q.swapaxes(0, 1) @ keys.swapaxes(1, 2) / np.sqrt(np.float32(dim))
        is_later = (
            np.arange(num_before + num_rows) > num_before + np.arange(num_rows)[:, None]
        )
        scores[:, is_later] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return (weights @ values).swapaxes(0, 1).reshape(num_rows, -1)

    def _rotate(self, x: Array, before: int) -> Array:
        rows = self.cos_sin[before : before + len(x), None]
        cos, sin = np.split(rows, 2, axis=-1)
        low, high = np.split(x, 2, axis=-1)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    def _norm(self, x: Array, name: str) -> Array:
        mean = (x * x).mean(axis=-1, keepdims=True)
        return x / np.sqrt(mean + np.float32(self.config.norm_eps)) * self._weight(name)

    def _weight(self, name: str) -> Array:
        return self.tensors[f"{name}.weight"]


class Transformers:
    """A model by transformers."""

    def __init__(self, folder: Path, config: ModelConfig, dtype: str = "float32"):
        import torch
        from transformers import AutoModelForCausalLM

        dtypes = {"dtype": getattr(torch, dtype), "local_files_only": True}
        self.model = AutoModelForCausalLM.from_pretrained(folder, **dtypes).eval()
        parameters = signature(self.model.forward).parameters
        self.cache = "cache" if "cache" in parameters else "past_key_values"
        self.experts: Array | None = None
        routers = [m for m in self.model.modules() if hasattr(m, "top_k")]
        routers = [m for m in routers if type(m).__name__.endswith("Router")]
        for layer_idx, router in enumerate(routers):
            router.register_forward_hook(partial(self._choose, config, layer_idx))

    def start(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def _choose(
        self, config: ModelConfig, layer: int, module: Any, inputs: Any, outputs: Any
    ) -> Any:
        """The result of a router for the experts that are to be chosen."""
        import torch

        logits, weights, _ = outputs
        if self.experts is None:
            return outputs
        ids = torch.tensor(self.experts[layer], dtype=torch.int64)
        weights_of_ids = torch.softmax(logits.float(), dim=-1).gather(1, ids)
        if config.mixture is not None and config.mixture.router.normalize:
            weights_of_ids = weights_of_ids / weights_of_ids.sum(dim=-1, keepdim=True)
        return logits, weights_of_ids.to(weights.dtype), ids

    def logits(
        self, ids: Sequence[int], cache: Any, experts: Array | None = None
    ) -> Array:
        import torch

        self.experts = experts
        with torch.no_grad():
            output = self.model(torch.tensor([list(ids)]), **{self.cache: cache})
        return output.logits[0].float().numpy()


def _read(file: Path) -> dict[str, Array]:
    """The tensors of a file of `save`, in fp32."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:end]).items():
        if name != "__metadata__":
            first, last = (end + offset for offset in entry["data_offsets"])
            numbers = np.frombuffer(data[first:last], numpy_dtype("bfloat16"))
            tensors[name] = numbers.reshape(entry["shape"]).astype(np.float32)
    return tensors


REFERENCES: dict[str, type[Any]] = {"numpy": Plain, "transformers": Transformers}
