"""Mutations of the kernels: the emulator detects each missing wait, barrier or fence,
and each changed computation."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from etc_dist.errors import EtcDistError
from etc_dist.functions.append_kv import PagedCache
from etc_dist.functions.router import Router
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.models.sampling import Sampling
from etc_dist.ops.all_reduce import all_reduce_graph
from etc_dist.ops.all_reduce_norm import all_reduce_norm_graph
from etc_dist.ops.exchange_model import FLAGGED, TWO_SHOT
from etc_dist.runtime.build import kernels_folder
from etc_dist.runtime.cpu import simulate
from tests.emulate.aborted import check_skipped, sent_in_vain
from tests.emulate.cases import check
from tests.emulate.matrix import CASES, Case
from tests.emulate.mutations import BROKEN, MUTATIONS
from tests.functions.test_attend import OF_GEMMA
from tests.functions.test_attend import check as check_step
from tests.functions.test_best_column import rows_of
from tests.functions.test_down_token import BLOCKS, rows_of_octaves, scaled_graph
from tests.functions.test_heads_norm import COLUMNS
from tests.functions.test_heads_norm import norms as heads_norms
from tests.functions.test_mark_experts import MARKED
from tests.functions.test_post_norm import norms as post_norms
from tests.functions.test_rms_norm import norms
from tests.functions.test_route_rows import FEW, check_routes, routed, routed_rows
from tests.functions.test_router import DEEPSEEK, check_choices, chosen, drawn
from tests.functions.test_sample_column import GRAPH, sampled_given
from tests.graphs.early import early
from tests.graphs.early import inputs as early_inputs
from tests.graphs.paged import EPS, attention, dims_of, draw_step
from tests.graphs.tokens import next_tokens
from tests.layers.reference import draw

PAGED = PagedCache(64, 16, norm_eps=EPS)
OF_PROMPTS = replace(PAGED, head_dim=128, has_span=True)
SINKS = PagedCache(64, 16, has_sinks=True)


def some_routes() -> Any:
    return routed_rows(np.random.default_rng(1), FEW, 9, 16, 0, 0)


def check_some_routes(program: Emulator, arrays: Any, dims: dict[str, int]) -> None:
    [outputs] = program.run([arrays], dims)
    check_routes(outputs, FEW, arrays, dims)


def some_samples() -> Any:
    x = np.random.default_rng(2).standard_normal((4, 600))
    x[2, 17] = np.nan
    return sampled_given(x, [Sampling(1.0, 5, 0.9, seed=n) for n in range(4)])


def spoiled_rows() -> Any:
    """Twenty rows, one of which has a NaN among numbers."""
    x = np.random.default_rng(3).standard_normal((20, 600)).astype(np.float32)
    x[13, 400] = np.nan
    rows = rows_of(20) | {"x": x}
    return rows, {"rows": 20, "columns": 600, "count": 600, "stops": 40}


def some_choices() -> Any:
    ids = np.random.default_rng(4).integers(-1, 24, (128, 4)).astype(np.int32)
    return {"ids": ids}, {"tokens": 128}


CHOSEN = {
    "groups": (256, DEEPSEEK),
    "many experts": (512, Router(6, False, has_correction=True)),
}


def some_logits(experts: int, router: Router) -> Any:
    arrays = drawn(np.random.default_rng(5), experts, router)
    return arrays, {"tokens": len(arrays["logits"])}


def check_some_choices(
    experts: int, router: Router, program: Emulator, arrays: Any, dims: dict[str, int]
) -> None:
    [outputs] = program.run([arrays], dims)
    check_choices(outputs, experts, router, arrays)


def divided_rows() -> Any:
    """Rows that shares of both lists divide; more stages than a worker's ring holds."""
    rng, rows = np.random.default_rng(7), [[1900], [15, 16], [130], [511], [63]]
    arrays = draw_step(rng, PAGED, 3, 1, rows)
    return arrays, dims_of(arrays, 8, 2)


def some_prompts() -> Any:
    """Prompts, of which a request continues at the position after that of another one,
    with rows of shares in the same step."""
    rows = [[300], [40], range(200, 270), range(270, 300)]
    arrays = draw_step(np.random.default_rng(7), OF_PROMPTS, 3, 1, rows, in_order=True)
    return arrays, dims_of(arrays, 2, blocks=4)


def check_prompts(program: Emulator, arrays: Any, dims: dict[str, int]) -> None:
    [outputs] = program.run([arrays], dims)
    check_step(outputs, arrays, OF_PROMPTS, 3)


def many_shares() -> Any:
    """More shares of a row than it has stages."""
    arrays = draw_step(np.random.default_rng(7), PAGED, 3, 1, [[380]])
    return arrays, dims_of(arrays, 16, 2)


def some_sinks() -> Any:
    """A row that shares divide, and others."""
    arrays = draw_step(np.random.default_rng(7), SINKS, 3, 1, [[1900], [15, 16], [63]])
    arrays["sinks"][...] = 7
    return arrays, dims_of(arrays, 8, 2)


def check_sinks(program: Emulator, arrays: Any, dims: dict[str, int]) -> None:
    [outputs] = program.run([arrays], dims)
    check_step(outputs, arrays, SINKS, 3)


def check_rows(program: Emulator, arrays: Any, dims: dict[str, int]) -> None:
    [outputs] = program.run([arrays], dims)
    check_step(outputs, arrays, PAGED, 3)


def check_equal(program: Emulator, arrays: Any, dims: dict[str, int]) -> None:
    """The CUDA bodies give what the NumPy bodies give."""
    [expected] = simulate(program.plan, [arrays], dims).outputs
    [outputs] = program.run([arrays], dims)
    for name, array in expected.items():
        np.testing.assert_array_equal(outputs[name], array)


def early_rows() -> Any:
    return early_inputs(9, 0), {"n": 9}


def reduced() -> Any:
    """x of three ranks, in pieces of three vectors of a thread, by two exchanges."""
    xs = np.random.default_rng(5).standard_normal((3, 8 * 1900))
    inputs = [{"x": x.astype(np.float16)} for x in xs]
    return inputs, {"rows": 1, "vectors": 1900, "algorithm": TWO_SHOT, "piece": 600}


def check_ranks(program: Emulator, inputs: Any, dims: dict[str, int]) -> None:
    """As `check_equal`, on several ranks."""
    expected = simulate(program.plan, inputs, dims).outputs
    for outputs, y in zip(program.run(inputs, dims), expected, strict=True):
        np.testing.assert_array_equal(outputs["y"], y["y"])


def flagged() -> Any:
    """x of three ranks, in pieces of two vectors of a thread."""
    xs = np.random.default_rng(5).standard_normal((3, 8 * 1100))
    inputs = [{"x": x.astype(np.float16)} for x in xs]
    dims = {"rows": 1, "vectors": 1100, "algorithm": FLAGGED, "piece": 275}
    return inputs, {**dims, "flag_tasks": 4}


def check_flagged(program: Emulator, inputs: Any, dims: dict[str, int]) -> None:
    """As `check_ranks`, with other values in each call: the words of the last one are
    old. The second run of a call does not wait until all ranks have ended the first."""
    all_outputs = simulate(program.plan, inputs, dims).outputs
    expected = [outputs["y"] for outputs in all_outputs]
    for seed in range(6):
        for outputs, y in zip(
            program.run(inputs, dims, seed=seed, runs=2), expected, strict=True
        ):
            np.testing.assert_array_equal(outputs["y"], y)
        inputs = [{"x": np.negative(arrays["x"])} for arrays in inputs]
        expected = [np.negative(y) for y in expected]


def flagged_norm() -> Any:
    """Two rows on two ranks."""
    rng, shape = np.random.default_rng(6), (2, 2400)
    residual, gain = rng.standard_normal(shape), rng.standard_normal(shape[1])
    inputs = [
        {"x": rng.standard_normal(shape), "residual": residual, "gain": gain}
        for _ in range(2)
    ]
    dims = {"rows": 2, "vectors": 300, "algorithm": FLAGGED, "piece": 1}
    element = numpy_dtype("bfloat16")
    cast = [{name: a.astype(element) for name, a in of.items()} for of in inputs]
    return cast, {**dims, "flag_tasks": 4}


def check_sums(program: Emulator, inputs: Any, dims: dict[str, int]) -> None:
    """The new residuals, twice: at the second time words have earlier epochs."""
    expected = simulate(program.plan, inputs, dims).outputs
    for seed in range(2):
        for outputs, cpu_outputs in zip(
            program.run(inputs, dims, seed=seed), expected, strict=True
        ):
            name = "residual_out"
            np.testing.assert_array_equal(outputs[name], cpu_outputs[name])


def check_norms(program: Emulator, inputs: Any, dims: dict[str, int]) -> None:
    """The CUDA bodies give about what the NumPy bodies give."""
    expected = simulate(program.plan, inputs, dims).outputs
    for outputs, cpu_outputs in zip(program.run(inputs, dims), expected, strict=True):
        for name, array in cpu_outputs.items():
            actual, cpu_values = (a.astype(np.float32) for a in (outputs[name], array))
            np.testing.assert_allclose(actual, cpu_values, 2**-6, 2**-6)


def drawn_arrays(
    ranks: int, shapes: dict[str, tuple[int, ...]], dims: dict[str, int]
) -> Any:
    rng = np.random.default_rng(6)
    return [
        {name: draw(rng, shape, "bfloat16") for name, shape in shapes.items()}
        for _ in range(ranks)
    ], dims


def some_attention() -> Any:
    rng = np.random.default_rng(7)
    arrays = draw_step(rng, OF_GEMMA, 2, 2, [[0], [40, 41], [63, 307]])
    return arrays, dims_of(arrays, 4, 2)


def check_attention(program: Emulator, arrays: Any, dims: dict[str, int]) -> None:
    [outputs] = program.run([arrays], dims)
    check_step(outputs, arrays, OF_GEMMA, 2)


def some_norms() -> Any:
    of_rows = (2, 264)
    shapes = {name: of_rows for name in ("x", "total", "gain", "bias")}
    [arrays], dims = drawn_arrays(1, shapes, {"rows": 2, "columns": 264})
    return [arrays | {"ids": np.array([1, -1], np.int32)}], dims


POST_NORM = partial(
    post_norms, 1, dtype="bfloat16", has_bias=False, normalizes_sum=True, offset=1
)
POST_NORM_SHAPES = {"parts": (1, 2, 264), "gains": (3, 264), "total": (2, 264)}
HEADS = sum(COLUMNS)
HEADS_SHAPES = {"qk": (2, HEADS), "gains": (HEADS,)}
MUTATED = {
    **CASES,
    "flagged norm": Case(
        partial(all_reduce_norm_graph, 2, has_flags=True), flagged_norm
    ),
    "flagged": Case(
        partial(all_reduce_graph, 3, dtype="float16", has_flags=True),
        flagged,
        workers=2,
    ),
    "early": Case(partial(early, 1, loops=True), early_rows),
    "reduced": Case(partial(all_reduce_graph, 3, dtype="float16"), reduced),
    "queue": replace(CASES["moe"], schedule="dynamic"),
    "queue, conditions": replace(CASES["conditions"], schedule="dynamic"),
    "aborted": Case(partial(sent_in_vain, 2, num_wanted=2), tuple),
    "norms": Case(partial(norms, "bfloat16"), some_norms),
    "routes": Case(partial(routed, 1, routing=FEW), some_routes),
    "samples": Case(lambda: GRAPH, some_samples),
    "marked": Case(lambda: MARKED, some_choices),
    **{
        name: Case(partial(chosen, *options), partial(some_logits, *options))
        for name, options in CHOSEN.items()
    },
    "attention": Case(partial(attention, 1, paged=OF_GEMMA, group=2), some_attention),
    "post norm": Case(
        POST_NORM,
        partial(drawn_arrays, 1, POST_NORM_SHAPES, {"rows": 2, "columns": 264}),
    ),
    "heads norm": Case(
        partial(heads_norms, 2, dtype="bfloat16"),
        partial(drawn_arrays, 2, HEADS_SHAPES, {"rows": 2}),
    ),
    "shares": Case(partial(attention, 1, paged=PAGED, group=3), divided_rows),
    "sinks": Case(partial(attention, 1, paged=SINKS, group=3), some_sinks),
    "prompts": Case(partial(attention, 1, paged=OF_PROMPTS, group=3), some_prompts),
    "many shares": Case(partial(attention, 1, paged=PAGED, group=3), many_shares),
    "octaves": Case(partial(scaled_graph, BLOCKS, "bfloat16", 1, 1), rows_of_octaves),
    "spoiled": Case(partial(next_tokens, 1, dtype="float32"), spoiled_rows),
}
CHECKS = {
    "aborted": check_skipped,
    "norms": check_norms,
    "routes": check_some_routes,
    "samples": check_equal,
    "marked": check_equal,
    **{name: partial(check_some_choices, *options) for name, options in CHOSEN.items()},
    "shares": check_rows,
    "prompts": check_prompts,
    "many shares": check_rows,
    "sinks": check_sinks,
    "octaves": check_equal,
    "spoiled": check_equal,
    "attention": check_attention,
    "post norm": check_norms,
    "heads norm": check_norms,
    "early": check_equal,
    "reduced": check_ranks,
    "flagged": check_flagged,
    "flagged norm": check_sums,
}
HANDS_OVER = re.compile(
    r"\b(task\.sync|__syncwarp|named_barrier\w*|"
    r"mbarrier_(try_wait|arrive)\w*|store\d*_async\w*|"
    r"wait_(mbarrier|event|some|peer|stores)\w*|fence_\w+|fetch_add_ac\w+|"
    r"load_acquire|store_release|wgmma_wait|notify_event)[<(]"
)
"""Functions that order accesses of one thread before those of another."""


def code_of(header: Path) -> str:
    """Without comments."""
    return re.sub(r"//.*", "", header.read_text())


def test_each_header_that_hands_over_is_broken():
    folder = kernels_folder()
    headers = [p for p in folder.rglob("*.cuh") if HANDS_OVER.search(code_of(p))]
    names = {p.relative_to(folder).with_suffix("").as_posix() for p in headers}
    # The emulator has its own of these.
    ours = {name for name in names if not name.startswith(("ptx/", "far/"))}
    assert ours <= set(BROKEN)


def _numbered() -> list[Any]:
    """The mutations; all but the first of each header are exhaustive."""
    cases, first_files = [], set[str]()
    for mutation_number, (case, file, *_) in enumerate(MUTATIONS, 1):
        marks = [pytest.mark.exhaustive] if file in first_files else []
        cases.append(pytest.param(mutation_number, id=f"{case}-{file}", marks=marks))
        first_files.add(file)
    return cases


def program_of(name: str, kernels: Path) -> Emulator:
    case = MUTATED[name]
    options = {"schedule": case.schedule, "workers": case.workers}
    return Emulator(case.graph(), kernels=kernels, **options)


def run(name: str, program: Emulator, number: int) -> None:
    """Check a case with one mutation, or with none for 0."""
    mutation = ctypes.c_int.in_dll(program.library, "mutation")
    mutation.value = number
    try:
        CHECKS.get(name, check)(program, *MUTATED[name].make_example())
    finally:
        mutation.value = 0  # for other tests of this library


@pytest.mark.parametrize("name", sorted(CHECKS.keys() - {"aborted"}))
def test_what_is_not_broken_gives_the_reference(name, kernels):
    run(name, program_of(name, kernels), 0)


# Sums of uninitialised memory may have any value.
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize("number", _numbered())
def test_what_is_broken_shows(kernels, number):
    name = MUTATIONS[number - 1][0]
    program = program_of(name, kernels)
    with pytest.raises((AssertionError, EtcDistError)):
        run(name, program, number)
