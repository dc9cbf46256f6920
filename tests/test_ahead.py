"""Building a graph ahead of time, without a GPU and without a world."""

from __future__ import annotations

import pytest

import etc_dist
from etc_dist.errors import ArgumentError, ScheduleError
from examples.add_row_sum import add_row_sum


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ETC_DIST_CACHE", str(tmp_path))


def test_graph_is_built_without_a_world(tmp_path):
    binary = etc_dist.build(add_row_sum(4), target="sm_90a", schedule="dynamic")
    assert binary.cubin[:4] == b"\x7fELF" and binary.registers > 0
    assert binary.source.startswith("// add_row_sum on 4 ranks, dynamic schedule")
    lines = binary.show().splitlines()
    assert lines[0] == "add_row_sum on 4 ranks, dynamic schedule"
    assert "  spills     0 bytes, stack 0 bytes" in lines
    binary.save(tmp_path / "program.cubin")
    assert (tmp_path / "program.cubin").read_bytes() == binary.cubin


def test_options_that_do_not_fit_are_refused():
    with pytest.raises(TypeError, match="got function; call it .*row_sum.world.size"):
        etc_dist.build(add_row_sum)
    with pytest.raises(ArgumentError, match="target = 'H100'"):
        etc_dist.build(add_row_sum(1), target="H100")
    with pytest.raises(ScheduleError, match=r"build\(add_row_sum\)"):
        etc_dist.build(add_row_sum(1), schedule="best")
    with pytest.raises(TypeError, match="trace expects a bool"):
        etc_dist.build(add_row_sum(1), trace=3)
