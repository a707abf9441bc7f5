"""Sampler: the three moments over slots."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from klero import LogitsError, ParameterError, SamplingParams, sample
from klero.batch import Slot
from klero.errors import RequestError, SlotError
from klero.finish import Finish
from klero.sampling.sampler import Sampler, Seat

HOT = SamplingParams(temperature=1.0)


def make(num_slots=4, vocab_size=8, **options):
    return Sampler(num_slots=num_slots, vocab_size=vocab_size, max_len=32, **options)


def one_step(sampler, slots, logits):
    return sampler.update_requests(sampler.sample_async(sampler.step_of(slots), logits))


@given(
    order=st.permutations(range(4)),
    seeds=st.lists(st.integers(0, 2**64 - 1), min_size=4, max_size=4),
    backend=st.sampled_from(["cpu", "reference"]),
)
def test_tokens_equal_klero_sample_in_every_slot_and_order(order, seeds, backend):
    params = [HOT, SamplingParams(top_k=3, temperature=2.0), SamplingParams(top_p=0.5), SamplingParams()]
    logits = np.random.default_rng(seeds[0]).standard_normal((4, 8)).astype(np.float32)
    prompts = [[1], [2, 3], [4, 5, 6], [7]]
    sampler = make(backend=backend)
    seated = sampler.setup_step(
        Seat(f"{i}", params[i], prompts[i], seeds[i], child=i) for i in order
    )
    slots = dict(zip(order, seated, strict=True))
    updates = one_step(sampler, [slots[i] for i in range(4)], logits)
    alone = sample(logits, params, positions=[1, 2, 3, 1], seeds=seeds, children=range(4), backend="reference")
    assert [u.token_ids for u in updates] == [(t,) for t in alone.token_ids]
    for i in range(4):
        assert sampler.tokens(slots[i]).tolist() == [*prompts[i], alone.token_ids[i]]


def test_a_slot_is_read_by_its_owner_alone():
    sampler = make()
    (a,) = sampler.setup_step([Seat("a", HOT, [1], 0)])
    sampler.release(a)
    (b,) = sampler.setup_step([Seat("b", HOT, [2], 0)])
    assert b.index == a.index
    for touch in (sampler.tokens, sampler.release, lambda slot: sampler.step_of([slot])):
        with pytest.raises(SlotError, match="belongs to 'b' now"):
            touch(a)
    assert sampler.tokens(b).tolist() == [2]
    with pytest.raises(SlotError):
        sampler.tokens(Slot(9, 0))


def test_a_released_slot_keeps_nothing_of_its_owner():
    """IB-01: what one sequence asked for never acts on the next one in its slot."""
    sampler = make(num_slots=1)
    (a,) = sampler.setup_step([Seat("a", SamplingParams(temperature=9.0, top_k=3), [1, 2, 3], 77, child=5)])
    sampler.release(a)
    assert not sampler.columns["row"]["greedy"][0]
    assert sampler.columns["row"]["reciprocal"][0] == 1
    assert sampler.columns["seed"][0] == 0
    assert sampler.columns["child"][0] == 0
    assert sampler.history.lengths[0] == 0


def test_a_row_whose_slot_was_released_meanwhile_is_dropped():
    sampler = make()
    a, b = sampler.setup_step([Seat("a", HOT, [1], 0), Seat("b", HOT, [2], 1)])
    state = sampler.sample_async(sampler.step_of([a, b]), np.zeros((2, 8), np.float32))
    sampler.release(a)
    (c,) = sampler.setup_step([Seat("c", HOT, [3], 2)])
    assert c.index == a.index
    assert [u.slot for u in sampler.update_requests(state)] == [b]
    assert sampler.tokens(c).tolist() == [3]


def test_min_tokens_bans_on_its_row_alone():
    short, free = SamplingParams(min_tokens=2), SamplingParams()
    sampler = make()
    finish = Finish(short, end_token_ids=[7], max_tokens=9)
    a, b = sampler.setup_step([Seat("a", short, [1], 0, finish=finish, end_token_ids=[7]), Seat("b", free, [1], 0)])
    logits = np.zeros((2, 8), np.float32)
    logits[:, 7], logits[:, 3] = 2, 1
    before = logits.copy()
    tokens = [[u.token_ids[0] for u in one_step(sampler, [a, b], logits)] for _ in range(3)]
    assert tokens == [[3, 7], [3, 7], [7, 7]]
    assert np.array_equal(logits, before)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
def test_a_ban_does_not_hide_a_bad_row(bad):
    params = SamplingParams(min_tokens=1)
    sampler = make()
    finish = Finish(params, end_token_ids=[7], max_tokens=9)
    (a,) = sampler.setup_step([Seat("a", params, [1], 0, finish=finish, end_token_ids=[7])])
    logits = np.zeros((1, 8), np.float32)
    logits[0, 7] = bad
    (update,) = one_step(sampler, [a], logits)
    assert update.token_ids == ()
    assert "NaN or +inf" in update.error
    assert sampler.tokens(a).tolist() == [1]


def test_bad_seats_and_logits_are_refused():
    sampler = make()
    for prompt in ([], [8], [-1], [[1]], [1.5]):
        with pytest.raises(RequestError, match="prompt_ids"):
            sampler.setup_step([Seat("a", HOT, prompt, 0)])
    with pytest.raises(RequestError, match="33 tokens"):
        sampler.setup_step([Seat("a", HOT, [1] * 33, 0)])
    assert sampler.slots.num_free == 4
    (a,) = sampler.setup_step([Seat("a", HOT, [1], 0)])
    with pytest.raises(LogitsError, match="1 rows of 8"):
        sampler.sample_async(sampler.step_of([a]), np.zeros((1, 9), np.float32))


def test_seats_are_taken_together_or_not_at_all():
    sampler = make(num_slots=2)
    good = Seat("good", HOT, [1], 0)
    for bad, error in [
        (Seat("bad", HOT, [], 0), RequestError),
        (Seat("bad", HOT, [1], 2**64), ParameterError),
        (Seat("bad", HOT, [1], None), ParameterError),
        (Seat("bad", HOT, [1], 0, child=-1), ParameterError),
    ]:
        with pytest.raises(error):
            sampler.setup_step([good, bad])
    with pytest.raises(SlotError, match="3 sequences for 2 free slots"):
        sampler.setup_step([good, good, good])
    assert sampler.slots.num_free == 2


def test_a_negative_seed_is_the_same_bits():
    sampler = make()
    sampler.setup_step([Seat("a", HOT, [1], -1)])
    assert sampler.columns["seed"][0] == 2**64 - 1


def test_a_step_serves_its_owners_once():
    sampler = make()
    logits = np.zeros((1, 8), np.float32)
    (a,) = sampler.setup_step([Seat("a", HOT, [1], 0)])
    stale = sampler.step_of([a])
    sampler.release(a)
    with pytest.raises(SlotError, match="is free"):
        sampler.sample_async(stale, logits)
    (b,) = sampler.setup_step([Seat("b", HOT, [2], 0)])
    with pytest.raises(SlotError, match="belongs to 'b' now"):
        sampler.sample_async(stale, logits)
    step = sampler.step_of([b])
    state = sampler.sample_async(step, logits)
    assert len(sampler.update_requests(state)) == 1
    with pytest.raises(SlotError, match="taken once"):
        sampler.update_requests(state)
    with pytest.raises(SlotError, match="for position 1, and 2 comes next"):
        sampler.sample_async(step, logits)
    with pytest.raises(SlotError, match="twice"):
        sampler.sample_async(sampler.step_of([b, b]), np.zeros((2, 8), np.float32))
    assert len(sampler.tokens(b)) == 2


def test_a_full_history_is_refused_before_anything_changes():
    sampler = make()
    a, b = sampler.setup_step([Seat("a", HOT, [1] * 32, 0), Seat("b", HOT, [1], 0)])
    with pytest.raises(SlotError, match="max_len=32"):
        sampler.sample_async(sampler.step_of([a, b]), np.zeros((2, 8), np.float32))
    assert len(sampler.tokens(b)) == 1


def test_rules_that_raise_end_their_sequence_alone():
    class Broken:
        def push(self, token_id):
            raise ValueError("broken rules")

    sampler = make()
    a, b = sampler.setup_step([Seat("a", HOT, [1], 0, finish=Broken()), Seat("b", HOT, [1], 0)])
    first, second = one_step(sampler, [a, b], np.zeros((2, 8), np.float32))
    assert first.error == "ValueError: broken rules"
    assert second.error is None
    assert len(second.token_ids) == 1


def test_a_step_without_rows():
    sampler = make()
    assert one_step(sampler, [], np.zeros((0, 8), np.float32)) == []
