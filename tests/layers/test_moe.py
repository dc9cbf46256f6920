"""The mixture of experts: equal logits, and which of its programs serves which
tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.activation import Activation
from etc_dist.functions.router import Router
from etc_dist.layers.moe import MoE
from etc_dist.layers.moe_few_tokens import FEW_TOKENS, PREFETCH_BYTES, most_tokens
from etc_dist.layers.moe_steps import Sizes
from etc_dist.schedule import schedule_static
from tests.conftest import first_always, kept_proof, some_of
from tests.functions.both import both
from tests.functions.compiled import check_compiled
from tests.graphs.mixtures import moe_few_tokens_graph, moe_graph
from tests.layers.reference import draw, draw_experts, moe_reference, own_experts

FEW, MANY = "moe_few_tokens_graph", "moe_graph"
few_graph = partial(moe_few_tokens_graph, product_tasks=12)
"""With four tasks for each of three tokens, which the emulator soon executes."""


def check_both_programs(
    weights, world, arrays, draw_rows, top_k, biases=None, **options
):
    """Calls with few and then with many tokens."""
    put = [arrays.put(weight) for weight in weights]
    options_of_call = {name: arrays.put(bias) for name, bias in (biases or {}).items()}
    shared = options.pop("shared", ())
    options_of_call |= shared_arguments([*map(arrays.put, shared)])
    expert_biases = options.pop("expert_biases", ())
    few = not expert_biases
    if expert_biases:
        options_of_call["expert_biases"] = tuple(map(arrays.put, expert_biases))
    moe = MoE(*put, top_k=top_k, world=world, **options_of_call, **options)
    options |= {"biases": [*(biases or {}).values()], "shared": shared}
    if not few:
        options["expert_biases"] = expert_biases
    for tokens, name in ((2, FEW), (FEW_TOKENS + 3, MANY)):
        x = draw_rows((tokens, 40)).astype(weights[0].dtype)
        y = moe(arrays.put(x))
        moe.synchronize()
        moe_reference(x, weights, top_k, **options).check(arrays.get(y))
        assert moe.program.plan.graph.name == (name if few else MANY)
    moe.close()


@pytest.mark.mpi(ranks=[1])
@pytest.mark.parametrize("experts", [136, 256])
def test_of_equal_logits_the_lower_expert_wins(experts, one_rank, arrays, rng):
    weights = draw_experts(rng, experts, 40, 24)
    weights[0][...] = rng.integers(-1, 2, weights[0].shape)
    integers = lambda shape: rng.integers(-1, 2, shape)  # noqa: E731
    check_both_programs(weights, one_rank, arrays, integers, 16)


CORRECTED = Router(4, score="sigmoid", scale=2.5, has_correction=True)
ROUTERS = {
    "groups": (32, replace(CORRECTED, num_groups=4, topk_group=2)),
    "odd": (37, CORRECTED),
    "softplus": (8, replace(CORRECTED, score="sqrt_softplus")),
    "biased": (12, Router(3, score="softmax_chosen", has_bias=True)),
    "many": (512, replace(CORRECTED, top_k=10, normalize=False)),
    "one": (1, Router(1, False)),
}


def shared_arguments(arrays):
    """The arguments of MoE for gate_up, down and perhaps the gate."""
    arguments = {"shared": tuple(arrays[:2])} if arrays else {}
    return arguments | dict(zip(["shared_gate"], arrays[2:], strict=False))


def draw_shared(rng, hidden, inner, is_gated):
    shapes = [(2 * inner, hidden), (hidden, inner), (hidden,)][: 2 + is_gated]
    return [draw(rng, shape, "bfloat16") / 4 for shape in shapes]


def biases_of(rng, experts, router):
    biases = {name: rng.standard_normal(experts) for name in router.bias_names}
    return {name: (bias / 8).astype(np.float32) for name, bias in biases.items()}


def check_ranks(parallel, world, arrays, rng, weights, arguments, top_k=2, **options):
    """A layer on ranks. given: its arguments; options: of the reference."""
    x = draw(rng, (5 * world.size, 40), "bfloat16")
    rank_rows = np.split(x, world.size)[world.rank]
    moe = MoE(
        *map(arrays.put, own_experts(weights, parallel, world.rank, world.size)),
        top_k=top_k,
        parallel=parallel,
        world=world,
        **arguments,
    )
    y = moe(arrays.put(x if parallel == "tensor" else rank_rows))
    moe.synchronize()
    moe.close()
    moe_reference(rank_rows, weights, top_k, **options).check(arrays.get(y))


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("parallel", ["tensor", "expert"])
def test_ranks_add_the_shared_expert(parallel, is_gated, world, arrays, rng):
    weights = draw_experts(rng, 8, 40, 8 * world.size)
    shared = draw_shared(rng, 40, 24 * world.size, is_gated)
    of_shared = shared
    if parallel == "tensor":
        halves = [half[24 * world.rank :][:24] for half in np.split(shared[0], 2)]
        down = np.ascontiguousarray(np.split(shared[1], world.size, 1)[world.rank])
        of_shared = [np.concatenate(halves), down, *shared[2:]]
    arguments = shared_arguments([*map(arrays.put, of_shared)])
    check_ranks(parallel, world, arrays, rng, weights, arguments, shared=shared)


def check_kernels(graph, rng, weights, sizes, operands=None, top_k=2, **options):
    """The CUDA bodies of a graph. sizes: tokens, hidden, inner and perhaps that of the
    shared expert; options: of the reference."""
    x = draw(rng, sizes[:2], "bfloat16")
    inputs = dict(zip(("router", "gate_up", "down"), weights, strict=True))
    dims = dict(zip(("tokens", "hidden", "inner", "shared_inner"), sizes, strict=False))
    [outputs] = Emulator(graph, workers=2).run(
        [{"x": x, **inputs, **(operands or {})}], dims
    )
    moe_reference(x, weights, top_k, **options).check(outputs["y"])


@pytest.mark.parametrize(
    ("graph", "kind"),
    first_always(
        [
            (few_graph, "plain"),
            (moe_graph, "gated"),
            (few_graph, "gated"),
            (moe_graph, "plain"),
        ],
        2,
    ),
    ids=[f"{FEW}-plain", f"{MANY}-gated", f"{FEW}-gated", f"{MANY}-plain"],
)
def test_the_cuda_bodies_choose_and_add_the_shared_expert(graph, kind, rng):
    experts, router = ROUTERS["odd"]
    weights, biases = (
        draw_experts(rng, experts, 40, 24),
        biases_of(rng, *ROUTERS["odd"]),
    )
    shared = draw_shared(rng, 40, 56, kind == "gated")
    names = "shared_gate_up", "shared_down", "shared_gate"
    operands = biases | {n: a[None] for n, a in zip(names, shared, strict=False)}
    graph = graph(1, experts=experts, top_k=router, shared=kind)
    options = {"biases": [*biases.values()], "shared": shared}
    check_kernels(graph, rng, weights, (3, 40, 24, 56), operands, router, **options)


GPT_OSS = Activation(alpha=1.702, limit=0.75, shift=1.0)
ACTIVATIONS = {
    "gpt-oss": GPT_OSS,
    "gelu": Activation("gelu_tanh"),
    "gelu, clamped": Activation("gelu_tanh", limit=0.5),
    "clamped": Activation(limit=0.5),
}


def draw_biases(rng, experts, hidden, inner):
    """Of experts: gate_up's and down's."""
    return [draw(rng, (experts, n), "bfloat16") for n in (2 * inner, hidden)]


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("parallel", ["tensor", "expert"])
def test_ranks_add_the_biases_of_experts(parallel, world, arrays, rng):
    weights = draw_experts(rng, 8, 40, 8 * world.size)
    of_up, of_down = biases = draw_biases(rng, 8, 40, 8 * world.size)
    if parallel == "expert":
        of_rank = [np.split(bias, world.size)[world.rank] for bias in biases]
    else:
        halves = [
            half[:, 8 * world.rank :][:, :8] for half in np.split(of_up, 2, axis=1)
        ]
        of_rank = [np.concatenate(halves, axis=1), of_down * (world.rank == 0)]
    dtype = weights[0].dtype
    arguments = {"expert_biases": tuple(arrays.put(b.astype(dtype)) for b in of_rank)}
    check_ranks(parallel, world, arrays, rng, weights, arguments, expert_biases=biases)


# Narrow tiles, others, and those of half the columns.
@pytest.mark.parametrize(("tokens", "packs"), [(3, False), (60, True), (200, False)])
def test_the_cuda_bodies_add_the_biases_and_activate(tokens, packs, rng):
    hidden, inner = 520, 264
    weights = draw_experts(rng, 2, hidden, inner)
    biases = draw_biases(rng, 2, hidden, inner)
    operands = dict(zip(("gate_up_bias", "down_bias"), biases, strict=True))
    options = {"activation": GPT_OSS, "has_biases": True, "packs": packs}
    graph = moe_graph(1, experts=2, top_k=2, **options)
    of_experts = {"activation": GPT_OSS, "expert_biases": biases}
    check_kernels(graph, rng, weights, (tokens, hidden, inner), operands, **of_experts)


@pytest.mark.parametrize("name", some_of(ACTIVATIONS, 2))
def test_the_cuda_bodies_of_few_tokens_activate(name, rng):
    options = {"activation": ACTIVATIONS[name]}
    graph = few_graph(1, experts=8, top_k=2, **options)
    check_kernels(graph, rng, draw_experts(rng, 8, 40, 24), (3, 40, 24), **options)


# The number of experts, how they are chosen, and other arguments.
LAYERS = {
    "not normalized": (8, 3, lambda rng: {"normalize": False}),
    **{
        f"shared expert, gated: {is_gated}": (
            *(8, 2),
            lambda rng, g=is_gated: {"shared": draw_shared(rng, 40, 56, g)},
        )
        for is_gated in (False, True)
    },
    **{
        name: (8, 2, lambda rng, a=activation: {"activation": a})
        for name, activation in ACTIVATIONS.items()
    },
    "biases of experts": (
        *(8, 2),
        lambda rng: {
            "activation": GPT_OSS,
            "expert_biases": draw_biases(rng, 8, 40, 24),
        },
    ),
    **{
        f"router, {name}": (
            *sizes,
            lambda rng, sizes=sizes: {"biases": biases_of(rng, *sizes)},
        )
        for name, sizes in ROUTERS.items()
    },
}


@pytest.mark.mpi(ranks=[1])
@pytest.mark.parametrize("name", LAYERS)
def test_both_programs_fit_the_reference(name, one_rank, arrays, rng):
    experts, top_k, options = LAYERS[name]
    weights = draw_experts(rng, experts, 40, 24)
    normal = lambda shape: draw(rng, shape, "bfloat16")  # noqa: E731
    check_both_programs(weights, one_rank, arrays, normal, top_k, **options(rng))


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("parallel", ["tensor", "expert"])
def test_ranks_choose_as_the_router_says(parallel, world, arrays, rng):
    router, experts = replace(CORRECTED, num_groups=2, topk_group=1), 19 * world.size
    weights = draw_experts(rng, experts, 40, 8 * world.size)
    biases = biases_of(rng, experts, router)
    arguments = {"correction": arrays.put(biases["correction"])}
    options = {"top_k": router, "biases": [*biases.values()]}
    check_ranks(parallel, world, arrays, rng, weights, arguments, **options)


ONE_TASK = Sizes(score_tasks=1)
"""Logits of several groups of experts are computed in tiles."""


@pytest.mark.parametrize("experts", first_always([(131,), (37,), (67,)], 1))
def test_the_cuda_bodies_score_any_number_of_experts_in_tiles(experts, rng):
    graph = moe_graph(1, experts=experts, top_k=CORRECTED, sizes=ONE_TASK)
    check_corrected(graph, rng, experts, tokens=70)


@pytest.mark.parametrize("experts", first_always([(21,), (12,), (7,)], 1))
def test_the_cuda_bodies_score_any_number_of_experts_of_few_tokens(experts, rng):
    graph = few_graph(1, experts=experts, top_k=CORRECTED, score_tasks=1)
    check_corrected(graph, rng, experts, tokens=3)


def check_corrected(graph, rng, experts, tokens):
    """Both bodies of a graph with the router CORRECTED."""
    dims = {"tokens": tokens, "hidden": 72, "inner": 24}
    weights = draw_experts(rng, experts, 72, 24)
    x, biases = draw(rng, (tokens, 72), "bfloat16"), biases_of(rng, experts, CORRECTED)
    inputs = dict(zip(("router", "gate_up", "down"), weights, strict=True)) | biases
    answer = moe_reference(x, weights, CORRECTED, biases=[*biases.values()])
    for outputs in both(graph, {"x": x, **inputs}, dims):
        answer.check(outputs["y"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("experts", [257, 384, 512])
def test_programs_of_two_choices_compile_without_spills(experts):
    """Where the sums of a token's rows need the most registers."""
    router = Router(2, score="sigmoid", has_correction=True)
    check_compiled(moe_graph(1, experts=experts, top_k=router))


def test_512_experts_are_proved_for_all_data():
    graph = moe_graph(1, experts=512, top_k=10)
    dims = {"tokens": 4096, "hidden": 2048, "inner": 512}
    kept_proof(schedule_static(graph), dims, 132)


@pytest.mark.mpi(ranks=[1])
def test_few_and_many_tokens_take_turns(make, compiled):
    layer = make("moe few tokens", 40, 24)
    names = layer.check_turns([1, FEW_TOKENS + 1, FEW_TOKENS, 300, 2])
    assert names == [FEW, MANY, FEW, MANY, FEW]
    assert compiled == [MANY, FEW]
    hints = layer.layer.program._capacity_hint({"tokens": 2, "hidden": 40, "inner": 24})
    assert [dims["tokens"] for dims in hints] == [*range(1, FEW_TOKENS + 1)]


def prefetched(tokens: int, hidden: int, inner: int) -> list[int]:
    """The rows of down that the tasks of the first matmul prefetch."""
    graph = moe_few_tokens_graph(1, experts=8, top_k=2)
    call = next(c for c in graph.calls if c.name == "gate_up_token")
    env = graph.environment({"tokens": tokens, "hidden": hidden, "inner": inner}, 0)
    m, j = (axis.symbol.name for axis in call.axes)
    rows: list[int] = []
    for task in range(int(call.tasks.evaluate(env)) // tokens):
        _, of_rows, _ = call.reads[4].bounds({**env, m: 0, j: task})
        rows += range(*of_rows)
    return rows


@pytest.mark.parametrize("hidden", [8, 40, 2047, 2048])
def test_of_one_token_all_rows_of_down_are_prefetched_once(hidden):
    most_rows = PREFETCH_BYTES // (2 * 2 * hidden)
    every = [*range(hidden)]
    assert prefetched(1, hidden, 24) == prefetched(1, hidden, most_rows) == every
    assert prefetched(1, hidden, most_rows + 1) == prefetched(2, hidden, 24) == []


def test_few_tokens_are_those_that_read_little():
    assert most_tokens(8, 2048, 768) == 4  # qwen3-30b-a3b
    assert most_tokens(2, 4096, 14336) == 0  # mixtral-8x7b
    assert most_tokens(2, 40, 24) == FEW_TOKENS


@pytest.mark.mpi(ranks=[1])
def test_a_layer_of_large_experts_has_one_program(make, monkeypatch):
    read = 2 * 3 * 40 * 24 * 2
    for tokens, name in ((1, FEW), (0, MANY)):
        limit = read * (tokens + 1) - 1
        monkeypatch.setattr("etc_dist.layers.moe_few_tokens.FEW_BYTES", limit)
        layer = make("moe few tokens", 40, 24)
        for count in (2, 1):
            layer.check(count)
        assert layer.program == name


@pytest.mark.mpi(ranks=[1])
def test_logits_may_be_added_in_one_order_for_any_number_of_tokens(make):
    layer = make("moe few tokens", 40, 24, experts=128, deterministic="batch")
    for count in (1, 1100):  # so many would have logits in tiles
        layer.check(count)
        assert layer.program == MANY
    calls = layer.layer.program.plan.graph.calls
    assert "score_experts" in {call.name for call in calls}
    assert "score_tiles" not in {call.name for call in calls}


@pytest.mark.mpi(ranks=[1])
def test_logits_of_any_number_of_experts_may_be_in_tiles(make):
    layer = make("moe", 40, 24, experts=70, top_k=7)
    layer.check(1500)
    graph = layer.layer.program.plan.graph
    env = graph.environment({"tokens": 1500, "hidden": 40, "inner": 24}, 0)
    assert env["tiled"] == 1


def test_a_token_has_the_same_bits_beside_any_others(rng):
    """In the CUDA bodies, where neighbouring rows share instructions."""
    dims = {"tokens": 32, "hidden": 72, "inner": 72}
    options = {"experts": 8, "top_k": 8, "dtype": "float16", "in_order": True}
    emulator = Emulator(moe_graph(1, packs=True, **options), workers=2)
    weights = draw_experts(rng, 8, dims["hidden"], dims["inner"], "float16")
    operands = dict(zip(("router", "gate_up", "down"), weights, strict=True))
    x = draw(rng, (dims["tokens"], dims["hidden"]), "float16")
    replaced = x.copy()
    replaced[1::2] = draw(rng, (len(x) // 2, dims["hidden"]), "float16")
    first, second = (
        emulator.run([{"x": a, **operands}], dims)[0]["y"] for a in (x, replaced)
    )
    np.testing.assert_array_equal(first[::2], second[::2])
    assert (first[1::2] != second[1::2]).any()
