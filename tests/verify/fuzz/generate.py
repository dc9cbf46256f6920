"""Random programs: stages that are right as they are composed, and then changes."""

from __future__ import annotations

from random import Random

from tests.verify.fuzz import data_stages, stages
from tests.verify.fuzz.change import change
from tests.verify.fuzz.maker import Maker
from tests.verify.fuzz.program import Program

STAGES = (
    stages.map_tiles,
    stages.map_tiles,
    stages.exchange,
    stages.exchange,
    stages.loop,
    stages.nested,
    stages.chain,
    stages.update,
    stages.leave,
    stages.overwrite,
    stages.gather,
    data_stages.bins,
    data_stages.pick,
    data_stages.stream,
    data_stages.limited,
)


def generate(number: int) -> Program:
    """The program of this number. More than a third of all have faults."""
    random = Random(f"program {number}")
    program = compose(random)
    for _ in range(random.choice((0, 0, 1, 1, 1, 2))):
        program = change(program, random)
    return program


def compose(random: Random) -> Program:
    """Stages, and outputs of all that they write."""
    maker = Maker(random)
    maker.input()
    for _ in range(random.choice((1, 1, 2, 2, 3))):
        random.choice(STAGES)(maker)
    for source in [s for s in maker.sources if s.event not in {"", *maker.used}]:
        stages.drain(maker, source)
    if random.random() < 0.1:
        maker.calls.reverse()
    return maker.program()
