"""The expert-parallel mixture of experts over several hosts: a token goes once to each
host, and one sum comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.layers.moe_steps import Sizes
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import SCHEDULES
from etc_dist.verify.verify import verify
from tests.emulate.cases import named
from tests.graphs.mixtures import moe_graph
from tests.layers.reference import (
    Answer,
    draw,
    draw_experts,
    moe_reference,
    own_experts,
)
from tests.world.jobs import run_on_hosts

exhaustive = pytest.mark.exhaustive
SMALL = Sizes(8, 8, 8, 8, group_tokens=2, passes=4, combined=8)
SMALL = replace(SMALL, part_tokens=4, push_tasks=4, score_tasks=4)
"""Sizes with several blocks, tiles and small parts."""


def example(
    world: int,
    experts: int,
    top_k: int,
    tokens: int | Sequence[int],
    hidden: int,
    inner: int,
) -> tuple[list[dict[str, Any]], list[Answer], dict[str, int]]:
    """tokens: of all ranks, or of each."""
    rng = np.random.default_rng(world)
    weights = draw_experts(rng, experts, hidden, inner)
    counts = [tokens] * world if isinstance(tokens, int) else tokens
    xs = [draw(rng, (count, hidden), "bfloat16") for count in counts]
    inputs = [
        {"x": x, **named(own_experts(weights, "expert", rank, world))}
        for rank, x in enumerate(xs)
    ]
    gate, gate_up, down = draw_experts(rng, 1, hidden, inner)
    shared = {"shared_gate_up": gate_up, "shared_down": down, "shared_gate": gate}
    inputs = [arrays | shared for arrays in inputs]
    dims = {"tokens": max(counts), "hidden": hidden, "inner": inner}
    dims["shared_inner"] = inner
    of_all = gate_up[0], down[0], gate[0]
    return inputs, [moe_reference(x, weights, top_k, shared=of_all) for x in xs], dims


@pytest.mark.parametrize(
    ("world", "local_size", "tokens", "schedule", "packs"),
    [
        (4, 2, (9, 0, 5, 1), "static", False),
        (2, 1, 3, "dynamic", True),
        *(
            pytest.param(*case, False, marks=exhaustive)
            for case in [(2, 1, 19, "dynamic"), (4, 1, 19, "static")]
        ),
    ],
)
def test_the_graph_is_proved_and_right(world, local_size, tokens, schedule, packs):
    options = {"experts": 16, "top_k": 3, "parallel": "expert", "shared": "gated"}
    options |= {"sizes": SMALL, "packs": packs}
    plan = SCHEDULES[schedule](moe_graph(world, local_size=local_size, **options))
    inputs, answers, dims = example(world, 16, 3, tokens, 24, 16)
    verify(plan, dims, 4)
    results = simulate(plan, inputs, dims, epochs=2, seed=1).outputs
    for answer, outputs in zip(answers, results, strict=True):
        answer.check(outputs["y"])


@exhaustive
@pytest.mark.parametrize(
    ("world", "local_size", "experts", "top_k", "tokens", "has_far"),
    [(2, 1, 8, 2, 20, False), (4, 2, 16, 4, 40, False), (4, 2, 16, 4, 40, True)],
)
def test_kernels(world, local_size, experts, top_k, tokens, has_far):
    """With all ranks on one host, whose memory they map; or on several."""
    options = {"experts": experts, "top_k": top_k, "parallel": "expert"}
    options["shared"] = "gated"
    graph = moe_graph(world, local_size=local_size, **options)
    inputs, answers, dims = example(world, experts, top_k, tokens, 136, 64)
    program = Emulator(graph, workers=2, has_far=has_far)
    results = program.run(inputs, dims, seed=1, runs=2)
    for answer, outputs in zip(answers, results, strict=True):
        answer.check(outputs["y"])


@pytest.mark.mpi(ranks=[2])
@pytest.mark.parametrize("kind", ["mlp many rows", "moe expert-parallel"])
def test_layers_repeat_their_bits(kind, make, arrays, world):
    """On one host, or on several: late messages do not change them."""
    layer = make(kind, 136, 64)
    layer.check(20)
    x, out, answer = layer.rows(20)
    texts = set()
    for _ in range(5 if world.backend == "cpu" else 100):
        layer.layer(x, out)
        layer.layer.synchronize()
        texts.add(arrays.get(out).tobytes())
        out[...] = np.nan
    assert len(texts) == 1
    answer.check(np.frombuffer(texts.pop(), np.float32).reshape(20, 136))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=exhaustive)])
def test_the_layer_runs_over_two_hosts(ranks):
    source = """
import etc_dist
from tests.layers.test_moe_hosts import example

world = etc_dist.start()
inputs, answers, _ = example(world.size, 8, 2, range(20, 0, -5)[: world.size], 64, 32)
own, answer = inputs[world.rank], answers[world.rank]
weights = own["router"], own["gate_up"], own["down"]
shared = own["shared_gate_up"][0], own["shared_down"][0]
of_all = {"shared": shared, "shared_gate": own["shared_gate"][0]}
with etc_dist.MoE(*weights, top_k=2, parallel="expert", **of_all) as moe:
    y = moe(own["x"]).copy()
    assert all((moe(own["x"]) == y).all() for _ in range(3))
answer.check(y)
print("right on", world.hosts.count, "hosts", flush=True)
world.close()
"""
    code, output = run_on_hosts(source, ranks)
    assert code == 0, output
    assert output.count("right on 2 hosts") == ranks
