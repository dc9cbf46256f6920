"""GGUF models of which parts are missing, or do not belong together."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.errors import ArgumentError
from etc_dist.models.gguf_split import read_parts
from tests.models.test_gguf_file_errors import write
from tests.models.test_gguf_split import PARTS, write_parts


def refusal(path):
    with pytest.raises(ArgumentError, match="the model cannot be loaded") as caught:
        read_parts(path)
    return caught.value


def test_parts_that_are_missing_are_named(tmp_path):
    write_parts(tmp_path)
    for name in PARTS[1:]:
        (tmp_path / name).unlink()
    assert refusal(tmp_path / PARTS[0]).got == f"missing: {PARTS[1]}; {PARTS[2]}"


def test_a_part_of_another_name_is_refused(tmp_path):
    write_parts(tmp_path)
    (tmp_path / PARTS[0]).rename(tmp_path / "model.gguf")
    assert (
        "a name that ends in -00001-of-00003" in refusal(tmp_path / "model.gguf").wanted
    )


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"split.no": 1}, "split.no = 2, as for part 3"),
        ({"split.count": 4}, "split.count = 3, as for part 3"),
        ({"general.name": "other"}, "general.name = 'm', as for part 3"),
        ({"general.more": 3}, "general.more = None, as for part 3"),
    ],
)
def test_parts_of_different_models_are_refused(tmp_path, changes, wanted):
    write_parts(tmp_path, **changes)
    error = refusal(tmp_path / PARTS[1])
    assert error.wanted.startswith(wanted) and error.where == str(tmp_path / PARTS[2])


def test_a_part_that_is_damaged_is_named(tmp_path):
    write_parts(tmp_path)
    content = (tmp_path / PARTS[1]).read_bytes()
    (tmp_path / PARTS[1]).write_bytes(content[:-8])
    error = refusal(tmp_path / PARTS[0])
    assert (error.wanted, error.where) == (
        "a complete GGUF file",
        str(tmp_path / PARTS[1]),
    )


def test_a_number_of_tensors_that_differs_is_refused(tmp_path):
    write_parts(tmp_path)
    twice = {"t1": np.ones(64, np.float32)}
    own = {"split.no": 2, "split.count": 3, "split.tensors.count": 3}
    write(tmp_path / PARTS[2], tensors=twice, metadata=own | {"general.name": "m"})
    assert "3 tensors of different names" in refusal(tmp_path / PARTS[0]).wanted


def test_a_count_that_is_not_a_number_is_refused(tmp_path):
    write(tmp_path / "model.gguf", metadata={"split.count": "2"})
    assert refusal(tmp_path / "model.gguf").wanted == "split.count: an integer"
