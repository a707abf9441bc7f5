"""Faults of kind grammar, each by its id in `cases/faults.jsonl`."""

from __future__ import annotations

import numpy as np
import pytest

import klero
from klero import LLM, GrammarError, Sampler, SamplingParams, Seat
from klero.finish import Finish, TokenBytes
from klero.grammar.matchers import fill_drafts
from klero.grammar.source import source_of
from klero.testing.models import PagedToyModel, ToyModel

llguidance = pytest.importorskip("llguidance")

from klero.grammar.llguidance import LLGuidance  # noqa: E402

GREEDY = SamplingParams(temperature=0)


def bits(words, num):
    return {i for i in range(num) if words[i >> 5] >> (i & 31) & 1}


def backend_of(texts, special=()):
    """A backend over these texts as tokens 0, 1, 2, ..."""
    return LLGuidance(TokenBytes.from_list([text.encode() for text in texts], special=special), len(texts))


def matcher_of(backend, end_ids, **guided):
    return backend.compile(source_of(SamplingParams(**guided))).matcher(end_ids)


def test_GR_01_columns_beyond_the_mask_are_banned():
    """70 columns, a mask of 64 bits that allows 1 and 2; column 69 is the largest."""
    logits = np.full((1, 70), -5, np.float32)
    logits[0, 69], logits[0, 1:3] = 50, 0
    mask = np.array([[6, 0]], np.int32)
    assert klero.sample(logits, GREEDY, positions=0, masks=mask).token_ids.tolist() == [1]
    drawn = klero.sample(np.repeat(logits, 500, 0), SamplingParams(temperature=9.0), positions=range(500), seeds=3,
                         masks=np.repeat(mask, 500, 0))  # fmt: skip
    assert set(drawn.token_ids.tolist()) == {1, 2}


def test_GR_03_after_the_end_every_end_id_and_nothing_else():
    """'{}' is done; the model's end ids are 2 and 9, logits: 7 = 10, 2 = -3, 9 = -4."""
    backend = backend_of(["{", "}", "</s>", "a", "b", "c", "d", "e", "f", "<eot>"], special=(2, 9))
    matcher = matcher_of(backend, (2, 9), grammar='start: "{}"')
    words = np.zeros(1, np.int32)
    assert matcher.accept(0)
    assert matcher.accept(1)
    matcher.fill(words)
    assert bits(words, 10) == {2, 9}
    logits = np.zeros((1, 10), np.float32)
    logits[0, [7, 2, 9]] = 10, -3, -4
    finish = Finish(GREEDY, end_token_ids=(2, 9), max_tokens=9)
    assert klero.sample(logits, GREEDY, positions=0, masks=words[None]).token_ids.tolist() == [2]
    assert finish.push(2).reason == "stop"


def test_GR_04_each_draft_row_has_its_own_mask_and_an_illegal_one_ends_them():
    """'[' digit ']', drafts '[', 'x', ']'."""
    texts = [*"0123456789", "[", "x", "]", "</s>"]
    matcher = matcher_of(backend_of(texts, special=(13,)), (13,), regex=r"\[[0-9]\]")
    words = np.zeros((4, 1), np.int32)
    assert fill_drafts(matcher, [10, 11, 12], words) == 2
    assert [bits(row, 14) for row in words] == [{10}, set(range(10)), set(), set()]
    assert matcher.accept(10)  # the accepted one,
    assert matcher.accept(7)  # and the digit from the masked row: two consumed
    matcher.fill(words[0])
    assert bits(words[0], 14) == {12}


def test_GR_06_the_mask_comes_before_the_filters():
    logits = np.array([[9.0, 8.0, 1.0, 0.5]], np.float32)
    params = SamplingParams(temperature=1.0, top_k=2, top_p=0.9, seed=1, return_probs=True)
    sampled = klero.sample(logits, params, positions=0, masks=np.array([[0b1100]], np.int32))
    assert sampled.probs.ids.tolist() == [2, 3]
    np.testing.assert_allclose(sampled.probs.values, [0.622459, 0.377541], atol=1e-6)


@pytest.mark.parametrize("parts", [None, 1, 2, 3])
def test_GR_07_microbatches_do_not_mix_masks_up(parts):
    """A, B, C, D in microbatches, grammars on B and C."""
    vocabulary = TokenBytes.from_list([bytes([i]) for i in range(64)] + [b"</s>"], special=(64,))
    asked = [{}, {"regex": "[0-3]{9}"}, {"regex": "[4-7]{9}"}, {}]
    with LLM(PagedToyModel(65, 64, (64,), vocabulary=vocabulary), max_microbatch_requests=parts) as llm:
        params = [SamplingParams(temperature=1.0, seed=s, max_tokens=9, **one) for s, one in enumerate(asked)]
        a, b, c, d = (output.outputs[0] for output in llm.generate([[1]] * 4, params))
    assert (set(b.text) <= set("0123"), set(c.text) <= set("4567")) == (True, True)
    assert (len(b.token_ids), len(c.token_ids)) == (9, 9)
    with LLM(ToyModel(65, 64, (64,), vocabulary=vocabulary)) as llm:
        assert [llm.generate([1], one)[0].outputs[0].token_ids for one in params] == [
            choice.token_ids for choice in (a, b, c, d)
        ]


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": []},
        {"type": "object", "properties": {"x": {"enum": []}}, "required": ["x"]},
        {"type": "strnig"},
        {"type": "integer", "minimum": 5, "maximum": 4},
    ],
)
def test_GR_09_what_nothing_satisfies_is_refused_at_admission(schema):
    vocabulary = TokenBytes.from_list([bytes([i]) for i in range(128)] + [b"</s>"], special=(128,))
    with LLM(ToyModel(129, end_token_ids=(128,), vocabulary=vocabulary)) as llm:
        with pytest.raises(GrammarError, match=r"^json="):
            llm.generate([1], SamplingParams(json=schema))
        assert llm.engine.num_unfinished == 0
        assert llm.engine.times.num_steps == 0


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_BN_10_min_tokens_yields_to_the_end_of_a_grammar(backend):
    """Choice "yes" as token 5, end id 2, min_tokens 8, greedy: "yes", stop, two tokens."""
    texts = ["n", "o", "</s>", "y", "e", "yes", "s"]
    vocabulary = TokenBytes.from_list([text.encode() for text in texts], special=(2,))
    params = SamplingParams(temperature=0, choice=["yes"], min_tokens=8, max_tokens=20)
    sampler = Sampler(num_slots=2, vocab_size=7, max_len=30, backend=backend)
    finishes = [Finish(params, end_token_ids=(2,), vocabulary=vocabulary, max_tokens=20) for _ in range(2)]
    seats = [
        Seat("guided", params, [0], 1, finish=finishes[0], end_token_ids=(2,),
             make_matcher=lambda: matcher_of(LLGuidance(vocabulary, 7), (2,), choice=["yes"])),
        Seat("free", SamplingParams(temperature=0, min_tokens=8), [0], 1, end_token_ids=(2,)),
    ]  # fmt: skip
    slots, logits = sampler.setup_step(seats), np.array([[9, 0, 8, 0, 0, 7, 0]] * 2, np.float32)
    logits[1] = [0, 0, 9, 8, 0, 0, 0]
    got = []
    for _ in range(2):
        step = sampler.step_of(slots)
        sampler.begin_masks(step)
        got.append(sampler.sample_async(step, logits))
        updates = sampler.update_requests(got[-1])
    assert [state.host.token_ids.tolist() for state in got] == [[5, 3], [2, 3]]  # the neighbour's end id stays banned
    assert (finishes[0].text, str(updates[0].finished.reason), finishes[0].num_tokens) == ("yes", "stop", 2)
