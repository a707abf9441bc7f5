"""The engine on toy models: the same tokens whatever else is running, and nothing left behind."""

from __future__ import annotations

import itertools
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.free import assert_all_free

from klero import LogitsError, ModelError, OptionError, ParameterError, SamplingParams, sample
from klero.engine import LLM, Engine
from klero.errors import RequestError
from klero.finish import TokenBytes
from klero.testing.models import PagedToyModel, ScriptedModel, ToyModel, logits_of_state, state_after

HOT = SamplingParams(temperature=1.0, seed=5, max_tokens=12)


def by_hand(prompt, params, seed, child=0, vocab_size=64, scale=4.0):
    """The tokens that `klero.sample` draws from the toy's logits, one at a time: what the engine must say."""
    state, tokens = 0, list(prompt)
    for position, token in enumerate(prompt):
        state = state_after(state, token, position)
    while len(tokens) < len(prompt) + params.max_tokens:
        row = logits_of_state(state, vocab_size, scale)[None]
        one = SamplingParams(
            temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p
        )
        drawn = sample(row, one, positions=len(tokens), seeds=seed, children=child, backend="reference")
        token = int(drawn.token_ids[0])
        state = state_after(state, token, len(tokens))
        tokens.append(token)
    return tuple(tokens[len(prompt) :])


@pytest.mark.parametrize("model", [ToyModel, PagedToyModel])
def test_the_engine_says_what_klero_sample_draws(model):
    (output,) = LLM(model()).generate([[1, 2, 3]], HOT)
    assert output.outputs[0].token_ids == by_hand([1, 2, 3], HOT, seed=5)
    assert output.outputs[0].seed == 5


PARAMS = [
    SamplingParams(max_tokens=9),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=7),
    SamplingParams(temperature=1.5, min_p=0.05, seed=2**64 - 1, max_tokens=11),
    SamplingParams(temperature=1.0, top_k=5, seed=-1, n=3, max_tokens=5),
    SamplingParams(temperature=2.0, seed=0, max_tokens=13),
]
PROMPTS = [[1], [2, 3, 4, 5, 6, 7, 8], [9] * 20, [10, 11], [12, 13, 14]]


@given(
    model=st.sampled_from([ToyModel, PagedToyModel]),
    order=st.permutations(range(5)),
    max_num_seqs=st.integers(1, 8),
    budget=st.sampled_from([1, 2, 3, 7, 16, 64]),
    block_size=st.sampled_from([1, 3, 16]),
    spare=st.integers(0, 6),
)
def test_tokens_do_not_depend_on_batch_order_budget_or_blocks(model, order, max_num_seqs, budget, block_size, spare):
    """Down to one block more than the longest request needs: preemption and recompute included."""
    llm = LLM(
        model(),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        block_size=block_size,
        num_blocks=-(-40 // block_size) + spare,
    )
    outputs = llm.generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order])
    for i, output in zip(order, outputs, strict=True):
        seed = 0 if PARAMS[i].seed is None else PARAMS[i].seed % 2**64
        for choice in output.outputs:
            assert choice.token_ids == by_hand(PROMPTS[i], PARAMS[i], seed, choice.index), (i, choice.index)
    assert_all_free(llm.engine)


def test_preemption_happens_and_changes_nothing():
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=30)
    llm = LLM(PagedToyModel(), block_size=4, num_blocks=20, max_num_batched_tokens=8)
    outputs = llm.generate([[i] * 10 for i in range(1, 6)], params)
    assert llm.engine.scheduler.num_preemptions > 0
    for i, output in enumerate(outputs):
        assert output.outputs[0].token_ids == by_hand([i + 1] * 10, params, seed=1 + i)


def test_one_seed_over_a_list_is_spread_and_reported():
    outputs = LLM(ToyModel()).generate([[1], [1], [1]], SamplingParams(temperature=1.0, seed=2**64 - 1, max_tokens=8))
    assert [o.outputs[0].seed for o in outputs] == [2**64 - 1, 0, 1]
    assert len({o.outputs[0].token_ids for o in outputs}) == 3


def test_a_fresh_seed_is_reported_and_gives_the_text_again():
    first = LLM(ToyModel()).generate([[4, 5]], SamplingParams(temperature=1.0, max_tokens=8))[0].outputs[0]
    again = LLM(ToyModel()).generate([[4, 5]], SamplingParams(temperature=1.0, seed=first.seed, max_tokens=8))
    assert again[0].outputs[0].token_ids == first.token_ids


def test_the_engine_seed_makes_every_seed():
    def seeds(seed):
        outputs = LLM(ToyModel(), seed=seed).generate([[1], [1]], SamplingParams(temperature=1.0, max_tokens=2))
        return [o.outputs[0].seed for o in outputs]

    assert seeds(7) == seeds(7)
    assert seeds(7) != seeds(8)
    assert len(set(seeds(7))) == 2
    assert seeds(None) != seeds(None)


class OneBadRow(ToyModel):
    """NaN in the row of the sequence whose prompt starts with token 9, from its third token on."""

    def forward(self, step):
        logits = super().forward(step)
        ids = [self.first.get(slot) for slot in step.slots.tolist()]
        for n, slot in enumerate(step.slots.tolist()):
            if step.positions[step.query_starts[n]] == 0:
                self.first[slot] = ids[n] = int(step.input_ids[step.query_starts[n]])
        row_of = {t: r for r, t in enumerate(step.logits_rows.tolist())}
        for n, first in enumerate(ids):
            last = int(step.query_starts[n + 1]) - 1
            if first == 9 and step.positions[last] >= 3 and last in row_of:
                logits[row_of[last], 63] = np.nan
        return logits

    first: dict[int, int]


def test_a_bad_row_ends_its_request_alone():
    model = OneBadRow()
    model.first = {}
    llm = LLM(model)
    good, bad, other = llm.generate([[1, 2], [9, 9], [3, 4]], SamplingParams(temperature=1.0, seed=3, max_tokens=6))
    assert bad.outputs[0].finish_reason == "error"
    assert "position 4" in bad.outputs[0].error
    assert len(bad.outputs[0].token_ids) == 2
    assert good.outputs[0].token_ids == by_hand([1, 2], HOT, seed=3)[:6]
    assert other.outputs[0].token_ids == by_hand([3, 4], HOT, seed=5)[:6]
    assert_all_free(llm.engine)


def test_bad_requests_are_refused_and_the_others_go_on():
    engine = Engine(PagedToyModel(max_model_len=16), block_size=4, num_blocks=4)
    engine.add_request("good", [1, 2, 3], SamplingParams(temperature=1.0, seed=5, max_tokens=4))
    engine.step()
    for prompt, params, error, words in [
        ([], HOT, RequestError, "empty"),
        ([64], HOT, RequestError, r"\[0, 63\]"),
        ([-1], HOT, RequestError, r"\[0, 63\]"),
        ([1.5], HOT, RequestError, "integer"),
        ([True], HOT, RequestError, "integer"),
        ([1] * 16, HOT, RequestError, "context is 16"),
        ([1] * 17, HOT, RequestError, "17 tokens"),
        ([1] * 8, SamplingParams(max_tokens=9), ParameterError, "8 prompt tokens"),
        ([1], SamplingParams(stop_token_ids=[64]), ParameterError, "stop_token_ids"),
        ([1], SamplingParams(end_token_ids=[64]), ParameterError, "end_token_ids"),
        ([1], SamplingParams(stop="x"), ParameterError, "tokenizer"),
        ([1] * 10, SamplingParams(min_tokens=7), ParameterError, "min_tokens"),
    ]:
        with pytest.raises(error, match=words):
            engine.add_request("bad", prompt, params)
    with pytest.raises(RequestError, match="is running"):
        engine.add_request("good", [1], HOT)
    outputs = list(itertools.chain.from_iterable(engine.step() for _ in range(10)))
    assert [o.outputs[0].token_ids for o in outputs] == [by_hand([1, 2, 3], HOT, seed=5)[:4]]
    assert_all_free(engine)


@pytest.mark.parametrize(
    "prompt_len, max_tokens, num_out", [(8, 8, 8), (8, None, 8), (15, None, 1), (15, 1, 1)]
)
def test_prompt_and_output_fill_the_context_to_the_last_token(prompt_len, max_tokens, num_out):
    llm = LLM(PagedToyModel(max_model_len=16), block_size=5)
    (output,) = llm.generate([[1] * prompt_len], SamplingParams(temperature=1.0, max_tokens=max_tokens))
    assert len(output.outputs[0].token_ids) == num_out
    assert output.outputs[0].finish_reason == "length"


def test_two_threads_may_generate_on_one_llm():
    llm = LLM(ToyModel())
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=12)
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda i: llm.generate([[i]], params), range(16)))
    for i, (output,) in enumerate(outputs):
        assert output.outputs[0].token_ids == by_hand([i], params, seed=5)
    assert_all_free(llm.engine)


def test_one_bad_prompt_in_a_list_stops_the_call_before_anything_runs():
    llm = LLM(ToyModel())
    with pytest.raises(RequestError, match=r"prompts\[1\]"):
        llm.generate([[1], []], HOT)
    assert_all_free(llm.engine)
    assert llm.engine.model.num_forwards == 0


def test_abort_keeps_what_was_there_and_frees_everything():
    engine = Engine(PagedToyModel(), block_size=4, num_blocks=64)
    engine.add_request("a", [1], SamplingParams(temperature=1.0, n=2, seed=5, max_tokens=50))
    engine.add_request("b", [2], SamplingParams(temperature=1.0, seed=6, max_tokens=6))
    for _ in range(3):
        engine.step()
    output = engine.abort("a")
    assert [c.finish_reason for c in output.outputs] == ["abort", "abort"]
    assert [len(c.token_ids) for c in output.outputs] == [3, 3]
    with pytest.raises(RequestError, match="no such request"):
        engine.abort("a")
    with pytest.raises(RequestError, match="no such request"):
        engine.abort("never")
    outputs = [o for _ in range(5) for o in engine.step()]
    assert outputs[0].outputs[0].token_ids == by_hand([2], SamplingParams(temperature=1.0, max_tokens=6), seed=6)
    assert_all_free(engine)


def test_generate_takes_no_output_of_requests_it_did_not_add():
    llm = LLM(ToyModel())
    llm.engine.add_request("mine", [1], HOT)
    with pytest.raises(RequestError, match="added to it directly"):
        llm.generate([[2]], HOT)
    outputs = [o for _ in range(12) for o in llm.engine.step()]
    assert [o.request_id for o in outputs] == ["mine"]
    assert llm.generate([[1]], HOT)[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids


def test_generate_from_its_own_progress_is_refused():
    llm = LLM(ToyModel())
    with pytest.raises(RequestError, match="progress"):
        llm.generate([[1]], HOT, progress=lambda _: llm.generate([[2]], HOT))
    assert_all_free(llm.engine)
    assert llm.generate([[1]], HOT)[0].outputs[0].token_ids == by_hand([1], HOT, seed=5)


@pytest.mark.parametrize("model", [ToyModel, PagedToyModel])
def test_an_interrupt_at_any_line_leaves_a_working_engine(model):
    """Raise KeyboardInterrupt at the k-th line of klero's engine, batch and sampler, for many k."""
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=4, n=2)
    llm = LLM(model(), max_num_seqs=3, block_size=4, num_blocks=8)
    expected = [by_hand([1, 2], params, 5, child) for child in range(2)]
    files = (
        "engine/engine.py", "engine/scheduler.py", "batch/slots.py", "batch/blocks.py", "batch/kv.py",
        "batch/input_batch.py", "batch/changes.py", "sampling/sampler.py",
    )  # fmt: skip

    def interrupted(k):
        left = k

        def trace(frame, event, _):
            nonlocal left
            if not frame.f_code.co_filename.endswith(files) or frame.f_code.co_name == "discard":
                return None
            left -= event == "line"
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            llm.generate([[1, 2]], params)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    k = 0
    while interrupted(k):
        assert_all_free(llm.engine)
        k += 5
    assert k > 100
    assert [c.token_ids for c in llm.generate([[1, 2]], params)[0].outputs] == expected


def test_end_ids_outside_the_logits_are_no_end_ids():
    llm = LLM(ScriptedModel([5], vocab_size=8, end_token_ids=[99, -1, 7]))
    (output,) = llm.generate([[1]], SamplingParams(min_tokens=1, max_tokens=3))
    assert output.outputs[0].token_ids == (5, 5, 5)


def test_refused_requests_take_no_seed():
    def seed_of_next(engine):
        return engine.add_request("y", [1], SamplingParams(temperature=1.0, max_tokens=1)).seed

    engine = Engine(ToyModel(), seed=5)
    with pytest.raises(RequestError):
        engine.add_request("x", [], HOT)
    assert seed_of_next(engine) == seed_of_next(Engine(ToyModel(), seed=5))


def test_a_failing_forward_leaves_the_engine_usable():
    class Failing(ToyModel):
        fail = True

        def forward(self, step):
            if self.fail:
                raise RuntimeError("the model broke")
            return super().forward(step)

    llm = LLM(Failing())
    with pytest.raises(RuntimeError, match="the model broke"):
        llm.generate([[1], [2]], HOT)
    assert_all_free(llm.engine)
    llm.engine.model.fail = False
    assert llm.generate([[1]], HOT)[0].outputs[0].token_ids == by_hand([1], HOT, seed=5)


def test_a_step_that_fails_after_the_forward_can_be_run_again():
    class Wide(ToyModel):
        wide = True

        def forward(self, step):
            states = dict(self._states)
            logits = super().forward(step)
            if self.wide:
                self._states = states
                return np.zeros((len(logits), 65), np.float32)
            return logits

    engine = Engine(Wide())
    engine.add_request("a", [1, 2], HOT)
    with pytest.raises(LogitsError, match="1 rows of 64"):
        engine.step()
    engine.model.wide = False
    outputs = [o for _ in range(12) for o in engine.step()]
    assert outputs[0].outputs[0].token_ids == by_hand([1, 2], HOT, seed=5)
    assert_all_free(engine)


def test_an_id_without_text_ends_its_request_alone():
    """Id 50 is inside the logits width and not in the vocabulary."""
    words = TokenBytes.from_list([b"x"] * 50)
    model = ScriptedModel([1, 50, 1], prompt_len=2, vocabulary=words)
    engine = Engine(model, vocabulary=words)
    engine.add_request("bad", [1, 1], SamplingParams(max_tokens=4))
    engine.add_request("good", [1, 1], SamplingParams(max_tokens=1))
    with pytest.raises(ModelError, match="50"):
        engine.add_request("echo", [50, 1, 1, 1], SamplingParams(max_tokens=1, echo=True))
    outputs = {o.request_id: o.outputs[0] for _ in range(3) for o in engine.step()}
    assert outputs["good"].finish_reason == "length"
    assert outputs["bad"].finish_reason == "error"
    assert "50" in outputs["bad"].error
    assert outputs["bad"].text == "x"
    assert_all_free(engine)


def test_preemption_does_not_thrash():
    """6 sequences of 10 + 60 tokens in 20 blocks of 4: what is computed twice stays below what is computed once."""
    computed = []

    class Counting(PagedToyModel):
        def forward(self, step):
            computed.append(len(step.input_ids))
            return super().forward(step)

    llm = LLM(Counting(), block_size=4, num_blocks=20, max_num_batched_tokens=16)
    llm.generate([[i] * 10 for i in range(6)], SamplingParams(temperature=1.0, seed=1, max_tokens=60))
    assert sum(computed) < 2 * 6 * 69


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_everyone_who_runs_gets_on_in_every_step(budget):
    engine = Engine(ToyModel(), max_num_batched_tokens=budget)
    for i in range(5):
        engine.add_request(str(i), [1] * 4, SamplingParams(temperature=1.0, max_tokens=30))
    for _ in range(20):
        before = {c: c.num_computed for c in engine.scheduler.running}
        engine.step()
        assert len(before) <= budget
        assert all(c.finished or c.num_computed > num for c, num in before.items())


def test_options_act_or_are_refused():
    llm = LLM(ToyModel(), max_model_len=4)
    assert len(llm.generate([[1, 2]], SamplingParams())[0].outputs[0].token_ids) == 2
    with pytest.raises(OptionError, match="max_model_len=257"):
        LLM(ToyModel(), max_model_len=257)
    with pytest.raises(OptionError, match="dtype"):
        LLM(ToyModel(), dtype="float32")


def test_min_tokens_bans_every_end_until_it_is_reached():
    model = ScriptedModel([7], vocab_size=16, end_token_ids=[7])
    (output,) = LLM(model).generate([[1]], SamplingParams(min_tokens=3, max_tokens=9))
    assert output.outputs[0].token_ids == (0, 0, 0, 7)  # zeros: the lowest id of a tie while 7 is banned
    assert output.outputs[0].finish_reason == "stop"


def test_an_emptied_row_names_the_rule():
    model = ScriptedModel([0], vocab_size=2, end_token_ids=[0, 1])
    (output,) = LLM(model).generate([[1]], SamplingParams(min_tokens=2, max_tokens=4))
    assert output.outputs[0].finish_reason == "error"
    assert "min_tokens" in output.outputs[0].error
