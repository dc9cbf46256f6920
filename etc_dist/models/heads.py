"""The elements of heads: their order in files, and that of the rotary embedding.

The CUDA bodies rotate elements i and i + head_dim / 2. Scores do not change if queries
and keys have their elements in another order: so weights are reordered as they are
read, and every model has the same program. Elements that are not rotated have an angle
of 0, those beyond the head's are zeros."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from etc_dist.models.float8 import SCALES


@dataclass(frozen=True)
class HeadLayout:
    """A head in the files. size: its elements. rotated: the first ones, which the
    rotary embedding rotates. is_paired: elements 2 i and 2 i + 1 are rotated together,
    else i and i + rotated / 2."""

    size: int
    rotated: int
    is_paired: bool = False

    def is_plain(self, head_dim: int) -> bool:
        """Whether the files have the program's order."""
        return self.size == self.rotated == head_dim and not self.is_paired

    def order(self, head_dim: int) -> Any:
        """The element of the file at each place of a query or key; `size` for none."""
        half, num_pairs = head_dim // 2, self.rotated // 2
        step, apart = (2, 1) if self.is_paired else (1, num_pairs)
        order = np.full((2, half), self.size)
        order[0, :num_pairs] = np.arange(num_pairs) * step
        order[1, :num_pairs] = np.arange(num_pairs) * step + apart
        unrotated = np.arange(self.rotated, self.size)
        room = half - num_pairs
        order[0, num_pairs:][: len(unrotated)] = unrotated[:room]
        order[1, num_pairs:][: max(0, len(unrotated) - room)] = unrotated[room:]
        return order.ravel()


def arranged(
    tensors: Iterable[tuple[str, Any]], head: HeadLayout, head_dim: int
) -> Iterator[tuple[str, Any]]:
    """The tensors, with heads of `head_dim` elements in the program's order. Those of
    other sizes are not changed, nor are scales, which heads have as a whole."""
    if head.is_plain(head_dim):
        yield from tensors
        return
    rotated, padded = head.order(head_dim), np.arange(head_dim).clip(max=head.size)
    for name, array in tensors:
        _, _, attention_name = name.partition(".self_attn.")
        of, _, kind = attention_name.partition(".")
        if kind.endswith(SCALES):
            yield name, array
        elif of in ("q_proj", "k_proj", "q_norm", "k_norm"):
            yield name, _reordered(array, 0, head.size, rotated)
        elif of == "v_proj":
            yield name, _reordered(array, 0, head.size, padded)
        elif of == "o_proj" and array.ndim == 2:
            yield name, _reordered(array, 1, head.size, padded)
        else:
            yield name, array


def _reordered(array: Any, axis: int, size: int, order: Any) -> Any:
    """The heads of `size` along an axis with elements `order`, zeros for `size`."""
    if array.ndim == 0 or array.shape[axis] % size:
        return array
    front, back = array.shape[:axis], array.shape[axis + 1 :]
    heads = array.reshape(*front, -1, size, *back)
    zeros = np.zeros((*heads.shape[: axis + 1], 1, *back), array.dtype)
    ordered_heads = np.concatenate([heads, zeros], axis + 1).take(order, axis + 1)
    return ordered_heads.reshape(*front, -1, *back)


def split_fused(
    tensors: Iterable[tuple[str, Any]], heads: int, kv_heads: int
) -> Iterator[tuple[str, Any]]:
    """Fused matrices as those of their parts: qkv_proj, and gate_up_proj of an MLP."""
    for name, array in tensors:
        stem, _, kind = name.rpartition(".")
        parts: dict[str, Any] = {}
        if stem.endswith(".self_attn.qkv_proj"):
            unit = array.shape[0] // (heads + 2 * kv_heads)
            ends = heads * unit, (heads + kv_heads) * unit
            parts = dict(zip("qkv", np.split(array, ends), strict=True))
        elif stem.endswith(".mlp.gate_up_proj") and array.ndim < 3:
            parts = dict(zip(("gate", "up"), np.array_split(array, 2), strict=True))
        if not parts:
            yield name, array
        front, _, _ = stem.rpartition(".")
        for part, of_part in parts.items():
            yield f"{front}.{part}_proj.{kind}", of_part
