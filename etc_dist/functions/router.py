"""The router of a mixture of experts: which experts a token chooses, and their weights;
CUDA half in `kernels/functions/router.cuh`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from etc_dist.errors import (
    ArgumentError,
    expect_choice,
    expect_range,
    expect_type,
)
from etc_dist.functions.plain_numbers import use_plain_numbers
from etc_dist.ir import Operand

SCORES = ("softmax", "softmax_chosen", "sigmoid", "sqrt_softplus")
GROUP_SCORES = ("best_two", "best")
MOST_EXPERTS, MOST_CHOICES = 512, 32
MOST_GROUPS = 32
LEAST_SUM = np.float32(1e-20)
"""Added to the sum of scores that weights are divided by, unless it is a softmax."""


@dataclass(frozen=True)
class Router:
    """How a token chooses experts by its logits, x @ router.T in fp32.

    top_k: the number of experts of a token; the largest values win, and of equal ones
    the lower expert. NaN wins over all, so that it reaches the result.
    score: of a logit: "softmax" over all experts, "softmax_chosen" over those chosen by
    their logits, "sigmoid", or "sqrt_softplus", the square root of log(1 + exp(logit)).
    The weight of an expert is its score.
    normalize: weights are divided by their sum. scale: then they are multiplied by it.
    has_bias: an array [experts] is added to the logits. has_correction: an array
    [experts] is added to the scores for the choice, but not to the weights (Wang et
    al., 2024, arXiv 2408.15664).
    num_groups, topk_group: experts are in groups of neighbours, and only those of the
    topk_group best groups are chosen (DeepSeek-V3, arXiv 2412.19437). group_score: of a
    group, the sum of its "best_two" scores or its "best" score, with the correction."""

    top_k: int
    normalize: bool = True
    score: str = "softmax"
    scale: float = 1.0
    num_groups: int = 1
    topk_group: int = 1
    group_score: str = "best_two"
    has_bias: bool = False
    has_correction: bool = False

    def __post_init__(self) -> None:
        use_plain_numbers(self)

    def check(self, experts: int, most: int = MOST_CHOICES) -> None:
        """Raise TypeError or ArgumentError unless it can choose from so many experts.
        most: the largest top_k."""
        expect_range(experts, 1, MOST_EXPERTS, "experts")
        expect_range(self.top_k, 1, min(experts, most), "top_k")
        for name in ("normalize", "has_bias", "has_correction"):
            expect_type(getattr(self, name), bool, name)
        expect_choice(self.score, SCORES, "score")
        expect_choice(self.group_score, GROUP_SCORES, "group_score")
        expect_type(self.scale, (int, float), "scale")
        if not 0 < self.scale < np.finfo(np.float32).max:
            raise _refusal("scale: a finite number above 0", f"scale = {self.scale}")
        num_groups = expect_range(self.num_groups, 1, MOST_GROUPS, "num_groups")
        expect_range(self.topk_group, 1, num_groups, "topk_group")
        size, remainder = divmod(experts, num_groups)
        least = 2 if num_groups > 1 and self.group_score == GROUP_SCORES[0] else 1
        if remainder or size < least or self.topk_group * size < self.top_k:
            wanted = (
                f"groups of equal size, at least {least}, of which {self.topk_group} "
                f"have {self.top_k} experts"
            )
            raise _refusal(wanted, f"{experts} experts in {num_groups} groups")

    @property
    def bias_names(self) -> list[str]:
        """Internal: the arrays [experts] that a choice reads."""
        names = ["router_bias"] * self.has_bias
        return names + ["correction"] * self.has_correction

    @property
    def has_groups(self) -> bool:
        """Internal: whether some groups of experts are not chosen from."""
        return self.topk_group < self.num_groups

    def constants(self) -> dict[str, int | float]:
        """Internal: those of CUDA bodies that choose."""
        return {
            "kScore": SCORES.index(self.score),
            "kNormalize": int(self.normalize),
            "kScale": float(self.scale),
            "kHasBias": int(self.has_bias),
            "kHasCorrection": int(self.has_correction),
            "kGroups": self.num_groups if self.has_groups else 1,
            "kTopGroups": self.topk_group if self.has_groups else 1,
            "kGroupOfTwo": int(self.group_score == GROUP_SCORES[0]),
        }

    def operands(self, experts: int) -> list[Operand]:
        """Internal: the regions of the biases, the last reads of bodies that choose."""
        return [Operand((experts,), "float32", leading=True, by_element=True)] * len(
            self.bias_names
        )

    def choose(self, logits: Any, *biases: Any) -> tuple[Any, Any]:
        """logits [tokens, experts], and the bias and the correction [experts] if there
        are such -> ids and weights [tokens, top_k], the best expert first."""
        values = self.values(logits, *biases)
        values = np.where(np.isnan(values), np.inf, values)
        is_out = self._left_out(values) if self.has_groups else values < -np.inf
        ids = np.lexsort((-values, is_out), axis=1)[:, : self.top_k]
        return ids, self.weights(logits, ids, *biases)

    def values(self, logits: Any, *biases: Any) -> Any:
        """Internal: numbers [tokens, experts], of which the largest are chosen: the
        logits, if these have the order of the scores."""
        values = logits + biases[0] if self.has_bias else logits
        is_by_logit = not self.has_correction and not self.has_groups
        if not is_by_logit and self.score != "softmax_chosen":
            values = self._scores(values)
        return values + biases[-1] if self.has_correction else values

    def _scores(self, logits: Any) -> Any:
        """Of all experts, not normalized."""
        if self.score == "sigmoid":
            return 1 / (1 + np.exp(-np.maximum(logits, -80)))
        if self.score == "sqrt_softplus":
            return np.sqrt(np.logaddexp(np.float32(0), logits))
        exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
        return exponents / exponents.sum(axis=1, keepdims=True)

    def _left_out(self, values: Any) -> Any:
        """Which experts are in groups that are not chosen."""
        tokens, experts = values.shape
        groups = values.reshape(tokens, self.num_groups, experts // self.num_groups)
        best = -np.sort(-groups, axis=2)
        scores = best[:, :, 0]
        if self.group_score == GROUP_SCORES[0]:
            scores = scores + best[:, :, 1]
        best_groups = np.argsort(-scores, axis=1, kind="stable")[:, : self.topk_group]
        is_out = np.ones(groups.shape[:2], bool)
        np.put_along_axis(is_out, best_groups, False, axis=1)
        return np.repeat(is_out, groups.shape[2], axis=1)

    def weights(self, logits: Any, ids: Any, *biases: Any) -> Any:
        """Internal: the weights [tokens, top_k] of the experts ids."""
        if self.has_bias:
            logits = logits + biases[0]
        chosen_logits = np.take_along_axis(logits, ids, axis=1)
        if self.score.startswith("softmax"):
            of_chosen = self.normalize or self.score == "softmax_chosen"
            whole = chosen_logits if of_chosen else logits
            most = whole.max(axis=1, keepdims=True)
            weights = np.exp(chosen_logits - most)
            weights /= np.exp(whole - most).sum(axis=1, keepdims=True)
        else:
            weights = self._scores(chosen_logits)
            if self.normalize:
                weights /= weights.sum(axis=1, keepdims=True) + LEAST_SUM
        return weights * np.float32(self.scale)


def as_router(top_k: int | Router, normalize: bool | None = None) -> Router:
    """The router that options of a layer or a graph describe. normalize: of a number of
    experts; None: True. Raises ArgumentError for both a Router and normalize."""
    if not isinstance(top_k, Router):
        expect_type(top_k, int, "top_k")
        return Router(top_k, True if normalize is None else normalize)
    if normalize is not None:
        raise ArgumentError(
            "two arguments describe the weights of the experts",
            where="arguments top_k and normalize",
            wanted="normalize as a field of the Router",
            got=f"top_k = {top_k}, normalize = {normalize!r}",
            fix=f"omit normalize, or pass Router(..., normalize={normalize!r})",
        )
    return top_k


def _refusal(wanted: str, got: str) -> ArgumentError:
    return ArgumentError(
        "the router cannot choose from these experts",
        where="etc_dist.Router",
        wanted=wanted,
        got=got,
        fix="correct the fields of the router",
    )
