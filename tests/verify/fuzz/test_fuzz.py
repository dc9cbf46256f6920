"""The verifier and an oracle that shares no code with it agree on random programs, and
differ where the verifier has a fault."""

from __future__ import annotations

import pytest

from etc_dist.verify import cells, happens_before, races
from tests.conftest import first_always, some_of
from tests.verify.fuzz.compare import differs, plans, report, verdicts
from tests.verify.fuzz.execute import body, check_numbers
from tests.verify.fuzz.faults import FAULTS, Fault, planted
from tests.verify.fuzz.generate import generate
from tests.verify.fuzz.oracle import ACCEPTED, judge

PROGRAMS, CHUNK = 20_000, 50
CHUNKS = first_always([(first,) for first in range(0, PROGRAMS, CHUNK)], 1)


@pytest.mark.parametrize("first", CHUNKS)
def test_the_verifier_agrees_with_the_oracle(first, monkeypatch):
    for number in range(first, first + CHUNK):
        program = generate(number)
        with monkeypatch.context() as patch:
            if number % 2:  # as programs of many tasks are checked
                patch.setattr(cells, "MANY_CELLS", 0)
                patch.setattr(races, "MOST_SUSPECTS", 0)
                patch.setattr(happens_before, "BUDGET", 1)
            outcomes = verdicts(program)
            if any(
                verdict not in allowed_verdicts
                for verdict, allowed_verdicts in outcomes
            ):
                pytest.fail(f"program {number}\n{report(program)}", pytrace=False)


def test_many_programs_are_accepted_and_many_refused():
    verdicts = [judge(generate(number), dynamic=False) for number in range(100)]
    accepted = verdicts.count(frozenset({ACCEPTED})) / len(verdicts)
    assert 0.3 < accepted < 0.7


@pytest.mark.parametrize("first", some_of(range(0, 1000, 25), 40))
def test_accepted_programs_compute_the_right_numbers(first):
    ran = 0
    for number in range(first, first + 25):
        program = generate(number)
        for plan in plans(program, body):
            ran += check_numbers(program, plan, number)
    assert ran > 5


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_of_the_verifier_shows(fault: Fault) -> None:
    program = generate(fault.program)
    assert not differs(program)
    with planted(fault):
        assert differs(program)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_of_the_verifier_is_found(fault: Fault) -> None:
    with planted(fault):
        assert any(differs(generate(number)) for number in range(PROGRAMS))
