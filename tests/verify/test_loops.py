"""Proofs of loops of the size of a decoder."""

from __future__ import annotations

import pytest

from etc_dist.schedule import SCHEDULES
from etc_dist.verify.verify import verify
from tests.graphs.decode_steps import decoder


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
@pytest.mark.parametrize("rows", [1, 20])
def test_64_layers_are_proved(rows, schedule):
    verified = verify(
        SCHEDULES[schedule](decoder(1)), {"layers": 64, "rows": rows}, 132
    )
    assert verified.unchecked == ()
    assert verified.tasks > 60000
