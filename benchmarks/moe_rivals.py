"""Other ways to a mixture of experts, timed beside ours where asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

LAYERS = "vllm.model_executor.layers.fused_moe"


class FusedMoE:
    """The layer by vLLM: its routing, and its Triton kernel for either grouped product,
    with the tile sizes that vLLM has for the device. Logits in fp32, as ours."""

    def __init__(
        self, logits: Callable[[Any], Any], gate_up: Any, down: Any, top_k: int
    ):
        self._layers = import_module(LAYERS)
        self._logits, self._weights, self._top_k = logits, (gate_up, down), top_k

    def __call__(self, x: Any) -> Any:
        """The result for x, in memory of its own."""
        layers = self._layers
        scores = self._logits(x)
        weights, ids, *_ = layers.fused_topk(x, scores, self._top_k, renormalize=True)
        return layers.fused_experts(x, *self._weights, weights, ids)

    def name(self) -> str:
        """The versions, and whose tile sizes ran."""
        kernel = import_module(f"{LAYERS}.fused_moe")
        experts, _, inner = self._weights[1].shape
        tuned = kernel.get_moe_configs(experts, inner, None)
        file = kernel.get_config_file_name(experts, inner, None)
        vllm, triton = (import_module(n).__version__ for n in ("vllm", "triton"))
        tiles = f"tuned tiles {file}" if tuned else "default tiles"
        return f"vLLM {vllm} fused_experts, Triton {triton}, {tiles}"
