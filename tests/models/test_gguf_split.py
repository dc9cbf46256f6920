"""GGUF models in several files."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.models.gguf_split import read_parts
from tests.models.gguf_bytes import write

PARTS = [f"m-{n:05}-of-00003.gguf" for n in (1, 2, 3)]


def write_parts(folder, **changes):
    """Three parts, with one tensor each. changes: to the keys of the last one."""
    for part_idx, name in enumerate(PARTS):
        entries = {"split.no": part_idx, "split.count": 3, "split.tensors.count": 3}
        entries |= {"general.name": "m"} | (changes if part_idx == 2 else {})
        tensors = {f"t{part_idx}": np.full(64, part_idx, np.float32)}
        write(folder / name, tensors=tensors, metadata=entries)


@pytest.mark.parametrize("name", PARTS)
def test_any_part_loads_the_whole_model(tmp_path, name):
    write_parts(tmp_path)
    content = read_parts(tmp_path / name)
    assert [tensor.name for tensor in content.tensors] == ["t0", "t1", "t2"]
    assert [tensor.data.view("<f4")[0] for tensor in content.tensors] == [0, 1, 2]
    assert content.metadata["split.no"] == 0


@pytest.mark.parametrize("count", [0, 1])
def test_a_file_without_other_parts_may_have_any_name(tmp_path, count):
    write(tmp_path / "merged.gguf", metadata={"split.no": 0, "split.count": count})
    assert len(read_parts(tmp_path / "merged.gguf").tensors) == 1
