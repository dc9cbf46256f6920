"""An interrupt at any line of a step: a model of one rank stays usable, and right."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from etc_dist.models import Batch, Model, PageTable, Sampling, load, mirror, rows
from etc_dist.models.prefixes import NamedPages
from etc_dist.models.rows import RowChecks
from etc_dist.models.written import WrittenPositions
from tests.interrupts import interrupted
from tests.models.small import make_model

FUNCTIONS = [
    *(Batch.step, Batch._add, Batch.add, Batch.remove, Batch.__exit__),
    *(PageTable.add, PageTable.remove, PageTable.examine),
    *(rows.RowArrays.fill, rows.RowSections.write, rows._update),
    *(mirror.Mirror.send, Model.steps, RowChecks.add_written),
    *(WrittenPositions.gap, WrittenPositions.add, WrittenPositions.forget),
    *(WrittenPositions._count, WrittenPositions._store),
]
GIVEN = "ids", "position", "end", "stop", "sampling"


@pytest.fixture(scope="module")
def model(world: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A model whose ids depend on all that a step passes to its program, but for the
    numbers of requests and pages."""
    if world.size > 1 or world.backend != "cpu":
        pytest.skip("for one rank of the CPU backend")

    def launch(bound: Any) -> None:
        arguments = {
            name: bound.arrays[name].owner for name in (*GIVEN, "table", "request")
        }
        requests = arguments["request"][arguments["ids"] >= 0]
        pages = arguments["table"][requests]
        assert len(np.unique(pages[:, 0])) == len(np.unique(requests))
        data = b"".join(arguments[name].tobytes() for name in GIVEN)
        data += (pages >= 0).tobytes()
        bound.arrays["next_ids"].owner[...] = zlib.crc32(data) % 520

    folder = make_model(tmp_path_factory.mktemp("model"), np.random.default_rng(1))
    with (
        load(folder, batch=2, positions=48, page_size=16, world=world) as model,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(model.program, "launch", launch)
        yield model


@pytest.mark.mpi(ranks=[1])
@pytest.mark.parametrize(
    "function", FUNCTIONS, ids=lambda function: function.__qualname__
)
def test_interrupt_at_each_line_leaves_the_model_right(function: Any, model: Model):
    def generate() -> list[list[int]]:
        samplings, two = [None, Sampling(seed=5)], [[3], [5] * 16]
        texts = model.generate([[4]], max_new_tokens=2)
        texts += model.generate([[4]], max_new_tokens=2, sampling=samplings[1])
        return texts + model.generate(two, max_new_tokens=2, sampling=samplings)

    expected = generate()
    line = 1
    while interrupted(generate, [function.__code__], line):
        assert generate() == expected, f"after line event {line}"
        line += 1
    assert line > 1
    with Batch(model) as batch:
        assert batch.has_room()
        assert model.pages.free_requests == 2
        assert model.pages.free_pages == model.pages.count


@pytest.mark.mpi(ranks=[1])
@pytest.mark.parametrize("function", [Batch._add, Batch.remove])
def test_batch_continues_after_an_interrupt(function: Callable[..., Any], model: Model):
    def run(line: int) -> list[int]:
        with Batch(model) as batch:
            request = batch.add([3], max_new_tokens=3)
            interrupted(batch.step, [function.__code__], line)
            interrupted(batch.step, [function.__code__], line)
            while not batch.is_done:
                batch.step()
        return request.new_tokens

    for line in range(1, 12):
        assert len(run(line)) == 3


@pytest.mark.mpi(ranks=[1])
def test_batch_has_room_again_after_an_interrupted_add(model: Model):
    codes = [Batch.add.__code__, PageTable.add.__code__]
    with Batch(model) as batch:
        batch.add([3])
        line = 1
        while interrupted(lambda: batch.add([3]), codes, line):
            for request in batch._requests[1:]:  # added, but not returned
                batch.remove(request)
            assert batch.has_room()
            line += 1
        assert not batch.has_room()


SHARING = [
    *(PageTable.add, PageTable.keep, PageTable.remove, PageTable._take),
    *(NamedPages.add, NamedPages.use, NamedPages.release, NamedPages.take),
]


class Owner:
    """Of requests."""


@pytest.mark.parametrize(
    "function", SHARING, ids=lambda function: function.__qualname__
)
def test_interrupt_at_each_line_leaves_shared_pages_right(function: Any):
    keys = [bytes([n]) for n in range(4)]
    owner, line, is_interrupted = Owner(), 1, True

    def share() -> None:
        first = pages.add(64, owner)
        pages.keep(first, 0, keys)
        second = pages.add(64, owner, pages.find(keys[:3]))
        pages.remove(first)
        pages.add(48, owner)  # takes a page that was kept
        pages.remove(second)

    while is_interrupted:
        pages = PageTable(3, 4, 16, 7)
        is_interrupted = interrupted(share, [function.__code__], line)
        for request in pages.owned(owner):
            pages.remove(request)
        found_pages = pages.find(keys)
        again = pages.add(64, owner, found_pages[:3])
        assert pages.table[again, :3].tolist()[: len(found_pages)] == found_pages[:3]
        pages.add(48, owner)
        page_ids = pages.table[pages.table >= 0]
        assert len(np.unique(page_ids)) == len(page_ids) == 7, (
            f"after line event {line}"
        )
        assert pages.free_pages == 0 and pages.find(keys) == found_pages[:3]
        line += 1
    assert line > 2
