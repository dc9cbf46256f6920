"""The best experts of tokens; CUDA half in `kernels/functions/best_experts.cuh`."""

from __future__ import annotations

from typing import Any

import numpy as np


def best_experts(logits: Any, top_k: int, normalize: bool) -> tuple[Any, Any]:
    """logits [tokens, experts] -> ids and weights [tokens, top_k] of the largest ones,
    the largest first; among equal ones the lower expert index wins. Weights are the
    softmax over all experts, or with `normalize` over those picked."""
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
    selected = np.take_along_axis(exponents, ids, axis=1)
    whole = selected if normalize else exponents
    return ids, selected / whole.sum(axis=1, keepdims=True)
