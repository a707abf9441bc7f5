"""What scores cost: a prompt computed once, memory bounded before a request runs, and failures that stay alone."""

from __future__ import annotations

import dataclasses
import json
import sys

import numpy as np
import pytest
from tests.engine.free import assert_all_free
from tests.engine.said import assert_prompt, assert_same, rows_of

from klero import LogitsError, ParameterError, SamplingParams, device, score
from klero.cli import show
from klero.cli.requests import Asked
from klero.engine import LLM, Engine, scores
from klero.engine.scores import PromptScores, StepRows, TokenScores
from klero.errors import OptionError
from klero.logprobs import nothing
from klero.testing.models import PagedToyModel, ToyModel

SCORE = SamplingParams(max_tokens=0, prompt_logprobs=1, return_context_logits=True)
SAY = {"logprobs": 2, "return_kept": True, "return_generation_logits": True}


def run(engine):
    """Step until nothing is left; the answers by name."""
    found = {}
    while engine.num_unfinished:
        found |= {output.request_id: output for output in engine.step()}
    return found


def no_memory(*_, **__):
    raise MemoryError("no more of it")


def fail_once(owner, name):
    """Let a method of one object fail the first time."""
    method, calls = getattr(owner, name), []
    setattr(owner, name, lambda *args: method(*args) if calls else calls.append(1) or no_memory())


@pytest.mark.parametrize("budget", [2, 64])
@pytest.mark.parametrize("max_num_seqs", [1, 4])
def test_n_choices_that_only_score_compute_their_prompt_once(budget, max_num_seqs):
    engine = Engine(PagedToyModel(), max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, block_size=4)
    params, prompt, num_rows = SamplingParams(max_tokens=0, prompt_logprobs=1, n=3), [1, 2, 3, 4, 5], []
    forward = engine.model.forward
    engine.model.forward = lambda step: num_rows.append(len(step.input_ids)) or forward(step)
    engine.add_request("a", prompt, params, stream=True)
    output = run(engine)["a"]
    assert sum(num_rows) == output.metrics.num_prompt_tokens_computed == 5
    assert_prompt(output, prompt, 1)
    assert [(c.index, c.text, c.token_ids, c.finish_reason, c.error) for c in output.outputs] == [
        (index, "", (), "length", None) for index in range(3)
    ]
    assert [(d.index, d.finish_reason) for d in engine.take_deltas()] == [(0, "length"), (1, "length"), (2, "length")]
    assert_all_free(engine)


@pytest.mark.parametrize("num_steps", [0, 1])
@pytest.mark.parametrize("how", ["abort", "discard", "fail"])
def test_n_choices_that_only_score_end_together(how, num_steps):
    engine = Engine(PagedToyModel(), max_num_batched_tokens=2, block_size=4)
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=0, prompt_logprobs=0, n=2))
    for _ in range(num_steps):
        assert engine.step() == []
    if how == "discard":
        engine.discard(["a"])
    elif how == "abort":
        assert [choice.finish_reason for choice in engine.abort("a").outputs] == ["abort", "abort"]
    else:
        engine.model.forward = no_memory
        with pytest.raises(MemoryError):
            engine.step()
        (output,) = engine.fail("broken")
        assert [(choice.finish_reason, choice.error) for choice in output.outputs] == [("error", "broken")] * 2
    assert_all_free(engine)


def test_abort_of_what_never_ran_says_nothing_and_takes_nothing():
    engine = Engine(ToyModel())
    engine.add_request("a", [1, 2], SCORE)
    output = engine.abort("a")
    assert output.prompt_logprobs.token_ids.tolist() == [1, 2]
    assert not output.context_mask.any()
    assert np.isnan(output.context_logits).all()
    assert (output.context_logits.shape, output.context_logits.strides) == ((2, 64), (0, 0))
    context, mask = PromptScores([1, 2, 3], SCORE, 2**40).context()  # 13 TB
    assert (context.shape, context.dtype, mask.tolist()) == ((3, 2**40), np.float32, [False] * 3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_only_the_rows_that_ask_become_float32(dtype, monkeypatch):
    """Row 2 of 5, and later none."""
    rows, converted, read_logits = rows_of(range(5)), [], scores.read_logits
    bits = (rows.view(np.uint32) >> 16).astype(np.uint16)
    given = bits if dtype == "bfloat16" else rows.astype(np.float16)
    expected = (bits.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else given.astype(np.float32)
    monkeypatch.setattr(scores, "read_logits", lambda part: converted.append(len(part)) or read_logits(part))
    step, mine = StepRows(None, given), TokenScores(SamplingParams(return_generation_logits=True), 64)
    mine.extend(step, range(2, 3))
    mine.extend(step, range(4, 4))
    assert converted == [1, 0]
    assert mine.logits().tolist() == expected[2:3].tolist()


@pytest.mark.parametrize(
    "field, fields, num_bytes",
    [
        ("return_context_logits", {"return_context_logits": True}, 5 * 64 * 4),
        ("prompt_logprobs", {"prompt_logprobs": -1}, 5 * 60 * 8),
        ("prompt_logprobs", {"prompt_logprobs": 7}, 5 * 7 * 8),
        ("logprobs", {"logprobs": -1, "n": 2}, 2 * 3 * 60 * 8),
        ("logprobs", {"logprobs": 2, "prompt_logprobs": 1}, 3 * 2 * 8 + 5 * 8),
        ("logprob_token_ids", {"logprob_token_ids": [4, 5]}, 3 * 2 * 8),
        ("return_generation_logits", {"return_generation_logits": True, "n": 3}, 3 * 3 * 64 * 4),
        ("return_generation_logits", {"n": 2, "return_context_logits": True, "return_generation_logits": True}, 2816),
    ],
)
def test_an_answer_too_large_is_refused_before_it_runs(field, fields, num_bytes):
    """A prompt of 5, max_tokens 3, rows of 64 of which 60 are tokens: float32 rows, or an id and a number for each."""
    engine = Engine(ToyModel(), padded_from=60, max_answer_bytes=num_bytes)
    params = SamplingParams(max_tokens=3, **fields)
    engine.add_request("fits", [1] * 5, params)
    assert run(engine)["fits"].outputs[0].finish_reason == "length"
    engine = Engine(ToyModel(), padded_from=60, max_answer_bytes=num_bytes - 1)
    with pytest.raises(ParameterError, match=rf"{num_bytes} bytes, .* is {num_bytes - 1}; ask for less, ") as raised:
        engine.add_request("large", [1] * 5, params)
    assert (raised.value.field, raised.value.value) == (field, getattr(params, field))
    assert ("shorten the prompt" in raised.value.rule) == (field in ("prompt_logprobs", "return_context_logits"))
    assert_all_free(engine)


def test_what_costs_nothing_is_never_too_large():
    (output,) = LLM(ToyModel(), max_answer_bytes=1).generate([[1] * 5], SamplingParams(max_tokens=2, logprobs=0))
    assert len(output.outputs[0].logprobs) == 2
    with pytest.raises(OptionError, match="max_answer_bytes=0: must be an integer >= 1"):
        LLM(ToyModel(), max_answer_bytes=0)


def test_the_default_is_4_gib_and_without_max_tokens_all_that_fits_counts():
    """Rows of 256 bytes: of a context for 2^24 + 4 tokens a prompt of 4 leaves 2^24, and one of 3 leaves one more."""
    engine = Engine(ToyModel(max_model_len=2**24 + 4), max_num_seqs=1)
    params = SamplingParams(return_generation_logits=True)
    engine.add_request("a", [1] * 4, params)
    with pytest.raises(ParameterError, match="return_generation_logits=True: the answer may take 4294967552 bytes"):
        engine.add_request("b", [1] * 3, params)
    assert engine.abort("a").outputs[0].generation_logits.shape == (0, 64)


@pytest.mark.parametrize("of, what", [
    ("scores", "logprobs"), ("scores", "cumulative"), ("scores", "logits"), ("prompt_scores", "logprobs"),
    ("prompt_scores", "context"),
])  # fmt: skip
def test_an_answer_that_cannot_be_put_together_costs_no_other(of, what, capsys):
    """Three requests end in one step. The one without memory keeps its tokens, and nothing is said about any."""
    engine, prompt = Engine(ToyModel()), [1, 2, 3]
    params = SamplingParams(
        temperature=1.0, seed=1, max_tokens=2, n=2, prompt_logprobs=1, return_context_logits=True, **SAY
    )
    requests = {name: engine.add_request(name, prompt, params) for name in "abc"}
    fail_once(getattr(requests["b"].choices[0], of), what)
    found = run(engine)
    assert list(found) == ["a", "b", "c"]
    for name in "ac":
        assert_prompt(found[name], prompt, 1)
        assert [(c.finish_reason, len(c.logprobs), c.generation_logits.shape) for c in found[name].outputs] == [
            ("length", 2, (2, 64))
        ] * 2
    bad, good = found["b"], found["a"]
    assert_same(bad.prompt_logprobs, dataclasses.replace(nothing(3), token_ids=np.array(prompt, np.int32)))
    assert (bad.context_mask.any(), bad.context_logits.shape) == (False, (3, 64))
    for choice, same in zip(bad.outputs, good.outputs, strict=True):
        assert (choice.finish_reason, choice.token_ids) == ("error", same.token_ids)
        assert choice.error == "the answer could not be put together: MemoryError: no more of it"
        assert_same(choice.logprobs, dataclasses.replace(nothing(2), token_ids=np.array(same.token_ids, np.int32)))
        assert np.isnan([choice.cumulative_logprob, *choice.generation_logits.flat]).all()
        assert choice.generation_logits.shape == (2, 64)
    show.print_json(Asked("prompt_token_ids", prompt, {}), bad)
    line = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (line["cumulative_logprob"], line["logprobs"]) == (None, [None, None])
    assert_all_free(engine)


def test_an_aborted_request_may_fail_to_be_put_together_too():
    engine = Engine(ToyModel())
    request = engine.add_request("a", [1, 2], SamplingParams(max_tokens=3, **SAY))
    engine.step()
    fail_once(request.choices[0].scores, "logits")
    assert [c.finish_reason for c in engine.abort("a").outputs] == ["error"]
    assert_all_free(engine)


@pytest.mark.parametrize("error", [MemoryError("no more of it"), ValueError("odd")])
@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("budget", [2, 64])
def test_a_prompt_that_cannot_be_scored_ends_its_request_alone(error, max_tokens, budget, monkeypatch):
    def sometimes(rows, token_ids, **options):
        if 9 in token_ids:
            raise error
        return score(rows, token_ids, **options)

    monkeypatch.setattr(scores, "score", sometimes)
    engine = Engine(PagedToyModel(), max_num_batched_tokens=budget, block_size=4)
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=1, return_context_logits=True, n=2)
    prompts = {"good": [1, 2, 3], "bad": [1, 4, 9, 3], "last": [5, 6]}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    found = run(engine)
    for name in ("good", "last"):
        assert_prompt(found[name], prompts[name], 1)
        assert [(c.finish_reason, len(c.token_ids)) for c in found[name].outputs] == [("length", max_tokens)] * 2
    message = f"the prompt could not be scored: {type(error).__name__}: {error}"
    assert [(c.finish_reason, c.error) for c in found["bad"].outputs] == [("error", message)] * 2
    assert found["bad"].context_mask.sum() <= 2
    assert_all_free(engine)


def test_rows_that_cannot_be_read_are_the_fault_of_no_request():
    engine = Engine(ToyModel())
    engine.model.forward = lambda step: np.zeros((len(step.logits_rows), 64))
    engine.add_request("a", [1, 2], SamplingParams(max_tokens=0, prompt_logprobs=0))
    with pytest.raises(LogitsError, match="dtype float64"):
        engine.step()


@pytest.mark.skipif(not device.HAVE_NUMBA, reason="nothing is compiled")
def test_a_terminal_is_told_when_the_kernels_of_logprobs_are_compiled(monkeypatch):
    """Each kind of kernel speaks for itself: that others were used already does not silence it."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(device, "_used", set())
    LLM(ToyModel()).generate([[1, 2]], SamplingParams(max_tokens=1, logprobs=1, prompt_logprobs=1))
    assert device._used >= {"float32", "scored float32", "given tokens float32"}
