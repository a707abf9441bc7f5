"""LLM as its callers see it: abort from other threads, closing, deterministic or not, metrics."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
from tests.engine.gated import Gated

from klero import OptionError, SamplingParams
from klero.engine import LLM, Engine
from klero.engine.times import PARTS
from klero.errors import RequestError
from klero.testing.models import PagedToyModel, ToyModel

HOT = SamplingParams(temperature=1.0, seed=5, max_tokens=12)


def in_thread(function):
    """Run a function beside the test; its result, or its exception, lands in the list."""
    results = []

    def run():
        try:
            results.append(function())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def test_abort_from_another_thread_takes_effect_between_steps():
    model = Gated()
    llm = LLM(model, block_size=4, num_blocks=64)
    thread, results = in_thread(lambda: llm.generate([[1], [2]], HOT, request_ids=["a", "b"]))
    for _ in range(3):
        model.steps.release()
    for _ in range(4):
        assert model.at_gate.acquire(timeout=10)
    llm.abort("a")  # in the middle of step 4, which computes it all the same
    llm.abort("a")  # twice is once
    with pytest.raises(RequestError, match="no such request"):
        llm.abort("c")
    assert llm.engine.num_unfinished == 2
    for _ in range(20):
        model.steps.release()
    thread.join(10)
    a, b = results[0]
    plain = LLM(ToyModel()).generate([[1], [2]], HOT)
    assert (a.outputs[0].finish_reason, a.outputs[0].error) == ("abort", "aborted by the caller")
    assert a.outputs[0].token_ids == plain[0].outputs[0].token_ids[:4]
    assert b.outputs == plain[1].outputs
    with pytest.raises(RequestError, match="no such request"):
        llm.abort("b")


def test_an_abort_that_comes_too_late_does_not_hit_the_next_request_of_that_name():
    llm = LLM(ToyModel())
    one = SamplingParams(max_tokens=1)
    (output,) = llm.generate([[1]], one, request_ids="r", progress=lambda p: p.unfinished and llm.abort("r"))
    assert output.outputs[0].finish_reason == "length"
    stream = llm.stream([[1]], HOT, request_ids="r")
    next(stream)
    llm.abort("r")
    stream.close()
    assert llm.generate([[1]], one, request_ids="r")[0].outputs[0].finish_reason == "length"


def test_progress_names_what_is_unfinished_and_may_abort_it():
    llm = LLM(ToyModel())

    def stop_early(progress):
        seen.append(progress.unfinished)
        if progress.num_tokens == 6:
            llm.abort(progress.unfinished[0])

    seen = []
    outputs = llm.generate([[1], [2]], HOT, request_ids=["a", "b"], progress=stop_early)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [3, 12]
    assert seen == [("a", "b")] * 3 + [("b",)] * 8 + [()]


def test_closing_frees_the_model_and_ends_use():
    model = PagedToyModel()
    alive = weakref.ref(model)
    with LLM(model, block_size=4, num_blocks=64) as llm:
        assert len(llm.generate([[1]], HOT)) == 1
        assert len(model._cache) == 256
    assert len(model._cache) == 4
    del model
    gc.collect()
    assert alive() is None
    llm.close()
    for use in (
        lambda: llm.generate([[1]], HOT),
        lambda: next(llm.stream([[1]], HOT)),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
        lambda: llm.abort("r"),
        lambda: llm.engine.add_request("r", [1], HOT),
        llm.__enter__,
    ):
        with pytest.raises(RequestError, match="closed"):
            use()


def test_closing_aborts_what_runs_in_another_thread():
    model = Gated()
    llm = LLM(model, block_size=4, num_blocks=64)
    thread, results = in_thread(lambda: llm.generate([[1], [2]], HOT))
    model.steps.release()
    for _ in range(2):
        assert model.at_gate.acquire(timeout=10)
    closing, _ = in_thread(llm.close)
    while not llm._turns._closing:
        closing.join(0.001)
    model.steps.release(20)
    closing.join(10)
    thread.join(10)
    assert [o.outputs[0].finish_reason for o in results[0]] == ["abort", "abort"]
    assert [o.outputs[0].error for o in results[0]] == ["the LLM was closed"] * 2
    assert model.num_forwards <= 3


def test_closing_inside_a_progress_callback_or_a_stream_ends_the_call():
    llm = LLM(ToyModel())
    (output,) = llm.generate([[1]], HOT, progress=lambda p: llm.close())
    assert (output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == ("abort", 1)
    llm = LLM(ToyModel())
    deltas = []
    for delta in llm.stream([[1]], HOT):
        deltas.append(delta)
        llm.close()
    assert [d.finish_reason for d in deltas] == [None, "abort"]
    llm = LLM(ToyModel())
    stream = llm.stream([[1]], HOT)
    next(stream)
    llm.close()
    stream.close()
    assert llm.engine.num_unfinished == 0


def test_a_model_in_its_blocks_is_closed_in_the_middle_of_a_stream():
    llm = LLM(PagedToyModel(), block_size=4, num_blocks=8)
    stream = llm.stream([[1, 2], [3]], HOT)
    first = [next(stream), next(stream)]
    llm.close()
    last = list(stream)
    assert [d.finish_reason for d in first + last] == [None, None, "abort", "abort"]
    assert llm.engine.kv.blocks.num_free == 8


class Loose(ToyModel):
    deterministic = False


class Silent(ToyModel):
    """A Model that does not say."""

    deterministic = property()  # reading it raises AttributeError


@pytest.mark.parametrize("model, reproducible", [(ToyModel, True), (Loose, False), (Silent, False)])
def test_every_answer_says_whether_it_is_reproducible(model, reproducible):
    llm = LLM(model())
    assert [c.reproducible for c in llm.generate([[1]], SamplingParams(n=2, max_tokens=2))[0].outputs] == [
        reproducible
    ] * 2
    assert {d.reproducible for d in llm.stream([[1]], HOT)} == {reproducible}


@pytest.mark.parametrize("model, asked", [(Loose, True), (Silent, True), (ToyModel, False)])
def test_a_model_object_is_as_deterministic_as_it_is(model, asked):
    with pytest.raises(OptionError, match=f"deterministic={asked}"):
        LLM(model(), deterministic=asked)
    LLM(model(), deterministic=not asked)


def test_deterministic_is_a_boolean():
    with pytest.raises(OptionError, match="True, False or None"):
        LLM(ToyModel(), deterministic=1)


def test_metrics_count_what_happened():
    llm = LLM(ToyModel(), max_num_batched_tokens=4, max_num_seqs=1)
    first, second = llm.generate([[1] * 6, [2]], SamplingParams(temperature=1.0, seed=5, max_tokens=3))
    m = first.metrics
    assert (m.num_prompt_tokens, m.num_prompt_tokens_computed) == (6, 6)
    assert (m.num_generated_tokens, m.num_steps, m.num_preemptions) == (3, 4, 0)
    assert 0 <= m.seconds_queued <= m.seconds_to_first_token <= m.seconds_total
    assert second.metrics.seconds_queued >= m.seconds_to_first_token  # it waited for the only seat
    assert second.metrics.num_steps == 3


def test_metrics_of_choices_and_preemptions():
    llm = LLM(PagedToyModel(), block_size=4, num_blocks=10, max_num_batched_tokens=64)
    (output,) = llm.generate([[1] * 10], SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=20))
    m = output.metrics
    assert m.num_preemptions == llm.engine.scheduler.num_preemptions > 0
    assert m.num_prompt_tokens_computed == 10 + 1 + 1 + 2  # siblings share; once preempted, 8 of 10 were still cached
    assert m.num_generated_tokens == 60
    assert m.num_steps == llm.engine.times.num_steps


def test_metrics_of_requests_that_never_ran_or_failed():
    engine = Engine(ToyModel(), max_num_seqs=1)
    for name in "abc":
        engine.add_request(name, [1], HOT)
    engine.step()
    waiting, running = engine.abort("b").metrics, engine.abort("a").metrics
    assert (waiting.seconds_queued, waiting.seconds_to_first_token, waiting.num_steps) == (None, None, 0)
    assert waiting.seconds_total > 0
    assert running.seconds_to_first_token is not None
    engine.model.forward = None
    with pytest.raises(TypeError):
        engine.step()
    (failed,) = engine.fail("broken")
    assert (failed.outputs[0].finish_reason, failed.outputs[0].error) == ("error", "broken")
    assert failed.metrics.seconds_queued is not None
    assert failed.metrics.seconds_to_first_token is None
    assert engine.fail("again") == []
    assert engine.num_unfinished == 0


def test_a_request_whose_first_row_cannot_be_drawn_has_no_first_token():
    class Bad(ToyModel):
        def forward(self, step):
            return super().forward(step) * np.float32("nan")

    (output,) = LLM(Bad()).generate([[1]], HOT)
    assert (output.outputs[0].finish_reason, output.metrics.num_generated_tokens) == ("error", 0)
    assert output.metrics.seconds_to_first_token is None
    assert output.metrics.seconds_queued is not None


def test_only_the_requests_of_the_last_step_can_fail_with_it():
    engine = Engine(ToyModel())
    engine.add_request("a", [1], HOT)
    forward, engine.model.forward = engine.model.forward, None
    with pytest.raises(TypeError):
        engine.step()
    engine.model.forward = forward
    engine.step()
    assert engine.fail("too late") == []
    assert engine.unfinished == ("a",)


def test_answers_are_equal_whatever_they_cost():
    first, second = (LLM(ToyModel()).generate([[1]], HOT) for _ in range(2))
    assert first == second
    assert first[0].metrics != second[0].metrics


def test_times_count_steps_tokens_and_rows():
    llm = LLM(ToyModel(), max_num_batched_tokens=4)
    times = llm.engine.times
    assert set(times.shares().values()) == {0.0}
    llm.generate([[1] * 6], SamplingParams(temperature=1.0, max_tokens=3))
    assert (times.num_steps, times.num_tokens, times.num_rows) == (4, 8, 3)
    assert tuple(times.seconds) == PARTS
    assert all(seconds > 0 for seconds in times.seconds.values())
    assert sum(times.shares().values()) == pytest.approx(1)
    assert times.total == pytest.approx(sum(times.seconds.values()))
    times.reset()
    assert (times.num_steps, times.num_tokens, times.num_rows, times.total) == (0, 0, 0, 0.0)


def test_the_time_of_a_step_lands_in_its_part():
    class Slow(ToyModel):
        def forward(self, step):
            threading.Event().wait(0.02)
            return super().forward(step)

    llm = LLM(Slow())
    llm.generate([[1]], HOT)
    llm.engine.times.reset()
    llm.generate([[1]], HOT)
    assert llm.engine.times.seconds["forward"] >= 12 * 0.02
    assert llm.engine.times.shares()["forward"] > 0.6


def test_a_step_that_fails_counts_for_nothing():
    engine = Engine(ToyModel())
    engine.add_request("a", [1], HOT)
    forward = engine.model.forward
    engine.model.forward = None
    with pytest.raises(TypeError):
        engine.step()
    assert (engine.times.num_steps, engine.times.total) == (0, 0.0)
    engine.model.forward = forward
    threading.Event().wait(0.3)  # nor does the time between steps
    engine.step()
    assert engine.times.num_steps == 1
    assert engine.times.seconds["schedule"] < 0.3


def test_closing_ends_a_call_that_waits_for_its_turn():
    llm = LLM(ToyModel())
    stream = llm.stream([[1]], HOT)
    next(stream)
    thread, results = in_thread(lambda: llm.generate([[2]], HOT))
    llm.close()
    thread.join(10)
    assert isinstance(results[0], RequestError)
    assert "closed" in str(results[0])


def test_a_refused_call_leaves_the_requests_of_others():
    llm = LLM(ToyModel())
    llm.engine.add_request("request-0", [1], HOT)
    with pytest.raises(RequestError, match="added to it directly"):
        llm.generate([[2]], HOT)
    outputs = []
    while llm.engine.num_unfinished:
        outputs += llm.engine.step()
    assert [output.request_id for output in outputs] == ["request-0"]


@pytest.mark.parametrize("params", [5, object(), [5], {"max_tokens": 3}])
def test_params_that_are_none_are_refused(params):
    with pytest.raises(RequestError, match="must be SamplingParams"):
        LLM(ToyModel()).generate([[1]], params)


def test_sizes_are_checked_before_a_model_is_looked_for():
    with pytest.raises(OptionError, match="max_num_seqs=0"):
        LLM("./no-such-model", max_num_seqs=0)
