"""Two layers of a model, compared with those of transformers, on the CPU backend.

Both have the fields of the given config.json, except for the sizes, which are small, so
that the comparison takes seconds. Weights are random, biases and gains included."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from etc_dist.models import ModelConfig, load
from etc_dist.models.families import FAMILIES
from etc_dist.models.mixture_fields import COUNTS
from etc_dist.settings import Settings
from etc_dist.world import start

Array = np.ndarray[Any, Any]
PACKAGES = ("torch", "transformers")
LAYERS, HIDDEN, INNER, VOCABULARY, EXPERTS = 2, 128, 192, 512, 16
WINDOW, ROWS = 7, (18, 3, 1, 1)
"""Of a model with sliding windows; the rows of each step, more than a window."""
MOST_ERROR = 2.5
"""Of the logits, in units of the error of transformers in bf16."""
NOTES = {
    "architectures",
    "auto_map",
    "dtype",
    "model_type",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
    "_name_or_path",
}
"""Fields that are not of the configuration itself, or that are set anew."""


def missing_packages() -> list[str]:
    """Those without which there is nothing to compare with."""
    return [name for name in PACKAGES if find_spec(name) is None]


def small_fields(
    config_fields: Mapping[str, Any], config: ModelConfig
) -> dict[str, Any]:
    """The fields of a small model of the same kind, with LAYERS layers: of each kind of
    its layers, the first ones."""
    kept_fields = {
        name: value for name, value in config_fields.items() if name not in NOTES
    }
    group_size = config.heads // config.kv_heads
    kv_heads = min(2, config.kv_heads)
    fields = {
        **kept_fields,
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": group_size * kv_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": config.head.size,
        "vocab_size": VOCABULARY,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    kinds = config_fields.get("layer_types")
    if isinstance(kinds, list):
        first = list(dict.fromkeys(kinds))
        fields["layer_types"] = [first[n % len(first)] for n in range(LAYERS)]
    if config_fields.get("sliding_window") is not None:
        fields["sliding_window"] = WINDOW
    if config_fields.get("max_window_layers") is not None:
        fields["max_window_layers"] = 1
    if config.mixture is not None:
        experts = min(config.mixture.experts, max(EXPERTS, config.mixture.router.top_k))
        names = {"num_experts", *COUNTS["num_experts"]}
        fields |= {name: experts for name in names.intersection(config_fields)}
        widths = {"moe_intermediate_size", "shared_expert_intermediate_size"}
        fields |= {
            name: INNER for name in widths if config_fields.get(name) is not None
        }
        form = FAMILIES[config.architecture].mixture
        assert form is not None
        dense = min(config.dense_layers, LAYERS - 1)
        kinds = ["dense"] * dense + ["sparse"] * (LAYERS - dense)
        if config_fields.get(form.dense) is not None:
            is_list = isinstance(config_fields[form.dense], list)
            fields[form.dense] = kinds if is_list else dense
        if config_fields.get(form.last) is not None:
            fields[form.last] = LAYERS - 1
    return fields


def compare(config_fields: Mapping[str, Any], config: ModelConfig) -> tuple[str, bool]:
    """Compare the logits of a prompt, in several steps; a line on it, and whether they
    are as near to those of fp32 as those of transformers in bf16."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    model = _random_model(config_fields, config)
    ids = np.random.default_rng(5).integers(VOCABULARY, size=sum(ROWS)).tolist()
    exact, rounded = (
        _their_logits(model, ids, kind) for kind in ("float32", "bfloat16")
    )
    with TemporaryDirectory() as folder:
        model.bfloat16().save_pretrained(folder)
        logits = _own_logits(Path(folder), ids)
    ratio = _distance(logits, exact) / _distance(rounded, exact)
    return (
        f"{len(ids)} tokens of {LAYERS} layers, transformers {transformers.__version__}"
        f": an error of {ratio:.2f} times its own in bf16, at most {MOST_ERROR:g}",
        ratio <= MOST_ERROR,
    )


def _random_model(config_fields: Mapping[str, Any], config: ModelConfig) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = FAMILIES[config.architecture]
    small = CONFIG_MAPPING[family.model_type](**small_fields(config_fields, config))
    model = AutoModelForCausalLM.from_config(small).float().eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1:
                noise *= weight.shape[-1] ** -0.5
            elif name.endswith("bias"):
                noise *= 0.5
            else:
                noise = weight + noise / 8  # of the initial gain
            weight.copy_(noise.bfloat16())
    return model


def _their_logits(model: Any, ids: list[int], dtype: str) -> Array:
    import torch

    model.to(getattr(torch, dtype))
    with torch.no_grad():
        outputs = model(torch.tensor([ids]), use_cache=False)
    model.float()
    logits: Array = outputs.logits[0].float().numpy()
    return logits


def _own_logits(folder: Path, ids: list[int]) -> Array:
    """By steps of ROWS rows, which read what those before have written."""
    parts, position = [], 0
    with (
        start(Settings(backend="cpu", verify=0)) as world,
        load(folder, batch=1, positions=len(ids), world=world) as model,
    ):
        for count in ROWS:
            span = range(position, position + count)
            model.step(ids[position : position + count], [0] * count, span, [[0]])
            parts.append(model.logits.astype(np.float32))
            position += count
    return np.concatenate(parts)


def _distance(logits: Array, expected: Array) -> float:
    """The root mean square of the differences of a row, in the median of all rows: one
    whose rounding has changed the choice of an expert is far off."""
    of_rows = np.sqrt(np.mean((logits - expected) ** 2, axis=1))
    return float(np.median(of_rows))
