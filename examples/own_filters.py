"""A processor and a filter of one's own, in the same pipeline as klero's: `klero.sample`, `explain`, and the engine.

    python examples/own_filters.py

It needs no model and no network.
"""

from __future__ import annotations

import numpy as np

import klero
from klero.testing.models import ToyModel


def no_echo(token_ids, row):
    """A processor: 1 off the logit of the last two tokens. Written in place, so nothing is returned."""
    row[token_ids[-2:]] -= 1.0


def even_ids(row):
    """A filter that returns a mask: tokens with an even id, or all where there is none."""
    even = row.ids % 2 == 0
    return even if even.any() else len(row)


def half_of_the_first(row):
    """A filter that returns a length: tokens at least half as likely as the first. The row is sorted."""
    return int(np.count_nonzero(row.weights >= 0.5))


def main() -> None:
    """Follow one row, then let a small model generate with the same parameters."""
    params = klero.SamplingParams(
        temperature=1.0, repetition_penalty=1.2, seed=7, max_tokens=8,
        logits_processors=no_echo, filters=[even_ids, half_of_the_first],
    )  # fmt: skip
    row = np.array([[3.0, 2.9, 2.8, 1.0, 2.6, -np.inf]], np.float32)
    print(klero.explain(row[0], params, prompt=[0, 3], output=[2]))
    print(klero.sample(row, params, prompts=[[0, 3]], outputs=[[2]]).token_ids)

    with klero.LLM(ToyModel(vocab_size=50)) as llm:
        (output,) = llm.generate([[1, 2, 3]], params)
    print(output.outputs[0].token_ids, output.outputs[0].finish_reason)


if __name__ == "__main__":
    main()
