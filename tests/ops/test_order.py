"""Orders of tasks: each coordinate once, in the sequence that they promise."""

from __future__ import annotations

import pytest

from etc_dist.ir.call import TASK
from etc_dist.ops.order import last_between


@pytest.mark.parametrize("tasks", [1, 2, 5])
@pytest.mark.parametrize("parts", [2, 3, 8])
def test_the_last_part_lies_between_the_others(parts, tasks):
    pairs = last_between(TASK, parts, tasks)
    found = [tuple(e.evaluate({"t": t}) for e in pairs) for t in range(parts * tasks)]
    last = parts - 1
    assert [i for p, i in found if p == last] == list(range(tasks))
    others = [(p, i) for p in range(last) for i in range(tasks)]
    assert [pair for pair in found if pair[0] != last] == others
    places = [t for t, (p, _) in enumerate(found) if p == last]
    assert places == list(range(last, parts * tasks, parts))
