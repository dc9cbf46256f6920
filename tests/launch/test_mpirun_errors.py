"""launch/mpirun: arguments that no job can be started with."""

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from runpy import run_path

import pytest

MPIRUN = Path(__file__).parents[2] / "launch" / "mpirun"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "the command to start is missing"),
        ("--grace nan true", "argument --grace: nan is not a number of seconds"),
        ("--grace -5 true", "argument --grace: -5 is not a number of seconds"),
        ("--time-limit -1 true", "argument --time-limit: -1 is not a number of sec"),
        ("--time-limit nan true", "argument --time-limit: nan is not a number of sec"),
        ("--time-limit inf true", "argument --time-limit: inf is not a number of sec"),
        ("--time-limit 0 true", "--time-limit 0 would end all ranks at once"),
        ("--per-host 0 true", "--per-host must be at least 1, not 0"),
        ("--hostfile nowhere true", "--hostfile nowhere: there is no such file"),
        ("--hostfile {self} --mps true", "--mps starts a server on this host alone"),
        ("--pretend-hosts 2 true", "--pretend-hosts must be at least 1, and at most"),
        ("--pretend-hosts 1 --per-host 1 true", "--pretend-hosts places ranks itself"),
        ("{folder}", "{folder} is a folder: name a program or a .py file"),
        ("nowhere.py", "nowhere.py: there is no such file"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(
    arguments, words, tmp_path, monkeypatch, capsys
):
    def filled(text: str) -> str:
        return text.format(self=__file__, folder=tmp_path)

    monkeypatch.syspath_prepend(MPIRUN.parent)
    monkeypatch.setattr(
        sys, "argv", [str(MPIRUN), "-n", "1", *filled(arguments).split()]
    )
    with pytest.raises(SystemExit, match="2"):
        run_path(str(MPIRUN), run_name="__main__")
    assert filled(words) in capsys.readouterr().err


@pytest.mark.parametrize("hosts", [0, 2])
@pytest.mark.parametrize("cores", [2, 100])
def test_too_many_ranks_are_refused(monkeypatch, tmp_path, hosts, cores):
    command = run_path(str(MPIRUN.parent / "command.py"))
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    file = tmp_path / "hosts"
    file.write_text("# two\none\ntwo  # of two\n")
    hostfile = str(file) if hosts else None
    most = max(64, 8 * cores)
    for ranks in (most, most + 1):
        options = Namespace(ranks=ranks * (hosts or 1), hostfile=hostfile, per_host=1)
        fault = command["too_many_ranks"](options)
        assert (f"at most {most} ranks" in fault) == (ranks > most)


def test_many_ranks_are_refused_before_anything_is_started(tmp_path):
    missing = tmp_path / "none"  # fails at once where the ranks are not refused
    process = subprocess.run(
        [sys.executable, str(MPIRUN), "-n", "99999", "true"],
        env=os.environ | {"LAUNCH_MPIRUN": str(missing)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 2
    for part in ("too many ranks", "where:", "wanted:", "got:    99999", "to do:"):
        assert part in process.stderr


def test_hosts_that_open_mpi_cannot_pretend_are_refused(tmp_path):
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.6'\n")
    mpirun.chmod(0o755)
    process = subprocess.run(
        [sys.executable, str(MPIRUN), "-n", "2", "--pretend-hosts", "2", "true"],
        env=os.environ | {"LAUNCH_MPIRUN": str(mpirun)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 1
    for part in ("by MPICH only", "where:", "wanted:", "got:", "to do:"):
        assert part in process.stderr
