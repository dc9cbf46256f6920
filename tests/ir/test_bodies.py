"""The digest of NumPy bodies: functions that enclose each other, and changed files."""

from __future__ import annotations

import os
import runpy

import pytest

from etc_dist.ir import device_function
from etc_dist.ir.bodies import digest_bodies
from tests.graphs.calls import whole


def digest_of(body):
    filled = device_function(source="fill.cuh", reads=0, writes=1)(body)

    return digest_bodies(whole(1, function=filled, y="1"))


def enclosing_each_other(value, number=9):
    """A function that encloses others, of which each encloses all of them."""
    names = [f"f{n}" for n in range(number)]
    calls = ", ".join(names)
    definitions = "".join(
        f" def {name}(y): return ({calls}, value)\n" for name in names
    )
    scope = {}
    exec(f"def make(value):\n{definitions} return f0", scope)
    return scope["make"](value)


def test_functions_that_enclose_each_other_count_once():
    digests = [digest_of(enclosing_each_other(value)) for value in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("text", ["y = (\n(", "y"])
def test_a_file_that_changed_after_its_import_is_not_needed(text, tmp_path):
    file = tmp_path / "fill.py"
    file.write_text("\n\ndef fill(y):\n    y[...] = 1\n")
    fill = runpy.run_path(str(file))["fill"]
    digest_of(fill)
    file.write_text(f"{text}\n" * 4)
    os.utime(file, (0, 0))
    assert digest_of(fill) == digest_of(fill)
