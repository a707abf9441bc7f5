"""What tests of scores share: the toys' own rows, and equality of records."""

from __future__ import annotations

import dataclasses

import numpy as np

from klero import score
from klero.testing.models import logits_of_state, state_after

VOCAB, SCALE = 64, 4.0


def rows_of(token_ids, vocab_size=VOCAB):
    """The toys' rows [n, V]: row i follows token i."""
    state, rows = 0, []
    for position, token in enumerate(token_ids):
        state = state_after(state, token, position)
        rows.append(logits_of_state(state, vocab_size, SCALE))
    return np.array(rows, np.float32).reshape(len(rows), vocab_size)


def assert_same(found, expected):
    """Two records say the same, in bits."""
    assert len(found) == len(expected)
    for field in dataclasses.fields(expected):
        ours, theirs = getattr(found, field.name), getattr(expected, field.name)
        assert ours.dtype == theirs.dtype, field.name
        assert np.array_equal(ours, theirs, equal_nan=ours.dtype.kind == "f"), field.name


def assert_prompt(output, prompt, num_top):
    """The prompt's logprobs are the scores of the model's own rows, and of the first token nothing is said."""
    said, scored = output.prompt_logprobs, score(rows_of(prompt)[:-1], prompt[1:], num_top=num_top)
    assert said.token_ids.tolist() == list(prompt)
    assert np.isnan(said.sampled[0])
    assert said.rank[0] == 0
    assert said[0] == {}
    assert_same(said.rows(1, len(prompt)), scored)
