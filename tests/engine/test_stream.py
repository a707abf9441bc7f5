"""Streams: together the deltas are the answer, and whoever leaves early leaves nothing behind."""

from __future__ import annotations

import contextlib
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.free import assert_all_free

from klero import SamplingParams
from klero.engine import LLM, Engine
from klero.errors import ParameterError, RequestError
from klero.finish import TokenBytes
from klero.testing.models import PagedToyModel, ScriptedModel, ToyModel

# Halves of characters, a byte that no character has, stop strings across tokens, two special tokens; 14 and 15 are
# inside the logits and have no text, so that drawing one is an error of that choice.
PIECES = [
    b"a", b"b", b"ab", b"ba", b"\xf0\x9f", b"\x98\x80", b"\xe2\x82", b"\xac", b"\xff", b" ", b"aab", b"",
    b"<s>", b"<e>",
]  # fmt: skip
WORDS = TokenBytes.from_list(PIECES, special=[12, 13])
HOT = SamplingParams(temperature=1.0, seed=5, max_tokens=12)


def toy(model=ToyModel, vocabulary=WORDS):
    return model(vocab_size=16, max_model_len=64, end_token_ids=[13], vocabulary=vocabulary)


FLAGS = ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens", "echo")


@st.composite
def some_params(draw):
    max_tokens = draw(st.integers(1, 20))
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.7, 2.0])),
        seed=draw(st.integers(0, 2**64 - 1)),
        n=draw(st.integers(1, 3)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        stop=draw(st.lists(st.sampled_from(["a", "bb", "aba", "ab ", "€", "😀a", "<s>", "\ufffd"]), max_size=3)),
        stop_token_ids=draw(st.lists(st.sampled_from([[1], [2, 3], [0, 0, 1]]), max_size=2)),
        **{flag: draw(st.booleans()) for flag in FLAGS},
    )


class Joined:
    """The deltas of one choice put together."""

    def __init__(self):
        self.text, self.token_ids, self.end = "", (), None

    def take(self, delta):
        assert self.end is None, "a delta came after the last"
        assert delta.text or delta.token_ids or delta.finish_reason, "a delta without news"
        self.text, self.token_ids = self.text + delta.text, self.token_ids + delta.token_ids
        self.seed, self.reproducible = delta.seed, delta.reproducible
        if delta.finish_reason is not None:
            self.end = delta.finish_reason, delta.stop_reason, delta.error

    def assert_is(self, output):
        assert self.text == output.text
        assert self.token_ids == output.token_ids
        assert self.end == (output.finish_reason, output.stop_reason, output.error)
        assert (self.seed, self.reproducible) == (output.seed, output.reproducible)


def joined(deltas):
    choices = {}
    for delta in deltas:
        choices.setdefault((delta.prompt_index, delta.index), Joined()).take(delta)
    return choices


@given(
    model=st.sampled_from([ToyModel, PagedToyModel]),
    prompts=st.lists(st.lists(st.integers(0, 13), min_size=1, max_size=9), min_size=1, max_size=4),
    params=st.lists(some_params(), min_size=4, max_size=4),
    max_num_seqs=st.integers(1, 6),
    budget=st.sampled_from([1, 3, 16]),
)
def test_together_the_deltas_are_the_answer_in_every_field(model, prompts, params, max_num_seqs, budget):
    params = params[: len(prompts)]
    names = [f"name-{i}" for i in range(len(prompts))]
    plain = LLM(toy(model)).generate(prompts, params, request_ids=names)
    llm = LLM(toy(model), max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, block_size=4, num_blocks=12)

    def whole():
        assert (yield from llm.stream(prompts, params, request_ids=names)) == plain

    deltas = list(whole())
    choices = joined(deltas)
    assert len(choices) == sum(one.n for one in params)
    for i, output in enumerate(plain):
        for choice in output.outputs:
            choices[i, choice.index].assert_is(choice)
    assert all(delta.request_id == names[delta.prompt_index] for delta in deltas)
    assert_all_free(llm.engine)


def test_every_step_brings_each_choice_at_most_one_delta_and_at_once():
    engine = Engine(toy(), vocabulary=WORDS)
    params = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=9, ignore_eos=True, detokenize=False)
    engine.add_request("r", [1, 2], params, stream=True)
    engine.add_request("quiet", [1, 2], params)
    while engine.num_unfinished:
        running = [choice for choice in engine.scheduler.running if choice.request.request_id == "r"]
        engine.step()
        deltas = engine.take_deltas()
        assert {delta.request_id for delta in deltas} <= {"r"}
        assert len({delta.index for delta in deltas}) == len(deltas) >= len(running)


def test_an_abort_ends_the_stream_with_what_was_held():
    """Half a character and the beginning of a stop string come out at the end."""
    llm = LLM(ScriptedModel([0, 1, 4], vocab_size=16, vocabulary=WORDS))
    seen = []
    for delta in llm.stream([[1]], SamplingParams(stop="bz", max_tokens=9), request_ids=["r"]):
        seen.append((delta.text, delta.token_ids, delta.finish_reason))
        if len(seen) == 2:
            llm.abort("r")
    assert seen == [("a", (0,), None), ("", (1,), None), ("b", (), "abort")]
    assert_all_free(llm.engine)


def test_discarded_requests_leave_no_deltas():
    engine = Engine(ToyModel())
    for name in "ab":
        engine.add_request(name, [1], HOT, stream=True)
    engine.step()
    engine.discard(["a"])
    assert [delta.request_id for delta in engine.take_deltas()] == ["b"]


def test_leaving_the_loop_frees_everything_at_once():
    llm = LLM(PagedToyModel(), max_num_seqs=2, block_size=4, num_blocks=16)
    for delta in llm.stream([[1]] * 3, HOT):
        assert delta.token_ids
        break
    assert_all_free(llm.engine)
    with contextlib.suppress(KeyError):
        for delta in llm.stream([[1]] * 3, HOT):
            raise KeyError(delta.index)
    assert_all_free(llm.engine)
    stream = llm.stream([[1]] * 3, HOT)
    next(stream)
    assert llm.engine.num_unfinished == 3
    stream.close()
    assert_all_free(llm.engine)
    assert list(stream) == []
    assert llm.engine.take_deltas() == []
    assert llm.generate([[1]], HOT)[0].outputs == LLM(ToyModel()).generate([[1]], HOT)[0].outputs


def test_a_stream_that_was_never_started_holds_nothing():
    llm = LLM(ToyModel())
    stream = llm.stream([[1]], HOT)
    assert len(llm.generate([[1]], HOT)) == 1
    with pytest.raises(RequestError, match=r"prompts\[0\]"):
        next(llm.stream([[]], HOT))
    del stream
    assert_all_free(llm.engine)


def test_a_failing_model_ends_the_stream_with_its_exception():
    class Failing(ToyModel):
        def forward(self, step):
            if self.num_forwards == 3:
                raise RuntimeError("the model broke")
            return super().forward(step)

    llm = LLM(Failing())
    stream = llm.stream([[1]], HOT)
    with pytest.raises(RuntimeError, match="the model broke"):
        list(stream)
    assert_all_free(llm.engine)


def test_the_same_thread_is_refused_and_another_waits_until_the_stream_is_closed():
    llm = LLM(ToyModel())
    stream = llm.stream([[1]], HOT)
    next(stream)
    with pytest.raises(RequestError, match="close the stream"):
        llm.generate([[2]], HOT)
    with pytest.raises(RequestError, match="close the stream"):
        next(llm.stream([[2]], HOT))
    answers, started = [], threading.Event()

    def other():
        started.set()
        answers.extend(llm.generate([[2]], HOT))

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    started.wait()
    thread.join(0.05)
    assert thread.is_alive()
    stream.close()
    thread.join(10)
    assert [a.outputs[0].token_ids for a in answers] == [LLM(ToyModel()).generate([[2]], HOT)[0].outputs[0].token_ids]


def test_a_stream_may_go_from_thread_to_thread():
    llm = LLM(ToyModel())
    stream = llm.stream([[1]], HOT)
    next(stream)
    refused = []

    def other():
        next(stream)
        try:
            llm.generate([[1]], HOT)
        except RequestError as error:
            refused.append(error)

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    thread.join(10)
    assert len(refused) == 1
    stream.close()
    assert_all_free(llm.engine)


def test_request_ids_are_checked():
    llm = LLM(ToyModel())
    for request_ids, words in [
        (["a"], "1 for 2 prompts"),
        (["a", "a"], "'a' stands there 2 times"),
        (["a", ""], "non-empty"),
        (["a", 5], "non-empty"),
    ]:
        with pytest.raises(RequestError, match=words):
            llm.generate([[1], [2]], HOT, request_ids=request_ids)
    outputs = llm.generate([[1], [2]], HOT, request_ids=("a", "b"))
    assert [o.request_id for o in outputs] == ["a", "b"]
    assert llm.generate([1], HOT, request_ids="c")[0].request_id == "c"
    with pytest.raises(ParameterError, match=r"prompts\[1\]"):
        llm.generate([[1], [2]], [HOT, SamplingParams(max_tokens=999)])
