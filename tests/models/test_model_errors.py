"""Models that cannot be loaded, and requests that do not fit a model."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from etc_dist.errors import ArgumentError
from etc_dist.models import load, load_tokenizer
from etc_dist.models.config import read_config
from etc_dist.models.extras import extra_module
from etc_dist.models.model import Model
from etc_dist.models.weights import load_weights
from tests.models.small import make_model

pytestmark = pytest.mark.mpi(ranks=[1])
TABLE = np.array([[0], [1]], np.int32)


@pytest.fixture
def folder(tmp_path, rng):
    return make_model(tmp_path, rng)


@pytest.fixture(scope="module")
def model(tmp_path_factory, world):
    """One for all tests: what is refused changes nothing."""
    if world.size > 1:
        pytest.skip("for one rank")
    folder = make_model(tmp_path_factory.mktemp("model"), np.random.default_rng(3))
    with load(folder, batch=2, positions=32, page_size=16, world=world) as model:
        yield model


@pytest.mark.parametrize(
    ("prompts", "count", "text"),
    [
        ([[]], 1, "an empty prompt"),
        ([[1], [520]], 1, "ids of 0 .. 519\n  got:    id 520"),
        ([[1], [-1]], 1, "id -1"),
        ([[1], [2], [3]], 1, "at most 2 requests at once"),
        ([[1], [2] * 32], 1, "at most 32 positions\n  got:    32 \\+ 1 new tokens"),
        ([[1], [2] * 8], 25, "8 \\+ 25 new tokens"),
        ([[1]], 0, "max_new_tokens is out of range"),
    ],
)
def test_requests_that_do_not_fit_are_refused(model, prompts, count, text):
    with pytest.raises(ArgumentError, match=text):
        model.generate(prompts, max_new_tokens=count)
    assert len(model.generate([[1], [2]], max_new_tokens=2)[1]) == 2


@pytest.mark.parametrize("prompts", ["text", [3, 4], [["a"]], [[1.5]], 7])
def test_prompts_of_wrong_types_are_refused(model, prompts):
    with pytest.raises(TypeError, match="expects"):
        model.generate(prompts, max_new_tokens=1)


@pytest.mark.parametrize("stop", [5, [[1]], "</s>", [1.0]], ids=str)
def test_a_wrong_stop_token_takes_no_request(model, stop):
    for _ in range(3):
        with pytest.raises(TypeError, match="stop expects"):
            model.generate([[1]], stop=stop)
    assert model.pages.free_requests == 2


def test_a_stop_token_outside_of_the_vocabulary_takes_no_request(model):
    for token in (-1, model.config.vocabulary, 2**31):
        with pytest.raises(ArgumentError, match=f"id {token}"):
            model.generate([[1]], stop=[token])
    assert model.pages.free_requests == 2


def test_stop_tokens_may_come_from_an_iterator(model):
    (whole,) = model.generate([[3]], max_new_tokens=4, stop=())
    prompts = [[3], [3]]
    texts = model.generate(prompts, max_new_tokens=4, stop=iter(whole[2:3]))
    assert texts == [whole[: whole.index(whole[2])]] * 2


def with_nan(array):
    copy = array.copy()
    copy.flat[-1] = np.nan
    return copy


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda w: {}, "embedding: missing; norm: missing"),
        (lambda w: w | {"norm": w["norm"][:-1]}, r"norm: \[2, 72\] .* of \[3"),
        (lambda w: w | {"w_o": w["w_o"][..., ::-1]}, "w_o: .* not contiguous"),
        (lambda w: w | {"norm": w["norm"].astype("f4")}, "dtypes bfloat16, float32"),
        (lambda w: w | {"w_up": with_nan(w["w_up"])}, "w_up: numbers that are not fin"),
    ],
)
def test_weights_that_do_not_fit_leave_the_world_usable(change, text, folder, one_rank):
    config = read_config(folder)
    weights = load_weights(folder, config, "bfloat16")
    with pytest.raises(ArgumentError, match=text):
        Model(config, change(weights), batch=1, positions=16, world=one_rank)
    with Model(config, weights, batch=1, positions=16, world=one_rank) as model:
        assert len(model.generate([[1]], max_new_tokens=1)[0]) == 1


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (([520], [0], [0], TABLE), r"ids\[0\] = 520"),
        (([1], [2], [0], TABLE), r"requests\[0\] = 2"),
        (([1], [0], [16], TABLE), r"positions\[0\] = 16"),
        (([1], [0], [-1], TABLE), r"positions\[0\] = -1"),
        (([1], [0], [0], TABLE + 4), "below 0, on pages"),
        (([1], [0], [0], TABLE - 1), "below 0, on pages"),
        (([1, 2], [0], [0], TABLE), "equally many"),
        (([1, 2], [0, 0], [3, 3], TABLE), "row 1 and one before it"),
        (([1, 2], [0, 1], [0, 0], TABLE * 0), "row 1 and one before it"),
        (([], [], [], TABLE), "1 to 64 rows"),
        (([1] * 65, [0] * 65, [0] * 65, TABLE), "1 to 64 rows"),
        (([1], [0], [0], np.zeros((3, 1), np.int32)), "table of up to 2 requests"),
    ],
)
def test_steps_that_do_not_fit_are_refused(model, step, text):
    with pytest.raises(ArgumentError, match=text):
        model.step(*step)
    assert len(model.step([1], [1], [0], TABLE)) == 1


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"batch": 0}, ArgumentError, "batch is out of range"),
        ({"batch": 129}, ArgumentError, "batch is out of range"),
        ({"batch": 1.0}, TypeError, "batch expects an int"),
        ({"positions": 513}, ArgumentError, "positions is out of range"),
        ({"positions": 1}, ArgumentError, "positions: an integer from 2 to 512"),
        ({"page_size": 24}, ArgumentError, "unknown page_size"),
        ({"dtype": "float32"}, ArgumentError, "'bfloat16' or 'float16'"),
        ({"deterministic": "yes"}, ArgumentError, "unknown deterministic"),
        ({"path": 3}, TypeError, "os.PathLike"),
        ({"path": "/nowhere"}, ArgumentError, "the folder of a Hugging Face model"),
    ],
)
def test_options_that_do_not_fit_are_refused(folder, one_rank, options, kind, text):
    with pytest.raises(kind, match=text):
        load(**({"path": folder, "world": one_rank} | options))


@pytest.mark.parametrize(
    ("rope", "text"),
    [
        ({"rope_type": "ntk", "factor": 2.0}, "rope_type default or linear"),
        ({"rope_type": "linear"}, "rope_scaling with factor"),
        ({"rope_type": "llama3", "factor": 2.0}, "rope_scaling with low_freq_factor"),
    ],
)
def test_ropes_that_are_not_complete_are_refused(tmp_path, rng, one_rank, rope, text):
    folder = make_model(tmp_path, rng, rope_scaling=rope)
    with pytest.raises(ArgumentError, match=text):
        load(folder, world=one_rank)


def test_a_vocabulary_that_does_not_match_is_named(tmp_path, rng, one_rank):
    folder = make_model(tmp_path, rng)
    config = (folder / "config.json").read_text().replace("520", "528")
    (folder / "config.json").write_text(config)
    with pytest.raises(ArgumentError, match=r"embed_tokens.weight: \[520, 72\]"):
        load(folder, world=one_rank)


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ArgumentError, match="pip install gguf"):
        load_tokenizer(tmp_path / "model.gguf")


def test_the_package_of_a_missing_module_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "jinja2.sandbox", raising=False)
    with pytest.raises(ArgumentError, match="pip install jinja2;"):
        extra_module("jinja2.sandbox")
