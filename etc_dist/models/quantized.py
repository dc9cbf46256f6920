"""Quantized weights in safetensors files, which are widened as they are read, but for
those of float8 that a decoder reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etc_dist.functions.scaled_weights import BLOCK
from etc_dist.models import float8, mxfp4
from etc_dist.models.experts import DENSE_MATMULS, EXPERT_MATMULS, SHARED_MATMULS
from etc_dist.models.families import FAMILIES
from etc_dist.models.family import MLP_NAMES, Family
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


def check_field(fields: Mapping[str, Any], family: Family, path: Path) -> None:
    """ArgumentError for another quantization_config of the file `path`."""
    quantization, may_be = fields.get(FIELD), may_be_packed(family)
    if quantization is None:
        return
    is_known = isinstance(quantization, Mapping) and (
        float8.is_known(quantization) or (may_be and mxfp4.is_known(quantization))
    )
    if not is_known:
        wanted = f"{FIELD}: null, or {float8.WANTED}"
        wanted += f", or quant_method {mxfp4.METHOD!r}" * may_be
        raise refused(path, wanted, repr(quantization)[:120], VARIANT_FIX)


def float8_matmuls(fields: Mapping[str, Any], config: ModelConfig) -> tuple[str, ...]:
    """The matmuls of a model that read weights of float8: those of which all are, in
    blocks that no change of the heads divides. fields: those of config.json."""
    quantization, family = fields.get(FIELD), FAMILIES[config.architecture]
    if not isinstance(quantization, Mapping) or not float8.is_known(quantization):
        return ()
    has_biases = config.mixture is not None and config.mixture.has_biases
    if family.is_fused or has_biases or config.hidden % MULTIPLE:
        return ()
    head, dim = config.head, config.head_dim
    is_whole = head.size == dim
    may_be = {
        "qkv": is_whole and (head.is_plain(dim) or dim <= BLOCK),
        "o": is_whole,
        "down": config.inner % MULTIPLE == 0,
        "expert_down": config.inner % MULTIPLE == 0,
        "shared_down": config.shared_inner % MULTIPLE == 0,
        "dense_down": config.dense_inner % MULTIPLE == 0,
    }
    return tuple(
        name
        for name, matrices in _matrices(config, family).items()
        if may_be.get(name, True) and float8.are_converted(quantization, matrices)
    )


def _matrices(config: ModelConfig, family: Family) -> dict[str, Sequence[str]]:
    """The matrices of each matmul of a layer, but for the router."""
    matrices: dict[str, Sequence[str]] = {
        "qkv": [f"self_attn.{name}_proj" for name in "qkv"],
        "o": ["self_attn.o_proj"],
    }
    form, mixture = family.mixture, config.mixture
    if form is None or mixture is None:
        blocks = {("gate_up", "down"): ("mlp", MLP_NAMES)}
    else:
        blocks = {EXPERT_MATMULS: (f"{form.block}.experts.0", form.names)}
        if mixture.shared:
            blocks[SHARED_MATMULS] = f"{form.block}.{form.shared}", MLP_NAMES
        if mixture.has_dense:
            blocks[DENSE_MATMULS] = "mlp", MLP_NAMES
    for (up, down), (block, names) in blocks.items():
        matrices[up] = [f"{block}.{name}" for name in names[:2]]
        matrices[down] = [f"{block}.{names[2]}"]
    return matrices


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
