"""Models of random weights in Hugging Face folders, and references for their logits: in
plain NumPy, and by transformers where it is installed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from etc_dist.ir.tensor import numpy_dtype
from etc_dist.models.config import ModelConfig, read_config
from etc_dist.models.safetensors_file import STORED

Array = np.ndarray[Any, Any]

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


class Reference(Protocol):
    """The logits of one request's next positions, in fp32; `start` gives what a request
    keeps between calls."""

    def start(self) -> Any: ...
    def logits(self, ids: Sequence[int], kept: Any) -> Array: ...


def draw_folder(
    folder: Path, rng: np.random.Generator, given: Mapping[str, Any]
) -> ModelConfig:
    """Write a model of random bf16 weights with the config.json `given`."""
    (folder / "config.json").write_text(json.dumps(given))
    config = read_config(folder)
    hidden, inner, dim = config.hidden, config.inner, config.head_dim
    heads, kv_heads = config.heads * dim, config.kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    if given["model_type"] == "qwen3":
        shapes |= {"self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)}
    names = {
        f"model.layers.{layer}.{name}": shape
        for layer in range(config.layers)
        for name, shape in shapes.items()
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
    save(folder / "model.safetensors", tensors)
    return config


def save(file: Path, tensors: Mapping[str, Array], stored: str = "BF16") -> None:
    """Write a safetensors file; stored: the dtype there."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in tensors.items():
        part = array.astype(numpy_dtype(STORED[stored])).tobytes()
        offsets = [len(data), len(data) + len(part)]
        header[name] = dict(dtype=stored, shape=array.shape, data_offsets=offsets)
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
        self.tensors = tensors or _read(folder / "model.safetensors")
        self.cos_sin = config.cos_sin(config.positions)

    def start(self) -> list[list[Array]]:
        """For each layer, keys and values [positions, kv_heads, head_dim]."""
        empty = np.empty((0, self.config.kv_heads, self.config.head_dim), np.float32)
        return [[empty, empty] for _ in range(self.config.layers)]

    def logits(self, ids: Sequence[int], kept: list[list[Array]]) -> Array:
        x = self._weight("model.embed_tokens")[ids]
        for layer, keys_values in enumerate(kept):
            name = f"model.layers.{layer}."
            y = self._norm(x, f"{name}input_layernorm")
            attended = self._attend(y, f"{name}self_attn.", keys_values)
            x = x + attended @ self._weight(f"{name}self_attn.o_proj").T
            y = self._norm(x, f"{name}post_attention_layernorm")
            gate = y @ self._weight(f"{name}mlp.gate_proj").T
            up = y @ self._weight(f"{name}mlp.up_proj").T
            active = gate / (1 + np.exp(-gate)) * up
            x = x + active @ self._weight(f"{name}mlp.down_proj").T
        tied = self.config.is_tied
        head = self._weight("model.embed_tokens" if tied else "lm_head")
        return self._norm(x, "model.norm") @ head.T

    def _attend(self, x: Array, name: str, keys_values: list[Array]) -> Array:
        count, dim = len(x), self.config.head_dim
        q, k, v = (
            (x @ self._weight(f"{name}{n}_proj").T).reshape(count, -1, dim)
            for n in "qkv"
        )
        if f"{name}q_norm.weight" in self.tensors:
            q, k = self._norm(q, f"{name}q_norm"), self._norm(k, f"{name}k_norm")
        before = len(keys_values[0])
        q, k = self._rotate(q, before), self._rotate(k, before)
        for place, new in enumerate((k, v)):
            keys_values[place] = np.concatenate([keys_values[place], new])
        group = self.config.heads // self.config.kv_heads
        keys, values = (np.repeat(a, group, 1).swapaxes(0, 1) for a in keys_values)
        scores = q.swapaxes(0, 1) @ keys.swapaxes(1, 2) / np.sqrt(np.float32(dim))
        later = np.arange(before + count) > before + np.arange(count)[:, None]
        scores[:, later] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return (weights @ values).swapaxes(0, 1).reshape(count, -1)

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
        known = signature(self.model.forward).parameters
        self.cache = "cache" if "cache" in known else "past_key_values"

    def start(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def logits(self, ids: Sequence[int], kept: Any) -> Array:
        import torch

        with torch.no_grad():
            found = self.model(torch.tensor([list(ids)]), **{self.cache: kept})
        return found.logits[0].float().numpy()


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


REFERENCES: dict[str, type[Any]] = {"numpy": Plain}
if find_spec("torch") and find_spec("transformers"):
    REFERENCES["transformers"] = Transformers
