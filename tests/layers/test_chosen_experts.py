"""Experts of tokens whose choices are given."""

import numpy as np
import pytest
from ml_dtypes import bfloat16

import etc_dist
from etc_dist.codegen import generate
from etc_dist.functions.best_experts import best_experts
from etc_dist.layers.moe_graph import chosen_experts_graph
from etc_dist.runtime.build import compile_cubin, kernels_folder
from etc_dist.runtime.includes import headers
from etc_dist.schedule import schedule_static
from tests.ops.arrays import Arrays

EXPERTS, TOP_K, HIDDEN, INNER = 8, 4, 24, 16


def chosen_words(ids: np.ndarray) -> np.ndarray:
    """chosen [experts, blocks] of ids [tokens, top_k]."""
    words = np.zeros((EXPERTS, -(-len(ids) // 32)), np.uint32)
    for token, row in enumerate(ids):
        words[row, token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)


@pytest.mark.mpi(max_size=2)
@pytest.mark.parametrize(("tokens", "packs"), [(1, True), (32, False), (70, True)])
def test_result_is_the_weighted_sum_of_the_chosen_experts(tokens, packs, world, rng):
    logits = rng.standard_normal((tokens, EXPERTS)).astype(np.float32)
    ids, weights = best_experts(logits, TOP_K, True)
    x = rng.standard_normal((tokens, HIDDEN)).astype(bfloat16)
    gate_up = rng.standard_normal((EXPERTS, 2 * INNER, HIDDEN)).astype(bfloat16)
    down = rng.standard_normal((EXPERTS, HIDDEN, INNER)).astype(bfloat16)
    arrays = {"x": x, "ids": ids.astype(np.int32), "weights": weights}
    arrays |= {"chosen": chosen_words(ids), "gate_up": gate_up, "down": down}
    graph = chosen_experts_graph(world.size, experts=EXPERTS, top_k=TOP_K, packs=packs)
    with etc_dist.compile(graph, world) as program:
        on = Arrays(world.backend)
        given = {name: on.put(array) for name, array in arrays.items()}
        y = on.get(program.run(**given)["y"])
        program.synchronize()
    both = np.einsum("eix,tx->tei", gate_up.astype("f4"), x.astype("f4"))
    gate, up = np.split(both, 2, axis=2)
    every = np.einsum(
        "exi,tei->tex", down.astype("f4"), gate / (1 + np.exp(-gate)) * up
    )
    taken = np.take_along_axis(every, ids[:, :, None], 1)
    wanted = (weights[:, :, None] * taken).sum(1)
    np.testing.assert_allclose(y, wanted, rtol=0, atol=abs(wanted).max() / 50)


@pytest.mark.exhaustive
def test_kernel_compiles_without_spills():
    plan = schedule_static(chosen_experts_graph(1, experts=128, top_k=8))
    source = generate(plan)
    cubin, log = compile_cubin(source.text, headers(source, kernels_folder()))
    assert cubin
    assert "0 bytes spill stores" in log
