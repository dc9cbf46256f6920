"""The content of GGUF files."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from etc_dist.models.gguf_reader import read_gguf
from tests.models import gguf_bytes as made

NUMBERS = np.arange(6, dtype=np.float32)


@pytest.mark.parametrize("version", [2, 3])
def test_values_have_the_types_of_the_file(tmp_path, version):
    values = {
        "number": (made.UINT32, struct.pack("<I", 7)),
        "below": (made.INT64, struct.pack("<q", -7)),
        "true": (made.BOOL, b"\1"),
        "text": (made.TEXT, made.text("é")),
        "bytes": (made.TEXT, made.text(b"\xff")),
        "texts": (made.ARRAY, made.array(made.TEXT, [made.text("a"), made.text("")])),
        "numbers": (
            made.ARRAY,
            made.array(made.INT64, [struct.pack("<q", n) for n in (3, -4)]),
        ),
    }
    (tmp_path / "file").write_bytes(made.gguf(values, version=version))
    metadata = dict(read_gguf(tmp_path / "file").metadata)
    assert metadata.pop("numbers").tolist() == [3, -4]
    assert metadata == {
        "number": 7,
        "below": -7,
        "true": True,
        "text": "é",
        "bytes": b"\xff",
        "texts": ["a", ""],
    }


@pytest.mark.parametrize("unit", [32, 64])
def test_tensors_are_bytes_at_multiples_of_the_alignment(tmp_path, unit):
    rows = made.tensor("rows", (3, 2)), made.tensor("packed", (64, 2), made.Q8_0, unit)
    data = NUMBERS.tobytes().ljust(unit, b"\0") + bytes(range(2 * 68))
    values = {"general.alignment": (made.UINT32, struct.pack("<I", unit))}
    (tmp_path / "file").write_bytes(made.gguf(values, rows, data, unit=unit))
    first, second = read_gguf(tmp_path / "file").tensors
    assert (first.name, first.kind.name) == ("rows", "F32")
    np.testing.assert_array_equal(first.data.view("<f4"), NUMBERS.reshape(2, 3))
    assert (second.kind.name, second.data.shape) == ("Q8_0", (2, 68))
    assert second.data[1, -1] == 135
