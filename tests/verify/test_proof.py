"""Recorded proofs: reused if valid, for the same plan and verifier."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import etc_dist
from etc_dist.cache import Cache, Entry
from etc_dist.errors import GraphError
from etc_dist.ir import DeviceFunction
from etc_dist.schedule import schedule_static
from etc_dist.schedule.plan import Plan
from etc_dist.settings import Settings
from etc_dist.verify import proof
from etc_dist.verify.proof import prove, verifier_digest
from tests.graphs.calls import Task, calls

DIMS = {"n": 4}


def plan(writers: int = 1) -> Plan:
    """A graph with `writers` calls that write its output."""
    fill = DeviceFunction("fill", print, "/fill.cuh", "tensor", 0, 1)
    tasks = [Task(fill, (), ["y n float32"], name=f"fill{n}") for n in range(writers)]
    return schedule_static(calls(1, tasks=tasks))


@pytest.fixture
def settings(tmp_path) -> Settings:
    return Settings(cache=tmp_path / "cache")


@pytest.fixture
def verified(monkeypatch) -> list[int]:
    """The sizes of the proofs that are made during the test."""
    sizes: list[int] = []
    verify = proof.verify

    def counted(plan, dims, workers):
        sizes.append(dims["n"])
        return verify(plan, dims, workers)

    monkeypatch.setattr(proof, "verify", counted)
    return sizes


def record(settings: Settings) -> Path:
    (path,) = (settings.cache / "proofs").iterdir()
    return path


def test_a_proof_is_found_again_as_it_was(settings, verified):
    first = prove(plan(), DIMS, 2, settings)
    assert prove(plan(), DIMS, 2, settings) == first
    assert verified == [4]


def test_ranks_that_prove_the_same_prove_it_once(settings, verified, monkeypatch):
    verify = proof.verify
    slow = lambda *plan: [time.sleep(0.1), verify(*plan)][1]  # noqa: E731
    monkeypatch.setattr(proof, "verify", slow)
    with ThreadPoolExecutor(4) as pool:
        first, *rest_of_proofs = pool.map(
            lambda _: prove(plan(), DIMS, 2, settings), range(4)
        )
    assert rest_of_proofs == [first] * 3
    assert verified == [4]


def test_functions_with_other_roles_are_proved_again(settings, verified):
    bodies = plan()
    (call,) = bodies.graph.calls
    function = replace(call.function, roles=("load", "compute"))
    calls = (replace(call, function=function),)
    lanes = tuple(replace(lane, calls=calls) for lane in bodies.lanes if lane.calls)
    graph = replace(bodies.graph, calls=calls)
    for bodies_plan in (
        bodies,
        replace(bodies, graph=graph, lanes=(*lanes, bodies.lanes[1])),
    ):
        prove(bodies_plan, DIMS, 2, settings)
    assert verified == [4, 4]


@pytest.mark.parametrize("forged", ["file", "folder", "other proof", "other verdict"])
def test_a_forged_proof_does_not_count(settings, forged):
    prove(plan(), DIMS, 2, settings)
    good = record(settings)
    text = good.read_text()
    key = proof.proof_key(plan(2), DIMS, 2)
    for path in (good.with_name(key), good.with_name(f"{key}.json")):
        if forged == "folder":
            path.mkdir()
        elif forged == "file":
            path.write_text("")
        else:
            path.write_text(text.replace(good.stem, key) if "v" in forged else text)
    with pytest.raises(GraphError):
        prove(plan(2), DIMS, 2, settings)


@pytest.mark.parametrize("damage", [0, 20, -2])
def test_a_damaged_proof_is_made_again(settings, verified, damage):
    first = prove(plan(), DIMS, 2, settings)
    content = record(settings).read_bytes()
    record(settings).write_bytes(content[:damage])
    again = prove(plan(), DIMS, 2, settings)
    assert (again.tasks, verified) == (first.tasks, [4, 4])
    assert prove(plan(), DIMS, 2, settings) == again


def with_facts(settings: Settings, key: str, **changes) -> None:
    """Store the record that is there under `key`, with its digest, and changed."""
    proof_record = Cache(settings.cache).load("proofs", record(settings).stem)
    facts = {
        k: v for k, v in {**proof_record.facts, **changes}.items() if v is not None
    }
    Cache(settings.cache).store("proofs", key, Entry(facts))


def test_a_signed_record_of_another_proof_does_not_count(settings):
    prove(plan(), DIMS, 2, settings)
    with_facts(settings, proof.proof_key(plan(2), DIMS, 2))
    with pytest.raises(GraphError):
        prove(plan(2), DIMS, 2, settings)


@pytest.mark.parametrize(
    "changes",
    [
        {"tasks": None},
        {"tasks": "4"},
        {"seconds": True},
        {"graph": 1},
        {"dims": {"n": 4}},
        {"dims": [["n"]]},
        {"dims": [["n", 4.0]]},
        {"unchecked": "text"},
        {"unchecked": [1]},
        {"more": 1},
    ],
    ids=str,
)
def test_a_record_with_odd_values_is_made_again(settings, verified, changes):
    first = prove(plan(), DIMS, 2, settings)
    with_facts(settings, record(settings).stem, **changes)
    again = prove(plan(), DIMS, 2, settings)
    assert (again.tasks, verified) == (first.tasks, [4, 4])
    assert prove(plan(), DIMS, 2, settings) == again


def test_the_key_covers_all_sources_of_the_verifier():
    code = "import sys, etc_dist.verify.verify\n"
    code += "print(*(m for m in sys.modules if m.startswith('etc_dist.')))"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True
    )
    parts = {name.split(".")[1] for name in process.stdout.split()}
    assert parts == {name.removesuffix(".py") for name in proof.VERIFIER}


@pytest.mark.parametrize("name", ["ir/expr.py", "ir/loads.py", "verify/races.py"])
def test_a_changed_verifier_proves_again(tmp_path, monkeypatch, name):
    package = Path(etc_dist.__file__).parent
    digests = []
    for number in range(2):
        copy = tmp_path / f"{number}"
        for part in proof.VERIFIER:
            files = [package / part, *(package / part).rglob("*.py")]
            for path in (p for p in files if p.is_file()):
                place = copy / path.relative_to(package)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(path.read_bytes())
        if number:
            (copy / name).write_text("# changed\n")
        monkeypatch.setattr(proof, "PACKAGE", copy)
        digests.append(verifier_digest.__wrapped__())
    assert digests[0] != digests[1]


def test_an_unwritable_cache_costs_one_warning(tmp_path, verified):
    (tmp_path / "file").write_text("")
    settings = Settings(cache=tmp_path / "file")
    with pytest.warns(RuntimeWarning, match="Set ETC_DIST_CACHE") as caught:
        for _ in range(2):
            prove(plan(), DIMS, 2, settings)
    assert (len(caught), verified) == (1, [4, 4])
