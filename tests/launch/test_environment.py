"""launch/environment.sh: what it installs into .venv, and what it keeps."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from launch import get_pip

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
FOLDERS = ("benchmarks", "etc_dist", "examples", "launch", "tests")
FOR_GPUS = {"cuda", "cupy", "cupy_backends", "cupyx"}
FOR_TORCH = {"safetensors", "torch", "transformers", "vllm"}
"""Modules of tests that `launch/test` leaves out here."""

# Stands for every Python: makes a .venv with itself inside, and notes what pip does.
PYTHON = """#!/bin/sh
case "$*" in
    "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    *"-m pip"*) echo "$*" >>pip.log && rm -f copy ;;
    *find_spec*) [ ! -e copy ] ;;
    *hashlib*) echo hash ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """A folder in which `prepare` can run without a network."""
    (tmp_path / "launch").mkdir()
    shutil.copy(LAUNCH / "environment.sh", tmp_path / "launch")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text(PYTHON)
    (tmp_path / "bin" / "python3").chmod(0o755)
    return tmp_path


def prepare(checkout: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{checkout}/bin:{os.environ['PATH']}"}
    environment.pop("LAUNCH_PYTHON", None)
    return subprocess.run(
        ["sh", "-euc", ". launch/environment.sh; prepare test"],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
    )


def installs(checkout: Path) -> int:
    return len((checkout / "pip.log").read_text().splitlines())


def test_what_is_installed_already_is_not_installed_again(checkout):
    for _ in range(2):
        assert prepare(checkout).returncode == 0
        assert installs(checkout) == 1
    assert "--editable .[test]" in (checkout / "pip.log").read_text()


def test_copy_of_the_package_is_replaced_by_the_checkout(checkout):
    prepare(checkout)
    (checkout / "copy").touch()  # pip install .
    prepare(checkout)
    assert installs(checkout) == 2


def test_broken_environment_of_its_own_is_made_anew(checkout):
    prepare(checkout)
    (checkout / ".venv" / "bin" / "python").unlink()
    process = prepare(checkout)
    assert process.returncode == 0
    assert "making .venv with" in process.stderr
    assert installs(checkout) == 2


def test_broken_environment_of_the_user_is_refused_and_kept(checkout):
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "kept").touch()
    process = prepare(checkout)
    assert process.returncode == 1
    assert "was not made by this script" in process.stderr
    assert f"remove or rename {checkout}/.venv" in process.stderr
    assert (checkout / ".venv" / "kept").exists()


def test_pip_with_another_hash_is_not_installed(tmp_path):
    (tmp_path / "pip.whl").write_bytes(b"something else")
    with pytest.raises(SystemExit, match="is not installed: its SHA-256 is"):
        get_pip.main((tmp_path / "pip.whl").as_uri())


def extra(name: str) -> set[str]:
    """The packages of an extra of pyproject.toml, and of the extras that it names."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*extras["dependencies"], *extras["optional-dependencies"][name]]
    packages = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in lines}
    matches = [re.match(r"etc-dist\[(.*)\]", line) for line in lines]
    inner = [part for match in matches if match for part in match[1].split(",")]
    return packages.union(*map(extra, inner))


def modules_of_others() -> set[str]:
    """The modules that the checkout imports, without its own and Python's."""
    pattern = re.compile(
        r"^ *import (\w+)|^ *from (\w+)[\w.]* import|extra_module\(\"(\w+)",
        re.MULTILINE,
    )
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    texts = [path.read_text() for path in paths]
    modules = {max(groups) for text in texts for groups in pattern.findall(text)}
    own_names = {*FOLDERS, *(path.stem for path in LAUNCH.glob("*.py"))}
    return modules - sys.stdlib_module_names - own_names


def test_extra_test_has_all_packages_of_the_tests():
    modules = modules_of_others()
    assert {"numpy", "tokenizers", "pytest"} <= modules
    assert modules - extra("test") - FOR_GPUS - FOR_TORCH == set()


def test_no_test_is_skipped_for_a_package_that_is_not_installed():
    skip = "importor" + "skip"
    tests = (ROOT / "tests").rglob("*.py")
    assert [path.name for path in tests if skip in path.read_text()] == []
