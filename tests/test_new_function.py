"""The command etc-dist new-function: its files pass their own test at once."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from etc_dist import cli
from tests.test_layers import may_import

ROOT = Path(__file__).parent.parent


def run_tests(command):
    options = {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "-qx -p no:cacheprovider"}
    return subprocess.run(
        command,
        shell=True,
        env=os.environ | options,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_new_files_pass_until_the_cuda_body_is_changed(tmp_path, capsys):
    """By the command that is printed, also where pytest does not look for modules in
    the folder of a test."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib")
    folder = tmp_path / "new functions"
    assert cli.main(["new-function", "double_rows", "--folder", str(folder)]) == 0
    *paths, line, _ = capsys.readouterr().out.split("\n")
    names = ["double_rows.py", "double_rows.cuh", "test_double_rows.py"]
    assert paths == [str(folder / name) for name in names]
    command = line.removeprefix("try: ").partition(", after")[0]
    process = run_tests(command)
    assert process.returncode == 0, process.stdout

    cuda = folder / "double_rows.cuh"
    cuda.write_text(cuda.read_text().replace("2.0f *", "3.0f *"))
    assert "1 failed" in run_tests(command).stdout


def test_in_a_checkout_the_files_have_their_folders(tmp_path):
    folders = "etc_dist/functions", "kernels/functions", "tests/functions"
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
    assert cli.main(["new-function", "scale", "--folder", str(tmp_path)]) == 0
    files = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*scale*")}
    names = "scale.py", "scale.cuh", "test_scale.py"
    assert files == {f"{a}/{b}" for a, b in zip(folders, names, strict=True)}
    text = (tmp_path / folders[0] / "scale.py").read_text()
    layers = re.findall(r"^from etc_dist\.?(\w*)", text, re.M)
    assert layers and all(may_import("functions", layer) for layer in layers)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Scale", "lower-case"),
        ("for", "keyword"),
        ("a/b", "letters"),
        ("old", "exists"),
    ],
)
def test_no_file_is_written_under(name, words, tmp_path, capsys):
    (tmp_path / "old.cuh").touch()
    assert cli.main(["new-function", name, "--folder", str(tmp_path)]) == 1
    assert words in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["old.cuh"]
