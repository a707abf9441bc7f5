"""The whole pipeline, everything asked at once: backends, batches and the sampler over slots agree on every token."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rewrite.mixtures import WIDTHS, contexts

from klero import ParameterError, Sampler, SamplingParams, Seat, explain, sample
from klero.device import HAVE_NUMBA
from klero.logprobs import Logprobs
from klero.testing import nasty_row

pytestmark = pytest.mark.skipif(not HAVE_NUMBA, reason="needs Numba")


def halve(row):
    """A filter of one's own: the more likely half."""
    return max(1, len(row) // 2)


def keep_even(row):
    """Another: even ids, where there are any."""
    even = row.ids % 2 == 0
    return even if even.any() else len(row)


def lean(token_ids, row):
    """A processor: what came last is less likely."""
    row[token_ids[-1:] % len(row)] -= 1


SHAPES = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([None, 0.0, 0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([None, 0, 1, 3, 50]),
        "top_p": st.sampled_from([None, 0.5, 0.9]),
        "min_p": st.sampled_from([None, 0.05]),
        "top_p_decay": st.sampled_from([None, 0.5, 0.9]),
        "top_n_sigma": st.sampled_from([None, 1.0, 2.5]),
        "epsilon_cutoff": st.sampled_from([0, 0.01]),
        "eta_cutoff": st.sampled_from([0, 0.02]),
        "top_a": st.sampled_from([0, 0.2]),
        "typical_p": st.sampled_from([1, 1, 1, 0.8]),
        "xtc_probability": st.sampled_from([0, 0.5, 1]),
        "filters": st.sampled_from([(), (), (), halve, [keep_even, halve]]),
        "logits_processors": st.sampled_from([(), (), lean]),
    }
)


@st.composite
def wishes(draw, width):
    """What else a row may want; often nothing."""
    if draw(st.booleans()):
        return {}
    wanted = {
        "logprobs": draw(st.sampled_from([None, 0, 1, min(5, width), -1])),
        "logprob_token_ids": draw(st.lists(st.integers(0, width - 1), max_size=3, unique=True)),
        "return_kept": draw(st.booleans()),
        "return_probs": draw(st.booleans()),
    }
    if wanted["logprobs"] is not None or wanted["logprob_token_ids"]:
        wanted["logprobs_mode"] = draw(st.sampled_from(["raw", "processed"]))
    return wanted


@st.composite
def batches(draw):
    """(rows [R, V], [(params, prompt, output, mask)], end ids): R requests on one vocabulary."""
    width = draw(st.sampled_from(WIDTHS))
    ends = draw(st.lists(st.integers(0, width - 1), max_size=2))
    rows, asked = [], []
    for _ in range(draw(st.integers(1, 5))):
        at = draw(contexts(width))
        shape = draw(SHAPES)
        kind = draw(st.sampled_from(["normal", "peaked", "ties", "banned", "huge", "+nan", "empty"]))
        rows.append(nasty_row(kind, width, draw(st.integers(0, 2**16))))
        params = SamplingParams(**at.params.asked(), **shape, **draw(wishes(max(1, width // 2))))
        prompt = at.prompt_ids if len(at.prompt_ids) else np.int32([0])
        asked.append((params, prompt, at.output_ids, at.mask))
    return np.stack(rows), asked, ends


def all_allowed(width):
    return np.full(-(-width // 32), -1, np.int32)


def said(logprobs, asked):
    """What is said about each row, in bytes; "" where it wants nothing."""
    fields = dataclasses.fields(Logprobs)
    return [
        tuple(getattr(logprobs.rows(r, r + 1), field.name).tobytes() for field in fields) if params.asks else ""
        for r, (params, *_) in enumerate(asked)
    ]


def drawn(rows, asked, ends, backend="auto", padded_from=None):
    """What klero.sample makes of a batch: (token, status, number kept, message) by row."""
    width = rows.shape[1]
    masks = np.stack([all_allowed(width) if mask is None else mask for *_, mask in asked])
    result = sample(
        rows, [params for params, *_ in asked], prompts=[prompt for _, prompt, *_ in asked],
        outputs=[output for _, _, output, _ in asked], masks=masks, end_token_ids=ends, seeds=7,
        backend=backend, padded_from=padded_from,
    )  # fmt: skip
    told = [result.messages.get(r) for r in range(len(rows))]
    columns = result.token_ids.tolist(), result.status.tolist(), result.num_kept.tolist(), told
    return list(zip(*columns, said(result.logprobs, asked), strict=True))


def padding(width, share):
    """Where padding begins: not before the half that wishes speak of."""
    return max(1, width // 2, round(share * width))


@given(batches(), st.floats(0, 1))
def test_kernel_and_reference_agree(batch, share):
    padded_from = padding(batch[0].shape[1], share)
    right = drawn(*batch, backend="reference", padded_from=padded_from)
    assert drawn(*batch, backend="cpu", padded_from=padded_from) == right
    assert all(token < padded_from for token, *_ in right)


@given(batches())
@settings(max_examples=20)
def test_a_row_alone_is_a_row_in_a_batch(batch):
    rows, asked, ends = batch
    together = drawn(rows, asked, ends)
    for r in range(len(rows)):
        assert drawn(rows[r : r + 1], asked[r : r + 1], ends) == together[r : r + 1]


@given(batches(), st.sampled_from(["cpu", "reference"]), st.floats(0, 1))
def test_the_sampler_over_slots_agrees(batch, backend, share):
    rows, asked, ends = batch
    padded_from = padding(rows.shape[1], share)
    sizes = {"num_slots": len(rows) + 1, "vocab_size": rows.shape[1], "max_len": 60, "padded_from": padded_from}
    sampler = Sampler(**sizes, backend=backend)
    seats = [
        Seat(f"{r}", params, prompt, 7, output_ids=output, end_token_ids=ends)
        for r, (params, prompt, output, _) in enumerate(asked)
    ]
    sampler.release(sampler.setup_step(seats[:1])[0])  # a slot that was used
    slots = sampler.setup_step(seats)
    masks = np.stack([all_allowed(rows.shape[1]) if mask is None else mask for *_, mask in asked])
    state = sampler.sample_async(sampler.step_of(slots), rows, masks)
    right = drawn(rows, asked, ends, padded_from=padded_from)
    assert state.host.token_ids.tolist() == [token for token, *_ in right]
    assert state.host.status.tolist() == [status for _, status, *_ in right]
    assert said(state.host.logprobs, asked) == [what for *_, what in right]
    for update, (token, _, _, told, _) in zip(sampler.update_requests(state), right, strict=True):
        assert (update.token_ids, update.error) == (((token,), None) if told is None else ((), told))


@given(batches())
@settings(max_examples=20)
def test_steps_go_on_as_histories_say(batch):
    """Three steps in a sampler are three calls with the history written out: counts, n-grams and decay follow it."""
    rows, asked, ends = batch
    sampler = Sampler(num_slots=len(rows), vocab_size=rows.shape[1], max_len=60)
    slots = sampler.setup_step(
        Seat(f"{r}", params, prompt, 7, output_ids=output, end_token_ids=ends)
        for r, (params, prompt, output, _) in enumerate(asked)
    )
    live = list(range(len(rows)))
    told = [(params, prompt, output, None) for params, prompt, output, _ in asked]
    for _ in range(3):
        right = drawn(rows[live], [told[r] for r in live], ends) if live else []
        state = sampler.sample_async(sampler.step_of([slots[r] for r in live]), rows[live])
        assert state.host.token_ids.tolist() == [token for token, *_ in right]
        assert said(state.host.logprobs, [asked[r] for r in live]) == [what for *_, what in right]
        sampler.update_requests(state)
        for r, (token, status, *_) in zip(live, right, strict=True):
            params, prompt, output, _ = told[r]
            told[r] = (params, prompt, np.append(output, token).astype(np.int32), None) if status == 0 else told[r]
        live = [r for r, (_, status, *_) in zip(live, right, strict=True) if status == 0]


@given(batches())
@settings(max_examples=20)
def test_explain_tells_what_was_drawn(batch):
    rows, asked, ends = batch
    for r, (token, status, num_kept, told, _) in enumerate(drawn(rows, asked, ends)):
        params, prompt, output, mask = asked[r]
        how = explain(rows[r], params, seed=7, prompt=prompt, output=output, mask=mask, end_token_ids=ends)
        assert (how.token, how.status, len(how.kept), how.message) == (token, status, num_kept, told)
        str(how)


def test_a_history_that_is_needed_must_be_told():
    with pytest.raises(ParameterError, match=r"repetition_penalty=2\.0: reads the history; give prompts= and outputs="):
        sample(np.zeros((1, 4), np.float32), SamplingParams(repetition_penalty=2), positions=0)
    with pytest.raises(ParameterError, match="min_tokens=1: bans the model's end ids; give end_token_ids="):
        sample(np.zeros((1, 4), np.float32), SamplingParams(min_tokens=1), prompts=[[1]], outputs=[[]])
    with pytest.raises(ParameterError, match="bad_words"):
        sample(np.zeros((1, 4), np.float32), SamplingParams(bad_words=["a"]), positions=0)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_padding_is_neither_read_nor_drawn(backend):
    rows = np.float32([[1, 2, 3, 9], [1, 2, 3, np.nan], [1, 2, 3, np.inf]])
    for asked in ({}, {"logit_bias": {0: 0.5, 3: 5}}, {"logits_processors": lambda ids, row: row}):
        told = {"prompts": [[3]] * 3, "outputs": [[]] * 3}
        result = sample(rows, SamplingParams(**asked), padded_from=3, backend=backend, **told)
        assert result.token_ids.tolist() == [2, 2, 2]
        assert result.status.tolist() == [0, 0, 0]


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no words")


def raise_unprintable(*_):
    raise Unprintable


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("field", ["logits_processors", "filters"])
def test_an_error_that_cannot_be_printed_ends_its_own_row(field, backend):
    params = [SamplingParams(temperature=1.0, **{field: raise_unprintable}), SamplingParams(temperature=0.0)]
    told = {"prompts": [[1]] * 2, "outputs": [[]] * 2, "seeds": 1}
    result = sample(np.float32([[1, 2], [1, 2]]), params, backend=backend, **told)
    assert result.status.tolist() == [3, 0]
    assert result.token_ids.tolist() == [-1, 1]
    assert result.messages[0].endswith("raised Unprintable")


def test_half_a_history_is_no_history():
    for told in ({"prompts": [[1]]}, {"outputs": [[1]]}):
        with pytest.raises(ParameterError, match="reads the history"):
            sample(np.zeros((1, 4), np.float32), SamplingParams(repetition_penalty=2), positions=1, **told)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_an_allow_list_may_name_padding(backend):
    sampler = Sampler(num_slots=2, vocab_size=128, max_len=9, padded_from=50, backend=backend)
    asked = SamplingParams(allowed_token_ids=[3, 100])
    slots = sampler.setup_step([Seat("a", asked, [1], 0), Seat("b", SamplingParams(), [1], 0)])
    rows = np.zeros((2, 128), np.float32)
    rows[:, 100] = 9
    masks = np.full((2, 4), -1, np.int32)
    masks.flags.writeable = False
    assert sampler.sample_async(sampler.step_of(slots), rows, masks).host.token_ids.tolist() == [3, 0]


def test_a_seat_that_fails_takes_no_slot(monkeypatch):
    sampler = Sampler(num_slots=2, vocab_size=8, max_len=9)
    good, bad = (Seat(name, SamplingParams(logit_bias={1: 1}), [1], 0) for name in ("good", "bad"))
    monkeypatch.setattr(sampler.rules, "start", lambda index, at: 1 / (1 - index))
    with pytest.raises(ZeroDivisionError):
        sampler.setup_step([good, bad])
    assert sampler.slots.num_free == 2


def test_a_filter_cannot_change_the_row():
    def forge(row):
        row.ids.setflags(write=True)
        row.ids[:] = 3
        return len(row)

    asked = SamplingParams(temperature=1.0, filters=forge, bad_token_ids=[3])
    result = sample(np.zeros((20, 4), np.float32), asked, positions=0, seeds=np.arange(20))
    assert set(result.token_ids.tolist()) == {0, 1, 2}


def test_masks_of_the_other_byte_order():
    for order in "<>":
        masks = np.array([[8]], f"{order}i4")
        assert sample(np.zeros((1, 32), np.float32), SamplingParams(), positions=0, masks=masks).token_ids == [3]


def test_a_row_that_begins_to_draw_needs_a_seed():
    asked = SamplingParams(top_p=0, top_p_decay=0.5, top_p_min=0.9)  # greedy at first, and no longer after a token
    told = {"prompt": [0], "output": [1]}
    with pytest.raises(ParameterError, match="seed"):
        explain([3.0, 2.0, 1.0], asked, **told)
    assert explain([3.0, 2.0, 1.0], asked, prompt=[0], output=[]).token == 0
