"""What is said about tokens of rows that custom processors rewrote: by the kernels, with the bits of the reference."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from klero import Sampler, SamplingParams, Seat, sample
from klero.device import HAVE_NUMBA
from klero.sampling import work
from klero.testing import nasty_row

pytestmark = pytest.mark.skipif(not HAVE_NUMBA, reason="needs Numba")
FOUR = np.log(np.float32([[0.5, 0.3, 0.15, 0.05]]))
HISTORY = {"prompts": [[1]], "outputs": [[]]}


def lean(token_ids, row):
    """The token that came last is less likely."""
    row[token_ids[-1:] % len(row)] -= 1


def swap(token_ids, row):
    """Turn the row around."""
    return row[::-1]


def ban_half(token_ids, row):
    """Every other token goes."""
    row[::2] = -np.inf


def ban_all(token_ids, row):
    """Nothing is left."""
    row[:] = -np.inf


def tiny(token_ids, row):
    """Numbers that count as 0."""
    row *= np.float32(1e-38)


def fail(token_ids, row):
    """A processor with a fault."""
    raise KeyError("fault")


PROCESSORS = st.lists(st.sampled_from([lean, swap, ban_half, tiny, ban_all, fail]), min_size=1, max_size=2)
SHAPES = st.sampled_from([
    {}, {"temperature": 1}, {"temperature": 0.7, "top_k": 3}, {"temperature": 1, "top_p": 0.8},
    {"temperature": 2, "typical_p": 0.7}, {"temperature": 1, "xtc_probability": 1, "xtc_threshold": 0.05},
    {"temperature": 1, "top_p": 0.9, "bad_token_ids": [0], "logit_bias": {1: 2}}, {"top_k": 1},
])  # fmt: skip
KINDS = ["normal", "peaked", "ties", "banned", "huge", "+nan", "empty"]


@st.composite
def wishes(draw, width):
    """What a row asks for, at least one thing."""
    wanted = {"logprobs": draw(st.sampled_from([0, 1, min(5, width), -1, None]))}
    wanted["logprob_token_ids"] = draw(st.lists(st.integers(0, width - 1), max_size=3, unique=True))
    if wanted["logprobs"] is not None or wanted["logprob_token_ids"]:
        wanted["logprobs_mode"] = draw(st.sampled_from(["raw", "processed"]))
    kept = draw(st.sampled_from(["return_kept", "return_probs", None]))
    return wanted | ({kept: True} if kept else {})


@st.composite
def batches(draw):
    """(rows [R, V], params of R rows): hosted rows, and now and then one that is not."""
    width = draw(st.sampled_from([2, 5, 257, 700]))
    rows = [nasty_row(draw(st.sampled_from(KINDS)), width, draw(st.integers(0, 2**16))) for _ in range(4)]
    params = [
        SamplingParams(**draw(SHAPES), **draw(wishes(width)), logits_processors=draw(PROCESSORS)) for _ in range(3)
    ]
    last = SamplingParams(**draw(SHAPES), **draw(wishes(width)))
    return np.stack(rows), [*params[:2], last, params[2]]


def all_of(result):
    """Everything that a call returns, in bytes."""
    said = [] if result.logprobs is None else [array.tobytes() for array in vars(result.logprobs).values()]
    return result.token_ids.tolist(), result.status.tolist(), result.num_kept.tolist(), dict(result.messages), said


@given(batches(), st.integers(0, 2**32), st.booleans(), st.booleans())
def test_every_bit_is_that_of_the_reference(batch, seed, half, padded):
    rows, params = batch
    if half:
        rows = (rows.view(np.uint32) >> 16).astype(np.uint16)
    padded_from = None
    if padded:
        padded_from = rows.shape[1]
        rows = np.concatenate([rows, rows[:, :1]], 1)
    told = {"prompts": [[1]] * 4, "outputs": [[0, 1]] * 4, "seeds": seed, "padded_from": padded_from}
    cpu, reference = (sample(rows, params, backend=backend, **told) for backend in ("cpu", "reference"))
    assert all_of(cpu) == all_of(reference)


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_the_reference_is_not_asked(monkeypatch, mode):
    for name in ("sample_row", "sample_rows"):
        monkeypatch.setattr(work.reference, name, None)
    monkeypatch.setattr(work, "say_row", None)
    asked = SamplingParams(
        temperature=1, logprobs=2, logprobs_mode=mode, logprob_token_ids=[3], return_probs=True, logits_processors=lean
    )
    assert sample(FOUR, asked, **HISTORY).status.tolist() == [0]
    sampler = Sampler(num_slots=1, vocab_size=4, max_len=4)
    state = sampler.sample_async(sampler.step_of(sampler.setup_step([Seat("a", asked, [1], 0)])), FOUR)
    assert state.host.logprobs.top_ids.size == 2


def test_raw_is_the_models_row_and_processed_what_was_drawn_from():
    """Token 0 is banned by a processor: .3, .15, .05 are left, and top_p .75 keeps the first two of them."""

    def ban_first(token_ids, row):
        row[0] = -np.inf

    said = {}
    for mode in ("raw", "processed"):
        asked = SamplingParams(
            temperature=1, top_p=0.75, logprobs=4, logprobs_mode=mode, logprob_token_ids=[3, 0], return_probs=True,
            logits_processors=ban_first,
        )  # fmt: skip
        said[mode] = sample(FOUR, asked, seeds=1, **HISTORY).logprobs
    raw, processed = said["raw"], said["processed"]
    token = int(raw.token_ids[0])
    assert raw.top_ids.tolist() == [0, 1, 2, 3]
    assert np.exp(raw.top).tolist() == pytest.approx([0.5, 0.3, 0.15, 0.05])
    assert np.exp(raw.listed).tolist() == pytest.approx([0.05, 0.5])
    assert processed.top_ids.tolist() == [1, 2, 0, 3]
    assert np.exp(processed.top).tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert np.exp(processed.listed).tolist() == [0, 0]
    for one in (raw, processed):
        assert np.exp(one.raw[0]) == pytest.approx([0, 0.3, 0.15][token])
        assert np.exp(one.processed[0]) == pytest.approx([0, 2 / 3, 1 / 3][token])
        assert np.exp(one.kept_mass[0]) == pytest.approx(0.9)
        assert (one.num_kept.tolist(), one.kept_ids.tolist()) == ([2], [1, 2])
    assert (raw.sampled[0], processed.sampled[0]) == (raw.raw[0], processed.processed[0])
    assert (raw.rank[0], processed.rank[0]) == (token + 1, token)
