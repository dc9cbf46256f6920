"""Bundles of models: built from a configuration, and loaded without a compiler."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import etc_dist
from etc_dist import cli
from etc_dist.errors import ArgumentError
from etc_dist.models import load
from etc_dist.models.config import read_config
from etc_dist.models.model_bundle import bundle_model
from etc_dist.models.setup import ModelSetup
from etc_dist.ops.tuning import default_tuning
from tests.models.small import make_model
from tests.models.test_model import EXPERTS, expect_best

pytestmark = pytest.mark.mpi(ranks=[1])
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
SPLIT = {"num_attention_heads": 12, "intermediate_size": 192, "vocab_size": 571}
"""That 2 ranks can split, with padding of the vocabulary."""
OPTIONS: dict[str, Any] = {"batch": 3, "positions": 64, "page_size": 16, "pages": 10}


@pytest.fixture
def folder(tmp_path, rng):
    return new_model(tmp_path, rng)


def new_model(tmp_path, rng, **changes):
    (tmp_path / "model").mkdir()
    return make_model(tmp_path / "model", rng, **changes)


@pytest.fixture
def uncompiled(world, monkeypatch):
    """Without GPUs, nothing is compiled: the CPU backend runs no program."""
    if world.backend == "cpu":
        compiled = b"\x7fELF", ""
        monkeypatch.setattr("etc_dist.runtime.build.compile_cubin", lambda *_: compiled)


@pytest.fixture
def bundle(folder, one_rank, uncompiled):
    return new_bundle(folder, one_rank)


def new_bundle(folder, world):
    """Of the configuration alone, for as many workers as programs here have."""
    config, bundle_folder = folder.with_name("config"), folder.with_name("bundle")
    config.mkdir()
    shutil.copy(folder / "config.json", config)
    workers, options = world.settings.cpu_workers, {**OPTIONS, "ranks": world.size}
    if world.backend == "cuda":
        graph = ModelSetup(read_config(folder), **options).graph()
        workers = etc_dist.compile(graph, world).workers
    for rank in range(world.size):
        if rank == world.rank:  # the later ones find its proofs in the cache
            bundle_model(config, bundle_folder, workers=workers, **options)
        world.barrier()
    return bundle_folder


def forbidden(*_: Any) -> Any:
    raise AssertionError("compiled, proved, or captured")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.mpi(ranks=[2]), id="dense"),
        pytest.param(EXPERTS, marks=pytest.mark.mpi(ranks=[1]), id="experts"),
    ],
)
def test_a_model_with_a_bundle_compiles_proves_and_captures_nothing(
    changes, tmp_path, world, uncompiled, rng, monkeypatch
):
    if changes and world.size > 1:
        pytest.skip("experts are on one rank")
    folder = new_model(tmp_path, rng, **SPLIT, **changes)
    bundle, workers = new_bundle(folder, world), world.settings.cpu_workers
    monkeypatch.setattr("etc_dist.verify.proof.verify", forbidden)
    monkeypatch.setattr("etc_dist.verify.proof.Cache.load", forbidden)
    monkeypatch.setattr("etc_dist.runtime.build.compiler_version", forbidden)
    if world.backend == "cuda":
        monkeypatch.setattr("cupy.cuda.Stream.begin_capture", forbidden)
    # The CPU backend takes the tiles of a GPU: otherwise its steps have other dims.
    policy = ModelSetup.policy
    of_gpu = lambda setup, texts: policy(setup, texts or workers)  # noqa: E731
    monkeypatch.setattr(ModelSetup, "policy", of_gpu)
    prompts = [rng.integers(571, size=n).tolist() for n in (1, 18, 7)]
    with load(folder, bundle=bundle, world=world) as model:
        assert (model.batch, model.positions, model.pages.page_size) == (3, 64, 16)
        texts = model.generate(prompts, max_new_tokens=4)
        assert model.pages.count == 10
        assert len(model.generate([prompts[1]], max_new_tokens=12)[0]) == 12
    if not changes:
        for prompt, new in zip(prompts, texts, strict=True):
            expect_best(folder, prompt, new)


def test_a_model_has_the_tiles_for_which_its_bundle_has_proofs(
    folder, one_rank, uncompiled, tmp_path, monkeypatch
):
    tuning = replace(default_tuning(), device="NVIDIA GB99")
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps(tuning.document()))
    monkeypatch.setenv("ETC_DIST_TUNING", str(path))
    bundle_folder = new_bundle(folder, one_rank)
    monkeypatch.delenv("ETC_DIST_TUNING")
    with load(folder, bundle=bundle_folder, world=one_rank) as model:
        assert model._policy.tuning == tuning
    with load(folder, **OPTIONS, world=one_rank) as model:
        assert model._policy.tuning == default_tuning()


def test_other_options_are_named(folder, bundle, one_rank):
    (folder / "model.safetensors").unlink()  # the bundle is checked first
    with pytest.raises(ArgumentError) as caught:
        load(folder, bundle=bundle, batch=4, schedule="dynamic", world=one_rank)
    assert caught.value.what == "a bundle was built for something else"
    assert caught.value.wanted == "batch=4, schedule='dynamic'"
    assert caught.value.got == "batch=3, schedule='static'"


def test_another_model_is_named(tmp_path, bundle, rng, one_rank):
    (tmp_path / "other").mkdir()
    deeper = make_model(tmp_path / "other", rng, num_hidden_layers=3)
    with pytest.raises(ArgumentError, match="wanted: layers=3\n  got:    layers=2\n"):
        load(deeper, bundle=bundle, world=one_rank)


def test_a_damaged_bundle_is_refused(folder, bundle, one_rank):
    (bundle / "proofs.json").write_text("{}")
    with pytest.raises(ArgumentError, match="proofs.json"):
        load(folder, bundle=bundle, world=one_rank)


def test_the_command_of_the_documentation_builds_bundles(
    folder, tmp_path, uncompiled, one_rank, capsys
):
    bundle_folder = tmp_path / "made"
    [line] = re.findall(r"etc-dist (build FOLDER --bundle .*)", PAGE.read_text())
    places = {"FOLDER": str(folder), "BUNDLE": str(bundle_folder)}
    assert "`--steps-per-launch 8 --pages 4096`" in PAGE.read_text()
    options = ["--positions", "64", "--schedule", "dynamic", "--workers", "4"]
    options += ["--steps-per-launch", "2", "--pages", "9"]
    command = [places.get(word, word) for word in line.split()]
    assert cli.main([*command, *options]) == 0
    assert "/made: 1 program in" in capsys.readouterr().out
    parameters = json.loads((bundle_folder / "manifest.json").read_text())["parameters"]
    expected = {"batch": 32, "schedule": "dynamic", "steps_per_launch": 2, "pages": 9}
    assert parameters.items() >= expected.items()
    assert "\nwith load(FOLDER, bundle=BUNDLE) as model:\n" in PAGE.read_text()
    if one_rank.backend == "cpu":  # a GPU has more workers
        with load(folder, bundle=bundle_folder, world=one_rank) as model:
            assert (model.batch, model.steps_per_launch) == (32, 2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "a bundle is of one model"),
        (["one", "two"], "a bundle is of one model"),
        (["/nowhere"], "the folder of a Hugging Face model"),
        (["FOLDER", "--page-size", "24"], "unknown page_size"),
        (["FOLDER", "--batch", "0"], "batch is out of range"),
        (["FOLDER", "--workers", "0"], "workers is out of range"),
        (["FOLDER", "--pages", "0"], "pages is out of range"),
        (["FOLDER", "--pages", str(10**12)], "pages is out of range"),
        (["FOLDER", "--pages", str(10**8)], "does not fit in the memory"),
        (["FOLDER", "--steps-per-launch", "0"], "steps_per_launch is out of range"),
        (["FOLDER", "--ranks", "3"], "cannot be split"),
        (["FOLDER", "--schedule", "best"], "unknown schedule"),
        (["FOLDER", "--dtype", "float32"], "'bfloat16' or 'float16'"),
    ],
)
def test_options_of_the_command_are_checked(options, text, folder, tmp_path, capsys):
    arguments = [str(folder) if option == "FOLDER" else option for option in options]
    assert cli.main(["build", *arguments, "--bundle", str(tmp_path / "made")]) == 1
    assert text in capsys.readouterr().err
    assert not (tmp_path / "made").exists()
