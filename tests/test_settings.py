"""Settings: read from the environment, and checked."""

import os
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from etc_dist.errors import ArgumentError
from etc_dist.settings import MAX_SECONDS, Settings

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"


def test_no_variables_give_the_defaults():
    assert Settings.load({}) == Settings()


def test_variables_are_read_by_type():
    settings = Settings.load(
        {
            "ETC_DIST_BACKEND": "cpu",
            "ETC_DIST_WAIT_LIMIT": "0.5",
            "ETC_DIST_VERIFY": "0",
            "ETC_DIST_TRACE": "True",
            "ETC_DIST_CPU_WORKERS": "8",
            "ETC_DIST_CACHE": "/tmp/here",
            "HOME": "/not/ours",
        }
    )
    assert settings == Settings(
        backend="cpu",
        wait_limit=0.5,
        verify=False,
        trace=True,
        cpu_workers=8,
        cache=Path("/tmp/here"),
    )


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("ETC_DIST_WAIT_LIMIT", "soon", "seconds above 0"),
        ("ETC_DIST_WORLD_LIMIT", "", "at most 1000000"),
        ("ETC_DIST_WORLD_LIMIT", "\u0663", "at most 1000000"),
        ("ETC_DIST_CPU_WORKERS", "4.5", "an integer"),
        ("ETC_DIST_CPU_WORKERS", "1_0", "an integer"),
        ("ETC_DIST_SYMMETRIC_SIZE", "\u0663G", 'such as "8G"'),
        ("ETC_DIST_SYMMETRIC_SIZE", "8 giga", 'such as "8G"'),
        ("ETC_DIST_CACHE", " ", "a folder"),
        ("ETC_DIST_TRACE", "perhaps", "0, 1, true or false"),
        ("ETC_DIST_VERIFY", "-1", '0, 1 or "data"'),
    ],
)
def test_text_that_cannot_be_read_is_refused_by_name(name, value, text):
    with pytest.raises(ArgumentError) as caught:
        Settings.load({name: value})
    message = str(caught.value)
    assert name in message
    assert repr(value) in message
    assert text in message


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        *(("wait_limit", v, "seconds above 0") for v in (0, -1, float("nan"))),
        *(("world_limit", v, "at most 1000000") for v in (1e7, 10**400)),
        *(("symmetric_size", v, "to 1024T") for v in ("x", "0.5", "9" * 9 + "T")),
        *(("cache", value, "a folder") for value in ("", " ", "~no-such-user")),
        *(("tuning", value, "or a file") for value in ("", "\0", "~no-such-user")),
        ("verify", 2, '0, 1 or "data"'),
        *(("cpu_workers", value, "from 1 to 1024") for value in (0, 10**6)),
    ],
)
def test_value_out_of_range_is_refused_by_name(name, value, text):
    with pytest.raises(ArgumentError) as caught:
        Settings(**{name: value}).checked()
    assert caught.value.where.endswith(f"ETC_DIST_{name.upper()}")
    assert caught.value.got == f"{name} = {value!r}"
    assert caught.value.wanted.startswith(f"{name}: ") and text in caught.value.wanted


@pytest.mark.parametrize(
    ("name", "value"), [("cache", 7), ("wait_limit", "4"), ("cpu_workers", True)]
)
def test_value_of_another_type_is_a_type_error(name, value):
    with pytest.raises(
        TypeError, match=f"^{name} expects an? .*{type(value).__name__}"
    ):
        Settings(**{name: value}).checked()


def test_longest_limits_are_accepted():
    settings = Settings(wait_limit=MAX_SECONDS, world_limit=10**6).checked()
    assert (settings.wait_limit, settings.world_limit) == (1e6, 1e6)


def test_home_of_the_cache_is_found(monkeypatch):
    monkeypatch.setenv("HOME", "/home/of/user")
    assert Settings().cache == Path("/home/of/user/.cache/etc_dist")
    assert Settings.load({"ETC_DIST_CACHE": "~/x"}).cache == Path("/home/of/user/x")
    assert Settings(cache="~/x").checked().cache == Path("/home/of/user/x")


def test_user_without_a_home_has_a_separate_cache(monkeypatch):
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr("tempfile.tempdir", "/tmp/of/all")
    assert Settings.load({}).cache == Path(f"/tmp/of/all/etc_dist-{os.geteuid()}")
    assert Settings.load({"ETC_DIST_CACHE": "/c"}).cache == Path("/c")


def test_all_values_out_of_range_are_reported_at_once():
    with pytest.raises(ArgumentError) as caught:
        Settings(wait_limit=-1, verify="no").checked()
    assert caught.value.got == "wait_limit = -1; verify = 'no'"


def test_settings_of_a_subclass_keep_their_class():
    class Text(str):
        def __str__(self) -> str:
            return "another"

    class Own(Settings):
        def __init__(self):
            super().__init__(backend=Text("cpu"))

    settings = Own().checked()
    assert (type(settings), settings.backend) == (Own, "cpu")
    assert type(settings.backend) is str


def test_checked_settings_have_the_declared_types():
    settings = Settings(wait_limit=3, cpu_workers=np.int64(2), cache="/tmp/here")
    checked = settings.checked()
    assert checked == Settings(wait_limit=3.0, cpu_workers=2, cache=Path("/tmp/here"))
    assert (type(checked.wait_limit), type(checked.cpu_workers)) == (float, int)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("8G", 8 << 30), ("1.5m", 3 << 19), ("20 K", 20480), ("77", 77)],
)
def test_sizes_read_as_nvshmem_reads_them(text, nbytes):
    assert Settings(symmetric_size=text).symmetric_bytes == nbytes


@pytest.mark.parametrize(
    ("text", "setting", "verify"),
    [("0", False, 0), ("1", True, 1), ("false", 0, 0), ("data", "data", "data")],
)
def test_verify_is_0_or_1_or_data(text, setting, verify):
    read, settings = Settings.load({"ETC_DIST_VERIFY": text}), Settings(verify=setting)
    for value in (read.verify, settings.checked().verify):
        assert (value, type(value)) == (verify, type(verify))


def test_unknown_variable_is_refused_and_the_known_ones_are_listed():
    with pytest.raises(ArgumentError) as caught:
        Settings.load({"ETC_DIST_BACKENDS": "cpu"})
    assert "ETC_DIST_BACKENDS" in caught.value.got
    assert "ETC_DIST_BACKEND," in caught.value.wanted


def test_page_names_exactly_the_settings_in_order():
    rows = re.findall(r"^\|\s*`?(ETC_DIST_[A-Z_]+)`?\s*\|", PAGE.read_text(), re.M)
    assert rows == [f"ETC_DIST_{field.name.upper()}" for field in fields(Settings)]


def test_relative_cache_does_not_follow_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = Settings.load({"ETC_DIST_CACHE": "here"})
    monkeypatch.chdir("/")
    assert settings.cache == tmp_path / "here"
