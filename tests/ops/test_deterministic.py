"""Which results have the same bits: `deterministic`."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist import MLP, AllGatherMatmul, Matmul, MatmulReduceScatter, MoE
from etc_dist.errors import ArgumentError
from etc_dist.ops.tile_model import FAMILY, Tiling, dims_of
from etc_dist.schedule.plan import Choice
from tests.ops.arrays import cancelling

pytestmark = pytest.mark.mpi

ROWS = (1, 5, 16, 33, 64, 100, 300, 1100)
"""Of a rank: tiles of all kinds, and both programs of the MLP."""
HIDDEN, INNER = 512, 256
EXPERTS, TOP_K = 128, 4
"""So many experts that logits of the most rows would be computed in tiles."""


def drawn(rng, *shape):
    return rng.standard_normal(shape) * shape[-1] ** -0.25


OPERATIONS = {
    "matmul": (Matmul, {}, 1),
    "reduce_scatter": (MatmulReduceScatter, {}, 0),
    "reduce_scatter in fp32": (MatmulReduceScatter, {"partials": "float32"}, 0),
    "all_gather": (AllGatherMatmul, {}, 1),
}
"""The operation, its options, and whether a rank passes its own rows alone."""


# NumPy rounds a row's products differently with another number of rows.
@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_row_has_the_same_bits_for_any_number_of_rows(name, world, arrays, rng, make):
    kind, options, is_own = OPERATIONS[name]
    op = make(kind, deterministic="batch", **options)
    most, ranks = ROWS[-1], 1 if is_own else world.size
    x, w = cancelling(rng, most, HIDDEN, 1024)
    x, w = arrays.put(np.stack([x] * ranks)), arrays.put(w)
    results = []
    for rows in ROWS:
        operand = x[:, :rows].copy().reshape(ranks * rows, -1)
        results.append(arrays.get(op(operand, w))[0])
    for row in results[1:]:
        np.testing.assert_array_equal(row, results[0])


# The tensor cores add in one order, whichever rows and columns a tile has.
@pytest.mark.gpu
@pytest.mark.mpi(ranks=[1])
def test_all_tiles_that_add_k_in_its_order_give_the_same_bits(
    arrays, rng, make, monkeypatch
):
    x, w = map(arrays.put, cancelling(rng, 300, HIDDEN, 1000))
    op, results = make(Matmul), {}
    for shape_idx, shape in enumerate(FAMILY):
        dims = dims_of(Tiling(shape_idx, shape.columns)).items()
        choices = [Choice(dim, value, list) for dim, value in dims]
        monkeypatch.setattr(Matmul, "_choose", lambda *_, c=choices: c)
        rows = x[: 300 - shape_idx].copy()  # another call, which chooses again
        if shape.k_parts == 1:
            results[str(shape)] = arrays.get(op(rows, w))
    least = 300 - len(FAMILY)
    [first, *names] = results
    for name in names:
        is_equal = results[name][:least] == results[first][:least]
        assert is_equal.all(), f"{name} and {first} differ"


@pytest.mark.gpu
@pytest.mark.mpi(ranks=[1])
def test_without_the_option_tiles_for_few_rows_round_in_other_ways(arrays, rng, make):
    x, w = map(arrays.put, cancelling(rng, 1100, HIDDEN, 1024))
    op = make(Matmul)
    few, many = (arrays.get(op(x[:rows].copy(), w))[0] for rows in (1, 1100))
    assert (few != many).any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mlp", "moe"])
def test_a_token_has_the_same_bits_for_any_number(name, world, arrays, rng, make):
    def put(*shape):
        return arrays.put_as(drawn(rng, *shape), "bfloat16")

    x, inner = put(ROWS[-1] * world.size, HIDDEN), INNER
    if name == "mlp":
        weights = put(inner, HIDDEN), put(inner, HIDDEN), put(HIDDEN, inner)
        kind, options, ranks = MLP, {}, 1
    else:
        weights = (
            put(EXPERTS, HIDDEN),
            put(EXPERTS, 2 * inner, HIDDEN),
            put(EXPERTS, HIDDEN, inner),
        )
        kind, options, ranks = MoE, {"top_k": TOP_K}, world.size
    layer = kind(*weights, world=world, deterministic="batch", **options)
    results = []
    with layer:
        for rows in ROWS:
            tokens = x[: rows * ranks].copy()
            tokens[::rows] = x[0]  # the first one of each rank's part
            results.append(arrays.get(layer(tokens))[0])
    for row in results[1:]:
        np.testing.assert_array_equal(row, results[0])


@pytest.mark.mpi(ranks=[1])
@pytest.mark.parametrize("kind", [Matmul, AllGatherMatmul, MatmulReduceScatter])
def test_other_values_are_refused(kind, world):
    with pytest.raises(ArgumentError, match="unknown deterministic") as caught:
        kind(world=world, deterministic="always")
    assert caught.value.wanted == "'run' or 'batch'"
    with pytest.raises(TypeError, match="deterministic"):
        kind(world=world, deterministic=True)
