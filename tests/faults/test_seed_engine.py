"""Faults around seeds that need an engine."""

from __future__ import annotations

import pytest

from klero import SamplingParams
from klero.engine import LLM, Engine
from klero.testing.models import PagedToyModel, ToyModel


def run(engine, preempt_after=()):
    """Step to the end, preempting after so many output tokens; the tokens and the positions that were drawn."""
    request = engine.add_request("r", [1, 2, 3], SamplingParams(temperature=1.0, seed=5, max_tokens=12))
    (choice,) = request.choices
    drawn = []
    while choice.finished is None:
        before = choice.finish.num_tokens
        engine.step()
        if choice.finish.num_tokens > before:
            drawn.append(3 + before)
        if choice.finish.num_tokens in preempt_after and choice.num_computed:
            preempt_after = [n for n in preempt_after if n != choice.finish.num_tokens]
            engine.scheduler.preempt(choice)
    assert not preempt_after
    return choice.finish.token_ids, drawn


def test_SD_01_a_seeded_request_beside_any_neighbour():
    """Four runs in each of three companies, 16 steps on flat rows: row 0 says the same twelve times."""
    seen = set()
    for neighbours in ([None], [7], []):
        for _ in range(4):
            llm = LLM(ToyModel(vocab_size=32, scale=0.0))
            seeds = [42, *neighbours]
            params = [SamplingParams(temperature=0.8, seed=seed, max_tokens=16) for seed in seeds]
            seen.add(llm.generate([[1]] * len(seeds), params)[0].outputs[0].token_ids)
    assert len(seen) == 1


def test_SD_03_children_of_one_seed_differ_and_repeat():
    def children(**changes):
        params = SamplingParams(**({"n": 3, "seed": 11, "temperature": 1.0, "max_tokens": 20} | changes))
        (output,) = LLM(ToyModel(vocab_size=256, scale=0.0)).generate([[1]], params)
        assert [c.index for c in output.outputs] == list(range(params.n))
        return [c.token_ids for c in output.outputs]

    assert len(set(children())) == 3
    assert children() == children()
    assert children(n=1) == children()[:1]
    assert len(set(children(temperature=0))) == 1


@pytest.mark.parametrize("model", [ToyModel, PagedToyModel])
@pytest.mark.parametrize("budget", [2, 64])
def test_SD_04_preemption_goes_on_with_the_same_lots(model, budget):
    """Preempted after 5 and 9 tokens; the next token drawn is number 5 (position 8), then number 9."""

    def engine():
        return Engine(model(), block_size=4, max_num_batched_tokens=budget)

    tokens, drawn = run(engine(), preempt_after=[5, 9])
    assert (tokens, drawn) == run(engine())
    assert drawn == list(range(3, 15))


def test_IB_03_every_request_keeps_its_own_parameters():
    params = [
        SamplingParams(max_tokens=1, temperature=0.0),
        SamplingParams(max_tokens=3, temperature=1.0, seed=3),
        SamplingParams(max_tokens=2, temperature=1.0, top_k=1),
    ]
    together = LLM(ToyModel()).generate([[1], [2], [3]], params)
    assert [len(o.outputs[0].token_ids) for o in together] == [1, 3, 2]
    greedy = LLM(ToyModel()).generate([[1], [2], [3]], SamplingParams(max_tokens=3))
    assert together[0].outputs[0].token_ids == greedy[0].outputs[0].token_ids[:1]
    assert together[2].outputs[0].token_ids == greedy[2].outputs[0].token_ids[:2]
