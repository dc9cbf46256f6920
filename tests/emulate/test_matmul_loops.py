"""Loops of matmuls and of tasks between them."""

from __future__ import annotations

import numpy as np
import pytest

from etc_dist.emulate import Emulator
from tests.graphs.turned_layers import ROWS, layers_to_turn, products_of, turned_layers


@pytest.mark.parametrize(("layers", "schedule"), [(1, "dynamic"), (3, "static")])
def test_layers_of_matmuls_run_turn_by_turn(layers, schedule, kernels):
    arrays = layers_to_turn(layers)
    options = {"schedule": schedule, "workers": 4, "kernels": kernels}
    outputs = Emulator(turned_layers(1), **options).run([arrays])[0]
    turned = outputs["turned"].reshape(layers + 1, ROWS, -1)
    for layer_idx, product in enumerate(products_of(arrays)):
        np.testing.assert_array_equal(outputs["product"][layer_idx], product)
        np.testing.assert_array_equal(turned[layer_idx + 1], product[:, ::-1])
    np.testing.assert_array_equal(outputs["y"], product[:1])
