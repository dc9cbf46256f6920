"""Where tensors belong, by their names."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from etc_dist.models.config import parse_config
from etc_dist.models.part import WHOLE
from etc_dist.models.weight_places import WeightPlaces
from tests.models.test_config import SMOL

LAYERS = 10**8


def test_places_cost_no_more_for_many_layers(tmp_path):
    config = parse_config(SMOL, tmp_path / "config.json")
    few, places = (
        WeightPlaces(replace(config, layers=count), WHOLE) for count in (3, LAYERS)
    )
    assert (len(few) - 2) / 3 == (len(places) - 2) / LAYERS == 9
    assert list(islice(places, len(few) - 3)) == list(few)[:-3]
    assert set(few) == {name for name in few if few.find(name) is not None}
    last = f"model.layers.{LAYERS - 1}.mlp.down_proj.weight"
    assert places.find(last) == ("w_down", (LAYERS - 1, ...))
    for name in (f"layers.{LAYERS}.", "layers.03.", "layers.-1.", "layers.3"):
        assert places.find(f"model.{name}mlp.down_proj.weight") is None
