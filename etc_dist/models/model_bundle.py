"""Bundles of models: the program and the proofs of all steps, made without weights."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from etc_dist.cache import Cache
from etc_dist.codegen import generate
from etc_dist.errors import expect_range
from etc_dist.models.loading import DEFAULTS, read_model
from etc_dist.models.setup import ModelSetup
from etc_dist.ops.tuning import find_tuning
from etc_dist.runtime.build import ARCH, compiler_version, for_bundle
from etc_dist.runtime.bundle import Bundle, write_bundle
from etc_dist.schedule import SCHEDULES
from etc_dist.settings import MAX_WORKERS, Settings
from etc_dist.verify.proof import proof_record

WORKERS = 132
"""Of an H100 (SXM) and of an H200: one for each SM."""


def bundle_model(
    path: str | Path,
    folder: Path,
    *,
    workers: int = WORKERS,
    arch: str = ARCH,
    **options: Any,
) -> str:
    """Write the bundle of the model in `path`, whose weights are not read; returns a
    summary. options: of `load`, and the number of ranks."""
    dtype = options.get("dtype", DEFAULTS["dtype"])
    config, _ = read_model(path, dtype)
    settings = Settings.load()
    tuning = find_tuning(settings.tuning, Cache(settings.cache), "")
    setup = ModelSetup(config, **{**DEFAULTS, **options}, tuning=tuning)
    setup.check()
    expect_range(workers, 1, MAX_WORKERS, "workers")
    return build_bundle(setup, folder, workers, arch)


def build_bundle(setup: ModelSetup, folder: Path, workers: int, arch: str) -> str:
    """Builds the program of `setup` for `workers` workers, proves its shapes,
    and writes both to `folder`. Returns a line on what was made."""
    settings, start = Settings.load(), time.perf_counter()
    graph = setup.graph()
    plan = SCHEDULES[setup.schedule](graph)
    programs = dict([for_bundle(generate(plan), settings, arch)])
    compiled = time.perf_counter()
    every = setup.dims(graph, workers)
    proofs = dict(proof_record(plan, dims, workers, settings) for dims in every)
    proved = time.perf_counter()
    compiler, parameters = compiler_version(), setup.parameters()
    write_bundle(Bundle(folder, arch, compiler, workers, parameters, programs, proofs))
    size = sum(path.stat().st_size for path in folder.iterdir())
    return (
        f"{folder}: 1 program in {compiled - start:.1f} s, {len(proofs)} proofs in "
        f"{proved - compiled:.1f} s, {size / 1e6:.1f} MB"
    )
