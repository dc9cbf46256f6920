"""The sizes of a decoder that its program is compiled for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from etc_dist.functions.activation import SWIGLU, Activation
from etc_dist.functions.append_kv import PagedCache
from etc_dist.functions.scaled_weights import BLOCKS, scales_name
from etc_dist.models.experts import (
    DENSE_MATMULS,
    DENSE_WEIGHTS,
    EXPERT_MATMULS,
    SHARED_MATMULS,
    SHARED_WEIGHTS,
    DecoderMixture,
)

MATMULS = ("qkv", "o", "gate_up", "down", "head")
"""The matmuls of a step without experts; the dims `<name>_shape` choose their tiles."""


MLP_WEIGHTS = ("w_gate", "w_up", "w_down")
"""Gate, up and down of an MLP, or of all experts."""
WEIGHTS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("w_qkv",),
    "o": ("w_o",),
    **{
        matmul: weights
        for matmuls, (gate, up, down) in (
            (("gate_up", "down"), MLP_WEIGHTS),
            (EXPERT_MATMULS, MLP_WEIGHTS),
            (SHARED_MATMULS, SHARED_WEIGHTS),
            (DENSE_MATMULS, DENSE_WEIGHTS),
        )
        for matmul, weights in zip(matmuls, ((gate, up), (down,)), strict=True)
    },
    "head": ("w_head",),
}
"""The weights of each matmul."""


def scaled_weights(float8: Sequence[str]) -> list[str]:
    """The weights of matmuls that read float8."""
    return [weight for matmul in float8 for weight in WEIGHTS[matmul]]


def weight_of(name: str) -> str:
    """The weight of scales, or the array itself."""
    return name.removesuffix(scales_name(""))


def layout_of(matmul: str, float8: Collection[str]) -> str:
    """The layout of the weights of a matmul. float8: as of `DecoderSizes`."""
    return BLOCKS.w_layout if matmul in float8 else "nk"


@dataclass(frozen=True)
class Features:
    """What the layers of a model have that Llama's have not. The program of a model
    without any does not depend on them.

    qkv_bias, o_bias: the matmul has a bias. score_scale: of attention; None: 1 /
    sqrt(head_dim). has_span: layers have sliding windows, which may differ.
    scales_queries: those of a position are rotated by a table of their own. pre_norm:
    the inputs of attention and of the MLP are normalized. post_norm: so are their
    outputs, before they are added to the residual. normalizes_all: all queries of a row
    are normalized together, and all keys. tables: rotary embeddings; with two, has_span
    says which layers have the second one. gain_offset: is added to the gains of norms.
    embedding_scale: of embeddings. activation: of the MLP. logit_cap: logits are at
    most this, by tanh. normalizes_rotated: heads are normalized after they are rotated.
    has_sinks: each query head has an attention sink. score_cap: attention scores are at
    most this, by tanh."""

    qkv_bias: bool = False
    o_bias: bool = False
    score_scale: float | None = None
    has_span: bool = False
    scales_queries: bool = False
    pre_norm: bool = True
    post_norm: bool = False
    normalizes_all: bool = False
    tables: int = 1
    gain_offset: int = 0
    embedding_scale: float = 1.0
    activation: Activation = SWIGLU
    logit_cap: float | None = None
    normalizes_rotated: bool = False
    has_sinks: bool = False
    score_cap: float | None = None


PLAIN = Features()


@dataclass(frozen=True)
class DecoderSizes:
    """The sizes of a decoder that are fixed when its program is compiled.

    norm_eps: the epsilon of each RMSNorm. normalizes_heads: each query and key is
    normalized, too. page_size: positions in a page of the cache. mixture: the experts
    in place of a dense MLP. features: of the layers. float8: the matmuls whose weights
    are float8 codes with scales, fp32, of blocks of 128 x 128."""

    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    normalizes_heads: bool = False
    page_size: int = 64
    dtype: str = "bfloat16"
    mixture: DecoderMixture | None = None
    features: Features = PLAIN
    float8: tuple[str, ...] = ()

    def w_layout(self, matmul: str) -> str:
        """The layout of the weights of a matmul."""
        return layout_of(matmul, self.float8)

    @property
    def matmuls(self) -> tuple[str, ...]:
        """The matmuls of a step."""
        if self.mixture is None:
            return MATMULS
        return "qkv", "o", *self.mixture.matmuls, "head"

    @property
    def group(self) -> int:
        """The number of query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def paged(self) -> PagedCache:
        """The parameters of the functions of a paged cache."""
        eps = self.norm_eps if self.normalizes_heads else None
        features = self.features
        return PagedCache(
            self.head_dim,
            self.page_size,
            self.dtype,
            eps,
            has_bias=features.qkv_bias,
            score_scale=features.score_scale,
            has_span=features.has_span,
            tables=features.tables,
            gain_offset=features.gain_offset,
            normalizes_rotated=features.normalizes_rotated,
            has_sinks=features.has_sinks,
            score_cap=features.score_cap,
        )
