"""Adversarial grammars: bounded time and memory, or an error; and a row that fails alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.grammar.adversaries import ADVERSARIAL, REFUSED
from tests.grammar.bytewise import BACKEND, allowed
from tests.grammar.walks import BYTES, END, NUM_BYTES

from klero.errors import GrammarError
from klero.grammar import LLGuidance, Source
from klero.grammar.llguidance import Limits

LIMIT = 5.0  # seconds of a processor; one takes 1.5, the others less than one, and what is not bounded takes hours


@pytest.fixture(scope="module")
def outcomes():
    """What comes of each, from a process that has 3 GiB: one that takes more, or all of a stack, ends it."""
    command = [sys.executable, "-m", "tests.grammar.adversaries"]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    found = {name: (seconds, rule) for name, seconds, rule in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 0, f"it ended after {list(found)[-1:]}: {done.stderr[-500:]}"
    return found


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_an_adversarial_grammar_takes_bounded_time_and_memory(name, outcomes):
    seconds, rule = outcomes[name]
    assert REFUSED.get(name, "works") in rule
    assert len(rule) < 500
    assert seconds < LIMIT


def test_a_row_that_becomes_too_complex_fails_alone_and_can_be_taken_back():
    backend = LLGuidance(BYTES, NUM_BYTES, 2, limits=Limits(step_fuel=20_000))
    hard = backend.compile(Source("regex", "(a{1,1000}){1,1000}")).matcher((END,))
    easy = backend.compile(Source("regex", "[a-z]+")).matcher((END,))
    masks, num_taken = np.zeros((3, 9), np.int32), 0
    errors = [None]
    while errors[0] is None and num_taken < 500:
        masks[:] = -1
        errors = backend.fill_all([hard, easy, hard2(backend)], masks)
        assert errors[1:] == [None, None]
        assert easy.accept(ord("a"))
        if errors[0] is None:
            assert hard.accept(ord("a"))
            num_taken += 1
    assert isinstance(errors[0], GrammarError)
    assert "cannot be followed here" in errors[0].rule
    assert not masks[0].any()
    assert masks[1].any()
    hard.rewind(num_taken)
    assert allowed(hard) == {ord("a")}


def hard2(backend):
    return backend.compile(Source("choice", '["x"]')).matcher((END,))


def test_what_a_lexer_remembers_is_no_limit_for_others():
    """The states that all matchers of a grammar share fill up; each goes on with new ones."""
    backend = LLGuidance(BYTES, NUM_BYTES, limits=Limits(lexer_states=300))
    grammar = backend.compile(Source("regex", "(?:[a-z]{1,30}x[a-y]{10,20}|[a-w]{3,50}yy){1,40}"))
    chance = np.random.default_rng(1)
    for _ in range(4):
        matcher, taken = grammar.matcher((END,)), []
        for _ in range(200):
            found = sorted(allowed(matcher) - {END})
            if not found:
                break
            taken.append(int(chance.choice(found)))
            assert matcher.accept(taken[-1])
        anew = BACKEND.compile(Source("regex", "(?:[a-z]{1,30}x[a-y]{10,20}|[a-w]{3,50}yy){1,40}")).matcher((END,))
        assert all(anew.accept(token_id) for token_id in taken)
        assert allowed(anew) == allowed(matcher)


LONG = Source("regex", "(a{1,1000}){1,1000}|b[0-9]+")  # what a lexer remembers of a... is too much at the 33rd token
FEW = Limits(step_fuel=20_000)


def last_of(matcher, byte, most=200):
    """How often a byte is taken before an error."""
    for num_taken in range(most):
        try:
            allowed(matcher)
            assert matcher.accept(byte)
        except GrammarError:
            return num_taken
    return most


def test_one_that_becomes_too_complex_leaves_its_grammar_to_the_others():
    grammar = LLGuidance(BYTES, NUM_BYTES, limits=FEW).compile(LONG)
    before, going = grammar.matcher((END,)), grammar.matcher((END,))
    assert going.accept(ord("b"))
    assert going.accept(ord("1"))
    num_taken = last_of(grammar.matcher((END,)), ord("a"))
    assert num_taken < 200
    for matcher in (before, grammar.matcher((END,))):
        assert allowed(matcher) == {ord("a"), ord("b")}
        assert matcher.accept(ord("b"))
        assert last_of(matcher, ord("7"), 50) == 50
    assert last_of(going, ord("2"), 50) == 50
    assert [last_of(grammar.matcher((END,)), ord("a")) for _ in range(2)] == [num_taken] * 2


def test_a_failure_for_work_is_ones_own():
    """Others spare a row work, or leave it all of it: with them it comes at least as far as without."""
    alone = last_of(LLGuidance(BYTES, NUM_BYTES, limits=FEW).compile(LONG).matcher((END,)), ord("a"))
    grammar = LLGuidance(BYTES, NUM_BYTES, limits=FEW).compile(LONG)
    row = grammar.matcher((END,))
    for num_taken in range(alone):
        if num_taken % 10 == 3:  # its lexer is ended by another row
            other = grammar.matcher((END,))
            last_of(other, ord("a"))
        assert allowed(row) == ({ord("a"), END} if num_taken else {ord("a"), ord("b")})
        assert row.accept(ord("a"))


def test_rows_that_begin_anew_in_one_fill_share_a_lexer(monkeypatch):
    backend = LLGuidance(BYTES, NUM_BYTES, limits=FEW)
    grammar = backend.compile(LONG)
    rows = [grammar.matcher((END,)) for _ in range(8)]
    assert all(row.accept(ord("a")) for row in rows for _ in range(9))
    last_of(grammar.matcher((END,)), ord("a"))
    for row in rows:  # what ends the lexer of one ends it for all
        row.inner.consume_token(ord("b"))
        assert row.inner.is_error()
    started, num_started = backend.started, []
    monkeypatch.setattr(backend, "started", lambda *of: num_started.append(1) or started(*of))
    masks = np.zeros((8, 9), np.int32)
    assert backend.fill_all(rows, masks) == [None] * 8
    assert all(
        set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))) == {97, END} for mask in masks
    )
    assert len(num_started) <= 1  # none where the one who ended it has made the next
