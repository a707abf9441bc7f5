"""Grammars and budgets of thinking in the engine, over a vocabulary of bytes: what comes out holds, in any company."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import threading

import pytest
from tests.engine.free import assert_all_free
from tests.grammar.words import OneOf

from klero import AsyncLLM, SamplingParams
from klero.engine import LLM, Engine
from klero.errors import GrammarError, ParameterError, QueueFullError, RequestError
from klero.finish import TokenBytes
from klero.testing.models import PagedToyModel, ToyModel

pytest.importorskip("llguidance")

END, THINK, THOUGHT, TURN = 256, 257, 258, 259  # 260 is a column without a token
BYTES = [bytes([i]) for i in range(256)] + [b"</s>", b"<think>", b"</think>", b"</t>"]
VOCABULARY = TokenBytes.from_list(BYTES, special=[END, THINK, THOUGHT, TURN])
PROMPT = list(b"Say it: ")


def model(paged=True, **more):
    """One more column than there are tokens."""
    return (PagedToyModel if paged else ToyModel)(261, 512, (END,), vocabulary=VOCABULARY, **more)


def asks(**more):
    return SamplingParams(**{"temperature": 1.0, "seed": 5, "max_tokens": 60} | more)


@pytest.fixture(scope="module")
def llm():
    with LLM(model(), thinking_token_ids=(THINK, THOUGHT), num_blocks=64) as llm:
        yield llm


SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "integer", "minimum": 3, "maximum": 5}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SHAPES = [
    ({"json": SCHEMA}, r'\{"a":"(x|yy)","b":[345]\}'),
    ({"regex": "[ab]{2,5}"}, "[ab]{2,5}"),
    ({"choice": ["yes", "no", "yes and no"]}, "yes|no|yes and no"),
    ({"grammar": 'start: "(" (start | "o") ")"'}, r"\(+o\)+"),
    ({"grammar": 'root ::= "(" (root | "o") ")"'}, r"\(+o\)+"),
    ({"json_object": True}, r"\{.*\}"),
]


@pytest.mark.parametrize(("guide", "shape"), SHAPES, ids=[next(iter(guide)) for guide, _ in SHAPES])
@pytest.mark.parametrize("temperature", [0, 1.0, 3.0])
def test_what_ends_holds(llm, guide, shape, temperature):
    for choice in llm.generate(PROMPT, asks(n=4, temperature=temperature, max_tokens=200, **guide))[0].outputs:
        assert choice.finish_reason in ("stop", "length"), choice.error
        if choice.finish_reason == "stop":
            assert choice.token_ids[-1] == END
            assert re.fullmatch(shape, choice.text, re.DOTALL), choice.text
            if "json" in next(iter(guide)):
                json.loads(choice.text)
    assert_all_free(llm.engine)


def test_the_company_and_the_way_change_nothing():
    """Neighbours with and without grammars, preemption, chunks, microbatches, padding: the same tokens."""
    cases = [(PROMPT, asks(seed=s, n=2, max_tokens=24, **guide)) for s, (guide, _) in enumerate(SHAPES)]
    cases += [(PROMPT * 2, asks(seed=9, max_tokens=24))]
    cases += [(PROMPT, asks(seed=3, top_k=2, regex="[0-9]{3,30}", logprobs=2, max_tokens=24))]
    prompts, params = (list(each) for each in zip(*cases, strict=True))
    with LLM(model(paged=False)) as alone:
        expected = [alone.generate([prompt], one)[0].outputs for prompt, one in cases]
    ways = [
        {}, {"num_blocks": 12, "block_size": 4}, {"max_num_batched_tokens": 5}, {"max_microbatch_requests": 2},
        {"max_num_seqs": 3, "swap_space": 1e-3, "num_blocks": 14, "block_size": 4},
    ]  # fmt: skip
    for way in ways:
        with LLM(model(), **way) as llm:
            outputs = llm.generate(prompts, params)
            assert [output.outputs for output in outputs] == expected, way
            assert_all_free(llm.engine)


def test_a_failed_step_is_made_up_for():
    """The matcher is made anew and reads what was generated."""
    one = asks(regex="[0-9]{3,30}", max_tokens=20, n=2)
    with LLM(model()) as whole:
        expected = whole.generate(PROMPT, one)[0].outputs
    engine = Engine(model(), vocabulary=VOCABULARY)
    engine.add_request("a", PROMPT, one)
    forward, outputs = engine.model.forward, []
    for step in range(40):
        engine.model.forward = None if step % 3 == 2 else forward
        try:
            outputs += engine.step()
        except TypeError:
            continue
    assert outputs[0].outputs == expected
    assert_all_free(engine)


def test_children_share_no_matcher(llm):
    texts = {choice.text for choice in llm.generate(PROMPT, asks(regex="[a-z]{8}", n=16))[0].outputs}
    assert len(texts) == 16
    assert all(re.fullmatch("[a-z]{8}", text) for text in texts)


def test_the_end_comes_before_min_tokens_where_nothing_else_may(llm):
    """BN-10 in the engine; and where something else may come, it has to."""
    (choice,) = llm.generate(PROMPT, asks(choice=["yes"], min_tokens=8, temperature=0))[0].outputs
    assert (choice.text, choice.finish_reason, len(choice.token_ids)) == ("yes", "stop", 4)
    for seed in range(8):
        (choice,) = llm.generate(PROMPT, asks(regex="[ab]+", min_tokens=8, seed=seed, max_tokens=40))[0].outputs
        assert len(choice.token_ids) > 8


def test_a_grammar_meets_the_other_rules(llm):
    """Banned by one, allowed by the other: neither comes; nothing left is an error that names both."""
    one = asks(choice=["a", "b", "c"], bad_token_ids=[ord("a")], logit_bias={ord("b"): -100.0})
    assert llm.generate(PROMPT, one)[0].outputs[0].text == "c"
    (choice,) = llm.generate(PROMPT, asks(choice=["a"], bad_token_ids=[ord("a")]))[0].outputs
    assert choice.finish_reason == "error"
    assert "bad_token_ids" in choice.error


def test_own_end_ids(llm):
    """GR-03: every end id that counts is allowed at the end, and no other token."""
    one = asks(regex="x", end_token_ids=[TURN], temperature=0, logit_bias={TURN: 9.0}, ignore_eos=True)
    (choice,) = llm.generate(PROMPT, one)[0].outputs
    assert (choice.token_ids, choice.finish_reason) == ((ord("x"), TURN), "stop")


@pytest.mark.parametrize(
    ("schema", "field"),
    [
        ({"json": {"enum": []}}, "json"),
        ({"json": {"type": "strnig"}}, "json"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 4}}, "json"),
        ({"regex": "a("}, "regex"),
        ({"grammar": "start: nothing"}, "grammar"),
    ],
)
def test_what_cannot_be_held_is_refused_and_harms_nobody(llm, schema, field):
    with pytest.raises(GrammarError, match=rf"{field}=.*prompts\[1\]"):
        llm.generate([PROMPT, PROMPT], [asks(), asks(**schema)])
    assert_all_free(llm.engine)
    assert llm.generate(PROMPT, asks(max_tokens=2))[0].outputs[0].finish_reason == "length"


def test_what_it_needs_is_asked_for():
    with LLM(ToyModel()) as ids_alone:
        with pytest.raises(GrammarError, match=r"regex='a'.*give LLM\(tokenizer=...\)"):
            ids_alone.generate([1], asks(regex="a"))
        with pytest.raises(ParameterError, match="thinking_token_budget=3: needs the marks"):
            ids_alone.generate([1], asks(thinking_token_budget=3))
    with LLM(PagedToyModel(261, 512, (), vocabulary=VOCABULARY)) as endless:
        with pytest.raises(GrammarError, match=r"has none; give end_token_ids"):
            endless.generate([1], asks(regex="a"))
        assert endless.generate([1], asks(regex="a", end_token_ids=[END]))[0].outputs[0].text == "a"


def test_thinking_ends_at_its_budget_and_the_grammar_begins(llm):
    opened = [*PROMPT, THINK]
    for budget in (0, 1, 7):
        one = asks(choice=["yes", "no"], thinking_token_budget=budget, n=4)
        for choice in llm.generate([opened], one)[0].outputs:
            at = choice.token_ids.index(THOUGHT)
            assert at <= budget
            assert bytes(choice.token_ids[at + 1 : -1]) in (b"yes", b"no")
            assert choice.finish_reason == "stop"
    (choice,) = llm.generate([opened], asks(thinking_token_budget=2, temperature=0))[0].outputs
    assert choice.token_ids.index(THOUGHT) <= 2


def test_thinking_ends_in_the_middle_of_a_character(llm):
    """0xC3 begins one of two bytes; the end mark comes all the same, and what follows is the grammar's text, whole."""
    one = asks(choice=["\u00e9"], thinking_token_budget=1, logit_bias={0xC3: 100.0}, max_tokens=9)
    (choice,) = llm.generate([[*PROMPT, THINK]], one)[0].outputs
    assert choice.token_ids == (0xC3, THOUGHT, 0xC3, 0xA9, END)
    assert (choice.text, choice.finish_reason) == ("\ufffd\u00e9", "stop")


def test_ones_own_backend():
    """What a user writes: a backend that compiles, matchers of three methods."""

    class Two:
        def compile(self, source):
            return self

        def matcher(self, end_ids):
            return OneOf([[3, 4], [5]], set(end_ids))

    with LLM(ToyModel(16, 64, (2,)), grammar_backend=Two()) as llm:
        choices = llm.generate([1], asks(regex="anything", n=8))[0].outputs
        assert {choice.token_ids for choice in choices} == {(3, 4, 2), (5, 2)}


def test_a_matcher_that_fails_ends_its_choice_alone():
    class Failing:
        def compile(self, source):
            return type(self)(source.text == "bad")

        def __init__(self, fails=False):
            self.fails = fails

        def matcher(self, end_ids):
            return OneOf([[3, 4, 5, 6]], set(end_ids), fails_at=2 if self.fails else None)

    with LLM(ToyModel(16, 64, (2,)), grammar_backend=Failing()) as llm:
        found = llm.generate([[1]] * 3, [asks(regex="bad"), asks(regex="good"), asks(max_tokens=6, end_token_ids=[2])])
    bad, good, free = (output.outputs[0] for output in found)
    assert (bad.token_ids, bad.finish_reason) == ((3, 4), "error")
    assert "grammar: RuntimeError: no mask here" in bad.error
    assert (good.token_ids, good.finish_reason) == ((3, 4, 5, 6, 2), "stop")
    with LLM(ToyModel(16, 64, (2,))) as llm:
        assert free == llm.generate([1], asks(max_tokens=6, end_token_ids=[2]))[0].outputs[0]


def test_a_slow_grammar_delays_nobody():
    """AsyncLLM: while one request's grammar is compiled, another runs to its end."""
    gate, begun = threading.Event(), threading.Event()

    class Slow:
        def compile(self, source):
            begun.set()
            assert gate.wait(20)
            return self

        def matcher(self, end_ids):
            return OneOf([[3]], set(end_ids))

    async def main():
        async with AsyncLLM(ToyModel(16, 64, (2,)), grammar_backend=Slow()) as llm:
            slow = asyncio.create_task(llm.generate([1], asks(regex="slow")))
            left = asyncio.create_task(llm.generate([1], asks(regex="slow")))
            stream = llm.stream([1], asks(regex="slow"))
            first = asyncio.create_task(anext(stream))
            await asyncio.to_thread(begun.wait, 20)
            assert (await llm.generate([1], asks(max_tokens=5))).outputs[0].finish_reason != "error"
            left.cancel()
            await stream.aclose()
            assert not slow.done()
            gate.set()
            assert (await slow).outputs[0].token_ids == (3, 2)
            with pytest.raises((StopAsyncIteration, asyncio.CancelledError)):
                await first
            with pytest.raises(asyncio.CancelledError):
                await left
            await asyncio.sleep(0.05)
            assert llm.llm.engine.num_unfinished == 0

    asyncio.run(main())


def test_a_grammar_that_cannot_be_compiled_is_the_error_of_its_own_task(caplog):
    async def main():
        async with AsyncLLM(model()) as llm:
            bad = [llm.generate(PROMPT, asks(regex="a(")) for _ in range(3)]
            good = llm.generate(PROMPT, asks(regex="a"))
            *errors, output = await asyncio.gather(*bad, good, return_exceptions=True)
            with pytest.raises(GrammarError):
                async for _ in llm.stream(PROMPT, asks(regex="a(")):
                    pass
        return errors, output.outputs[0].text

    errors, text = asyncio.run(main())
    assert [type(error) for error in errors] == [GrammarError] * 3
    assert text == "a"
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_stream_of_a_grammar_is_its_answer():
    async def main():
        async with AsyncLLM(model()) as llm:
            stream = llm.stream(PROMPT, asks(json=SCHEMA, n=2))
            texts = ["", ""]
            async for delta in stream:
                texts[delta.index] += delta.text
            return texts, stream.output

    texts, output = asyncio.run(main())
    assert texts == [choice.text for choice in output.outputs]
    assert all(json.loads(text)["b"] in (3, 4, 5) for text in texts)


@pytest.mark.parametrize("made", [None, object(), 3])
@pytest.mark.parametrize("thinks", [False, True])
def test_a_backend_that_makes_no_matchers_is_refused(made, thinks):
    class Wrong:
        def compile(self, source):
            return self

        def matcher(self, end_ids):
            return made

    options = {"thinking_token_ids": ([3], [4])} if thinks else {}
    with LLM(ToyModel(16, 64, (2,)), grammar_backend=Wrong(), **options) as llm:
        with pytest.raises(GrammarError, match=r"regex='x': has no matcher: TypeError: .* has not the methods fill"):
            llm.generate([1], asks(regex="x"))
        Wrong.compile = lambda self, source: made
        with pytest.raises(GrammarError, match=r"regex='y': cannot be compiled: TypeError: .* has no method matcher"):
            llm.generate([1], asks(regex="y"))


class Picky:
    """A backend whose matchers are made so often and no more; then they cannot be made."""

    def __init__(self, most):
        self.most, self.made = most, 0

    def compile(self, source):
        return self

    def matcher(self, end_ids):
        self.made += 1
        if self.made > self.most:
            raise RuntimeError("no more")
        return OneOf([[3] * 9], set(end_ids))


@pytest.mark.parametrize("way", ["unseated", "step fails"])
def test_one_that_cannot_be_seated_anew_ends_alone(way):
    """After an urgent request took its seat, or a step failed: its neighbour goes on."""
    engine = Engine(ToyModel(16, 64, (2,)), max_num_seqs=2, scheduling_policy="priority", grammar_backend=Picky(2))
    engine.add_request("free", [1], asks(max_tokens=9, bad_token_ids=[2]), priority=0)
    engine.add_request("guided", [1], asks(regex="x"), priority=1)
    for _ in range(3):
        engine.step()
    if way == "unseated":
        engine.add_request("urgent", [1], asks(max_tokens=2, bad_token_ids=[2]), priority=-1)
    else:
        forward, engine.model.forward = engine.model.forward, None
        with pytest.raises(TypeError):
            engine.step()
        engine.model.forward = forward
    found = {}
    while engine.num_unfinished:
        found |= {output.request_id: output.outputs[0] for output in engine.step()}
    assert found["guided"].finish_reason == "error"
    assert found["guided"].error.endswith("grammar: RuntimeError: no more")
    assert (found["free"].finish_reason, len(found["free"].token_ids)) == ("length", 9)
    assert_all_free(engine)


def test_an_abort_while_a_grammar_is_compiled_ends_the_request():
    gate = threading.Event()

    class Slow:
        def compile(self, source):
            assert gate.wait(20)
            return self

        def matcher(self, end_ids):
            return OneOf([[3] * 30], set(end_ids))

    async def main():
        async with AsyncLLM(ToyModel(16, 64, (2,)), grammar_backend=Slow()) as llm:
            task = asyncio.create_task(llm.generate([1], asks(regex="slow"), request_id="mine"))
            await asyncio.sleep(0.05)
            await llm.abort("mine")
            gate.set()
            return (await task).outputs[0]

    choice = asyncio.run(main())
    assert (choice.finish_reason, choice.token_ids) == ("abort", ())


def test_a_closed_one_says_so():
    async def main():
        llm = AsyncLLM(model())
        await llm.close()
        with pytest.raises(RequestError, match="closed"):
            await llm.generate(PROMPT, asks(regex="a"))

    asyncio.run(main())


def test_a_full_queue_compiles_nothing():
    backend = Picky(9)
    engine = Engine(ToyModel(16, 64, (2,)), max_num_waiting=1, grammar_backend=backend)
    engine.add_request("a", [1], asks())
    with pytest.raises(QueueFullError):
        engine.add_request("b", [1], asks(regex="x"))
    assert backend.made == 0
