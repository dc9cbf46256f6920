"""Experts of tokens whose choices are given."""

import numpy as np
import pytest
from ml_dtypes import bfloat16

import etc_dist
from etc_dist.codegen import generate
from etc_dist.emulate import Emulator
from etc_dist.errors import ArgumentError
from etc_dist.functions.router import Router
from etc_dist.layers.moe_graph import chosen_experts_graph
from etc_dist.runtime.build import compile_cubin, kernels_folder
from etc_dist.runtime.cpu import simulate
from etc_dist.runtime.includes import headers
from etc_dist.schedule import schedule_static
from tests.conftest import first_always
from tests.ops.arrays import Arrays

EXPERTS, TOP_K, HIDDEN, INNER = 8, 4, 24, 16


def draw(
    rng: np.random.Generator, tokens: int, top_k: int = TOP_K
) -> dict[str, np.ndarray]:
    """The arrays of a run."""
    logits = rng.standard_normal((tokens, EXPERTS)).astype(np.float32)
    ids, weights = Router(top_k).choose(logits)
    return {
        "x": rng.standard_normal((tokens, HIDDEN)).astype(bfloat16),
        "ids": ids.astype(np.int32),
        "weights": weights,
        "gate_up": rng.standard_normal((EXPERTS, 2 * INNER, HIDDEN)).astype(bfloat16),
        "down": rng.standard_normal((EXPERTS, HIDDEN, INNER)).astype(bfloat16),
    }


def expect_sums(y: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
    """y has the sums over the chosen experts; zeros for a token without experts."""
    x, gate_up, down = (arrays[n].astype("f4") for n in ("x", "gate_up", "down"))
    gate, up = np.split(np.einsum("eix,tx->tei", gate_up, x), 2, axis=2)
    every = np.einsum("exi,tei->tex", down, gate / (1 + np.exp(-gate)) * up)
    ids, weights = arrays["ids"], arrays["weights"]
    terms = np.take_along_axis(every, ids[:, :, None].clip(0), 1)
    sums = ((weights * (ids >= 0))[:, :, None] * terms).sum(1)
    np.testing.assert_allclose(y, sums, rtol=0, atol=abs(sums).max() / 50)
    assert not y[(ids < 0).all(axis=1)].any()


@pytest.mark.mpi
@pytest.mark.parametrize(("tokens", "packs"), [(1, True), (32, False), (70, True)])
def test_result_is_the_weighted_sum_of_the_chosen_experts(tokens, packs, world, rng):
    arrays = draw(rng, tokens)
    graph = chosen_experts_graph(world.size, experts=EXPERTS, top_k=TOP_K, packs=packs)
    with etc_dist.compile(graph, world) as program:
        on = Arrays(world.backend)
        operands = {name: on.put(array) for name, array in arrays.items()}
        y = on.get(program.run(**operands)["y"])
        program.synchronize()
    expect_sums(y, arrays)


@pytest.mark.mpi
@pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
def test_a_choice_of_no_expert_adds_nothing(share, world, rng):
    arrays = draw(rng, 70)
    arrays["ids"][rng.random((70, TOP_K)) >= share] = -1
    graph = chosen_experts_graph(world.size, experts=EXPERTS, top_k=TOP_K)
    with etc_dist.compile(graph, world) as program:
        on = Arrays(world.backend)
        operands = {name: on.put(array) for name, array in arrays.items()}
        expect_sums(on.get(program.run(**operands)["y"]), arrays)


@pytest.mark.parametrize("top_k", first_always([(1,), (7,), (3,)], 2))
def test_the_cuda_bodies_take_any_number_of_choices(top_k, rng):
    arrays = draw(rng, 40, top_k)
    graph = chosen_experts_graph(1, experts=EXPERTS, top_k=top_k)
    dims = {"tokens": 40, "hidden": HIDDEN, "inner": INNER}
    [outputs] = Emulator(graph, workers=2).run([arrays], dims)
    expect_sums(outputs["y"], arrays)


def test_the_cuda_bodies_leave_out_choices_of_no_expert(rng):
    arrays = draw(rng, 40, 7)
    arrays["ids"][rng.random((40, 7)) < 0.5] = -1
    arrays["ids"][[3, 38]] = -1
    arrays["ids"][4] = -1, -1, 5, -1, -1, -1, -1
    graph = chosen_experts_graph(1, experts=EXPERTS, top_k=7)
    dims = {"tokens": 40, "hidden": HIDDEN, "inner": INNER}
    [outputs] = Emulator(graph, workers=2).run([arrays], dims)
    expect_sums(outputs["y"], arrays)
    [expected] = simulate(schedule_static(graph), [arrays], dims).outputs
    np.testing.assert_array_equal(outputs["y"] == 0, expected["y"] == 0)


@pytest.mark.mpi
@pytest.mark.parametrize("wrong", [EXPERTS, -2, 2**31 - 1])
def test_an_id_that_is_not_an_expert_ends_the_run(wrong, world, rng):
    arrays = draw(rng, 70)
    graph = chosen_experts_graph(world.size, experts=EXPERTS, top_k=TOP_K)
    with etc_dist.compile(graph, world) as program:
        on = Arrays(world.backend)
        operands = {name: on.put(array) for name, array in arrays.items()}
        ids = arrays["ids"].copy()
        ids[40, 1] = wrong
        with pytest.raises(ArgumentError, match="expert_exists"):
            program.run(**{**operands, "ids": on.put(ids)})
            program.synchronize()
        expect_sums(on.get(program.run(**operands)["y"]), arrays)


@pytest.mark.exhaustive
def test_kernel_compiles_without_spills():
    plan = schedule_static(chosen_experts_graph(1, experts=128, top_k=8))
    source = generate(plan)
    cubin, log = compile_cubin(source.text, headers(source, kernels_folder()))
    assert cubin
    assert "0 bytes spill stores" in log
