"""The scheduler: who computes what and when, who gives way, and who is refused."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from tests.engine.free import assert_all_free
from tests.engine.scheduling import choices, end, engine_of, held, hot, running, tokens_of

from klero import OptionError, ParameterError
from klero.errors import QueueFullError, RequestError
from klero.testing.models import PagedToyModel, ToyModel

# --- the bounds that the docstring states


def watched(engine):
    """Step; the sequences with a part in it, and how much it computes for each."""
    plans, schedule = [], engine.scheduler.schedule
    engine.scheduler.schedule = lambda: plans.append(schedule()) or plans[-1]
    engine.step()
    engine.scheduler.schedule = schedule
    return {plan.choice: plan for plan in plans[0].planned}


def measure(source):
    """One random workload: in every step, whoever runs gets on, and nobody waits for one that ranks after him."""
    size, by_priority = source.choice([1, 3, 4, 16]), source.random() < 0.5
    model = PagedToyModel(max_model_len=64)
    engine = engine_of(
        model, block_size=size, num_blocks=-(-64 // size) + source.randrange(4),
        max_num_batched_tokens=source.choice([1, 2, 3, 8, 20, 64]), max_num_seqs=source.choice([1, 2, 3, 8]),
        enable_prefix_caching=source.random() < 0.5, scheduling_policy="priority" if by_priority else "fcfs",
        swap_space=source.choice([0, 3, 40]) * model.bytes_per_block(size) / 2**30,
    )  # fmt: skip
    arriving, steps, steps_of_prompt = defaultdict(list), 0, defaultdict(int)
    for i in range(source.randrange(2, 9)):
        params = hot(source.randrange(1, 34), i, n=source.choice([1, 1, 2, 4]))
        priority = source.randrange(3) if by_priority else 0
        prompt = [source.randrange(3)] * source.randrange(1, 30)
        arriving[source.randrange(15)].append((str(i), prompt, params, priority))
    while arriving or engine.num_unfinished:
        for name, prompt, params, priority in arriving.pop(steps, ()):
            engine.add_request(name, prompt, params, priority=priority)
        steps += 1
        if not engine.num_unfinished:
            continue
        scheduler, alive = engine.scheduler, list(choices(engine).values())
        before, num_preemptions = list(scheduler.running), scheduler.num_preemptions
        decoding = {c: c.finish.num_tokens for c in before if c.num_tokens - c.num_computed == 1}
        parts = watched(engine)
        gone = [c for c in before if c not in parts]
        assert all(plan.num_new >= 1 for plan in parts.values())
        assert sum(plan.num_new for plan in parts.values()) <= engine.batch.max_num_batched_tokens
        assert not any(c.running for c in gone), "who runs has a part in every step"
        assert all(c.finish.num_tokens == num + 1 for c, num in decoding.items() if c in parts), "decodes get a token"
        first = min(alive, key=lambda c: c.rank)
        # a child waits for its first sibling's prompt, and may find the room taken then
        assert first in parts or first.index > 0 or scheduler.num_preemptions > num_preemptions, "the first in rank"
        for choice in gone:  # preempted: the last in rank
            assert all(other.rank < choice.rank for other in before if other in parts)
        for choice, plan in parts.items():
            if choice not in before:
                steps_of_prompt[choice] = 0
            steps_of_prompt[choice] += 1
            if plan.samples:
                assert steps_of_prompt.pop(choice) <= choice.num_tokens
                steps_of_prompt[choice] = 0
    assert_all_free(engine)
    return engine.scheduler.num_preemptions


@pytest.mark.parametrize("seed", range(3))
def test_the_stated_bounds_hold(seed):
    """A decode gets a token in every step, a prompt of P tokens is done in P steps, the first in rank goes first."""
    source = random.Random(seed)
    assert sum(measure(source) for _ in range(6)) > 0


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(3, 24))
def test_the_stated_bounds_hold_at_length(seed):
    source = random.Random(seed)
    for _ in range(40):
        measure(source)


def test_a_prompt_comes_in_chunks_beside_decodes():
    """Budget 4: one token for the decode, three for the prompt of eight."""
    engine = engine_of(max_num_batched_tokens=4)
    engine.add_request("a", [1], hot(20))
    engine.step()
    engine.add_request("b", [2] * 8, hot(4))
    done = []
    for _ in range(3):
        engine.step()
        done.append(choices(engine)["b"].num_computed)
    assert done == [3, 6, 8]
    assert choices(engine)["a"].finish.num_tokens == 4


# --- priority


def test_the_lower_number_goes_first_and_takes_the_place_of_a_higher_one():
    engine = engine_of(max_num_seqs=2, scheduling_policy="priority")
    for name, priority in [("a", 1), ("b", 1), ("c", 0), ("d", 1), ("e", -5)]:
        engine.add_request(name, [1, 2, 3], hot(6), priority=priority)
        if name == "b":
            engine.step()
            assert running(engine) == ["a", "b"]
        if name == "c":
            engine.step()
            assert running(engine) == ["c", "a"]  # b is the youngest of priority 1
    engine.step()
    assert running(engine) == ["e", "c"]
    found = end(engine)
    assert list(found) == ["c", "e", "a", "b", "d"]
    for name, preempted in [("a", 1), ("b", 1), ("c", 0), ("d", 0), ("e", 0)]:
        assert [choice.token_ids for choice in found[name].outputs] == tokens_of([1, 2, 3], hot(6))
        assert found[name].metrics.num_preemptions == preempted, name


@pytest.mark.parametrize("model", [ToyModel, PagedToyModel])
def test_a_full_budget_holds_nobody_back(model):
    """One token a step, and a decode of priority 1 has it; who has priority 0 does not wait for its end."""
    engine = engine_of(model(), max_num_batched_tokens=1, scheduling_policy="priority")
    engine.add_request("late", [1], hot(30), priority=1)
    engine.step()
    engine.add_request("soon", [2], hot(3), priority=0)
    assert [o.request_id for _ in range(3) for o in engine.step()] == ["soon"]
    assert end(engine)["late"].outputs[0].token_ids == tokens_of([1], hot(30))[0]


def test_the_chunk_of_a_higher_number_is_cut():
    """A prompt of 40 takes 8 tokens a step; 5 of the second chunk go to a prompt of priority 0."""
    engine = engine_of(max_num_batched_tokens=8, scheduling_policy="priority")
    engine.add_request("long", [1] * 40, hot(2), priority=1)
    engine.step()
    engine.add_request("short", [2] * 5, hot(2))
    engine.step()
    assert {name: choice.num_computed for name, choice in choices(engine).items()} == {"long": 11, "short": 5}
    assert engine.scheduler.num_preemptions == 0
    assert list(end(engine)) == ["short", "long"]


def test_nobody_loses_his_place_because_one_before_them_has_a_long_prompt():
    """The chunks of priority 0 leave no token in two steps; priority 1 waits for them, and the decode of 2 runs on."""
    engine = engine_of(max_num_batched_tokens=8, scheduling_policy="priority")
    engine.add_request("last", [1], hot(20), priority=2)
    engine.step()
    engine.add_request("long", [2] * 16, hot(9), priority=0)
    engine.add_request("middle", [3] * 3, hot(9), priority=1)
    seen = []
    for _ in range(3):
        engine.step()
        seen.append(running(engine))
    assert seen == [["long", "last"], ["long", "last"], ["long", "middle", "last"]]
    assert engine.scheduler.num_preemptions == 0
    assert choices(engine)["last"].finish.num_tokens == 4
    end(engine)


def test_nobody_loses_his_place_to_one_that_siblings_keep_out():
    """b0 takes the place of a1, and b1 and b2 will take what comes next: c, behind them, unseats nobody."""
    engine = engine_of(max_num_seqs=2, max_num_batched_tokens=4, scheduling_policy="priority")
    engine.add_request("a", [1], hot(30, n=2))
    for _ in range(3):
        engine.step()
    engine.add_request("b", [2] * 20, hot(3, n=3), priority=-1)
    engine.add_request("c", [3] * 3, hot(3), priority=-1)
    for _ in range(6):
        engine.step()
        assert running(engine) == ["b0", "a0"]
    assert engine.scheduler.num_preemptions == 1
    found = end(engine)
    assert [choice.token_ids for choice in found["a"].outputs] == tokens_of([1], hot(30, n=2))


def test_priority_needs_the_policy():
    engine = engine_of()
    with pytest.raises(RequestError, match="priority=3: scheduling_policy is 'fcfs'"):
        engine.add_request("a", [1], hot(2), priority=3)
    with pytest.raises(RequestError, match=r"priority=1\.5"):
        engine_of(scheduling_policy="priority").add_request("a", [1], hot(2), priority=1.5)
    with pytest.raises(OptionError, match="scheduling_policy"):
        engine_of(scheduling_policy="lottery")
    assert engine.num_unfinished == 0


# --- blocks run out


def test_the_youngest_of_the_last_priority_is_preempted():
    """Three of 8 + 12 tokens in 9 blocks of 4: b of priority 2 goes first, then c; a never."""
    engine = engine_of(num_blocks=9, scheduling_policy="priority", enable_prefix_caching=False)
    for name, priority in [("a", 1), ("b", 2), ("c", 1)]:
        engine.add_request(name, [3] * 7, hot(13), priority=priority)
    waiting = []
    while engine.num_unfinished:
        engine.step()
        waits = [name for name, choice in choices(engine).items() if not choice.running]
        waiting += [waits] if waits and waits not in waiting[-1:] else []
    assert waiting == [["b"], ["b", "c"], ["b"]]


def test_a_preempted_sequence_is_not_let_in_by_the_step_that_preempts_it():
    engine = engine_of(num_blocks=6, enable_prefix_caching=False)
    engine.add_request("a", [1] * 7, hot(13))
    engine.add_request("b", [2] * 7, hot(13))
    while engine.scheduler.num_preemptions == 0:
        engine.step()
    assert running(engine) == ["a"]
    assert (held(engine)["b"], choices(engine)["b"].num_computed) == ([], 0)
    found = end(engine)
    assert found["b"].metrics.num_preemptions == 1
    assert [found[name].outputs[0].token_ids for name in "ab"] == [
        tokens_of([1] * 7, hot(13))[0], tokens_of([2] * 7, hot(13))[0],
    ]  # fmt: skip


def test_what_can_never_fit_is_refused_and_the_rest_goes_on():
    engine = engine_of(num_blocks=3)
    engine.add_request("good", [1] * 4, hot(8))
    engine.step()
    before = held(engine)
    for prompt, params, error, words in [
        ([1] * 13, hot(1), RequestError, "all KV blocks together hold 12"),
        ([1] * 4, hot(9), ParameterError, "all KV blocks together hold 12"),
        ([1] * 12, hot(1), RequestError, "truncate_prompt_tokens"),
    ]:
        with pytest.raises(error, match=words):
            engine.add_request("bad", prompt, params)
    with pytest.raises(RequestError, match="is running"):
        engine.add_request("good", [1], hot(1))
    for name in ("bad", "never"):
        with pytest.raises(RequestError, match="no such request"):
            engine.abort(name)
    assert held(engine) == before
    engine.add_request("cut", [9] * 9 + [1] * 4, hot(8, truncate_prompt_tokens=4))
    found = end(engine)
    assert found["good"].outputs[0].token_ids == found["cut"].outputs[0].token_ids == tokens_of([1] * 4, hot(8))[0]
    with pytest.raises(RequestError, match="no such request"):
        engine.abort("good")


def test_a_full_queue_says_so_and_takes_nothing():
    engine = engine_of(ToyModel(), max_num_seqs=1, max_num_waiting=2)
    engine.add_request("a", [1], hot(3))
    engine.step()
    engine.add_request("b", [1], hot(3))
    with pytest.raises(QueueFullError, match="1 choices wait, this request brings 2, and max_num_waiting=2"):
        engine.add_request("c", [1], hot(3, n=2))
    engine.add_request("c", [1], hot(3))
    with pytest.raises(QueueFullError, match="2 choices wait"):
        engine.add_request("d", [1], hot(3))
    assert "d" not in engine
    engine.step()
    engine.step()
    engine.step()
    engine.add_request("d", [1], hot(3))
    assert list(end(engine)) == ["b", "c", "d"]
