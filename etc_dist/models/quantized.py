"""Quantized weights in safetensors files, which are widened as they are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from etc_dist.models import float8, mxfp4
from etc_dist.models.family import Family
from etc_dist.models.fields import VARIANT_FIX, refused
from etc_dist.models.weight_files import read_folder

FIELD = "quantization_config"


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


def read_widened(folder: Path, family: Family) -> Iterable[tuple[str, Any]]:
    """The tensors of a model of a family with their names, as `read_folder`, and those
    that are quantized in fp32."""
    may_be = may_be_packed(family)
    tensors = read_folder(folder, may_be)
    if may_be:
        tensors = [*mxfp4.widened(tensors, folder)]
    return float8.widened(tensors, folder)
