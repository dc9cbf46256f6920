"""Importing the package starts nothing; see `etc_dist.world`."""

import subprocess
import sys

import pytest

HEAVY = ("cupy", "mpi4py.MPI", "cuda", "nvshmem", "matplotlib", "torch")


@pytest.mark.parametrize("module", ["etc_dist", "etc_dist.world", "etc_dist.cli"])
def test_import_starts_no_gpu_and_no_mpi(module):
    source = f"import sys, {module}; print(*sys.modules, sep='\\n')"
    loaded = _python(source).splitlines()
    assert [name for name in HEAVY if name in loaded] == []


def test_import_leaves_environment_and_threads_alone():
    source = """
import os, threading
before = dict(os.environ)
import etc_dist
print(before == dict(os.environ), threading.active_count())
"""
    assert _python(source).split() == ["True", "1"]


def test_every_public_name_can_be_had():
    source = """
import etc_dist
assert len(etc_dist.__all__) == len(set(etc_dist.__all__)), etc_dist.__all__
for name in etc_dist.__all__:
    getattr(etc_dist, name)
"""
    _python(source)


def _python(source: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", source], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
