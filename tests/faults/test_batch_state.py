"""Cases from the field, kinds batch_state and overlap, and seeds and penalties under preemption."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tests.engine.free import assert_all_free
from tests.faults.rows import RowsModel

from klero import Sampler, SamplingParams, Seat, sample
from klero.batch import Buckets, InputBatch, NewSequence, SchedulerOutput
from klero.engine import Engine
from klero.errors import RequestError, SlotError
from klero.testing.models import PagedToyModel, ScriptedModel, ToyModel

FIVE = [0.0] * 5 + [9.0] + [0.0] * 10  # of 16 tokens, token 5 is the likeliest


def slots_of(engine):
    return {choice.request.request_id: index for index, choice in engine._choice_of_slot.items()}


def end(engine, **found):
    """Step to the end; the tokens of the first choice by name, with those that are known."""
    while engine.num_unfinished:
        found |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
    assert_all_free(engine)
    return found


def test_IB_01_a_mask_stays_with_its_request():
    """A leaves and nothing moves; B leaves, and D, who wants nothing, sits where B sat."""
    engine = Engine(RowsModel([FIVE]), max_num_seqs=3)
    only = SamplingParams(max_tokens=9, allowed_token_ids=[13])
    for name, params in [("a", SamplingParams(max_tokens=9)), ("b", only), ("c", SamplingParams(max_tokens=9))]:
        engine.add_request(name, [1], params)
    engine.step()
    seats = slots_of(engine)
    engine.abort("a")
    engine.step()
    assert slots_of(engine) == {name: seats[name] for name in "bc"}
    b = engine.abort("b").outputs[0].token_ids
    engine.add_request("d", [1], SamplingParams(max_tokens=3))
    engine.step()
    assert slots_of(engine) == {"c": seats["c"], "d": seats["b"]}
    assert end(engine, b=b) == {"b": (13, 13), "c": (5,) * 9, "d": (5,) * 3}


def test_IB_01_two_that_change_seats_take_everything_along():
    """Whoever has priority takes both seats; b and c come back into each other's, b's mask and c's bans with them."""
    engine = Engine(RowsModel([FIVE]), max_num_seqs=2, scheduling_policy="priority")
    engine.add_request("b", [1], SamplingParams(max_tokens=8, allowed_token_ids=[13]), priority=1)
    engine.add_request("c", [1], SamplingParams(max_tokens=8, logit_bias={5: -100, 7: 1}), priority=1)
    engine.step()
    before = slots_of(engine)
    engine.add_request("first", [1], SamplingParams(max_tokens=3))
    engine.add_request("second", [1], SamplingParams(max_tokens=1))
    found = {}
    for _ in range(4):
        found |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
    assert slots_of(engine) == {"b": before["c"], "c": before["b"]}
    found = end(engine, **found)
    assert found == {"first": (5,) * 3, "second": (5,), "b": (13,) * 8, "c": (7,) * 8}


def test_IB_01_a_seat_that_was_left_is_as_new():
    """Every column of batch, sampler, counts and rules has its neutral value once everybody has gone."""
    source = random.Random(1)
    engine = Engine(PagedToyModel(vocab_size=16), max_num_seqs=3, block_size=4, num_blocks=64)
    new = Engine(PagedToyModel(vocab_size=16), max_num_seqs=3, block_size=4, num_blocks=64)
    for i in range(12):
        params = SamplingParams(
            temperature=0.5, top_k=3, seed=i, n=source.choice([1, 2]), max_tokens=9, allowed_token_ids=[1, 2, 3],
            logit_bias={2: 1.0}, frequency_penalty=1.0, repetition_penalty=2.0, no_repeat_ngram_size=3,
            bad_token_ids=[[4, 5]], min_tokens=2, stop_token_ids=[3], top_p=0.9, top_p_decay=0.9, logprobs=1,
        )  # fmt: skip
        engine.add_request(str(i), [source.randrange(16) for _ in range(source.randrange(1, 9))], params)
        for _ in range(source.randrange(4)):
            engine.step()
        if source.random() < 0.3 and str(i) in engine:
            engine.abort(str(i))
    end(engine)
    for ours, theirs in [(engine.batch.columns, new.batch.columns), (engine.sampler.columns, new.sampler.columns)]:
        for name in ours._declared:
            assert np.array_equal(ours[name], theirs[name]), name
    assert not engine.sampler.history.lengths.any()
    assert not engine.sampler.rules.patched(np.arange(3)).any()
    # and whoever sits there next says what he says on a new engine
    for one in (engine, new):
        one.add_request("plain", [1, 2, 3], SamplingParams(temperature=1.0, seed=3, max_tokens=20))
    assert end(engine) == end(new)


def sequence(name, prompt, seed, block_ids):
    return NewSequence(name, Seat(name, SamplingParams(temperature=1.0), prompt, seed), block_ids)


def test_OV_01_a_token_in_flight_is_dropped_with_its_request():
    """A is aborted between its forward and its token, and D sits down in its seat before the token comes."""
    sampler = Sampler(num_slots=2, vocab_size=8, max_len=16)
    batch = InputBatch(max_num_seqs=2, max_num_batched_tokens=8, max_len=16, block_size=4, seats=sampler)
    a, b, d = ("a", 0), ("b", 0), ("d", 0)
    batch.update(SchedulerOutput({a: 1, b: 1}, new=(sequence("a", [1], 1, (0,)), sequence("b", [2], 2, (1,)))))
    _, step = batch.fill()
    late = sampler.sample_async(step, np.zeros((2, 8), np.float32))
    old = batch.slot_of(a)
    batch.update(SchedulerOutput(finished=(a,)))
    assert batch.num_blocks_of_slot.tolist() == [0, 1]
    with pytest.raises(RequestError, match=r"finished: \('a', 0\) is not in the batch"):
        batch.update(SchedulerOutput(finished=(a,)))
    batch.update(SchedulerOutput(new=(sequence("d", [3], 3, (0,)),)))
    assert batch.slot_of(d).index == old.index
    updates = sampler.update_requests(late)
    assert [update.slot for update in updates] == [batch.slot_of(b)]
    assert sampler.tokens(batch.slot_of(d)).tolist() == [3]
    with pytest.raises(SlotError, match="belongs to 'd' now"):
        sampler.tokens(old)
    batch.update(SchedulerOutput({b: 1, d: 1}))
    arrays, _ = batch.fill()
    assert arrays.input_ids.tolist() == [updates[0].token_ids[0], 3]
    assert arrays.positions.tolist() == [1, 0]


def test_OV_01_nothing_is_said_after_the_end_or_an_abort():
    engine = Engine(ScriptedModel([4, 5, 7], end_token_ids=[7]))
    engine.add_request("stops", [1], SamplingParams(max_tokens=9), stream=True)
    engine.add_request("aborted", [1], SamplingParams(max_tokens=9, ignore_eos=True), stream=True)
    engine.step()
    deltas, outputs = engine.take_deltas(), {"aborted": engine.abort("aborted")}
    for _ in range(2):
        outputs |= {output.request_id: output for output in engine.step()}
    deltas += engine.take_deltas()
    said = {name: [delta.token_ids for delta in deltas if delta.request_id == name] for name in outputs}
    assert said == {"stops": [(4,), (5,), (7,)], "aborted": [(4,), ()]}
    ends = {name: (o.outputs[0].finish_reason, o.metrics.num_generated_tokens) for name, o in outputs.items()}
    assert ends == {"stops": ("stop", 3), "aborted": ("abort", 1)}
    assert engine.step() == []
    assert engine.take_deltas() == []
    assert_all_free(engine)


def test_OV_03_padded_prefills_take_nobodys_token():
    """Two prompts of 3 tokens, each padded to 4, one after the other, then both decode."""
    found = []
    for buckets in (None, Buckets((4,), (2,))):
        engine = Engine(PagedToyModel(), max_num_seqs=2, max_num_batched_tokens=4, block_size=4, buckets=buckets)
        engine.add_request("a", [1, 2, 3], SamplingParams(temperature=1.0, seed=1, max_tokens=9))
        engine.step()
        engine.add_request("b", [4, 5, 6], SamplingParams(temperature=1.0, seed=2, max_tokens=9))
        found.append(end(engine))
    assert found[0] == found[1]


HEAVY = SamplingParams(
    temperature=1.0, seed=5, max_tokens=14, frequency_penalty=0.5, presence_penalty=0.5, repetition_penalty=1.3,
    no_repeat_ngram_size=2, top_p=0.95, top_p_decay=0.9, top_p_min=0.3, top_p_reset_id=3, min_tokens=9,
    stop_token_ids=[1],
)  # fmt: skip


def disturbed(engine, *, after, seat=False):
    """Run a request that is preempted after so many tokens, with its seat or without; its tokens, and what was drawn.

    Whoever takes its seat has penalties of his own.
    """
    request = engine.add_request("r", [1, 2, 3, 2], HEAVY, priority=int(seat))
    (choice,), drawn, left = request.choices, [], set(after)
    while choice.finished is None:
        num = choice.finish.num_tokens
        engine.step()
        drawn += [num] * (choice.finish.num_tokens - num)
        if choice.finish.num_tokens in left and choice.finished is None and choice.running:
            left.remove(choice.finish.num_tokens)
            if seat:
                other = SamplingParams(temperature=1.0, seed=9, max_tokens=2, frequency_penalty=2, top_k=4)
                engine.add_request(f"other{num}", [5, 5, 5], other)
            else:
                engine.scheduler.preempt(choice)
    assert not left
    end(engine)
    return choice.finish.token_ids, drawn


@pytest.mark.parametrize("num_host_blocks", [0, 40])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("budget", [2, 64])
def test_SD_04_PN_09_preempted_with_lots_counts_and_top_p(num_host_blocks, caching, budget):
    """After 5 and 9 tokens the blocks go, or the seat too; the next draw is number 5, and then number 9."""
    model = PagedToyModel(vocab_size=16)
    options = {
        "block_size": 4, "max_num_batched_tokens": budget, "enable_prefix_caching": caching, "max_num_seqs": 1,
        "swap_space": num_host_blocks * model.bytes_per_block(4) / 2**30, "scheduling_policy": "priority",
    }  # fmt: skip
    undisturbed = disturbed(Engine(ToyModel(vocab_size=16)), after=[])
    assert undisturbed[1] == list(range(len(undisturbed[0])))
    assert len(undisturbed[0]) > 9
    for seat in (False, True):
        engine = Engine(PagedToyModel(vocab_size=16), **options)
        assert disturbed(engine, after=[5, 9], seat=seat) == undisturbed
        assert engine.scheduler.num_preemptions == 2


def test_PN_09_a_prompt_that_is_preempted_half_way_has_drawn_nothing():
    """Chunks of 4 of a prompt of 10; after each it is preempted once. The first draw sees the prompt alone."""
    seen = []

    def watch(token_ids, row):
        seen.append(token_ids.tolist())

    prompt = [7, 3, 3, 9, 1, 5, 5, 5, 2, 8]
    params = SamplingParams(temperature=1.0, seed=5, frequency_penalty=1.0, max_tokens=3, logits_processors=watch)
    engine = Engine(PagedToyModel(vocab_size=16), max_num_batched_tokens=4, block_size=4, enable_prefix_caching=False)
    (choice,) = engine.add_request("a", prompt, params).choices
    for chunks in (1, 2):
        for _ in range(chunks):
            engine.step()
        assert choice.num_computed == 4 * chunks
        engine.scheduler.preempt(choice)
    tokens = end(engine)["a"]
    assert seen == [prompt, [*prompt, tokens[0]], [*prompt, *tokens[:2]]]


def test_PN_12_whoever_comes_back_has_his_own_counts():
    """A said 0 and is preempted, F goes, B comes: A has (4 - 1.5, 3) / 0.5, B has (4, 3) / 0.5, whatever the seats."""
    row = np.float32([[4, 3]])
    a, b = SamplingParams(presence_penalty=1.5, temperature=0.5), SamplingParams(temperature=0.5)
    for seed in range(30):
        engine = Engine(RowsModel([row[0]], max_model_len=16), max_num_seqs=2)
        f = SamplingParams(frequency_penalty=2, max_tokens=1)
        engine.add_request("f", [1], f)
        (of_a,) = engine.add_request(
            "a", [1], SamplingParams(presence_penalty=1.5, temperature=0.5, seed=seed, max_tokens=2)
        ).choices
        engine.step()
        engine.scheduler.preempt(of_a)
        engine.add_request("b", [1], SamplingParams(temperature=0.5, seed=seed, max_tokens=1))
        found = end(engine)
        first = int(sample(row, a, prompts=[[1]], outputs=[[]], seeds=seed).token_ids[0])
        second = int(sample(row, a, prompts=[[1]], outputs=[[first]], seeds=seed).token_ids[0])
        assert found["a"] == (first, second)
        assert found["b"] == tuple(sample(row, b, positions=1, seeds=seed).token_ids.tolist())
