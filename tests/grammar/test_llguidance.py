"""llguidance behind the protocol: small vocabularies by eye, what is refused, and what is bounded."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import numpy as np
import pytest
from tests.grammar.bytewise import BACKEND, allowed, follow, rule_of
from tests.grammar.walks import BYTES, END, NUM_BYTES

from klero.errors import GrammarError
from klero.finish import TokenBytes
from klero.grammar import LLGuidance, Source
from klero.grammar.gbnf import lark_of_gbnf


def backend_of(*texts, special=(), num_tokens=None):
    tokens = TokenBytes.from_list([text if isinstance(text, bytes) else text.encode() for text in texts], special)
    return LLGuidance(tokens, num_tokens or len(texts))


def test_a_choice_by_eye():
    backend = backend_of("y", "es", "yes", "no", "</s>", "x", special=[4])
    matcher = backend.compile(Source("choice", '["yes", "no"]')).matcher((4,))
    assert allowed(matcher) == {0, 2, 3}
    assert matcher.accept(0)
    assert allowed(matcher) == {1}
    assert not matcher.accept(3)
    assert matcher.accept(1)
    assert allowed(matcher) == {4}
    matcher.rewind(2)
    assert matcher.accept(3)
    assert allowed(matcher) == {4}


def test_a_number_by_eye():
    backend = backend_of(*"0123456789", "12", "1x", "</s>", special=[12])
    matcher = backend.compile(Source("regex", "[0-9]+")).matcher((12,))
    assert allowed(matcher) == set(range(11))
    assert matcher.accept(10)
    assert allowed(matcher) == {*range(11), 12}


def test_after_the_end_only_the_end_ids_are_allowed():  # GR-03
    backend = backend_of("{", "}", "</s>", "x", "{}", "a", "b", "c", "d", "<end>", special=[2, 9])
    matcher = backend.compile(Source("grammar", 'start: "{}"')).matcher((2, 9))
    assert allowed(matcher) == {0, 4}
    assert matcher.accept(4)
    for _ in range(3):
        assert allowed(matcher) == {2, 9}
        assert not matcher.accept(0)
        assert matcher.accept(9)
    matcher.rewind(3)
    assert allowed(matcher) == {2, 9}
    matcher.rewind(1)
    assert allowed(matcher) == {0, 4}
    assert not matcher.accept(2)


def test_a_draft_is_followed_and_taken_back():  # GR-04
    backend = backend_of("[", "]", "x", *"0123456789", "</s>", special=[13])
    matcher = backend.compile(Source("regex", r"\[[0-9]\]")).matcher((13,))
    assert allowed(matcher) == {0}
    assert matcher.accept(0)
    assert allowed(matcher) == set(range(3, 13))
    assert not matcher.accept(2)  # the draft breaks the grammar here
    assert allowed(matcher) == set(range(3, 13))
    matcher.rewind(1)
    assert allowed(matcher) == {0}
    assert matcher.accept(0)
    assert matcher.accept(7)  # the token that the target draws instead
    assert allowed(matcher) == {1}


def test_an_end_id_is_no_text_even_where_its_text_fits():
    backend = backend_of("a", "b", "ab")
    matcher = backend.compile(Source("regex", "(ab)+")).matcher((2,))
    assert allowed(matcher) == {0}
    assert not matcher.accept(2)
    assert matcher.accept(0)
    assert matcher.accept(1)
    assert allowed(matcher) == {0, 2}


def test_without_end_ids_nothing_follows_the_end():
    matcher = backend_of("a").compile(Source("regex", "a")).matcher(())
    assert matcher.accept(0)
    assert allowed(matcher) == set()


def test_special_tokens_match_no_text():
    backend = backend_of("a", "</s>", "<", "/s>", "\\xff", b"\xff</s>", special=[1, 5])
    for text in ("a</s>", "a.*", "a(?s:.)*", "a[^a]*"):
        matcher = backend.compile(Source("regex", text)).matcher(())
        assert matcher.accept(0)
        assert not allowed(matcher) & {1, 5}
        assert not matcher.accept(1)
    rule_of(Source("regex", r"a(?-u:\xff)</s>"), backend)
    text = 'start: "a" T\nT: /(?s-u:.)*/\n%llguidance {"allow_invalid_utf8": true}'
    rule_of(Source("grammar", text), backend)  # its author's own options come before ours


def test_a_lark_grammar_may_name_a_special_token():
    backend = backend_of("a", "<|tool|>", "</s>", special=[1, 2])
    matcher = backend.compile(Source("grammar", 'start: <|tool|> "a"')).matcher((2,))
    assert allowed(matcher) == {1}
    assert matcher.accept(1)
    assert allowed(matcher) == {0}
    matcher.rewind(1)
    assert allowed(matcher) == {1}
    assert "unknown special token" in rule_of(Source("grammar", 'start: <|other|> "a"'), backend)


def test_ids_without_text_are_never_allowed():
    backend = backend_of("a", "", "b", num_tokens=70)
    matcher = backend.compile(Source("regex", "(?s:.)*")).matcher((69,))
    assert allowed(matcher) == {0, 2, 69}
    assert not any(matcher.accept(token_id) for token_id in (1, 3, 68, 70, -1, 10**9))
    assert allowed(matcher) == {0, 2, 69}


@pytest.mark.parametrize("num_tokens", [31, 32, 33, 63, 64, 65, 257])
def test_no_bit_beyond_the_vocabulary_is_set(num_tokens):
    backend = LLGuidance(TokenBytes.from_list([bytes([i % 128]) for i in range(num_tokens)]), num_tokens, 2)
    grammar = backend.compile(Source("regex", "(?s:.)*"))
    matchers = [grammar.matcher((num_tokens - 1,)) for _ in range(3)]
    assert matchers[1].accept(num_tokens - 1)
    masks = np.full((3, -(-num_tokens // 32)), -1, np.int32)
    assert backend.fill_all(matchers, masks) == [None] * 3
    flags = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    assert flags.sum(axis=1).tolist() == [num_tokens, 1, num_tokens]
    assert not flags[:, num_tokens:].any()


def test_a_character_may_be_split_over_tokens():
    backend = backend_of(b"\xf0\x9f", b"\x98\x80", b"\x98", b"\x80", "é", b"\xc3", b"\xa9", "a")
    matcher = backend.compile(Source("regex", "[^a]+")).matcher(())
    assert allowed(matcher) == {0, 4, 5}
    assert matcher.accept(0)
    assert allowed(matcher) == {1, 2, 3, 6}
    assert matcher.accept(2)
    assert allowed(matcher) == {2, 3, 6}
    matcher.rewind(2)
    assert matcher.accept(5)
    assert allowed(matcher) == {2, 3, 6}


def test_a_forced_text_may_be_written_in_any_tokens():
    matcher = backend_of("a", "ab", "abc", "b", "c", "bc").compile(Source("choice", '["abc"]')).matcher(())
    assert allowed(matcher) == {0, 1, 2}
    assert matcher.accept(0)
    assert allowed(matcher) == {3, 5}


@pytest.mark.parametrize(
    "text, read, taken",
    [
        ("^a|b$", "b", "end"),
        (r"a/b\/c", "a/b/c", "end"),
        ("a\nb", "a\nb", "end"),
        (r"a\\", "a\\", "end"),
        ("a.b", "a\nb", 1),
        ("", "", "end"),
        ("/*", "/", "end"),
        ("a#b", "a#b", "end"),
        ('a"b', 'a"b', "end"),
        (r"\[/]", "[/]", "end"),
        ("/\nT: /b", "/\nT: /b", "end"),
    ],
)
def test_a_regex_matches_the_whole_text(text, read, taken):
    assert follow(Source("regex", text), read) == taken


@pytest.mark.parametrize("text", ["a(", "[", "a\\", "a)(b", "a{2,1}", r"\bа", "(a)\\1", "a^b", "(?x)a\nb", "*"])
def test_a_malformed_regex_is_refused(text):
    assert rule_of(Source("regex", text))


def test_the_texts_of_a_choice_are_no_patterns():
    texts = ["a.*", 'say "hi"\n', "\\d/", "#x", "é\x01", "a"]
    source = Source("choice", json.dumps(texts))
    assert [follow(source, text) for text in texts] == ["end"] * len(texts)
    assert follow(source, "ab") == 1


@pytest.mark.parametrize(
    "text, read, taken",
    [
        ('root ::= "a" rest? # a comment\nrest ::= [^\\n"b-d]{2,3} |\n  "\\x41\\u00e9"', "aAé", "end"),
        ('root ::= "a" rest? # a comment\nrest ::= [^\\n"b-d]{2,3} |\n  "\\x41\\u00e9"', "ac", 1),
        ('root ::= [a-z]* "end"', "spen", "more"),
        ('root ::= [a-z]* "end"', "endend", "end"),
        ('root ::= "(" root ")" | x\nx ::= .', "((é))", "end"),
        ('root ::= ("a" | )+ "b"', "aab", "end"),
        ('root ::= [\\]\\-^a] [-x] "\\\\"', "]-\\", "end"),
        ('root-1 ::= "x"\nroot ::= root-1 root-1', "xx", "end"),
        ('start: A "b"\nA: /a+/', "aab", "end"),
        ('start: %json {"type": "integer"}', "-12", "end"),
    ],
)
def test_grammars_in_both_languages(text, read, taken):
    assert follow(Source("grammar", text), read) == taken


@pytest.mark.parametrize(
    "text, rule",
    [
        ("root ::= y", "'y', which 'root' uses, is missing"),
        ('a ::= "b"', "no rule is called root"),
        ('root ::= "a', "is not understood"),
        ('root ::= ("a"', "not closed"),
        ('root ::= "a")', "may not stand here"),
        ('root ::= * "a"', "may not stand here"),
        ('root ::= "a"\nroot ::= "b"', "there twice"),
        ('root ::= "\\q"', "the escape"),
        ('root ::= "a" root', "'root' has no end"),
        ('root ::= "a" | (b? | "c") b\nb ::= ("x" root | "y") c{0} c+\nc ::= c b', "'b' has no end"),
        ("foo", "Expected token"),
        ("start: x", "unknown name"),
        ('{"grammars": [{"lark_grammar": "start: /(?s:.*)/"}]}', ""),
        ('start: X "b"\nX[stop="q"]: /.*/', ""),
        ('start: x "b"\nx[stop="q"]: /.*/', "rollback"),
        ('start: x "b"\nx[max_tokens=3]: /[a-z]*/', "rollback"),
        ("start: T\nT: /a/ & /b/", ""),
    ],
)
def test_a_malformed_grammar_is_refused(text, rule):
    assert rule in rule_of(Source("grammar", text))


def test_a_vocabulary_that_cannot_begin_the_text_is_refused():
    assert rule_of(Source("choice", '["yes"]'), backend_of("a", "b"))


def test_a_matcher_of_someone_else_is_filled_too():
    class Own:
        def fill(self, words):
            words[:] = 5

    masks = np.zeros((2, 9), np.int32)
    assert BACKEND.fill_all([Own(), BACKEND.compile(Source("regex", "a")).matcher((END,))], masks) == [None, None]
    assert masks[0].tolist() == [5] * 9
    assert masks[1].any()


def test_klero_is_imported_without_llguidance():
    code = "import sys, klero, klero.grammar; print('llguidance' in sys.modules, 'xgrammar' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_without_llguidance_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"llguidance is not installed; klero\[engine\] brings it"):
        LLGuidance(BYTES, NUM_BYTES)


@pytest.mark.parametrize("num_rules", [100, 5000])
def test_a_chain_of_rules_in_any_order_has_an_end(num_rules):
    rules = [f'r{i} ::= "a" r{i + 1}' for i in range(num_rules)] + [f'r{num_rules} ::= "b"']
    random.Random(1).shuffle(rules)
    assert lark_of_gbnf("\n".join(["root ::= r0", *rules])).startswith("start: T0")
    rules.remove(f'r{num_rules} ::= "b"')
    endless = "\n".join(["root ::= r0", *rules, f"r{num_rules} ::= r0 | (r1 r2)+"])
    with pytest.raises(ValueError, match="has no end"):
        lark_of_gbnf(endless)
    assert lark_of_gbnf(endless.replace(")+", ")*")).startswith("start: r0")


def test_a_text_that_is_too_ambiguous_is_not_read_again(monkeypatch):
    """It is so with any lexer: reading all of it again would hold up everybody's step, for seconds."""
    backend = backend_of("a", "b", "</s>", special=[2])
    grammar = backend.compile(Source("grammar", "start: e\ne: e e | /./"))
    matcher, begun = grammar.matcher((2,)), []
    monkeypatch.setattr(backend, "started", lambda *_: begun.append(1))
    def follow_on():
        for _ in range(400):
            allowed(matcher)
            matcher.accept(0)

    with pytest.raises(GrammarError, match="Current row has 501 items"):
        follow_on()
    assert not begun


class AtItsLimit:
    """A matcher of llguidance's whose lexer is full: it refuses what comes, and says so when a mask is wanted."""

    def __init__(self, inner):
        self._inner, self._is_error = inner, False

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def try_consume_tokens(self, token_ids):
        return 0

    def unsafe_compute_mask_ptr(self, *_):
        self._is_error = True

    def is_error(self):
        return self._is_error

    def get_error(self):
        return "too many lexer states"


def test_a_full_lexer_refuses_nothing_that_another_takes():
    """regex=".*[a-m].{500}" ended choices so, after hundreds of tokens."""
    backend = backend_of("a", "b", "</s>", special=[2])
    matcher = backend.compile(Source("regex", "ab*")).matcher((2,))
    assert matcher.accept(0)
    matcher.inner = AtItsLimit(matcher.inner)
    assert matcher.accept(1)
    assert allowed(matcher) == {1, 2}
    matcher.inner = AtItsLimit(matcher.inner)
    assert not matcher.accept(0)
    assert allowed(matcher) == {1, 2}
