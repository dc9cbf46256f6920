"""The activation of an expert: the product of its gate and up; CUDA half in
`kernels/functions/activation.cuh`."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from etc_dist.errors import ArgumentError, expect_choice, expect_type
from etc_dist.functions.plain_numbers import use_plain_numbers
from etc_dist.functions.weight_layouts import silu

FUNCTIONS = SILU, GELU_TANH = "silu", "gelu_tanh"


@dataclass(frozen=True)
class Activation:
    """function(gate) * (up + shift), in fp32.

    function: "silu", gate * sigmoid(alpha * gate), as in SwiGLU (Shazeer, 2020, arXiv
    2002.05202); or "gelu_tanh", the approximation of GELU by tanh, with alpha = 1.
    limit: gate is first clamped to at most limit, and up to [-limit, limit]; 0 for no
    limit."""

    function: str = SILU
    alpha: float = 1.0
    limit: float = 0.0
    shift: float = 0.0

    def __post_init__(self) -> None:
        use_plain_numbers(self)

    def check(self) -> None:
        """Raise TypeError or ArgumentError for values that are not supported."""
        expect_choice(self.function, FUNCTIONS, "function")
        for name in ("alpha", "limit", "shift"):
            value = getattr(self, name)
            expect_type(value, (int, float), name)
            if not 0 <= value < np.finfo(np.float32).max:
                raise _refusal(
                    f"{name}: a finite number from 0 on", f"{name} = {value}"
                )
        if self.function == GELU_TANH and self.alpha != 1:
            raise _refusal("alpha = 1 for gelu_tanh", f"alpha = {self.alpha}")

    def apply(self, gate: Any, up: Any) -> Any:
        """Internal: gate and up in fp32 -> their product."""
        if self.limit:
            gate, up = (
                np.minimum(gate, self.limit),
                np.clip(up, -self.limit, self.limit),
            )
        if self.function == GELU_TANH:
            inner = np.float32(0.7978845608) * (gate + np.float32(0.044715) * gate**3)
            active = gate / (1 + np.exp(-2 * np.maximum(inner, -40)))
        elif self.alpha == 1:
            active = silu(gate)
        else:
            active = gate / (1 + np.exp(-np.maximum(self.alpha * gate, -80)))
        return active * (up + np.float32(self.shift)) if self.shift else active * up

    def constants(self) -> dict[str, int]:
        """Internal: those of CUDA bodies: the function, and the bits of the numbers."""
        return {
            "kActivation": FUNCTIONS.index(self.function),
            "kAlphaBits": _bits(self.alpha),
            "kLimitBits": _bits(self.limit),
            "kShiftBits": _bits(self.shift),
        }


SWIGLU = Activation()


def _bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def _refusal(wanted: str, got: str) -> ArgumentError:
    return ArgumentError(
        "the activation cannot be used",
        where="etc_dist.Activation",
        wanted=wanted,
        got=got,
        fix="correct the fields of the activation",
    )
