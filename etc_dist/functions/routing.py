"""Routing of tokens to experts, shared by its device functions.

A token picks `top_k` experts. An expert's tokens are numbered in the order of their
indices and divided into as few tiles as possible, all of one size except the last. Its
rows of activations and results begin at a multiple of PADDING."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from etc_dist.errors import expect_choice, expect_type
from etc_dist.functions.activation import SWIGLU, Activation
from etc_dist.functions.router import MOST_CHOICES, Router
from etc_dist.functions.weight_layouts import two_byte
from etc_dist.ir import DeviceFunction, Expr, Operand, minimum, span, tile
from etc_dist.ir.tensor import Tile

BLOCK = 32
"""Tokens that one task routes: the bits of a word of `chosen`; at most 32."""
TILE_ROWS = 144
"""The most rows of a tile."""
NONE = -1
"""The id of no expert, and the place of a choice without a row."""
SHARED = PLAIN, GATED = "plain", "gated"
PADDING = 16
"""An expert's rows begin and end at a multiple of this, so that bulk copies of a tile's
rows of activations, 16 at a time, touch no other expert's."""


@dataclass(frozen=True)
class Routing:
    """The parameters of routing, and the sizes that are fixed on GPUs.

    experts: the number of experts of this rank. split: other ranks have further
    experts, which tokens may choose. router: how they choose. dtype: of x, weights and
    y. block: tokens that one task routes. tile_rows: the most rows of a tile. has_none:
    choices may have the id NONE."""

    experts: int
    router: Router
    dtype: str
    block: int = BLOCK
    tile_rows: int = TILE_ROWS
    split: bool = False
    has_none: bool = False

    def function(
        self,
        name: str,
        lane: str,
        reads: int,
        writes: int,
        body: Callable[..., None],
        gathers: tuple[int, ...] = (),
        reads_before_wait: tuple[int, ...] = (),
        tile: Mapping[int, Operand] | None = None,
        constants: Mapping[str, float] | None = None,
        starts: Mapping[str, tuple[int, int]] | None = None,
    ) -> DeviceFunction:
        """constants: in addition to those of the routing."""
        return DeviceFunction(
            name=name,
            body=body,
            source=f"functions/{name}.cuh",
            lane=lane,
            reads=reads,
            writes=writes,
            constants={
                "kExperts": self.experts,
                "kIsHalf": int(self.dtype == "float16"),
                "kSplit": int(self.split),
                "kTileRows": self.tile_rows,
                "kTopK": self.top_k,
                **(constants or {}),
            },
            gathers=gathers,
            reads_before_wait=reads_before_wait,
            tile={} if tile is None else tile,
            starts=starts or {},
        )

    def group(self, number: Expr, size: Expr | int) -> Tile:
        """Group `number` of so many experts: rows of the router, columns of logits."""
        if self.experts % 8 == 0:
            return tile(number, size)
        # Logits have further columns, to a multiple of 8.
        return span(number * size, minimum(size, self.experts - number * size))

    @property
    def top_k(self) -> int:
        """The experts of a token."""
        return self.router.top_k

    def choice_constants(self, has_position: bool = False) -> dict[str, int | float]:
        """The constants of functions that choose. has_position: operand 1 is the
        position of each row."""
        return {**self.router.constants(), "kHasPosition": int(has_position)}

    @property
    def element(self) -> str:
        """The dtype of the two-byte operands of CUDA bodies."""
        return two_byte(self.dtype)


@dataclass(frozen=True)
class Mixture:
    """What describes a mixture of experts, of a layer and of a decoder.

    experts: of all ranks. router: how a token chooses among them. shared: how the
    output of an expert that every token takes is added: PLAIN, GATED by its gate, or ""
    if there is none. activation: of all experts. has_biases: the chosen ones have
    biases."""

    experts: int
    router: Router
    shared: str = ""
    activation: Activation = SWIGLU
    has_biases: bool = False

    def check(self, most_choices: int = MOST_CHOICES) -> None:
        """Raise TypeError or ArgumentError for what is not supported. most_choices: the
        largest top_k."""
        self.router.check(self.experts, most_choices)
        expect_choice(self.shared, ("", *SHARED), "shared")
        expect_type(self.activation, Activation, "activation")
        self.activation.check()

    def routing(
        self, dtype: str, block: int = BLOCK, tile_rows: int = TILE_ROWS
    ) -> Routing:
        """The routing of tokens of `dtype`."""
        return Routing(self.experts, self.router, dtype, block, tile_rows)


def bits_of(words: Any) -> Any:
    """Words [...] -> their bits [..., 32], the lowest first."""
    shifted = words.astype(np.uint32)[..., None] >> np.arange(32, dtype=np.uint32)
    return (shifted & np.uint32(1)).astype(np.int64)
