"""A decoder's step against a plain reference in fp32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import etc_dist
from etc_dist.emulate import Emulator
from etc_dist.functions.plan_shares import STAGE
from etc_dist.functions.rotary import frequencies, rotary_table
from etc_dist.ir import GraphFunction
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.models.decoder import decoder_for, decoder_graph
from etc_dist.models.float8 import widen
from etc_dist.models.sizes import MATMULS, DecoderSizes
from etc_dist.runtime.cpu import simulate
from etc_dist.schedule import SCHEDULES
from tests.functions.compiled import check_compiled, check_wgmmas
from tests.graphs.paged import BASE
from tests.layers.reference import draw
from tests.models.steps import SHAPES, in_parts, row_arrays, share_dims, tile_dims

Array = np.ndarray[Any, Any]
QWEN = DecoderSizes(6, 2, 64, normalizes_heads=True, page_size=16)
LLAMA = DecoderSizes(4, 4, 64, norm_eps=1e-5)
FLOAT8 = replace(QWEN, float8=MATMULS[:-1])
HIDDEN, INNER, VOCABULARY = 72, 136, 520
OF_BLOCKS = 144, 272
"""Hidden and inner size with float8: of more than a block."""
PAGES, REQUESTS, MOST_PAGES = 40, 5, 6


def draw_model(rng: np.random.Generator, sizes: DecoderSizes, layers: int) -> Any:
    heads, dim = sizes.heads * sizes.head_dim, sizes.head_dim
    width = heads + 2 * sizes.kv_heads * dim
    hidden, inner = OF_BLOCKS if sizes.float8 else (HIDDEN, INNER)

    def weight(*shape: int) -> Array:
        return draw(rng, shape, sizes.dtype, shape[-1] ** -0.5)

    def gain(*shape: int) -> Array:
        return (1 + draw(rng, shape, "float32", 0.1)).astype(numpy_dtype(sizes.dtype))

    model = {
        "embedding": weight(VOCABULARY, hidden),
        "norm": gain(layers + 1, hidden),
        "mlp_norm": gain(layers, hidden),
        "w_qkv": weight(layers, width, hidden),
        "w_o": weight(layers, hidden, heads),
        "w_gate": weight(layers, inner, hidden),
        "w_up": weight(layers, inner, hidden),
        "w_down": weight(layers, hidden, inner),
        "w_head": weight(VOCABULARY, hidden),
    }
    if sizes.normalizes_heads:
        model |= {"q_norm": gain(layers, dim), "k_norm": gain(layers, dim)}
    pages = (layers, PAGES, 2, sizes.kv_heads, sizes.page_size, dim)
    return model | {
        "cos_sin": rotary_table(MOST_PAGES * sizes.page_size, frequencies(dim, BASE)),
        "table": rng.permutation(PAGES)[: REQUESTS * MOST_PAGES]
        .reshape(REQUESTS, MOST_PAGES)
        .astype(np.int32),
        "cache": np.full(pages, np.nan, numpy_dtype(sizes.dtype)),
    }


def quantized(model: Any) -> Any:
    """With all weights of layers in float8, and their scales."""
    weights = dict(model)
    for name in ("w_qkv", "w_o", "w_gate", "w_up", "w_down"):
        codes, scales = zip(*map(etc_dist.quantize, model[name]), strict=True)
        weights |= {name: np.stack(codes), f"{name}_scales": np.stack(scales)}
    return weights


def widened(model: Any, name: str) -> Array:
    """An array in fp32."""
    array = model[name]
    if f"{name}_scales" not in model:
        wide: Array = array.astype(np.float32)
        return wide
    return np.stack([*map(widen, array, model[f"{name}_scales"])])


def reference(model: Any, sizes: DecoderSizes, ids: list[int]) -> Array:
    """The logits of all positions of one request, in fp32."""
    w = {name: widened(model, name) for name in model}
    dim, group, num_rows = sizes.head_dim, sizes.group, len(ids)

    def norm(x: Array, gain: Array) -> Array:
        mean = (x**2).mean(axis=-1, keepdims=True)
        return x / np.sqrt(mean + sizes.norm_eps) * gain

    def turn(x: Array) -> Array:  # [positions, heads, dim]
        angles = np.outer(np.arange(num_rows), frequencies(dim, BASE))[:, None]
        pairs = (x[..., : dim // 2] + 1j * x[..., dim // 2 :]) * np.exp(1j * angles)
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    x = w["embedding"][ids]
    for layer in range(len(w["w_o"])):
        qkv = norm(x, w["norm"][layer]) @ w["w_qkv"][layer].T
        qkv = qkv.reshape(num_rows, -1, dim)
        q, k, v = np.split(qkv, [sizes.heads, sizes.heads + sizes.kv_heads], axis=1)
        if sizes.normalizes_heads:
            q, k = norm(q, w["q_norm"][layer]), norm(k, w["k_norm"][layer])
        q, k, v = turn(q), np.repeat(turn(k), group, 1), np.repeat(v, group, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim)
        scores[:, np.triu(np.ones((num_rows, num_rows), bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        attention = np.einsum("hqk,khd->qhd", weights, v).reshape(num_rows, -1)
        x = x + attention @ w["w_o"][layer].T
        y = norm(x, w["mlp_norm"][layer])
        gate, up = y @ w["w_gate"][layer].T, y @ w["w_up"][layer].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["w_down"][layer].T
    return norm(x, w["norm"][-1]) @ w["w_head"].T


def rows_of(ids: Any, request: Any, position: Any, end: Any = None) -> dict[str, Array]:
    """The arrays of the rows of steps."""
    logits = np.full((len(ids), VOCABULARY), np.nan, numpy_dtype("bfloat16"))
    return row_arrays(ids, request, position, end) | {"logits": logits}


def dims_of(
    arrays: Any, sizes: DecoderSizes, tasks: int, cuts: int = 0, steps: int = 1
) -> dict[str, int]:
    dims = tile_dims(SHAPES, dict(zip(MATMULS, (0, 1, 0, 1, 0), strict=True)))
    return dims | {
        **in_parts(1, 2),
        "steps": steps,
        "rows": len(arrays["ids"]),
        "outputs": len(arrays["ids"]),
        "stops": arrays["stop"].shape[1],
        "layers": len(arrays["w_o"]),
        "hidden": arrays["w_o"].shape[1],
        "inner": arrays["w_gate"].shape[1],
        "vocabulary": VOCABULARY,
        "all_ids": VOCABULARY,
        "positions": len(arrays["cos_sin"]),
        "requests": REQUESTS,
        "most_pages": MOST_PAGES,
        "pages": PAGES,
        **share_dims(tasks, cuts),
        "samples": int(arrays["sampling"].any()),
    }


STEPS = [
    # The rows of each step: request, number of positions.
    [(0, 30), (1, 1), (2, 7)],  # parts of prompts
    [(0, 1), (3, 20), (2, 1), (1, 1)],  # decoding, and a new prompt
    [(0, 1), (1, 1), (2, 1), (3, 1)],
]


SIZES = {"qwen": QWEN, "llama": LLAMA, "float8": FLOAT8}


@pytest.mark.parametrize(
    ("name", "layers", "schedule"),
    [
        *((name, 3, "static") for name in SIZES),
        *((name, 1, "dynamic") for name in ("qwen", "float8")),
    ],
)
def test_steps_give_the_ids_of_the_largest_logits(name, layers, schedule, rng):
    sizes = SIZES[name]
    model = draw_model(rng, sizes, layers)
    if sizes.float8:
        model = quantized(model)
    graph = decoder_graph(1, sizes=sizes, shapes=SHAPES, best_columns=64)
    plan = SCHEDULES[schedule](graph)
    history: dict[int, list[int]] = {request: [] for request in range(REQUESTS)}
    for step_idx, rows in enumerate(STEPS):
        request, position, ids = [], [], []
        for of, count in rows:
            new = rng.integers(VOCABULARY, size=count).tolist()
            position += range(len(history[of]), len(history[of]) + count)
            history[of] += new
            request += [of] * count
            ids += new
        arrays = model | rows_of(ids, request, position)
        dims = dims_of(arrays, sizes, 1 + step_idx, step_idx % 2)
        run = simulate(plan, [arrays], dims).outputs[0]
        model["cache"] = run["cache"]
        expected = {of: reference(model, sizes, history[of]) for of, _ in rows}
        pairs = zip(request, position, strict=True)
        logits = np.array([expected[of][at] for of, at in pairs])
        off = np.linalg.norm(run["logits"].astype(np.float32) - logits)
        assert off < 0.02 * np.linalg.norm(logits)
        logits_of_ids = logits[np.arange(len(logits)), run["next_ids"][0]]
        assert np.all(
            logits_of_ids > logits.max(axis=1) - 0.05 * np.abs(logits).max(axis=1)
        )


def test_float8_weights_with_outliers_add_no_error(rng):
    """To that of the same weights rounded to bf16, against fp32."""
    model = draw_model(rng, FLOAT8, 1)
    for name in ("w_qkv", "w_o", "w_gate", "w_up", "w_down"):
        tail = rng.standard_t(3, model[name].shape)  # heavier than normal numbers
        model[name] = (model[name] * np.abs(tail)).astype(model[name].dtype)
    model = quantized(model)
    plain = {n: a for n, a in model.items() if not n.endswith("_scales")}
    for name in set(model).difference(plain):
        weight = name.removesuffix("_scales")
        plain[weight] = widened(model, weight).astype(plain["norm"].dtype)
    ids, errors = rng.integers(VOCABULARY, size=12), []
    expected = reference(model, FLOAT8, ids.tolist())
    for sizes, weights in ((FLOAT8, model), (QWEN, plain)):
        graph = decoder_graph(1, sizes=sizes, shapes=SHAPES, best_columns=64)
        arrays = weights | rows_of(ids, np.zeros(12), np.arange(12))
        plan = SCHEDULES["static"](graph)
        [run] = simulate(plan, [arrays], dims_of(arrays, sizes, 1)).outputs
        errors.append(np.linalg.norm(run["logits"].astype(np.float32) - expected))
    assert errors[0] < 1.1 * errors[1] < 0.03 * np.linalg.norm(expected)


ROWS = ("ids", "position", "request", "end", "stop", "sampling", "logits")
EMULATED = [[1], [1, 3, 1], [1, 2, 16, 14]]
"""Rows of each request in steps that the emulator runs, in another order each."""


def decoder() -> GraphFunction:
    return decoder_graph(1, sizes=QWEN, shapes=SHAPES, best_columns=64)


def decoder_step() -> tuple[Any, dict[str, int]]:
    """A step of two requests, one of which has a part of a prompt, and its dims."""
    rng = np.random.default_rng(6)
    ids = rng.integers(VOCABULARY, size=5)
    rows = rows_of(ids, [2, 2, 0, 2, 2], [0, 1, 0, 2, 3])
    arrays = draw_model(rng, QWEN, 2) | rows
    return arrays, dims_of(arrays, QWEN, 2)


def check_ids(program: Emulator, arrays: Any, dims: dict[str, int]) -> None:
    """Run a `decoder_step`: its ids are those of the largest logits."""
    [outputs] = program.run([arrays], dims)
    model = {n: a for n, a in arrays.items() if n not in ROWS}
    ids = arrays["ids"]
    expected = reference(model, QWEN, ids[[0, 1, 3, 4]].tolist())
    logits = np.insert(expected, 2, reference(model, QWEN, [ids[2]]), axis=0)
    logits_of_ids = logits[np.arange(5), outputs["next_ids"][0]]
    assert np.all(
        logits_of_ids > logits.max(axis=1) - 0.05 * np.abs(logits).max(axis=1)
    )


# Without --all, test_steps.py runs them.
@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", [QWEN, FLOAT8], ids=["qwen", "float8"])
@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_the_cuda_bodies_agree_in_any_order(sizes, schedule, rng, kernels):
    options = {"schedule": schedule, "kernels": kernels}
    graph = decoder_graph(1, sizes=sizes, shapes=SHAPES, best_columns=64)
    emulator = Emulator(graph, workers=2, **options)
    model = draw_model(rng, sizes, 2)
    if sizes.float8:
        model = quantized(model)
    for step_idx, counts in enumerate(EMULATED):
        rows = [(r, at) for r, count in enumerate(counts) for at in range(count)]
        request, position = rng.permutation(np.array(rows, np.int32)).T
        ids = rng.integers(VOCABULARY, size=len(rows), dtype=np.int32)
        arrays = model | rows_of(ids, request, position)
        dims = dims_of(arrays, QWEN, 1 + step_idx % 3, step_idx % 2)
        [outputs] = emulator.run([arrays], dims, seed=step_idx)
        for r in range(len(counts)):
            row_ids = np.flatnonzero(request == r)[np.argsort(position[request == r])]
            expected = reference(model, QWEN, ids[row_ids].tolist())
            off = np.linalg.norm(
                outputs["logits"][row_ids].astype(np.float32) - expected
            )
            assert off <= 0.02 * np.linalg.norm(expected)
        best = outputs["logits"].astype(np.float32).argmax(axis=1)
        np.testing.assert_array_equal(outputs["next_ids"][0], best)


def test_steps_of_a_launch_read_what_earlier_ones_stored(rng, kernels):
    """The second step loads a stage that the first one completes, before its own keys
    are there."""
    position = np.array([STAGE - 1, 5, STAGE + 7])
    arrays = draw_model(rng, QWEN, 2) | rows_of([1, 2, 3], [0, 1, 4], position)
    arrays |= {"end": (position + 3).astype(np.int32)}
    arrays["cache"] = draw(rng, arrays["cache"].shape, QWEN.dtype)
    dims = dims_of(arrays, QWEN, 1, steps=3)
    [expected] = simulate(SCHEDULES["static"](decoder()), [arrays], dims).outputs
    [outputs] = Emulator(decoder(), workers=4, kernels=kernels).run([arrays], dims)
    np.testing.assert_array_equal(outputs["next_ids"], expected["next_ids"])
    caches = (a["cache"].astype(np.float32) for a in (outputs, expected))
    np.testing.assert_allclose(*caches, 0, 0.1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("ids", VOCABULARY), ("ids", -1), ("request", REQUESTS)),
        *(("position", MOST_PAGES * 16), ("end", 2**31 - 1), ("table", PAGES)),
    ],
)
def test_a_row_out_of_range_changes_no_other(name, value, rng):
    """Steps do not check rows: models do, on the host."""
    graph = decoder_graph(1, sizes=QWEN, shapes=SHAPES, best_columns=64)
    model = draw_model(rng, QWEN, 1)
    expected, results = (
        simulate(SCHEDULES["static"](graph), [arrays], dims_of(arrays, QWEN, 1)).outputs
        for arrays in (
            model | rows_of([0, 7], [-1, 1], [-1, 0]),
            out_of_range(model | rows_of([0, 7], [0, 1], [0, 0]), name, value),
        )
    )
    assert results[0]["next_ids"][0, 1] == expected[0]["next_ids"][0, 1]
    np.testing.assert_array_equal(results[0]["logits"][1], expected[0]["logits"][1])


def out_of_range(arrays: dict[str, Array], name: str, value: int) -> dict[str, Array]:
    array = arrays[name].copy()
    array[0] = value
    return arrays | {name: array}


LARGE = DecoderSizes(64, 8, 128, 1e-6, normalizes_heads=True)
"""Of Qwen3-32B."""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("sizes", "schedule"), [(LARGE, "static"), (LARGE, "dynamic"), (LLAMA, "static")]
)
def test_a_program_of_all_tiles_is_small_without_spills(sizes, schedule):
    cubin = check_compiled(decoder_for(schedule, 1, sizes), schedule).cubin
    check_wgmmas(cubin)
    assert len(cubin) <= 10**6
