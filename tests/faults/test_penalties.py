"""Cases from the field, kind penalties: what counts, how often, and in whose row."""

import numpy as np
import pytest
from tests.faults.rows import BACKENDS, row_after

from klero import Sampler, SamplingParams, Seat, sample
from klero.engine import Engine
from klero.testing import assert_bits, assert_draws
from klero.testing.models import PagedToyModel

pytestmark = pytest.mark.parametrize("backend", BACKENDS)
ZEROS = [0.0] * 6


def test_PN_01_repetition_scales_once_and_by_the_sign(backend):
    """Token 0 occurred three times and token 1 is negative: 2 / 1.5, -1 * 1.5, the others as they were."""
    after = row_after(backend, [2, -1, 0.5, 3], [0], [0, 0, 1], repetition_penalty=1.5)
    assert after.tolist() == pytest.approx([1.333333, -1.5, 0.5, 3.0], abs=1e-6)
    assert after[2:].tolist() == [0.5, 3.0]


def test_PN_03_histories_of_unequal_length_need_no_padding(backend):
    short, long = [4], [1, 1, 2, 3, 5]
    assert row_after(backend, ZEROS, [], short, frequency_penalty=0.75).tolist() == [0, 0, 0, 0, -0.75, 0]
    assert row_after(backend, ZEROS, [], long, frequency_penalty=0.75).tolist() == [0, -1.5, -0.75, -0.75, 0, -0.75]
    # side by side: 0.1 ahead, neither 0 nor 5 was said by the first row, and 5 was by the second
    rows = np.float32([[0, 0, 0, 0, 0.1, 0], [0, 0, 0, 0, 0, 0.1]] * 2)
    params = SamplingParams(frequency_penalty=0.75)
    histories = {"prompts": [[]] * 4, "outputs": [short, long, long, short]}
    assert sample(rows, params, backend=backend, **histories).token_ids.tolist() == [0, 0, 4, 5]


def say(sampler, slots, rows):
    """One step of these slots on these rows; their tokens."""
    state = sampler.sample_async(sampler.step_of(slots), np.array(rows, np.float32))
    return [token for update in sampler.update_requests(state) for token in update.token_ids]


@pytest.mark.parametrize("rival, said", [(1.5, 1), (1.4999, 2)])
def test_PN_04_every_accepted_token_counts(backend, rival, said):
    """2, 2, 2, 5 one by one: 2 has lost 1.5 and ties with token 1 at 1.5; min_tokens=4 has been reached."""
    sampler = Sampler(num_slots=1, vocab_size=6, max_len=8, backend=backend)
    seat = Seat("a", SamplingParams(frequency_penalty=0.5, min_tokens=4), [4], seed=0, end_token_ids=[0])
    (slot,) = sampler.setup_step([seat])
    for token in (2, 2, 2, 5):
        row = np.zeros(6)
        row[0], row[token] = 99, 20  # the end would win if it were not banned
        assert say(sampler, [slot], [row]) == [token]
    free = sampler.step_of([slot])
    assert free.position_of_row.tolist() == [5]
    assert say(sampler, [slot], [[-9, rival, 3, 0, 0, 1.9]]) == [said]


def test_PN_04_the_end_is_free_at_once_after_min_tokens(backend):
    fields = {"frequency_penalty": 0.5, "min_tokens": 4, "stop_token_ids": [0]}
    row, output = [9, 0, 3, 0, 0, 2], [2, 2, 2, 5]
    assert row_after(backend, row, [], output, **fields).tolist() == [9, 0, 1.5, 0, 0, 1.5]
    assert row_after(backend, row, [], output[:3], **fields).tolist() == [-np.inf, 0, 1.5, 0, 0, 2]
    at = {"prompts": [[]], "outputs": [output], "end_token_ids": [0], "backend": backend}
    assert sample(np.float32([row]), SamplingParams(**fields), **at).token_ids.tolist() == [0]


def test_PN_07_a_penalised_row_joins_and_the_others_keep_every_bit(backend):
    assert row_after(backend, [0.0] * 5, [], [3], presence_penalty=1.0).tolist() == [0, 0, 0, -1, 0]
    plain, penalised = SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, presence_penalty=1.0)
    assert_bits(row_after(backend, [0.0] * 5, [], [1, 2], temperature=1.0), np.zeros(5, np.float32))

    def run(joins):
        sampler = Sampler(num_slots=2, vocab_size=5, max_len=80, backend=backend)
        slots = sampler.setup_step([Seat("a", plain, [1], seed=3, output_ids=[2])])
        said = []
        for k in range(60):
            if joins and k == 20:
                slots = sampler.setup_step([Seat("b", penalised, [3], seed=4)]) + slots
            said.append(say(sampler, slots, [[0.0] * 5] * len(slots))[-1])
        return said

    assert run(joins=True) == run(joins=False)


def test_PN_09_a_chunk_of_a_prompt_changes_no_state(backend, monkeypatch):
    """Chunks of 4, 4 and 2: no token is drawn before the last, and then only the prompt is there."""
    prompt, seen = [7, 3, 3, 9, 1, 5, 5, 5, 2, 8], []

    def watch(token_ids, row):
        seen.append(token_ids.tolist())

    def run(budget, **fields):
        engine = Engine(PagedToyModel(vocab_size=16), max_num_batched_tokens=budget, block_size=4)
        assert engine.sampler.backend == backend
        params = SamplingParams(temperature=1.0, seed=5, frequency_penalty=1.0, max_tokens=6, **fields)
        engine.add_request("a", prompt, params)
        return next(o for _ in range(12) for o in engine.step()).outputs[0].token_ids

    monkeypatch.setattr("klero.sampling.sampler.choose_backend", lambda asked: backend)
    tokens = run(4)
    assert tokens == run(64) == run(4, logits_processors=watch)
    assert seen == [prompt + list(tokens[:k]) for k in range(6)]


def test_PN_10_there_is_no_window(backend):
    after = row_after(backend, [1.0] * 10, [], [9, 8, 7, 6, 5], repetition_penalty=2.0)
    assert after.tolist() == [1] * 5 + [0.5] * 5
    after = row_after(backend, [0.0] * 10, [0] * 3000, [9] * 3 + [8] * 3000, frequency_penalty=0.5)
    assert after.tolist() == [0] * 8 + [-1500, -1.5]


def test_PN_12_temperature_comes_after_the_penalties(backend):
    """A: ((4 - 1.5) / 0.5, 3 / 0.5) = (5, 6); B: (8, 6). Rows of both alternate."""
    a = SamplingParams(presence_penalty=1.5, temperature=0.5)
    rows, n = np.tile(np.float32([4, 3]), (2000, 1)), 1000
    drawn = sample(
        rows, [a, SamplingParams(temperature=0.5)] * n, prompts=[[]] * 2 * n, outputs=[[0], []] * n,
        positions=np.repeat(np.arange(n), 2), seeds=[1, 2] * n, backend=backend,
    ).token_ids  # fmt: skip
    for tokens, logits in ((drawn[::2], [5, 6]), (drawn[1::2], [8, 6])):
        p = np.exp(np.float64(logits))
        assert_draws(tokens, p / p.sum(), false_alarm=1e-9)


def test_PN_12_a_row_leaves_and_another_comes(backend):
    """F goes from in front of A, B takes its slot; both say what they say alone, for a hundred seeds."""
    a, plain = SamplingParams(presence_penalty=1.5, temperature=0.5), SamplingParams(temperature=0.5)
    row = np.float32([[4, 3]])
    sampler = Sampler(num_slots=2, vocab_size=2, max_len=8, backend=backend)
    for seed in range(100):
        (gone,) = sampler.setup_step([Seat("f", SamplingParams(frequency_penalty=2), [1], seed=seed)])
        (at_a,) = sampler.setup_step([Seat("a", a, [1], seed=seed, output_ids=[0])])
        assert say(sampler, [gone], row) == [0]
        sampler.release(gone)
        (at_b,) = sampler.setup_step([Seat("b", plain, [1], seed=seed)])
        assert at_b.index == gone.index
        alone = {"seeds": seed, "backend": backend}
        right = [
            *sample(row, plain, positions=1, **alone).token_ids,
            *sample(row, a, prompts=[[1]], outputs=[[0]], **alone).token_ids,
        ]
        assert say(sampler, [at_b, at_a], np.tile(row, (2, 1))) == right
        sampler.release(at_a)
        sampler.release(at_b)
