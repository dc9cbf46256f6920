"""launch/environment.sh: what it installs into .venv, and what it keeps."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from launch import get_pip

LAUNCH = Path(__file__).parents[2] / "launch"

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
    done = prepare(checkout)
    assert done.returncode == 0
    assert "making .venv with" in done.stderr
    assert installs(checkout) == 2


def test_broken_environment_of_the_user_is_refused_and_kept(checkout):
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "kept").touch()
    done = prepare(checkout)
    assert done.returncode == 1
    assert "was not made by this script" in done.stderr
    assert f"remove or rename {checkout}/.venv" in done.stderr
    assert (checkout / ".venv" / "kept").exists()


def test_pip_with_another_hash_is_not_installed(tmp_path):
    (tmp_path / "pip.whl").write_bytes(b"something else")
    with pytest.raises(SystemExit, match="is not installed: its SHA-256 is"):
        get_pip.main((tmp_path / "pip.whl").as_uri())
