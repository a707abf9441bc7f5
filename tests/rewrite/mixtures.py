"""Random requests that ask for anything that rewrites, with histories that make the rules meet."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from klero import SamplingParams
from klero.rewrite import Context

WIDTHS = (1, 2, 5, 31, 32, 33, 64, 255, 256, 257, 300, 513, 1000)
LOGITS = (-np.inf, -3e38, -7.5, -1.0, -1e-30, 0.0, 1e-30, 0.5, 1.0, 3.25, 3.4028235e38)


@st.composite
def contexts(draw, width):
    """A Context over ids below width; few distinct ids, so that they occur again and rules meet on them."""
    few = draw(st.lists(st.integers(0, width - 1), min_size=1, max_size=6))
    ids = st.sampled_from(few) | st.integers(0, width - 1)
    words = st.lists(st.lists(ids, min_size=1, max_size=4).map(tuple), max_size=5)
    bias = st.dictionaries(ids, st.sampled_from([-np.inf, -3e38, -100.0, -1.0, 0.25, 1.0, 3e38]), max_size=6)
    penalty = st.sampled_from([0, 0, -2, -0.3, 0.1, 0.5, 2])
    params = SamplingParams(
        logit_bias=draw(bias),
        repetition_penalty=draw(st.sampled_from([1, 1, 1e-45, 0.5, 1.1, 1.5, 1e6])),
        presence_penalty=draw(penalty),
        frequency_penalty=draw(penalty),
        prompt_ignore_length=draw(st.sampled_from([None, 0, 1, 2, 50])),
        bad_token_ids=draw(words),
        no_repeat_ngram_size=draw(st.sampled_from([0, 0, 1, 2, 3, 30])),
        min_tokens=draw(st.sampled_from([0, 0, 1, 4, 50])),
        stop_token_ids=draw(words),
        end_token_ids=draw(st.lists(ids, max_size=2)),
        ignore_eos=draw(st.booleans()),
    )
    allowed = draw(st.none() | st.lists(ids, min_size=1, max_size=40))
    if allowed is not None and not draw(st.booleans()):
        params = _allowing(params, allowed)
    mask = None
    if draw(st.booleans()):
        share = draw(st.sampled_from([0, 0.1, 0.9, 1]))
        bits = np.random.default_rng(draw(st.integers(0, 99))).random(-(-width // 32) * 32) < share
        mask = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
    history = st.lists(ids, max_size=25).map(np.int32)
    return Context(params, draw(history), draw(history), tuple(draw(st.lists(ids, max_size=2))), (), mask)


def _allowing(params, allowed):
    """The same with an allow-list, unless the bans leave nothing of it, which is refused at once."""
    from klero import ParameterError

    try:
        return SamplingParams(**params.asked(), allowed_token_ids=allowed)
    except ParameterError:
        return params
