"""Every listing of docs/tutorial.md runs, and prints what the page shows."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text()
FILES = re.findall(r"^```(?:python|cuda)\n(?:#|//) (\S+)\n(.*?)^```", PAGE, re.M | re.S)
COMMANDS = re.findall(r"^```sh\n(.*?)^```\n\n```text\n(.*?)^```", PAGE, re.M | re.S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tutorial")
    (folder / "examples").symlink_to(ROOT / "examples")
    for name, text in FILES:
        (folder / name).write_text(text)
    return folder


def run(command, folder):
    program, *arguments = shlex.split(command)
    places = {".venv/bin/python": [], "launch/mpirun": [ROOT / "launch" / "mpirun"]}
    return subprocess.run(
        [sys.executable, *places[program], *arguments],
        cwd=folder,
        env=os.environ
        | {"ETC_DIST_BACKEND": "cpu", "PYTHONPATH": str(ROOT)}
        | {"PYTHONWARNINGS": "error::UserWarning"},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.parametrize(("command", "output"), COMMANDS, ids=lambda text: text.strip())
def test_listing_prints_what_the_page_shows(command, output, folder):
    process = run(command, folder)
    assert sorted(process.stdout.splitlines()) == output.splitlines(), process.stderr


def test_missing_wait_is_the_error_of_the_page(folder):
    text = (folder / "normalise.py").read_text()
    line = "        waits=[ready[i]],\n"
    assert line in text
    (folder / "faulty.py").write_text(text.replace(line, ""))
    errors = run(".venv/bin/python faulty.py", folder).stderr
    (quoted,) = re.findall(r"^    - (absmax.*)$", PAGE, re.M)
    assert "graph normalise is not correct: 2 faults" in errors
    assert quoted in errors
