"""Tunings: which one is used, and files that are refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from etc_dist import Matmul
from etc_dist.cache import Cache, Entry
from etc_dist.errors import ArgumentError
from etc_dist.ops import tuning as module
from etc_dist.ops.tuning import (
    PACKAGE,
    KeptTiles,
    default_tuning,
    find_tuning,
    save_tuning,
    shipped,
)
from etc_dist.settings import AUTO

H200 = "NVIDIA H200"
CALL = str(default_tuning().tiles.call_us)
KEPT = (KeptTiles(64, 5120, 3200, "64 x 40, swapped"),)


@pytest.fixture
def cache(tmp_path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def own_tuning(cache):
    """The user's own tuning, of `etc-dist tune`."""
    tuning = replace(default_tuning(), kept=KEPT)
    save_tuning(cache, tuning)
    return tuning


def test_own_tuning_comes_before_that_of_the_package(cache):
    assert find_tuning(AUTO, cache, H200) == default_tuning()
    tuning = replace(default_tuning(), kept=KEPT)
    save_tuning(cache, tuning)
    assert find_tuning(AUTO, cache, H200) == tuning
    for setting in ("h200", PACKAGE):
        assert find_tuning(setting, cache, H200) == default_tuning()
    assert find_tuning(AUTO, cache, "").show() == default_tuning().show()


def test_an_unknown_gpu_has_the_constants_of_an_h200_and_says_so(cache, own_tuning):
    tuning = find_tuning(AUTO, cache, "NVIDIA GB99")
    assert tuning == default_tuning()
    assert tuning.show().startswith(
        "NVIDIA H200, of the package, since NVIDIA GB99 has none (etc-dist tune "
        "measures it), checksum "
    )


def test_each_tuning_of_the_package_is_of_another_gpu():
    devices = [tuning.device for tuning in shipped().values()]
    assert {H200, "NVIDIA H100 80GB HBM3"} == {*devices} and len(devices) == 2
    assert all(tuning.workers == 132 for tuning in shipped().values())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text[:-9], "Unterminated string"),
        (lambda text: text.replace(CALL, "8.7", 1), "of its content"),
        (lambda text: text.replace(CALL, f"-{CALL}", 1), "of its content"),
        (lambda text: text.replace("latency_us", "rest"), "rest"),
        (
            lambda text: text.replace('"workers": 132', '"workers": "132"'),
            "of its content",
        ),
        (lambda text: text.replace(CALL, "1" + "0" * 400, 1), "OverflowError"),
        (lambda text: "[1]", "got list"),
        (lambda text: text.replace('"format": 6', '"format": 1'), "format 1"),
        (
            lambda text: text.replace('"n": 5120', '"n": -8', 1),
            "of its content",
        ),
        (
            lambda text: text.replace('"NVIDIA H200"', 900 * "[" + 900 * "]"),
            "recursion",
        ),
        (None, "No such file"),
    ],
)
def test_a_damaged_file_is_refused_by_name(change, reason, tmp_path, cache):
    path = tmp_path / "tuning.json"
    tuning = replace(default_tuning(), kept=KEPT)
    text = json.dumps(tuning.document(), indent=1)
    path.write_text(text)
    assert find_tuning(str(path), cache, H200) == tuning
    path.unlink()
    if change is not None:
        path.write_text(change(text))
    with pytest.raises(ArgumentError) as caught:
        find_tuning(str(path), cache, H200)
    assert caught.value.what == "a tuning cannot be used"
    assert caught.value.where == f"file {path}" and reason in caught.value.got
    assert caught.value.wanted and "etc-dist tune" in caught.value.fix


def test_the_home_of_no_user_is_refused(cache):
    with pytest.raises(ArgumentError, match="file ~nosuchuser/x"):
        find_tuning("~nosuchuser/x", cache, H200)


def test_a_file_of_another_gpu_is_refused(tmp_path, cache):
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps(default_tuning().document()))
    with pytest.raises(ArgumentError) as caught:
        find_tuning(str(path), cache, "NVIDIA GB99")
    assert (caught.value.wanted, caught.value.got) == ("NVIDIA GB99", H200)
    assert find_tuning(str(path), cache, "") == default_tuning()


def test_own_tuning_that_is_damaged_is_refused_until_it_is_measured_again(
    cache, own_tuning
):
    path = cache.root / "tunings" / "nvidia-h200.json"
    path.write_bytes(path.read_bytes().replace(CALL.encode(), b"8.7"))
    with pytest.raises(ArgumentError, match=r"nvidia-h200\.json(.|\n)*remove the file"):
        find_tuning(AUTO, cache, H200)
    save_tuning(cache, own_tuning)
    assert find_tuning(AUTO, cache, H200) == own_tuning


def test_own_tuning_of_an_older_format_is_passed_over_visibly(cache, own_tuning):
    old = own_tuning.document() | {"format": 1}
    del old["kept"]
    cache.store("tunings", "nvidia-h200", Entry(old))
    tuning = find_tuning(AUTO, cache, H200)
    assert tuning == default_tuning()
    assert "nvidia-h200.json has an older format (etc-dist tune" in tuning.show()


@pytest.mark.mpi(ranks=[2])
def test_ranks_with_different_constants_are_named_on_all(
    make, problem, world, monkeypatch
):
    def find(*arguments):
        constants = replace(default_tuning().tiles, call_us=9.0 + world.rank)
        return replace(default_tuning(), tiles=constants)

    before = world.kept.pop(module.KIND, None)
    op, p = make(Matmul), problem(Matmul, (64, 264, 136))
    with monkeypatch.context() as patch:
        patch.setattr(module, "find_tuning", find)
        with pytest.raises(ArgumentError) as caught:
            op(p.x, p.w, p.out)
    assert caught.value.what == "the ranks have different tunings"
    lines = caught.value.got.splitlines()
    assert len(lines) == world.size and "checksum" in lines[0]
    assert "set ETC_DIST_TUNING" in caught.value.fix
    op(p.x, p.w, p.out)
    op.synchronize()
    p.check_exact(p.out)
    assert before is None or world.kept[module.KIND] == before
