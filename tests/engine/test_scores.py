"""What is said about prompts and tokens, on toy models: the same bits in any chunks, in any company, on every path."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.free import assert_all_free
from tests.engine.said import assert_prompt, assert_same, rows_of

from klero import LogitsError, ParameterError, SamplingParams, sample
from klero.engine import LLM, Engine
from klero.engine.scores import Growing
from klero.errors import RequestError
from klero.finish import TokenBytes
from klero.logprobs import join
from klero.testing.models import PagedToyModel, ScriptedModel, ToyModel

ALL = {"logprobs": 2, "logprob_token_ids": [7, 0], "return_kept": True, "return_probs": True}
ROWS = {"return_context_logits": True, "return_generation_logits": True}


def assert_tokens(choice, prompt, params):
    """Every field, in bits, is what one call of `klero.sample` on the model's own rows says."""
    num, num_prompt = len(choice.token_ids), len(prompt)
    rows = rows_of((*prompt, *choice.token_ids))[num_prompt - 1 : num_prompt - 1 + num]
    positions = num_prompt + np.arange(num)
    one = dataclasses.replace(params, seed=None, n=1)
    if not num:
        assert params.asks == (choice.logprobs is not None and len(choice.logprobs) == 0)
        return
    drawn = sample(rows, one, positions=positions, seeds=[choice.seed] * num, children=[choice.index] * num)
    assert tuple(drawn.token_ids.tolist()) == choice.token_ids
    if params.asks:
        assert_same(choice.logprobs, drawn.logprobs)
        assert choice.cumulative_logprob == (drawn.logprobs.cumulative if params.scores else None)
    else:
        assert (choice.logprobs, choice.cumulative_logprob) == (None, None)
    if params.return_generation_logits:
        assert choice.generation_logits.dtype == np.float32
        assert np.array_equal(choice.generation_logits, rows)
    else:
        assert choice.generation_logits is None


def assert_output(output, prompt, params):
    """Prompt and choices; and nothing that was not asked for."""
    if params.prompt_logprobs is not None:
        assert_prompt(output, prompt, params.prompt_logprobs)
    else:
        assert output.prompt_logprobs is None
    if params.return_context_logits:
        assert output.context_mask.tolist() == [True] * len(prompt)
        assert np.array_equal(output.context_logits, rows_of(prompt))
    else:
        assert (output.context_logits, output.context_mask) == (None, None)
    for choice in output.outputs:
        assert len(choice.token_ids) == params.max_tokens
        assert_tokens(choice, prompt, params)


PARAMS = [
    SamplingParams(max_tokens=0, prompt_logprobs=2, return_context_logits=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=7, prompt_logprobs=0, **ALL, **ROWS),
    SamplingParams(temperature=1.5, seed=4, max_tokens=5, n=3, prompt_logprobs=-1, logprobs=0),
    SamplingParams(max_tokens=6, logprobs=1, logprobs_mode="processed", return_context_logits=True),
    SamplingParams(temperature=1.0, min_p=0.2, seed=6, max_tokens=9, return_probs=True),
    SamplingParams(max_tokens=0, prompt_logprobs=1, n=2),
    SamplingParams(temperature=1.0, seed=9, max_tokens=8),
]
PROMPTS = [[9] * 20, [2, 3, 4, 5, 6, 7, 8], [1, 0, 63], [1], [12, 13], [10, 11, 12, 13, 14], [40, 41]]


@given(
    model=st.sampled_from([ToyModel, PagedToyModel]),
    order=st.permutations(range(7)),
    max_num_seqs=st.integers(1, 10),
    budget=st.sampled_from([1, 2, 3, 7, 16, 64]),
    block_size=st.sampled_from([1, 3, 16]),
    spare=st.integers(0, 6),
)
def test_what_is_said_does_not_depend_on_batch_order_budget_or_blocks(
    model, order, max_num_seqs, budget, block_size, spare
):
    """Down to the blocks of the longest request alone: preemption and recompute included."""
    llm = LLM(
        model(), max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, block_size=block_size,
        num_blocks=-(-20 // block_size) + spare,
    )  # fmt: skip
    outputs = llm.generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order])
    for i, output in zip(order, outputs, strict=True):
        assert_output(output, PROMPTS[i], PARAMS[i])
    assert_all_free(llm.engine)


@pytest.mark.parametrize("budget", [1, 3, 4])
def test_a_preemption_before_any_step_changes_nothing(budget):
    """Every position of a prompt of 7 and of 5 tokens after it: what was scored is not scored again."""
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=5, prompt_logprobs=2, **ALL, **ROWS)
    prompt = [5, 4, 3, 2, 1, 0, 63]
    num_steps, at = 99, 1
    while at < num_steps:
        engine = Engine(PagedToyModel(), max_num_batched_tokens=budget, block_size=4, num_blocks=16)
        request = engine.add_request("a", prompt, params)
        rows, forward = [], engine.model.forward

        def counting(step, forward=forward, rows=rows):
            rows.append(len(step.logits_rows))
            return forward(step)

        engine.model.forward = counting
        outputs, num_steps = [], 0
        while not outputs:
            if num_steps == at:
                engine.scheduler.preempt(request.choices[0])
            outputs, num_steps = engine.step(), num_steps + 1
        assert_output(outputs[0], prompt, params)
        assert sum(rows) == len(prompt) + params.max_tokens - 1
        at += 1
    assert at > 5


class Breaks(PagedToyModel):
    """Step number `at` fails: in the forward, by rows of another width, or in the sampler, when prompts are scored."""

    at, where, num_steps = 0, "", 0

    def forward(self, step):
        self.num_steps += 1
        if self.num_steps == self.at:
            if self.where == "forward":
                raise RuntimeError("broken")
            if self.where == "width":
                return np.zeros((len(step.logits_rows), 65), np.float32)
        return super().forward(step)

    def sample_async(self, *args):
        if (self.num_steps, self.where) == (self.at, "sampler"):
            raise RuntimeError("broken")
        return self.sampler.__class__.sample_async(self.sampler, *args)


@pytest.mark.parametrize("where", ["forward", "width", "sampler"])
@pytest.mark.parametrize("budget", [2, 16])
def test_a_step_that_fails_neither_loses_nor_doubles_a_row(where, budget):
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=3, prompt_logprobs=1, **ALL, **ROWS)
    for at in range(1, 6):
        engine = Engine(Breaks(), max_num_batched_tokens=budget, block_size=4, num_blocks=32)
        engine.model.at, engine.model.where, engine.model.sampler = at, where, engine.sampler
        engine.sampler.sample_async = engine.model.sample_async
        prompts = {"a": [5, 4, 3, 2, 1], "b": [7, 8]}
        for name, prompt in prompts.items():
            engine.add_request(name, prompt, params)
        outputs, num_failed = [], 0
        while engine.num_unfinished:
            try:
                outputs += engine.step()
            except (RuntimeError, LogitsError):
                num_failed += 1
                assert num_failed == 1
        assert num_failed == (engine.model.num_steps >= at)
        for output in outputs:
            assert_output(output, prompts[output.request_id], params)


def test_a_forward_with_too_few_rows_is_refused():
    class Short(ToyModel):
        def forward(self, step):
            return super().forward(step)[:-1]

    with pytest.raises(LogitsError, match=r"shape \(2, 64\): this step has 3 rows of 64"):
        LLM(Short()).generate([[1, 2, 3]], SamplingParams(max_tokens=2, prompt_logprobs=0))


def test_a_prompt_is_scored_without_a_token():
    llm = LLM(PagedToyModel(max_model_len=8), block_size=4, num_blocks=2)
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    outputs = llm.generate([[1] * 8, [2, 3], [4]], params)  # 8 fill the context, and all blocks
    for output, prompt in zip(outputs, ([1] * 8, [2, 3], [4]), strict=True):
        assert_prompt(output, prompt, 1)
        (choice,) = output.outputs
        assert (choice.token_ids, choice.text, choice.finish_reason, choice.error) == ((), "", "length", None)
        assert (choice.logprobs, choice.cumulative_logprob) == (None, None)
        assert output.metrics.num_generated_tokens == 0
        assert output.metrics.seconds_to_first_token is None
    with pytest.raises(RequestError, match=r"9 tokens .* so it does not fit"):
        llm.generate([[1] * 9], params)
    with pytest.raises(RequestError, match="no token can follow"):
        llm.generate([[1] * 8], SamplingParams(prompt_logprobs=1))
    assert_all_free(llm.engine)


def test_a_scored_prompt_draws_nothing():
    """No row is sampled, so no status of one can end it: here every row is good for scoring and bad for drawing."""
    engine = Engine(ToyModel())
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=0, prompt_logprobs=0))
    (output,) = engine.step()
    assert engine.times.num_rows == 0
    assert output.outputs[0].finish_reason == "length"


def test_echo_and_stream_of_a_scored_prompt():
    words = TokenBytes.from_list([b"%d " % i for i in range(64)])
    llm = LLM(ToyModel(vocabulary=words), max_num_batched_tokens=2)
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, echo=True, n=2)
    deltas = list(llm.stream([1, 2, 3], params))
    assert [(d.index, d.text, d.token_ids, d.finish_reason, d.logprobs) for d in deltas] == [
        (0, "1 2 3 ", (), "length", None),
        (1, "1 2 3 ", (), "length", None),
    ]


@pytest.mark.parametrize(
    "others",
    [
        {"temperature": 0.1, "top_k": 3},
        {"temperature": 2.0, "top_p": 0.1, "logit_bias": {4: 9.0, 5: float("-inf")}},
        {"repetition_penalty": 1.7, "presence_penalty": 1.0, "bad_token_ids": [3, 4, 5]},
        {"allowed_token_ids": [1]},
    ],
)
def test_prompt_logprobs_are_the_models_own_whatever_else_is_asked(others):
    prompt = [3, 4, 5, 3, 4]
    (output,) = LLM(ToyModel()).generate([prompt], SamplingParams(prompt_logprobs=3, max_tokens=2, **others))
    assert_prompt(output, prompt, 3)


def test_asking_changes_no_token():
    params = {"temperature": 1.0, "top_k": 9, "seed": 1, "max_tokens": 20, "n": 2}
    asked = SamplingParams(prompt_logprobs=1, **params, **ALL, **ROWS)
    prompts = [[1, 2, 3], [4], [5, 6]]
    plain, told = (LLM(ToyModel()).generate(prompts, one) for one in (SamplingParams(**params), asked))
    assert plain == told  # arrays take no part in equality
    assert [c.token_ids for o in plain for c in o.outputs] == [c.token_ids for o in told for c in o.outputs]


def test_a_neighbour_that_asks_for_more_changes_nothing():
    """Kept ids alone come without probabilities; probabilities come with their ids."""
    draw = {"temperature": 1.0, "top_k": 3, "seed": 1, "max_tokens": 4}
    ids, probs = SamplingParams(return_kept=True, **draw), SamplingParams(return_probs=True, logprobs=4, **draw)
    llm = LLM(ToyModel())
    (alone,) = llm.generate([[1, 2]], ids)
    first, second = llm.generate([[1, 2], [3]], [ids, probs])
    said, other = first.outputs[0].logprobs, second.outputs[0].logprobs
    assert_same(said, alone.outputs[0].logprobs)
    assert said.kept_starts.tolist() == other.kept_starts.tolist() == [0, 3, 6, 9, 12]
    assert [len(said.kept_ids), np.isnan(said.kept_probs).sum(), len(said.top)] == [12, 12, 0]
    assert [len(other.kept_ids), len(other.kept_probs), len(other.top)] == [12, 12, 16]


def test_the_end_has_an_entry_like_every_token():
    words = TokenBytes.from_list([b"a", b"b", b"c", b"<end>"], special=[3])

    def choice(script, **params):
        model = ScriptedModel(script, vocab_size=4, end_token_ids=[3], vocabulary=words)
        (output,) = LLM(model).generate([[0]], SamplingParams(logprobs=1, max_tokens=4, **params))
        return output.outputs[0]

    for one, num_tokens, reason in [
        (choice([0, 1, 3]), 3, "stop"),
        (choice([0, 1, 2], stop_token_ids=[1]), 2, "stop"),
        (choice([0, 1, 2], stop="bc"), 3, "stop"),
        (choice([0, 1, 2]), 4, "length"),
    ]:
        assert (len(one.token_ids), len(one.logprobs), one.finish_reason) == (num_tokens, num_tokens, reason)
        assert one.logprobs.token_ids.tolist() == list(one.token_ids)
        assert one.logprobs.rank.tolist() == [1] * num_tokens


class Bad(ToyModel):
    """NaN in the row after token 9, wherever it stands."""

    def forward(self, step):
        logits = super().forward(step)
        logits[step.input_ids[step.logits_rows] == 9, 63] = np.nan
        return logits


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("budget", [1, 2, 64])
def test_a_bad_prompt_row_ends_its_request_alone(max_tokens, budget):
    engine = Engine(Bad(), max_num_batched_tokens=budget)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=max_tokens, prompt_logprobs=0, logprobs=0, n=2)
    prompts = {"good": [1, 2, 3], "bad": [1, 9, 3, 4], "last": [1, 2, 9]}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params, stream=True)
    found = {}
    while engine.num_unfinished:
        found |= {output.request_id: output for output in engine.step()}
    assert_prompt(found["good"], prompts["good"], 0)
    for choice in found["good"].outputs:
        assert (choice.finish_reason, len(choice.logprobs)) == ("length", max_tokens)
    for choice in found["bad"].outputs:
        assert (choice.finish_reason, choice.token_ids, len(choice.logprobs)) == ("error", (), 0)
        assert "position 2 hold NaN" in choice.error
    assert found["bad"].prompt_logprobs.rank.astype(bool).tolist() == [False, True, False, False]  # for any budget
    assert len(found["bad"].prompt_logprobs) == 4
    assert {c.finish_reason for c in found["last"].outputs} == {"error" if max_tokens else "length"}
    ends = [(d.request_id, d.index) for d in engine.take_deltas() if d.finish_reason]
    assert sorted(ends) == [(name, index) for name in ("bad", "good", "last") for index in (0, 1)]
    assert_all_free(engine)


def test_a_row_that_cannot_be_drawn_has_no_entry():
    class Later(ToyModel):
        def forward(self, step):
            logits = super().forward(step)
            logits[step.positions[step.logits_rows] == 4] = np.nan
            return logits

    (output,) = LLM(Later()).generate([[1, 2]], SamplingParams(max_tokens=9, **ALL, return_generation_logits=True))
    (choice,) = output.outputs
    assert (choice.finish_reason, len(choice.token_ids)) == ("error", 3)
    assert len(choice.logprobs) == len(choice.generation_logits) == 3
    assert choice.logprobs.token_ids.tolist() == list(choice.token_ids)


def test_a_token_that_is_refused_has_no_entry():
    """Id 50 is inside the logits width and not in the vocabulary."""
    words = TokenBytes.from_list([b"x"] * 50)
    llm = LLM(ScriptedModel([1, 50, 1], vocabulary=words))
    deltas = list(llm.stream([1], SamplingParams(max_tokens=4, logprobs=0)))
    assert deltas[-1].finish_reason == "error"
    assert [(d.token_ids, len(d.logprobs)) for d in deltas] == [((1,), 1), ((), 0)]


def test_abort_keeps_what_was_said():
    """In the second chunk of the prompt, and after two tokens."""
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=9, prompt_logprobs=1, n=2, **ALL, **ROWS)
    prompt = [1, 2, 3, 4, 5]
    engine = Engine(ToyModel(), max_num_seqs=1, max_num_batched_tokens=2)
    engine.add_request("a", prompt, params)
    engine.step()
    output = engine.abort("a")
    assert output.context_mask.tolist() == [True, True, False, False, False]
    assert np.array_equal(output.context_logits[:2], rows_of(prompt)[:2])
    assert np.isnan(output.context_logits[2:]).all()
    assert output.prompt_logprobs.rank.astype(bool).tolist() == [False, True, True, False, False]
    assert output.prompt_logprobs.token_ids.tolist() == prompt
    assert [(len(c.logprobs), c.cumulative_logprob, c.generation_logits.shape) for c in output.outputs] == [
        (0, 0.0, (0, 64))
    ] * 2
    engine.add_request("b", prompt, params)
    for _ in range(4):
        engine.step()
    output = engine.abort("b")
    assert [len(c.token_ids) for c in output.outputs] == [2, 0]
    for choice in output.outputs:
        assert_tokens(choice, prompt, params)
    assert output.context_mask.all()
    assert_all_free(engine)


def test_the_deltas_come_to_the_answer():
    llm = LLM(ToyModel(), max_num_batched_tokens=3)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=6, n=2, prompt_logprobs=0, **ALL)
    stream, deltas = llm.stream([[1, 2, 3, 4], [5]], params), []
    while True:
        try:
            deltas.append(next(stream))
        except StopIteration as end:
            outputs = end.value
            break
    for i, output in enumerate(outputs):
        for choice in output.outputs:
            mine = [d for d in deltas if (d.prompt_index, d.index) == (i, choice.index)]
            assert all(len(d.logprobs) == len(d.token_ids) for d in mine)
            assert_same(join([d.logprobs for d in mine]), choice.logprobs)


def test_padding_columns_are_not_spoken_of():
    """60 of 64 columns are tokens."""
    engine = Engine(ToyModel(), padded_from=60)
    for prompt, asked, error, words in [
        ([1, 61], {"prompt_logprobs": 0}, RequestError, "prompt token id 61"),
        ([1], {"prompt_logprobs": 61}, ParameterError, "at most 60"),
        ([1], {"logprobs": 61}, ParameterError, "at most 60"),
        ([1], {"logprob_token_ids": [3, 60]}, ParameterError, r"\[0, 59\]"),
    ]:
        with pytest.raises(error, match=words):
            engine.add_request("bad", prompt, SamplingParams(max_tokens=1, **asked))
    engine.add_request("a", [1, 59, 2], SamplingParams(max_tokens=1, prompt_logprobs=-1, logprobs=60))
    engine.add_request("b", [1, 61, 2], SamplingParams(max_tokens=1))
    said = {output.request_id: output for output in engine.step()}
    assert np.diff(said["a"].prompt_logprobs.top_starts).tolist() == [0, 60, 60]
    assert said["a"].outputs[0].logprobs.top_ids.max() == 59
    assert said["b"].outputs[0].finish_reason == "length"


@given(parts=st.lists(st.integers(0, 9), max_size=9))
def test_growing_holds_what_was_put_into_it(parts):
    growing, numbers = Growing(np.int32, 2), np.arange(2 * sum(parts), dtype=np.int32).reshape(-1, 2)
    for begin, num in zip(np.cumsum([0, *parts]), parts, strict=False):
        growing.extend(numbers[begin : begin + num])
    assert np.array_equal(growing.values, numbers)
