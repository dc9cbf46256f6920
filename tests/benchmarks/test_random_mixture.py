"""Mixtures that follow from the commit, and the choices of their routers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import harness, run
from benchmarks.device import DTYPES
from benchmarks.random_sizes import NAMED_MIXTURE, seed_of, summary
from benchmarks.records import read
from benchmarks.subjects import (
    layers_float8,
    matmul,
    random_mixture,
    random_sizes,
)
from benchmarks.subjects._moe_torch import Torch
from benchmarks.subjects.moe import Model
from benchmarks.subjects.random_mixture import (
    MOST_BYTES,
    ROUTERS,
    mixture_draws,
    near_ties,
)
from etc_dist.functions.router import Router
from etc_dist.ir import GraphFunction
from tests.benchmarks.conftest import record
from tests.benchmarks.test_gpu_records import StandIn


def test_mixtures_are_drawn_within_the_limits(seed: int) -> None:
    texts = [f"{seed % 2**16 + n:08x}" for n in range(30)]
    drawn = [draw for text in texts for draw in mixture_draws(text)]
    assert drawn[:12] == [*mixture_draws(texts[0])] and len(drawn) == 360
    for draw in drawn:
        draw.router.check(draw.experts, most=16)
        assert draw.n % 64 == draw.k % 64 == 0
        assert 512 <= draw.n <= 8192 and 128 <= draw.k <= 4096
        assert 1 <= draw.rows <= 16384 and draw.experts <= 512
        assert 6 * draw.n * draw.k * draw.experts <= MOST_BYTES
    assert {draw.kind for draw in drawn} == {*ROUTERS}
    assert {draw.routing for draw in drawn} == {"uniform", "zipf"}
    assert {draw.router.top_k for draw in drawn} == {*range(1, 17)}


GROUPS = Router(2, num_groups=2, topk_group=1, score="sigmoid")


@pytest.mark.parametrize(
    ("router", "row", "is_near"),
    [
        (Router(1), [0, 1, 1.0001, 3], False),
        (Router(2), [0, 1, 1.0001, 3], True),
        (Router(2), [0, 1, 1.1, 3], False),
        (Router(4), [0, 1, 1.0001, 3], False),
        (GROUPS, [1, 3, 2, 2.0001], True),  # the groups have equal sums
        (GROUPS, [1, 1.0001, 2, 3], False),  # no other expert of the best group
    ],
)
def test_a_choice_that_rounding_may_change_is_found(
    router: Router, row: list[float], is_near: bool
) -> None:
    assert near_ties(router, np.array([row])).tolist() == [is_near]


def test_drawn_mixtures_have_gates() -> None:
    draws = [record("random_mixture", speedup=n) for n in (1.05, 3.0)]
    rows = summary("random_mixture", draws)
    assert [(row["value"], row["met"]) for row in rows] == [
        ("1.775", "yes"),
        ("1.050", "no"),
    ]


class OnTorch(StandIn):
    """With torch on the CPU."""

    def __init__(self, world: Any):
        import torch

        super().__init__(world)
        self.torch = torch

    def as_torch(self, array: Any) -> Any:
        bits = array.view({2: np.int16, 4: np.int32}[array.itemsize])
        return self.torch.from_numpy(bits).view(getattr(self.torch, array.dtype.name))

    def from_torch(self, tensor: Any) -> Any:
        name = str(tensor.dtype).removeprefix("torch.")
        return tensor.view(self.torch.int16).numpy().view(DTYPES[name])


def logits_in_fp32(layer: Torch, x: Any) -> Any:
    """torch has no such product on the CPU."""
    return x.float() @ layer.router.float().t()


@pytest.mark.torch
@pytest.mark.parametrize("kind", ROUTERS)
def test_the_rival_chooses_as_the_router(kind: str, rng: Any) -> None:
    import torch

    template = ROUTERS[kind]
    router = Router(**{**vars(template), "top_k": 3})
    logits = rng.normal(size=(40, 32)).astype(np.float32)
    biases = [rng.normal(size=32).astype(np.float32)] * router.has_correction
    ids, weights = router.choose(logits, *biases)
    layer = object.__new__(Torch)
    layer._torch, layer._choice, layer._top_k = torch, router, 3
    layer._correction = [*map(torch.from_numpy, biases)]
    layer.logits = lambda x: x  # type: ignore[method-assign]
    its_weights, its_ids = layer.choose(torch.from_numpy(logits))
    assert its_ids.tolist() == ids.tolist()
    np.testing.assert_allclose(its_weights.numpy(), weights, rtol=1e-5)


@pytest.mark.torch
def test_drawn_mixtures_are_recorded_beside_the_rival(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    graphs: list[GraphFunction] = []
    monkeypatch.setenv("BENCH_COMMIT", "0123abc")
    monkeypatch.setattr(harness, "open_device", OnTorch)
    monkeypatch.setattr(Torch, "logits", logits_in_fp32)
    monkeypatch.setattr(random_mixture, "compile_at_once", graphs.extend)
    monkeypatch.setattr(random_mixture, "Ranges", lambda: random_mixture.SMALL)
    monkeypatch.setattr(matmul, "ROTATED_BYTES", 3e6)
    monkeypatch.setattr(random_sizes, "REPEATS", 2)
    plain: Callable[..., Any] = lambda gpu, call: call  # noqa: E731
    monkeypatch.setattr(random_mixture, "captured", plain)
    monkeypatch.setattr("benchmarks.workload.captured_ours", plain)
    path = tmp_path / "some.jsonl"
    command = f"random_mixture --seeds 1 --draws 2 --cpu --record {path}"
    assert run.main(command.split()) == 1
    _, *results, last = read(path)
    assert last.failed == [
        "geometric mean 2 1.000 1.500 no",
        "least 2 1.000 1.100 no",
    ]
    for draw_idx, r in enumerate(results):
        assert (r.seed, r.model) == (seed_of("0123abc", r.op, 1), f"draw {draw_idx}")
        assert 0 < r.error < 3.75e-3 and 0 < r.baseline_error < 12e-3
        assert r.speedup == 1 and r.limit_ms > 0 and r.router in ROUTERS
    names = [graph.name for graph in graphs]
    assert names == [r.path.split(",")[0] for r in results]


def test_float8_mixtures_are_recorded_beside_16_bit_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    graphs: list[GraphFunction] = []
    small = Model(128, 64, 4, 2)
    monkeypatch.setenv("BENCH_COMMIT", "0123abc")
    monkeypatch.setattr(harness, "open_device", StandIn)
    monkeypatch.setattr(layers_float8, "compile_at_once", graphs.extend)
    monkeypatch.setattr(layers_float8, "MODELS", {NAMED_MIXTURE: small})
    monkeypatch.setattr(layers_float8, "Ranges", lambda rows: random_mixture.SMALL)
    monkeypatch.setattr(matmul, "ROTATED_BYTES", 3e6)
    monkeypatch.setattr(random_sizes, "REPEATS", 2)
    plain: Callable[..., Any] = lambda gpu, call: call  # noqa: E731
    monkeypatch.setattr("benchmarks.workload.captured_ours", plain)
    path = tmp_path / "some.jsonl"
    command = f"mixture_float8 --seeds 1 --draws 2 --cpu --record {path}"
    assert run.main(command.split()) == 1
    _, of_model, of_draw, last = read(path)
    assert last.failed == [
        "Qwen3-30B-A3B, one token 1 1.000 1.350 no",
        "drawn, M 1 to 32: geometric mean 1 1.000 1.600 no",
    ]
    assert (of_model.model, of_model.M, of_draw.model) == (NAMED_MIXTURE, 1, "draw 0")
    for r in (of_model, of_draw):
        assert 0 < r.error < 3.75e-3 and 0 < r.baseline_error < 12e-3
        assert r.speedup == 1 and r.w_layout == layers_float8.SCALING.w_layout
    assert len(graphs) == 4
