"""Tokens by chance: both bodies, their distribution, and what top_k and top_p keep."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.functions.best_column import NOT_FINITE
from etc_dist.functions.philox import philox
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.models.sampling import Sampling, row_sampling
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import schedule_static
from tests.conftest import first_always
from tests.functions.compiled import check_compiled
from tests.graphs.tokens import next_tokens

SAMPLED = partial(next_tokens, 1, samples=True)
GRAPH = SAMPLED(width=64)


@pytest.fixture(scope="module")
def emulator(kernels) -> Emulator:
    return Emulator(GRAPH, workers=2, kernels=kernels)


def sampled_given(x, sampling, position=None, padding=0):
    """Inputs and dims. padding: columns at the end of a row."""
    count, columns = x.shape
    position = np.arange(count) if position is None else position
    arrays = {
        "x": x.astype(numpy_dtype("bfloat16")),
        "sampling": row_sampling(count, sampling),
        "position": np.array(position, np.int32),
        "end": np.zeros(count, np.int32),
        "stop": np.full((count, 1), -1, np.int32),
    }
    dims = {"rows": count, "columns": columns, "stops": 1}
    return arrays, dims | {"count": columns - padding}


def run(x, sampling, position=None, emulator=None, graph=GRAPH, padding=0):
    """Tokens and least logits."""
    arrays, dims = sampled_given(x, sampling, position, padding)
    if emulator is not None:
        [outputs] = emulator.run([arrays], dims)
    else:
        outputs = simulate(schedule_static(graph), [arrays], dims).outputs[0]
    return outputs["best"].tolist(), outputs["least"].tolist()


# The test vectors of the paper's authors, of their library Random123.
@pytest.mark.parametrize(
    ("counter", "key", "text"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([2**32 - 1] * 4, [2**32 - 1] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_random_bits_are_those_of_philox(counter, key, text):
    assert " ".join(f"{int(n):08x}" for n in philox(counter, key)) == text


def chi_square(tokens, probabilities):
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert not counts[probabilities == 0].any()
    probabilities = probabilities[probabilities > 0] * len(tokens)
    counts = counts[counts > 0] if (counts > 0).sum() == len(probabilities) else counts
    return ((counts - probabilities) ** 2 / probabilities).sum()


@pytest.mark.parametrize(
    ("options", "num_columns"),
    [
        ({"temperature": 1.0}, 8),
        ({"temperature": 0.5}, 8),
        ({"temperature": 2.0, "top_k": 5}, 5),
        ({"temperature": 1.0, "top_p": 0.8}, 3),
        ({"temperature": 1.0, "top_k": 4, "top_p": 0.95}, 4),
    ],
)
def test_tokens_have_the_probabilities_of_softmax(options, num_columns):
    logits = np.array([3.0, 2.5, 2.0, 1.0, 0.5, 0.0, -1.0, -2.0])
    x = np.tile(logits, (1500, 1))
    weights = np.exp(logits / options["temperature"])
    weights[num_columns:] = 0
    sampling = [Sampling(**options, seed=2**40 + 5)] * len(x)
    tokens, _ = run(x, sampling)
    # Of 7 degrees of freedom, 1 in 1000 is above 24.3. The seed is fixed.
    assert chi_square(np.array(tokens), weights / weights.sum()) < 24.3


def test_both_backends_give_the_same_tokens(rng, emulator):
    x = rng.standard_normal((16, 600)) * 3
    x[5, :40], x[6, 100:] = -np.inf, -np.inf
    options = [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 20, 0.9), (1.3, 0, 0.5), (2.0, 7, 1)]
    sampling = [Sampling(*options[n % 5], seed=n) for n in range(16)]
    tokens, least = run(x, sampling)
    emulator_tokens, found_least = run(x, sampling, emulator=emulator)
    assert (emulator_tokens, found_least) == (tokens, least)
    rounded = x.astype(numpy_dtype("bfloat16")).astype(np.float32)
    assert tokens[::5] == rounded[::5].argmax(axis=1).tolist()
    order = np.sort(rounded, axis=1)[:, ::-1]
    np.testing.assert_array_equal(least[4::5], order[4::5, 6])


@pytest.mark.parametrize("padding", [1, 7, 60])
def test_columns_of_padding_are_not_drawn(padding, rng, emulator):
    x = rng.standard_normal((16, 584)) * 3
    options = [(0, 0, 1), (1, 0, 1), (0.7, 20, 0.9), (1, 9999, 0.5), (2, 580, 1)]
    sampling = [Sampling(*options[n % 5], seed=n) for n in range(16)]
    expected = run(x[:, :-padding], sampling)
    x[:, -padding:] = 99
    x[3, -1] = np.nan
    for runner in (None, emulator):
        assert run(x, sampling, emulator=runner, padding=padding) == expected


@pytest.mark.parametrize("spoiled", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_has_no_token(spoiled, rng, emulator):
    x = rng.standard_normal((16, 600))
    x[:, 3] = spoiled
    if spoiled < 0:
        x[...] = spoiled
    options = [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 5, 0.9), (1.3, 0, 0.5), (2.0, 7, 1)]
    sampling = [Sampling(*options[n % 5], seed=n) for n in range(16)]
    for runner in (None, emulator):
        tokens, _ = run(x, sampling, emulator=runner)
        assert tokens == [NOT_FINITE] * 16


def test_numbers_that_the_temperature_makes_infinite_have_no_token(emulator):
    x = np.full((4, 600), 2e38)
    for runner in (None, emulator):
        tokens, _ = run(x, [Sampling(0.5), Sampling(1.0)] * 2, emulator=runner)
        assert tokens[0] == NOT_FINITE
        assert tokens[1] >= 0


@pytest.mark.parametrize(
    "options", [{"top_k": 1}, {"top_p": 1e-300}, {"temperature": 0.0}]
)
def test_the_most_likely_token_is_left(options, rng, emulator):
    x = rng.integers(-3, 30, (8, 600)) / 4  # with ties
    x[:, 77] = x.max(axis=1) + 1
    for runner in (None, emulator):
        tokens, _ = run(x, [Sampling(**options)] * 8, emulator=runner)
        assert tokens == [77] * 8


def test_all_of_equal_logits_are_kept(emulator):
    x = np.zeros((64, 72))
    x[:, 10:20] = 4
    x[:, 5] = 5
    tokens, least = run(x, [Sampling(top_k=3)] * 64)
    assert least == [4] * 64
    assert set(tokens) == {5, *range(10, 20)}
    assert run(x[:4], [Sampling(top_k=3)] * 4, emulator=emulator)[0] == tokens[:4]


def test_a_token_depends_on_seed_and_position_alone(rng):
    x = np.tile(rng.standard_normal(640), (30, 1))
    first, second = Sampling(seed=1), Sampling(seed=2**63)
    alone, _ = run(x[:1], [first], position=[17])
    many, _ = run(x, [first if n % 2 else second for n in range(30)])
    assert many[17] == alone[0]
    assert len(set(many)) > 20
    wide, _ = run(x, [first] * 30, graph=SAMPLED(width=256))
    assert wide[17] == alone[0]
    greedy = [None if n != 17 else first for n in range(30)]
    assert run(x, greedy)[0][17] == alone[0]


@pytest.mark.parametrize("dtype", first_always([("bfloat16",), ("float16",)], 1))
def test_the_cuda_bodies_compile_without_spills(dtype):
    check_compiled(SAMPLED(width=64, dtype=dtype))
