"""Routers: both bodies against one token after the other in fp64."""

from __future__ import annotations

import math
import zlib
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.errors import ArgumentError
from etc_dist.functions.choose_experts import choose_experts
from etc_dist.functions.router import Router
from etc_dist.functions.routing import Routing
from etc_dist.ir import GraphFunction
from tests.conftest import first_always
from tests.functions.both import both
from tests.functions.compiled import check_compiled
from tests.graphs.calls import Task, calls

TOKENS = 35
DEEPSEEK = Router(
    8, score="sigmoid", scale=2.5, num_groups=8, topk_group=4, has_correction=True
)
ROUTERS = {
    "softmax": (128, Router(8)),
    "softmax over all": (40, Router(3, False)),
    "one expert": (1, Router(1, False)),
    "odd": (37, Router(5, scale=0.5)),
    "softmax, corrected": (72, Router(6, has_correction=True)),
    "softmax over all, corrected": (64, Router(6, False, has_correction=True)),
    "chosen, biased": (32, Router(4, score="softmax_chosen", has_bias=True)),
    "chosen, both": (
        *(24, Router(4, score="softmax_chosen", has_bias=True, has_correction=True)),
    ),
    "sigmoid": (96, Router(8, False, "sigmoid")),
    "sigmoid, corrected": (200, Router(10, score="sigmoid", has_correction=True)),
    "groups": (256, DEEPSEEK),
    "best of groups": (
        160,
        Router(6, False, num_groups=8, topk_group=3, group_score="best", scale=16.0),
    ),
    "groups that divide lanes": (
        90,
        Router(4, score="sigmoid", num_groups=6, topk_group=2, has_bias=True),
    ),
    "softplus": (256, Router(6, score="sqrt_softplus", has_correction=True, scale=1.5)),
    "many": (512, Router(16, score="sigmoid", has_correction=True)),
    "many, odd": (509, Router(7, False)),
}


def choice(experts: int, router: Router, prefix: str = "") -> Task:
    """Of logits and weights with columns of padding."""
    columns, top_k = -(-experts // 4) * 4, router.top_k
    return Task(
        choose_experts(Routing(experts, router, "bfloat16"), marks=True),
        reads=[
            f"{prefix}logits tokens/32 {columns}[:{experts}] float32",
            *(f"{prefix}{name} {experts} float32" for name in router.bias_names),
        ],
        writes=[
            f"{prefix}ids tokens/32 {top_k} int32",
            f"{prefix}weights tokens/32 16[:{top_k}] float32",
            f"{prefix}words {experts} tokens//32 int32",
        ],
        name=f"{prefix}choose",
    )


def chosen(experts: int, router: Router) -> GraphFunction:
    tasks = [choice(experts, router)]
    return calls(1, tasks=tasks, kinds={"weights": "state"})


def drawn(
    rng: Any, experts: int, router: Router, tokens: int = TOKENS
) -> dict[str, Any]:
    """Logits of which some are equal, and biases that change the choice."""
    logits = rng.standard_normal((tokens, -(-experts // 4) * 4)).round(2) * 3
    arrays = {"logits": logits.astype(np.float32)}
    arrays["weights"] = np.zeros((tokens, 16), np.float32)
    arrays["logits"][:, experts:] = 99
    if router.has_bias:
        arrays["router_bias"] = rng.standard_normal(experts).astype(np.float32)
    if router.has_correction:
        size = 2 if router.score == "softmax_chosen" else 0.2
        arrays["correction"] = (rng.standard_normal(experts) * size).astype(np.float32)
    return arrays


def expected(logits: Any, router: Router, bias: Any, correction: Any) -> Any:
    """Weights by expert of one token, in the order of the choice, and how much worse
    the best expert or group is that was not chosen."""
    logits = [float(v) + float(b) for v, b in zip(logits, bias, strict=True)]
    softmax = [math.exp(v - max(logits)) for v in logits]
    scores = {
        "softmax": [v / sum(softmax) for v in softmax],
        "softmax_chosen": logits,
        "sigmoid": [1 / (1 + math.exp(-v)) for v in logits],
        "sqrt_softplus": [math.sqrt(math.log1p(math.exp(v))) for v in logits],
    }[router.score]
    values = [s + float(c) for s, c in zip(scores, correction, strict=True)]
    size = len(values) // router.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(router.num_groups)]
    count = 1 if router.group_score == "best" else 2

    def of_group(group: Any) -> float:
        return sum(sorted((values[e] for e in group), reverse=True)[:count])

    ranked = sorted(groups, key=lambda group: -of_group(group))
    margins = [of_group(a) - of_group(b) for a, b in pairwise(ranked)]
    margin = margins[router.topk_group - 1] if margins[router.topk_group - 1 :] else 9
    candidates = sorted(e for group in ranked[: router.topk_group] for e in group)
    order = sorted(candidates, key=lambda e: (-values[e], e))
    best = order[: router.top_k + 1]
    gaps = [
        values[a] - values[b]
        for a, b in pairwise(best)
        if logits[a] != logits[b]  # equal ones are in the order of experts
    ]
    ids = order[: router.top_k]
    if router.score.startswith("softmax") and (
        router.normalize or router.score == "softmax_chosen"
    ):
        shares = [softmax[e] for e in ids]
        weights = [v / sum(shares) for v in shares]
    else:
        weights = [scores[e] for e in ids]
        if router.normalize:
            weights = [v / sum(weights) for v in weights]
    return ids, [v * router.scale for v in weights], min([margin, *gaps])


def check_choices(
    outputs: Any, experts: int, router: Router, inputs: dict[str, Any]
) -> None:
    """ids, weights and words are right, but for tokens with nearly equal values."""
    zeros = np.zeros(experts)
    bias, correction = inputs.get("router_bias", zeros), inputs.get("correction", zeros)
    near = 0
    for token_idx, logits in enumerate(inputs["logits"][:, :experts]):
        ids, weights, margin = expected(logits, router, bias, correction)
        if margin < 1e-5:
            near += 1
            continue
        assert outputs["ids"][token_idx].tolist() == ids
        np.testing.assert_allclose(
            outputs["weights"][token_idx, : router.top_k], weights, rtol=2e-5
        )
    assert near < len(inputs["logits"]) / 4
    words = np.zeros_like(outputs["words"], np.uint32)
    for token_idx, ids in enumerate(outputs["ids"]):
        words[ids, token_idx // 32] |= np.uint32(1 << token_idx % 32)
    np.testing.assert_array_equal(outputs["words"].view(np.uint32), words)


NUMBERS = {name: f"r{number}_" for number, name in enumerate(ROUTERS)}


@pytest.fixture(scope="module")
def emulator():
    """One program of all routers, which is compiled in the time of a few."""
    tasks = [choice(*of, NUMBERS[name]) for name, of in ROUTERS.items()]
    kinds = {f"{prefix}weights": "state" for prefix in NUMBERS.values()}
    return Emulator(calls(1, tasks=tasks, kinds=kinds), workers=2)


def drawn_for_all(tokens=TOKENS):
    """What each router is given."""
    return {
        name: drawn(np.random.default_rng(zlib.crc32(name.encode())), *of, tokens)
        for name, of in ROUTERS.items()
    }


def choose_all(emulator, inputs, tokens=TOKENS):
    """What both bodies choose, in one run."""
    every = {
        NUMBERS[router] + name: array
        for router, arrays in inputs.items()
        for name, array in arrays.items()
    }
    return [*both(emulator, every, {"tokens": tokens})]


@pytest.fixture(scope="module")
def choices(emulator):
    inputs = drawn_for_all()
    return inputs, choose_all(emulator, inputs)


WITH_NAN = ["softmax", "groups", "softplus"]


@pytest.fixture(scope="module")
def choices_with_nan(emulator):
    inputs = drawn_for_all(tokens=3)
    for name in WITH_NAN:
        inputs[name]["logits"][1, 7] = np.nan
    return choose_all(emulator, inputs, tokens=3)


@pytest.mark.parametrize("name", ROUTERS)
def test_both_bodies_choose_as_the_router_says(name, choices):
    inputs, results = choices
    for outputs in results:
        numbers = {n: outputs[NUMBERS[name] + n] for n in ("ids", "weights", "words")}
        check_choices(numbers, *ROUTERS[name], inputs[name])


@pytest.mark.parametrize("name", WITH_NAN)
def test_nan_reaches_the_weights(name, choices_with_nan):
    _, router = ROUTERS[name]
    for outputs in choices_with_nan:
        ids, weights = (outputs[NUMBERS[name] + n] for n in ("ids", "weights"))
        is_nan = np.isnan(weights[:, : router.top_k]).any(axis=1)
        assert is_nan.tolist() == [False, True, False]
        assert ids[1, 0] == 7


@pytest.mark.parametrize(
    "name", first_always([("groups",), ("many",), ("softplus",)], 2)
)
def test_the_cuda_body_compiles_without_spills(name):
    check_compiled(chosen(*ROUTERS[name]))


def test_equal_routers_have_one_text():
    router = Router(np.int64(2), scale=np.float32(2), num_groups=np.uint8(4))
    assert repr(router) == repr(Router(2, scale=2, num_groups=4))
    assert "scale=2.0" in repr(router)


GROUPED = partial(Router, 4, num_groups=4, topk_group=2)


@pytest.mark.parametrize(
    ("router", "experts", "words"),
    [
        (Router(2, score="tanh"), 8, "unknown score"),
        (Router(9), 8, "top_k: an integer from 1 to 8"),
        (Router(33), 512, "top_k: an integer from 1 to 32"),
        (Router(1), 513, "experts: an integer from 1 to 512"),
        (Router(1, scale=float("nan")), 8, "scale: a finite number above 0"),
        (Router(1, scale=10**400), 8, "scale: a finite number above 0"),
        (GROUPED(), 10, "10 experts in 4 groups"),
        (GROUPED(), 4, "groups of equal size, at least 2"),
        (GROUPED(topk_group=5), 16, "topk_group: an integer from 1 to 4"),
        (Router(6, num_groups=8, topk_group=1), 32, "1 have 6 experts"),
        (GROUPED(group_score="mean"), 16, "unknown group_score"),
    ],
)
def test_a_router_that_cannot_choose_is_refused(router, experts, words):
    with pytest.raises(ArgumentError, match=words):
        router.check(experts)
