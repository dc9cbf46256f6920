"""The part of a model that one of several ranks holds (tensor parallelism)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from etc_dist.errors import ArgumentError, expect_range
from etc_dist.models.config import ModelConfig

SPLIT_AXES = {"w_qkv": 0, "w_o": 1, "w_gate": 0, "w_up": 0, "w_down": 1, "w_head": 0}
SPLIT_AXES |= {"qkv_bias": 0, "q_all_norm": 0, "k_all_norm": 0, "sinks": 0}
SPLIT_AXES |= {"w_shared_gate": 0, "w_shared_up": 0, "w_shared_down": 1}
SPLIT_AXES |= {"w_dense_gate": 0, "w_dense_up": 0, "w_dense_down": 1}
"""The weights that are split, by the axis of a matrix, also of each expert. All ranks
have the others as a whole."""
EXPERTS = "w_gate", "w_up", "w_down"
"""The weights of experts."""
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
        than ranks, several ranks have the same KV head."""
        inner, mixture = whole.inner // self.count, whole.mixture
        if self.holds_whole and mixture is not None:
            mixture = replace(mixture, own=mixture.experts // self.count)
            inner = whole.inner
        return replace(
            whole,
            mixture=mixture,
            heads=whole.heads // self.count,
            kv_heads=max(1, whole.kv_heads // self.count),
            inner=inner,
            shared_inner=whole.shared_inner // self.count,
            dense_inner=whole.dense_inner // self.count,
            vocabulary=self._head_rows(whole.vocabulary),
        )

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

    def span(self, whole: int, own: int) -> slice:
        """The part of an axis, `own` of `whole` rows."""
        first = self.rank * whole // self.count // own * own
        return slice(first, first + own)


WHOLE = Part()


def check_ranks(config: ModelConfig, count: int, has_experts: bool = False) -> None:
    """ArgumentError unless the model can be split over `count` ranks. has_experts: as
    of `Part`."""
    expect_range(count, 1, None, "ranks")
    heads, kv_heads = config.heads, config.kv_heads
    experts = 0 if config.mixture is None else config.mixture.experts
    last = Part(count - 1, count).ids(config.vocabulary)
    faults = {
        f"{heads} heads, a multiple of the ranks": heads % count,
        f"{kv_heads} KV heads, a multiple or a divisor of the ranks": (
            kv_heads % count and count % kv_heads
        ),
        f"inner width {config.inner}, a multiple of {EIGHT} on each rank": (
            config.inner % (EIGHT * (1 if has_experts else count))
        ),
        f"{experts} experts, a multiple of the ranks": has_experts and experts % count,
        f"inner width {config.shared_inner} of the shared expert, a multiple of "
        f"{EIGHT} on each rank": config.shared_inner % (EIGHT * count),
        f"inner width {config.dense_inner} of dense layers, a multiple of {EIGHT} on "
        "each rank": config.dense_inner % (EIGHT * count),
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
