"""Thinking marks: said by the caller in ids or text, or read off the chat template; or an error, never a guess."""

from __future__ import annotations

import numpy as np
import pytest

from klero.engine.marks import KNOWN, marks_of
from klero.errors import OptionError
from klero.grammar.thinking import Marks

transformers = pytest.importorskip("transformers")

THINKS = "{{ messages[0].content.split('</think>')[-1] }}<think>\n"


def tokenizer_of(template, added=(), merges=()):
    """Bytes as tokens, the merged pairs, then the added tokens: 256 and on."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in merges]
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens([AddedToken(token, special=True) for token in added])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = template
    return tokenizer


def encode_of(tokenizer):
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def found(template, added=(), merges=(), asked=None):
    tokenizer = tokenizer_of(template, added, merges)
    return marks_of(asked, tokenizer, encode_of(tokenizer))


def test_the_template_shows_them():
    assert found(THINKS, ["<think>", "</think>"]) == Marks((256,), (257,))
    assert found("{{ x }}[THINK]a[/THINK]", ["[/THINK]", "[THINK]"]) == Marks((257,), (256,))
    assert found("{{ x.split('</think>')[-1] }}", ["<think>", "</think>"]) == Marks((256,), (257,))
    named = {"default": "{{ x }}", "thinking": THINKS}
    assert found(named, ["<think>", "</think>"]) == Marks((256,), (257,))


@pytest.mark.parametrize("start, end", KNOWN)
def test_every_known_pair_is_found_alone(start, end):
    assert found(f"{{{{ x }}}}{start}{end}", [start, end]) == Marks((256,), (257,))


def test_there_are_none():
    added = ["<think>", "</think>"]
    assert found(None, added) is None
    assert found("{{ x }}", added) is None
    assert found("{{ x }}<think>", added) is None  # nobody ends
    assert marks_of(None, None, None) is None
    assert marks_of(None, object(), lambda text: [0]) is None
    assert marks_of(None, tokenizer_of(THINKS, added), None) is None


def test_marks_of_several_tokens_count_where_nothing_joins_them():
    start, end = "<|open|>think<|sep|>", "<|close|>think<|sep|>"
    marks = found(start + end, ["<|open|>", "<|close|>", "<|sep|>"])
    assert (marks.start[0], marks.end[0], {marks.start[-1], marks.end[-1]}) == (256, 257, {258})
    assert len(marks.start) == 7
    assert len(found(THINKS).end) == len("</think>")  # bytes never join
    assert found(THINKS, merges=[(">", "Ċ")]) is None  # the model would write "</think" and ">\n"
    assert found(THINKS, merges=[("a", "<")]) is None
    assert found(THINKS, ["</think>"], merges=[(">", "Ċ")]) is None
    assert found(THINKS, ["<think>"], merges=[(">", "Ċ")]) is None
    assert found(THINKS, ["<think>", "</think>"], merges=[(">", "Ċ")]) == Marks((257,), (258,))


def test_a_pair_that_the_tokenizer_does_not_know_is_passed_over():
    """Both marks are the unknown token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({"?": 0, "a": 1}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?")
    tokenizer.chat_template = THINKS
    assert marks_of(None, tokenizer, encode_of(tokenizer)) is None


@pytest.mark.parametrize(
    "asked, marks",
    [
        ((5, 6), Marks((5,), (6,))),
        ([[5, 6], 7], Marks((5, 6), (7,))),
        ((np.int64(5), np.array([6, 7])), Marks((5,), (6, 7))),
        (("<a>", "</a>"), Marks((256,), (257,))),
        (("<a>", [1, 2]), Marks((256,), (1, 2))),
    ],
)
def test_who_asks_is_heard_before_the_template(asked, marks):
    assert found(THINKS, ["<a>", "</a>", "<think>", "</think>"], asked=asked) == marks


def test_a_string_asked_for_must_be_the_same_tokens_everywhere():
    assert found(None, asked=("(", ")")) == Marks((7,), (8,))
    with pytest.raises(OptionError, match=r"'\)' is no token .* or token ids, such as \[8\]"):
        found(None, merges=[(")", "Ċ")], asked=("(", ")"))


@pytest.mark.parametrize(
    "asked, words",
    [
        ("ab", r"must be a pair \(start, end\)"),
        (5, "must be a pair"),
        (0, "must be a pair"),
        ((), "must be a pair"),
        ((5,), "must be a pair"),
        ((5, 6, 7), "must be a pair"),
        ({"start": 5, "end": 6}, "must be a pair"),
        ((5, -1), "end mark"),
        ((True, 5), "start mark"),
        ((None, 5), "start mark"),
        (("", 5), "start mark"),
        ((5, []), "end mark"),
        ((5, [5, 6]), "contains"),
        (("<a>", "<a>"), "contains"),
    ],
)
def test_what_cannot_be_a_pair(asked, words):
    with pytest.raises(OptionError, match=f"thinking_token_ids.*{words}"):
        found(None, ["<a>"], asked=asked)


def test_text_needs_a_tokenizer():
    with pytest.raises(OptionError, match=r"'<a>' is text, and there is no tokenizer; give token ids"):
        marks_of(("<a>", 5), None, lambda text: [0])
    assert marks_of((5, 6), None, None) == Marks((5,), (6,))


@pytest.mark.smollm2
def test_the_default_model_does_not_think_until_told_how():
    from klero.engine.models import smollm2

    tokenizer = transformers.AutoTokenizer.from_pretrained(str(smollm2.provide()), local_files_only=True)
    assert marks_of(None, tokenizer, encode_of(tokenizer)) is None
    start, end = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>"))
    assert marks_of(("<|im_start|>", "<|im_end|>"), tokenizer, encode_of(tokenizer)) == Marks((start,), (end,))
    with pytest.raises(OptionError, match="'</think>' is no token"):
        marks_of(("<|im_start|>", "</think>"), tokenizer, encode_of(tokenizer))
