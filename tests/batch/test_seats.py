"""Who seats sequences: `Seats`, and the Sampler, which draws for a batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.batch.batches import PARAMS, A, B, batch_of, new

from klero import Sampler, SamplingParams
from klero.batch.scheduler_output import ChangedSequence, SchedulerOutput
from klero.batch.seats import Seat, Seats
from klero.errors import OptionError, RequestError, SlotError


class TestWithASampler:
    """The sampler seats, draws, and takes the batch's steps."""

    def batch(self, backend="auto"):
        return batch_of(seats=Sampler(num_slots=3, vocab_size=8, max_len=12, backend=backend))

    def test_its_tokens_are_those_of_a_sampler_alone(self):
        """Two sequences of which one has its first two positions embedded; it draws at the positions behind them."""
        batch, rng = self.batch(), np.random.default_rng(0)
        logits = rng.standard_normal((4, 2, 8)).astype(np.float32)
        embeds = np.zeros((2, 4), np.float32)
        two = new("a", [5], (1, 2, 3, 4), embeds=embeds), new("b", [5, 5, 5], (5, 6, 7, 8))
        batch.update(SchedulerOutput({A: 3, B: 3}, new=two))
        sampler = batch.seats
        for k in range(4):
            arrays, step = batch.fill()
            assert step.position_of_row.tolist() == [3 + k, 3 + k]
            same = np.repeat(logits[k, :1], 2, axis=0)
            state = sampler.sample_async(step, same)
            updates = sampler.update_requests(state)
            assert updates[0].token_ids == updates[1].token_ids  # same seed, position, child, row
            batch.update(SchedulerOutput({A: 1, B: 1}))
            assert arrays.num_sampled == 2
        assert sampler.tokens(batch.slot_of(A)).tolist()[1:] == sampler.tokens(batch.slot_of(B)).tolist()[3:]
        assert sampler.step_of([batch.slot_of(A)]).position_of_row.tolist() == [7]

    def test_it_refuses_drafts(self):
        batch = self.batch()
        batch.update(SchedulerOutput(new=(new("a", [1, 2], (1, 2)),)))
        batch.update(SchedulerOutput({A: 3}, changed=(ChangedSequence(A, draft_ids=(3,)),)))
        _, step = batch.fill()
        with pytest.raises(SlotError, match=r"verifies draft 0.*without draft_ids"):
            batch.seats.sample_async(step, np.zeros((2, 8), np.float32))
        assert batch.seats.history.lengths[0] == 2

    @pytest.mark.parametrize("backend", ["reference", "cpu"])
    def test_padding_rows_touch_nobody(self, backend):
        """Two sequences and three padding rows of NaN: tokens and columns are those without padding."""
        seats = [
            Seat("a", SamplingParams(temperature=1.0, presence_penalty=1.0, logprobs=1), [1, 2], 3),
            Seat("b", PARAMS, [1], 3),
        ]
        rows = np.full((5, 8), np.nan, np.float32)
        rows[:2] = np.random.default_rng(0).standard_normal((2, 8))
        taken = []
        for num_rows in (2, 5):
            sampler = Sampler(num_slots=3, vocab_size=8, max_len=4, backend=backend)
            step = sampler.step_of(sampler.setup_step(seats))
            state = sampler.sample_async(step.padded(num_rows, scratch_slot=2), rows[:num_rows])
            assert state.host.token_ids[2:].tolist() == [-1] * (num_rows - 2)
            columns = {name: sampler.columns[name].tolist() for name in ("row", "seed", "top_p", "asks")}
            lengths = sampler.history.lengths.tolist()
            taken.append((sampler.update_requests(state), columns, lengths, state.host.messages))
        assert taken[0] == taken[1]
        assert taken[0][2] == [3, 2, 0]

    def test_embedded_positions_count_towards_max_len(self):
        sampler = Sampler(num_slots=1, vocab_size=8, max_len=4)
        with pytest.raises(RequestError, match="5 tokens: the history holds 4"):
            sampler.setup_step([Seat("a", PARAMS, [1, 2], 1, num_embedded=3)])
        with pytest.raises(RequestError, match="num_embedded=-1"):
            sampler.setup_step([Seat("a", PARAMS, [1, 2], 1, num_embedded=-1)])
        (slot,) = sampler.setup_step([Seat("a", PARAMS, [1], 1, num_embedded=3)])
        with pytest.raises(SlotError, match="max_len=4"):
            sampler.sample_async(sampler.step_of([slot]), np.zeros((1, 8), np.float32))
        with pytest.raises(SlotError, match="max_len=4"):
            sampler.append(np.array([slot.index]), np.array([1]))
        sampler.release(slot)
        assert sampler.columns["num_embedded"].tolist() == [0]

    @pytest.mark.parametrize("backend", ["reference", "cpu"])
    def test_no_rule_sees_an_embedded_position(self, backend):
        """Penalties, n-grams and min_tokens of ids behind three embedded positions are those of the ids alone."""
        rules = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "no_repeat_ngram_size": 2, "min_tokens": 2}
        rows = np.random.default_rng(3).standard_normal((8, 1, 8)).astype(np.float32)

        def drawn(num_embedded, **asked):
            sampler = Sampler(num_slots=1, vocab_size=8, max_len=16, backend=backend)
            seat = Seat("a", SamplingParams(temperature=0, **asked), [1, 2, 1], 7, end_token_ids=(0,))
            (slot,) = sampler.setup_step([replace(seat, num_embedded=num_embedded)])
            for row in rows:
                sampler.update_requests(sampler.sample_async(sampler.step_of([slot]), row))
            return sampler.tokens(slot).tolist()

        assert drawn(3, **rules) == drawn(0, **rules) != drawn(0)

    def test_append_takes_tokens_that_were_drawn_elsewhere(self):
        sampler = Sampler(num_slots=1, vocab_size=8, max_len=4)
        (slot,) = sampler.setup_step([Seat("a", PARAMS, [1], 1)])
        sampler.append(np.array([0], np.int32), np.array([7], np.int32))
        assert sampler.tokens(slot).tolist() == [1, 7]
        for wrong in (8, -1):
            with pytest.raises(RequestError, match=rf"token_ids=\[{wrong}\]"):
                sampler.append(np.array([0], np.int32), np.array([wrong], np.int32))
        assert sampler.tokens(slot).tolist() == [1, 7]


class TestSeats:
    """The least that can seat sequences."""

    def test_all_or_none(self):
        seats = Seats(1, 4)
        with pytest.raises(SlotError, match="2 sequences for 1 free slots"):
            seats.setup_step([Seat("a", PARAMS, [1], 1), Seat("b", PARAMS, [1], 1)])
        with pytest.raises(RequestError, match="b: prompt_ids"):
            seats.setup_step([Seat("a", PARAMS, [1], 1), Seat("b", PARAMS, "text", 1)])
        assert seats.slots.num_free == 1
        (slot,) = seats.setup_step([Seat("a", PARAMS, [1], 1, output_ids=[2, 3])])
        assert seats.history.tokens(slot.index).tolist() == [1, 2, 3]
        seats.release(slot)
        assert seats.history.lengths.tolist() == [0]
        with pytest.raises(SlotError):
            seats.release(slot)

    @pytest.mark.parametrize("ids", [[[1]], [1.5], [-1], [2**31], [[1], [1, 2]], None])
    def test_what_is_no_list_of_ids(self, ids):
        with pytest.raises(RequestError, match="a: prompt_ids: must be token ids"):
            Seats(1, 4).checked([Seat("a", PARAMS, ids, 1)])

    def test_sizes(self):
        with pytest.raises(OptionError, match="max_len=0"):
            Seats(1, 0)
        with pytest.raises(RequestError, match="child=-1"):
            Seats(1, 4).checked([Seat("a", PARAMS, [1], 1, child=-1)])
