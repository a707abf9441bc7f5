"""Faults around seeds that need an engine."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from klero import ParameterError, SamplingParams
from klero.engine import LLM, Engine
from klero.testing import assert_draws, distribution
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


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)])
def test_SD_06_every_64_bit_seed_is_a_seed_and_reported(seed):
    """Two runs are identical, and so is one with the seed as reported, 0 .. 2^64-1; -1 is a seed, not "unset"."""
    llm = LLM(ToyModel(vocab_size=256, scale=0.0))
    params = [SamplingParams(temperature=1.0, seed=one, max_tokens=16) for one in (seed, seed, seed % 2**64)]
    answers = [llm.generate([1], one)[0].outputs[0] for one in params]
    assert {answer.seed for answer in answers} == {seed % 2**64}
    assert len({answer.token_ids for answer in answers}) == 1
    deltas = list(llm.stream([1], params[0]))
    assert {delta.seed for delta in deltas} == {seed % 2**64}


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 1.5, "7"])
def test_SD_06_anything_else_is_told_before_a_batch(seed):
    model = ToyModel()
    with pytest.raises(ParameterError, match="seed"):
        LLM(model).generate([1], SamplingParams(temperature=1.0, seed=seed, max_tokens=2))
    with pytest.raises(ParameterError, match="seed"):
        LLM(model, seed=seed)
    assert model.num_forwards == 0


UNSEEDED = {"temperature": 1.5, "top_p": 0.95, "top_k": 500}


def test_SD_07_two_requests_without_a_seed_differ():
    llm = LLM(ToyModel(vocab_size=1024, scale=0.0))
    params = SamplingParams(**UNSEEDED, max_tokens=16)
    answers = [o.outputs[0] for o in llm.generate([[1], [1]], params) + llm.generate([[1]], params)]
    assert len({answer.token_ids for answer in answers}) == 3
    assert len({answer.seed for answer in answers}) == 3


def test_SD_07_two_process_starts_differ():
    program = (
        "import klero, klero.testing.models as m\n"
        "p = klero.SamplingParams(temperature=1.5, top_p=0.95, top_k=500, max_tokens=16)\n"
        "(o,) = klero.LLM(m.ToyModel(vocab_size=1024, scale=0.0)).generate([1], p)\n"
        "print(o.outputs[0].token_ids, o.outputs[0].seed)"
    )
    other = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    params = SamplingParams(**UNSEEDED, max_tokens=16)
    (output,) = LLM(ToyModel(vocab_size=1024, scale=0.0)).generate([1], params)
    assert other.startswith("(")
    assert str(output.outputs[0].token_ids) not in other
    assert str(output.outputs[0].seed) not in other


def test_SD_07_first_tokens_of_5000_requests_fill_the_kept_set_evenly():
    # Fresh seeds: this one may fail by chance, once in 10^7 runs.
    params = SamplingParams(**UNSEEDED, max_tokens=1)
    llm = LLM(ToyModel(vocab_size=1024, scale=0.0), max_num_seqs=256)
    outputs = llm.generate([[1]] * 5000, params)
    first = np.array([output.outputs[0].token_ids[0] for output in outputs])
    assert_draws(first, distribution(np.zeros(1024, np.float32), params), false_alarm=1e-7)
