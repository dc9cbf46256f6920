"""Quantized weights in safetensors files, which are widened as they are read, but for
those of float8 that a decoder reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etc_dist.functions.scaled_weights import BLOCK
from etc_dist.models import float8, mxfp4
from etc_dist.models.families import FAMILIES
from etc_dist.models.family import Family
from etc_dist.models.fields import VARIANT_FIX, refused
from etc_dist.models.weight_files import read_folder

if TYPE_CHECKING:
    from etc_dist.models.config import ModelConfig

FIELD = "quantization_config"
MULTIPLE = 16
"""GPUs copy rows of so many bytes, or a multiple."""


def may_be_packed(family: Family) -> bool:
    """Whether the files of a family may have weights in MXFP4."""
    return FIELD in family.reads


def check_field(given: Mapping[str, Any], family: Family, path: Path) -> None:
    """ArgumentError for another quantization_config of the file `path`."""
    found, may_be = given.get(FIELD), may_be_packed(family)
    if found is None:
        return
    is_known = isinstance(found, Mapping) and (
        float8.is_known(found) or (may_be and mxfp4.is_known(found))
    )
    if not is_known:
        wanted = f"{FIELD}: null, or {float8.WANTED}"
        wanted += f", or quant_method {mxfp4.METHOD!r}" * may_be
        raise refused(path, wanted, repr(found)[:120], VARIANT_FIX)


def float8_matmuls(given: Mapping[str, Any], config: ModelConfig) -> tuple[str, ...]:
    """The matmuls of a model that read weights of float8: those of which all are, in
    blocks that no change of the heads divides."""
    found = given.get(FIELD)
    if not isinstance(found, Mapping) or not float8.is_known(found):
        return ()
    if FAMILIES[config.architecture].is_fused or config.mixture is not None:
        return ()
    head, dim = config.head, config.head_dim
    is_whole = head.size == dim
    may_be = {
        "qkv": is_whole and (head.is_plain(dim) or dim <= BLOCK),
        "o": is_whole,
        "gate_up": True,
        "down": config.inner % MULTIPLE == 0,
    }
    names = (
        float8.converted(found, config.layers) if config.hidden % MULTIPLE == 0 else []
    )
    return tuple(name for name in names if may_be[name])


def read_widened(
    folder: Path, family: Family, is_kept: Callable[[str], bool]
) -> Iterable[tuple[str, Any]]:
    """The tensors of a model of a family with their names, as `read_folder`, and those
    that are quantized in fp32. is_kept: whether a tensor stays as it is in float8."""
    may_be = may_be_packed(family)
    tensors = read_folder(folder, may_be)
    if may_be:
        tensors = [*mxfp4.widened(tensors, folder)]
    return float8.widened(tensors, folder, is_kept)
