"""The cache of grammars: each is compiled once, in the background; failures are kept; what is old goes."""

from __future__ import annotations

import threading
import traceback

import pytest

from klero.errors import Fault, GrammarError, MissingExtra, QueueFullError, RequestError
from klero.grammar.grammars import Grammars
from klero.grammar.source import Source


class Compiled(str):
    """What a text is compiled to."""

    matcher = None


class Panic(BaseException):
    """What a library written in Rust raises when it is broken."""


class Backend:
    """Compiles a source to its own text; those that begin with ! fail. gate: set it to let compiles go on."""

    def __init__(self):
        self.asked, self.gate = [], threading.Event()
        self.gate.set()

    def compile(self, source):
        self.gate.wait(10)
        self.asked.append(source.text)
        if source.text == "!bad":
            raise GrammarError([Fault("regex", source.text, "is bad")])
        if source.text == "!odd":
            raise ZeroDivisionError("odd")
        if source.text == "!panic":
            raise Panic
        if source.text == "!absent":
            raise MissingExtra("engine", "llguidance")
        return Compiled(source.text.upper())


@pytest.fixture
def backend():
    return Backend()


def regex(text):
    return Source("regex", text)


def test_each_is_compiled_once(backend):
    made = []
    grammars = Grammars(lambda: made.append(backend) or backend)
    assert made == []
    assert [grammars.compiled(regex(text)) for text in "aba"] == ["A", "B", "A"]
    assert (backend.asked, len(made)) == (["a", "b"], 1)
    assert grammars.compiled(Source("regex", "a", 1)) == "A"  # another whitespace is another grammar
    assert backend.asked == ["a", "b", "a"]


def test_it_is_compiled_in_the_background(backend):
    backend.gate.clear()
    grammars = Grammars(lambda: backend)
    one, same = grammars.prepare(regex("a")), grammars.prepare(regex("a"))
    assert one is same
    assert not one.done()
    backend.gate.set()
    assert one.result(10) == "A"


def test_what_fails_is_kept(backend):
    grammars = Grammars(lambda: backend)
    for _ in range(3):
        with pytest.raises(GrammarError, match="regex='!bad': is bad"):
            grammars.compiled(regex("!bad"))
    assert backend.asked == ["!bad"]


def test_what_says_nothing_about_the_grammar_is_not_kept(backend):
    grammars = Grammars(lambda: backend)
    for _ in range(2):
        with pytest.raises(GrammarError, match="regex='!odd': cannot be compiled: ZeroDivisionError: odd"):
            grammars.compiled(regex("!odd"))
        with pytest.raises(MissingExtra):
            grammars.compiled(regex("!absent"))
        with pytest.raises(GrammarError, match="cannot be compiled: Panic"):
            grammars.compiled(regex("!panic"))
    assert backend.asked == ["!odd", "!absent", "!panic"] * 2
    assert grammars.compiled(regex("a")) == "A"  # its thread goes on


def test_a_failure_that_is_kept_keeps_nobody_who_asked(backend):
    """Each gets an error of his own: the traceback of one for all would grow by every caller, and hold his frames."""
    grammars = Grammars(lambda: backend)
    errors = []
    for _ in range(5):
        try:
            grammars.compiled(regex("!bad"))
        except GrammarError as error:
            errors.append(error)
    assert len({id(error) for error in errors}) == 5
    depths = [len(traceback.extract_tb(error.__traceback__)) for error in errors]
    assert len(set(depths)) == 1
    assert {str(error) for error in errors} == {"regex='!bad': is bad"}


def test_the_oldest_goes(backend):
    grammars = Grammars(lambda: backend, max_entries=2)
    for text in "abacb":
        grammars.compiled(regex(text))
    assert backend.asked == ["a", "b", "c", "b"]  # a was used again, so b went for c
    grammars = Grammars(lambda: backend, max_bytes=5)
    backend.asked.clear()
    for text in ("aaa", "bb", "cc", "bb", "longer than all", "longer than all", "aaa"):
        grammars.compiled(regex(text))
    assert backend.asked == ["aaa", "bb", "cc", "longer than all", "aaa"]


def test_one_that_takes_too_long_is_an_error(backend):
    backend.gate.clear()
    grammars = Grammars(lambda: backend, timeout=0.05)
    for _ in range(2):
        with pytest.raises(GrammarError, match=r"regex='slow': was not compiled in 0\.05 s"):
            grammars.compiled(regex("slow"))
    future = grammars.prepare(regex("slow"))
    with pytest.raises(GrammarError, match="was not compiled"):
        grammars.compiled(regex("slow"), future)  # at once
    backend.gate.set()
    future.result(10)
    assert grammars.compiled(regex("slow"), future) == "SLOW"
    assert grammars.compiled(regex("slow")) == "SLOW"


def test_one_whose_turn_never_came_may_ask_again(backend):
    backend.gate.clear()
    grammars = Grammars(lambda: backend, timeout=0.05, num_threads=1)
    slow = grammars.prepare(regex("slow"))
    with pytest.raises(QueueFullError, match=r"regex: waited 0\.05 s while grammars of others were compiled"):
        grammars.compiled(regex("good"))
    backend.gate.set()
    slow.result(10)
    assert grammars.compiled(regex("good")) == "GOOD"


def test_what_was_prepared_is_there_though_it_went(backend):
    grammars = Grammars(lambda: backend, max_entries=1)
    future = grammars.prepare(regex("a"))
    assert grammars.compiled(regex("b")) == "B"
    assert grammars.compiled(regex("a"), future) == "A"
    assert backend.asked == ["a", "b"]


def test_too_many_do_not_wait(backend):
    backend.gate.clear()
    grammars = Grammars(lambda: backend, max_waiting=2, num_threads=1)
    first = grammars.prepare(regex("0"))
    while not first.running():
        pass
    futures = [grammars.prepare(regex(text)) for text in "12"]
    with pytest.raises(QueueFullError, match="2 grammars wait"):
        grammars.prepare(regex("3"))
    assert grammars.prepare(regex("2")) is futures[1]
    backend.gate.set()
    assert [future.result(10) for future in (first, *futures)] == ["0", "1", "2"]
    assert grammars.compiled(regex("3")) == "3"


def test_after_the_end_nothing_is_compiled(backend):
    backend.gate.clear()
    grammars = Grammars(lambda: backend, num_threads=1)
    first, second = grammars.prepare(regex("a")), grammars.prepare(regex("b"))
    while not first.running():
        pass
    grammars.close()
    backend.gate.set()
    assert first.result(10) == "A"
    with pytest.raises(GrammarError, match="the engine is closed"):
        grammars.compiled(regex("b"), second)
    with pytest.raises(RequestError, match="the engine is closed"):
        grammars.prepare(regex("c"))


def test_one_that_takes_long_holds_nobody_up():
    class Slow(Backend):
        def compile(self, source):
            return super().compile(source) if source.text == "slow" else Compiled("QUICK")

    backend = Slow()
    backend.gate.clear()
    grammars = Grammars(lambda: backend)
    slow = grammars.prepare(regex("slow"))
    assert grammars.compiled(regex("quick")) == "QUICK"
    assert not slow.done()
    backend.gate.set()
    assert slow.result(10) == "SLOW"
