"""Settings come from the environment, and nothing misspelt is taken in silence."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from etc_dist.errors import ArgumentError
from etc_dist.settings import Settings

README = Path(__file__).parent.parent / "README.md"


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
    ("name", "value", "wanted"),
    [
        ("ETC_DIST_WAIT_LIMIT", "soon", "seconds above 0"),
        ("ETC_DIST_WAIT_LIMIT", "-1", "seconds above 0"),
        ("ETC_DIST_WAIT_LIMIT", "nan", "seconds above 0"),
        ("ETC_DIST_CPU_WORKERS", "4.5", "a whole number"),
        ("ETC_DIST_VERIFY", "perhaps", "0, 1, true or false"),
    ],
)
def test_value_that_cannot_be_read_is_refused_by_name(name, value, wanted):
    with pytest.raises(ArgumentError) as caught:
        Settings.load({name: value})
    message = str(caught.value)
    assert name in message
    assert repr(value) in message
    assert wanted in message


def test_unknown_variable_is_refused_and_the_known_ones_are_listed():
    with pytest.raises(ArgumentError) as caught:
        Settings.load({"ETC_DIST_BACKENDS": "cpu"})
    assert "ETC_DIST_BACKENDS" in caught.value.got
    assert "ETC_DIST_BACKEND," in caught.value.wanted


def test_readme_table_names_exactly_the_settings_in_order():
    rows = re.findall(r"^\|\s*`?(ETC_DIST_[A-Z_]+)`?\s*\|", README.read_text(), re.M)
    assert rows == [f"ETC_DIST_{field.name.upper()}" for field in fields(Settings)]
