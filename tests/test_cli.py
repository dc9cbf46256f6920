"""The commands etc-dist build, which programs it builds, and etc-dist tune."""

from __future__ import annotations

import io

import pytest

from etc_dist import cli

GOOD = {"spill_bytes": 0, "stack_bytes": 0, "remarks": [], "registers": 168}
PROGRAMS = ["mlp_graph 4 bfloat16", "mlp_graph 8 bfloat16", "moe_graph mixtral"]


@pytest.fixture(autouse=True)
def built(monkeypatch):
    """The names that are built."""
    names = []

    def report(name, plan, arch):
        names.append(name)
        return GOOD

    monkeypatch.setattr(cli, "report", report)
    monkeypatch.setattr(cli, "library_programs", lambda: ((n, n) for n in PROGRAMS))
    return names


@pytest.mark.parametrize(
    "names, programs",
    [
        ([], PROGRAMS),
        (["mlp_graph 8 bfloat16"], PROGRAMS[1:2]),
        (["mlp_graph"], PROGRAMS[:2]),
        (["moe_graph", "* 4 *"], [PROGRAMS[0], PROGRAMS[2]]),
    ],
)
def test_programs_are_built_by_name(names, programs, built):
    assert cli.main(["build", *names]) == 0
    assert built == programs


@pytest.mark.parametrize(
    "fault",
    [
        {"spill_bytes": 8},
        {"stack_bytes": 8},
        {"remarks": ["C7510"]},
        {"registers": 160},
    ],
)
def test_a_program_that_spills_or_loses_a_property_fails(
    fault, built, monkeypatch, capsys
):
    monkeypatch.setattr(cli, "report", lambda name, *_: GOOD | fault)
    assert cli.main(["build", PROGRAMS[0]]) == 1
    assert capsys.readouterr().out.startswith("FAILED  ")


def test_characters_that_the_output_lacks_are_replaced(monkeypatch):
    stream = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(stream, encoding="ascii"))
    monkeypatch.setattr(cli, "_run", lambda options: print("na\u00efve"))
    cli.main(["doctor"])
    assert stream.getvalue() == b"na?ve\n"


@pytest.fixture
def answered(monkeypatch):
    """The arguments of each answer."""
    calls = []
    monkeypatch.setattr("etc_dist.models.chat.answer", lambda *args: calls.append(args))
    return calls


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--", "-x"], (None, "-x", 256, None, [], 0)),
        (["a", "--", "-x"], ("a", "-x", 256, None, [], 0)),
        (["--template-argument", "a=b", "x"], (None, "x", 256, None, ["a=b"], 0)),
        (["--speculate", "4", "x"], (None, "x", 256, None, [], 4)),
    ],
)
def test_generate_answers_the_prompt(arguments, expected, answered):
    assert cli.main(["generate", *arguments]) == 0
    assert answered == [expected]


def test_unknown_name_lists_the_names(built, capsys):
    assert cli.main(["build", "mlp_graph", "mlp"]) == 1
    output = capsys.readouterr().err
    assert "no program of the library has the name 'mlp'" in output
    assert all(name in output for name in PROGRAMS) and built == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "nothing can be measured\n  where:  etc-dist tune\n  wanted: a GPU\n"),
        (["--sizes", "5120x25600,4095x8"], "got:    5120x25600,4095x8\n"),
        (["--output", "/no/folder/file"], "got:    /no/folder cannot be written\n"),
        (["--output", "/tmp"], "got:    /tmp cannot be written\n"),
        (["--sizes", "8000000000x8"], "at most 2147483648 elements"),
        (["--sizes", "5120"], "wanted: N and K, multiples of 8, as in 5120x25600,"),
    ],
)
def test_tune_without_a_gpu_or_with_odd_sizes_is_refused(
    options, message, monkeypatch, capsys
):
    monkeypatch.setenv("ETC_DIST_BACKEND", "cpu")
    assert cli.main(["tune", *options]) == 1
    assert message in capsys.readouterr().err


def test_names_are_listed(built, capsys):
    assert cli.main(["build", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == PROGRAMS and built == []
    assert cli.main(["build", "--list", PROGRAMS[0]]) == 0
    assert capsys.readouterr().out.splitlines() == PROGRAMS[:1]
