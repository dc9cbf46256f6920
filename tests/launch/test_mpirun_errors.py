"""launch/mpirun: arguments that no job can be started with."""

import subprocess
import sys
from pathlib import Path

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
        ("{folder}", "{folder} is a folder: name a program or a .py file"),
        ("nowhere.py", "nowhere.py: there is no such file"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(arguments, words, tmp_path):
    def filled(text: str) -> str:
        return text.format(self=__file__, folder=tmp_path)

    done = subprocess.run(
        [sys.executable, str(MPIRUN), "-n", "1", *filled(arguments).split()],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert filled(words) in done.stderr
    assert "Traceback" not in done.stderr
