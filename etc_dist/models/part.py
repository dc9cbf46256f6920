"""The part of a model that one of several ranks holds (tensor parallelism)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from etc_dist.errors import ArgumentError, expect_range
from etc_dist.functions.scaled_weights import BLOCK
from etc_dist.models.config import ModelConfig

SPLIT_AXES = {"w_qkv": 0, "w_o": 1, "w_gate": 0, "w_up": 0, "w_down": 1, "w_head": 0}
SPLIT_AXES |= {"qkv_bias": 0, "q_all_norm": 0, "k_all_norm": 0, "sinks": 0}
SPLIT_AXES |= {"w_shared_gate": 0, "w_shared_up": 0, "w_shared_down": 1}
SPLIT_AXES |= {"w_dense_gate": 0, "w_dense_up": 0, "w_dense_down": 1}
SPLIT_AXES |= {"gate_bias": 0, "up_bias": 0}
"""The weights that are split, by the axis of a matrix, also of each expert. All ranks
have the others as a whole."""
FRACTIONS = (0, 16, 32, 64)
"""Elements of the last part of a block: it is in one block, and GPUs can copy it."""
EXPERTS = "w_gate", "w_up", "w_down", "gate_bias", "up_bias"
"""The weights and biases of experts that are split, unless ranks have whole ones."""
INNER = {
    name
    for name in SPLIT_AXES
    if name.startswith("w_") and name not in ("w_qkv", "w_o", "w_head")
}
"""Those that are split along an inner width."""
EIGHT = 8
"""The inner width of a rank, and the rows of its output head, are multiples of this."""


@dataclass(frozen=True)
class Part:
    """The part of `rank`, of `count` ranks. has_experts: some experts as a whole, in
    place of a part of the inner width of all."""

    rank: int = 0
    count: int = 1
    has_experts: bool = False

    @property
    def holds_whole(self) -> bool:
        """Whether it has only some experts, as a whole."""
        return self.has_experts and self.count > 1

    def config(self, whole: ModelConfig) -> ModelConfig:
        """The sizes of this part. vocabulary: the rows of the output head, a multiple
        of 8; those beyond the ids of the model are padding. If there are fewer KV heads
        than ranks, several ranks have the same KV head. float8: without the matmuls of
        whose weights ranks have parts of blocks."""
        mixture, inner = whole.mixture, self._inner(whole, whole.inner)
        if self.holds_whole and mixture is not None:
            mixture = replace(mixture, own=mixture.experts // self.count)
            inner = whole.inner
        heads, kv_heads = (
            whole.heads // self.count,
            max(1, whole.kv_heads // self.count),
        )
        parts = {"qkv": (heads, kv_heads), "o": (heads,) if self.count > 1 else ()}
        divided = [
            name
            for name, counts in parts.items()
            if any(n * whole.head_dim % BLOCK for n in counts)
        ]
        return replace(
            whole,
            mixture=mixture,
            heads=heads,
            kv_heads=kv_heads,
            inner=inner,
            shared_inner=self._inner(whole, whole.shared_inner),
            dense_inner=self._inner(whole, whole.dense_inner),
            vocabulary=self._head_rows(whole.vocabulary),
            float8=tuple(name for name in whole.float8 if name not in divided),
        )

    def _inner(self, config: ModelConfig, whole: int) -> int:
        """A rank's share of an inner width. That of float8 weights has whole blocks,
        and at most one part of a block, which is a fraction of it; or else only whole
        ones, which may be more than all ranks need."""
        share = whole // self.count
        remainder = share % BLOCK
        is_even = remainder in FRACTIONS and whole % self.count == 0
        if not has_blocks(config) or self.count == 1 or is_even:
            return share
        return -(-whole // (BLOCK * self.count)) * BLOCK

    def ids(self, vocabulary: int) -> slice:
        """The ids of `vocabulary` that have logits here."""
        rows = self._head_rows(vocabulary)
        first, end = self.rank * rows, (self.rank + 1) * rows
        return slice(min(first, vocabulary), min(end, vocabulary))

    def split_axis(self, name: str) -> int | None:
        """The axis along which a weight is split; None: it is not."""
        is_whole = self.holds_whole and name in EXPERTS
        return None if is_whole else SPLIT_AXES.get(name)

    def _head_rows(self, vocabulary: int) -> int:
        return -(-vocabulary // (EIGHT * self.count)) * EIGHT

    def span(self, whole: int, length: int) -> slice:
        """The part of an axis, `length` of `whole` rows."""
        first = self.rank * whole // self.count // length * length
        return slice(first, first + length)

    def blocks(self, whole: int, length: int) -> list[tuple[slice, slice]]:
        """The part of an inner width with blocks, `length` of `whole` elements: where
        pieces of it are in the part, and in the whole. First whole blocks: of each rank
        the same number; then a part of one of the others."""
        remainder = length % BLOCK
        most = length - remainder
        first = min(self.rank * most, whole)
        pieces = [(0, first, min(most, whole - first))]
        if remainder:
            pieces.append((most, self.count * most + self.rank * remainder, remainder))
        return [(slice(to, to + n), slice(of, of + n)) for to, of, n in pieces if n]


WHOLE = Part()


def of_blocks(elements: slice) -> slice:
    """The blocks of elements, which begin with a block."""
    first, end = elements.start or 0, elements.stop
    return slice(first // BLOCK, None if end is None else -(-end // BLOCK))


def has_blocks(config: ModelConfig) -> bool:
    """Whether ranks divide the inner width of a model by blocks of float8 weights."""
    return any(name not in ("qkv", "o") for name in config.float8)


def check_ranks(config: ModelConfig, count: int, has_experts: bool = False) -> None:
    """ArgumentError unless the model can be split over `count` ranks. has_experts: as
    of `Part`."""
    expect_range(count, 1, None, "ranks")
    heads, kv_heads = config.heads, config.kv_heads
    experts = 0 if config.mixture is None else config.mixture.experts
    last = Part(count - 1, count).ids(config.vocabulary)
    unit = EIGHT * (1 if has_blocks(config) else count)
    faults = {
        f"{heads} heads, a multiple of the ranks": heads % count,
        f"{kv_heads} KV heads, a multiple or a divisor of the ranks": (
            kv_heads % count and count % kv_heads
        ),
        f"inner width {config.inner}, a multiple of {EIGHT} on each rank": (
            config.inner % (EIGHT if has_experts else unit)
        ),
        f"{experts} experts, a multiple of the ranks": has_experts and experts % count,
        f"inner width {config.shared_inner} of the shared expert, a multiple of "
        f"{EIGHT} on each rank": config.shared_inner % unit,
        f"inner width {config.dense_inner} of dense layers, a multiple of {EIGHT} on "
        "each rank": config.dense_inner % unit,
        f"vocabulary {config.vocabulary}, with ids on each rank": (
            last.start == last.stop
        ),
    }
    broken = [text for text, fault in faults.items() if fault]
    if broken:
        raise ArgumentError(
            "the model cannot be split over the ranks",
            where=f"a world of {count} ranks",
            wanted="; ".join(broken),
            got=f"{count} ranks",
            fix="start another number of ranks"
            + ", or choose another experts= of load" * (experts > 0),
        )
