"""Loading a model from a Hugging Face folder or a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from etc_dist.compiler import world_or_current
from etc_dist.errors import ArgumentError, expect_type
from etc_dist.models.config import ModelConfig, read_config
from etc_dist.models.gguf_file import GgufFile
from etc_dist.models.model import Model
from etc_dist.models.part import Part, check_ranks
from etc_dist.models.weights import load_weights
from etc_dist.world import World

DTYPES = ("bfloat16", "float16")


def load(
    path: str | Path,
    *,
    batch: int = 8,
    positions: int | None = None,
    page_size: int = 64,
    dtype: str = "bfloat16",
    world: World | None = None,
) -> Model:
    """The model in `path`: a Hugging Face folder with config.json and safetensors
    files, or a GGUF file. Llama, Qwen3, Qwen3-MoE and Mixtral. Collective; a world of
    several ranks splits heads, inner width and vocabulary, and each rank loads its part
    alone.

    batch: requests at once, up to 128. positions: tokens of a request, its prompt
    included; default: those of the model, at most 2048. page_size: positions of a page
    of the cache. dtype: "bfloat16" or "float16", to which weights are converted.

    Raises ArgumentError for a path without a model, a model or a variant that is not
    implemented or that the ranks cannot split, and weights that are missing, unknown,
    of another shape or not finite: on every rank, if on one of them."""
    world = world_or_current(world)
    with world.refusing("the arguments of load"):
        config, weights = _read(path, dtype, Part(world.rank, world.size))
    return Model(
        config,
        weights,
        batch=batch,
        positions=positions,
        page_size=page_size,
        world=world,
    )


def _read(path: Any, dtype: Any, part: Part) -> tuple[ModelConfig, dict[str, Any]]:
    expect_type(path, (str, Path), "path")
    expect_type(dtype, str, "dtype")
    if dtype not in DTYPES:
        raise ArgumentError(
            "the dtype of a model is not supported",
            where="argument dtype",
            wanted=" or ".join(DTYPES),
            got=repr(dtype),
            fix="choose one of these",
        )
    path = Path(path).expanduser()
    if path.is_file():
        file = GgufFile(path)
        config = file.config()
        check_ranks(config, part.count)
        return config, file.weights(config, dtype, part)
    config = read_config(path)
    check_ranks(config, part.count)
    return config, load_weights(path, config, dtype, part)
