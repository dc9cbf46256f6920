"""Bundles: programs and proofs that another process has made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import etc_dist
from etc_dist.runtime.build import ARCH
from etc_dist.runtime.bundle import read_bundle, write_bundle
from etc_dist.settings import Settings
from examples.add_row_sum import add_row_sum
from tests.ops.arrays import Arrays
from tests.runtime.bundles import DIMS, make_bundle

ROOT = Path(__file__).parents[2]
USER = """
import sys
sys.modules["cuda"] = None  # NVRTC cannot be loaded
from etc_dist.codegen import generate
from etc_dist.runtime.build import build
from etc_dist.runtime.bundle import read_bundle
from etc_dist.verify import proof
from tests.runtime.bundles import *

proof.verify = None
bundle = read_bundle(Path(sys.argv[1]))
settings = Settings(cache=Path(sys.argv[2]))
cubin = build(generate(plan()), settings, bundle=bundle)
verified = proof.prove(plan(), DIMS, 4, settings, bundle.proofs)
print(verified.graph, cubin.code[:4], "nvrtc" in open("/proc/self/maps").read())
"""


def test_a_process_with_a_bundle_compiles_and_proves_nothing(tmp_path):
    bundle = make_bundle(tmp_path / "bundle", Settings(cache=tmp_path / "cache"))
    command = [sys.executable, "-c", USER, bundle.folder, tmp_path / "unused"]
    user = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (user.stdout, user.stderr) == ("add_row_sum b'\\x7fELF' False\n", "")
    assert not (tmp_path / "unused").exists()


def test_a_bundle_is_read_as_it_was_written(tmp_path):
    bundle = make_bundle(tmp_path / "bundle", Settings(cache=tmp_path / "cache"))
    write_bundle(bundle)  # in place of itself
    copy = read_bundle(bundle.folder)
    [(key, program)] = copy.programs.items()
    assert program.files == bundle.programs[key].files
    copy.expect(ARCH, {"layers": 2, "factors": (1, 2)})
    names = sorted(path.name for path in bundle.folder.iterdir())
    assert names == [f"{key}.cubin", "manifest.json", "proofs.json"]


def forbidden(*_: Any) -> Any:
    raise AssertionError("compiled, or proved")


@pytest.mark.mpi(ranks=[1])
def test_a_program_of_a_bundle_runs(tmp_path, one_rank, monkeypatch):
    graph, workers = add_row_sum(1), one_rank.settings.cpu_workers
    if one_rank.backend == "cuda":
        workers = etc_dist.compile(graph, one_rank).workers
    bundle = make_bundle(tmp_path / "bundle", one_rank.settings, workers)
    monkeypatch.setattr("etc_dist.verify.proof.verify", forbidden)
    monkeypatch.setattr("etc_dist.runtime.build.compiler_version", forbidden)
    arrays = Arrays(one_rank.backend)
    a = arrays.put(np.ones((DIMS["rows"], DIMS["n"]), np.float32))
    with etc_dist.compile(graph, one_rank, bundle=bundle) as program:
        total = arrays.get(program.run(a=a, b=a)["total"])
    assert total.tolist() == DIMS["rows"] * [2.0 * DIMS["n"]]
