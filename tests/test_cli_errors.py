"""How commands end that cannot be done: by an error in four parts and an exit code."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from etc_dist import cli
from tests.models.small import make_model

COMMANDS = {
    "doctor": ["doctor"],
    "build": ["build", "--list"],
    "trace": ["trace", "file"],
    "predict": ["predict", "mlp", "rows=8"],
    "tune": ["tune"],
    "generate": ["generate", "a prompt"],
}


@pytest.fixture
def model(tmp_path, rng):
    (tmp_path / "model").mkdir()
    return make_model(tmp_path / "model", rng)


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_closed_stream_is_named_on_the_other_one(
    closed, arguments, monkeypatch, capsys
):
    with monkeypatch.context() as patch:
        patch.setattr(sys, closed, None)
        assert cli.main(arguments) == 1
    output = "".join(capsys.readouterr())
    assert output.startswith(f"ArgumentError: {closed} of the command cannot be")
    assert len(output.splitlines()) == 5


def run(command: str) -> subprocess.CompletedProcess[str]:
    """In a shell, where $ETC_DIST is the command."""
    variables = {**os.environ, "ETC_DIST": f"{sys.executable} -m etc_dist.cli"}
    shell = ["bash", "-c", command]
    return subprocess.run(shell, capture_output=True, text=True, env=variables)


def test_a_shell_closes_stdout():
    process = run("$ETC_DIST build --list >&-")
    assert process.returncode == 1 and "got:    stdout closed" in process.stderr


def test_a_broken_pipe_ends_the_command_without_a_message():
    process = run("$ETC_DIST build --list | true; exit ${PIPESTATUS[0]}")
    assert (process.returncode, process.stderr) == (141, "")


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_an_interrupt_ends_each_command_without_a_message(
    arguments, monkeypatch, capsys
):
    def interrupt(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupt)
    assert cli.main(arguments) == 130
    assert capsys.readouterr() == ("", "")


def test_an_error_of_the_system_names_the_file(monkeypatch, capsys):
    def write(options):
        raise PermissionError(13, "Permission denied", "/some/file")

    monkeypatch.setattr(cli, "_run", write)
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "ArgumentError: a file cannot be used",
        "  where:  /some/file",
        "  wanted: a file that this user can read or write",
        "  got:    [Errno 13] Permission denied: '/some/file'",
        "  to do:  name another file, or change its permissions",
    ]


def test_a_trace_is_read_from_regular_files_alone(tmp_path, capsys):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", "/dev/zero"):
        assert cli.main(["trace", str(path)]) == 1
        assert "not a regular file" in capsys.readouterr().err


@pytest.mark.parametrize("value", [-1, 0, 10**30])
@pytest.mark.parametrize(
    "name",
    [
        "batch",
        "positions",
        "page-size",
        "pages",
        "steps-per-launch",
        "ranks",
        "workers",
    ],
)
def test_numbers_out_of_range_are_refused_before_a_build(
    name, value, model, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("etc_dist.models.model_bundle.build_bundle", None)
    bundle = ["--bundle", str(tmp_path / "bundle"), f"--{name}={value}"]
    assert cli.main(["build", str(model), *bundle]) == 1
    output = capsys.readouterr().err
    assert re.match(r"ArgumentError: .*\n  where:  .*\n  wanted: .*\n", output)
    assert str(value) in output and not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--ranks", "0"], "got:    ranks = 0\n"),
        (["--dtype", "float16"], "got:    dtype = 'float16'\n"),
        (["--arch", "H100"], "got:    target = 'H100'\n"),
        (["--arch", "H100", "--bundle", "bundle"], "got:    target = 'H100'\n"),
    ],
)
def test_options_that_do_not_fit_a_build_are_refused(arguments, text, capsys):
    assert cli.main(["build", "mlp_graph", *arguments]) == 1
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("argument", ["a", "=b", "a-b=1", "messages=[]"])
def test_generate_refuses_odd_template_arguments(argument, capsys):
    assert cli.main(["generate", "x", "--template-argument", argument]) == 1
    assert "wanted: NAME=VALUE" in capsys.readouterr().err
