"""From bytes to bodies, and the routes of words: what is no JSON, means nothing or is far too much is refused."""

from __future__ import annotations

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

from tests.server.toys import OPTIONS, USER, asked_of, refused, toy

from klero.server.asked import detokenize_of, read_body, tokenize_of
from klero.server.errors import ApiError, Unreadable

HELLO = [39, 68, 75, 75, 78]


@pytest.fixture(scope="module")
def llm():
    return toy()


@pytest.mark.parametrize(
    "raw, words",
    [
        (b"", "must be JSON"),
        (b"{", "must be JSON"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'"x"', "must be a JSON object"),
        (b"\xff", "must be JSON in UTF-8"),
        (b'{"a": ' + b"[" * 100_000, r"a=\[...\]: is nested more than 128 deep"),
        (b"[" * 100_000, "the body is nested more than 128 deep"),
    ],
)
def test_bodies_that_are_none(raw, words):
    with pytest.raises(ApiError, match=words) as caught:
        read_body(raw)
    assert caught.value.status == 400
    caught.value.message.encode()


@pytest.mark.parametrize(
    "raw, words",
    [
        (b'{"a": NaN}', "a=NaN: is no number"),
        (b'{"a": -Infinity}', "a=-Infinity: is no number"),
        (b'{"a": 1e999}', "a=1e999: is beyond binary64"),
        (b'{"a": 1, "a": 2}', "a=...: is twice in the body"),
        (b'{"a": [{"b": 1, "b": 1}]}', "a='b': is twice a key"),
        (b'{"a": "\\ud800"}', "a=\\ud800: holds half of a surrogate pair"),
        (b'{"\\udc00": 1}', "\\udc00=1: holds half of a surrogate pair"),
        (b'{"a": ' + b"9" * 5000 + b"}", "a=99999999999999999999...: is an integer of 5000 digits"),
        (b'{"a": ' + b"[" * 128 + b"]" * 128 + b"}", "a=[...]: is nested more than 128 deep"),
    ],
)
def test_what_means_nothing_is_told_with_its_field(llm, raw, words):
    (value,) = read_body(raw).values()
    assert isinstance(value, Unreadable)
    error = refused(llm, read_body(raw[:1] + b'"prompt": "x", "top_p": 2, ' + raw[1:]))
    assert error.message.startswith(words) or f"; {words}" in error.message
    assert "top_p=2" in error.message
    assert read_body(b'{"a": ' + b"[" * 127 + b"]" * 127 + b"}")


def test_a_body_is_read_as_it_is():
    assert read_body('{"a": "\\ud83d\\ude00 \u00e9", "b": [1, -2.5e3, null]}'.encode()) == {
        "a": "\U0001f600 \u00e9", "b": [1, -2500.0, None],
    }  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x", **{f"field {i}": i for i in range(200_000)}},
        {"messages": [{} for _ in range(300_000)]},
        {"messages": [{"role": "user", "content": "x", **{str(i): i for i in range(200_000)}}]},
        {"messages": USER, "metadata": {str(i): i for i in range(300_000)}},
        {"messages": USER, "tools": [{} for _ in range(300_000)]},
        {"prompt": "x", "stop": ["x"] * 500_000},
        {"prompt": ["x"] * 500_000},
        {"prompt": "x", "logit_bias": {str(i): 1.0 for i in range(200_000)}},
    ],
    ids=["fields", "messages", "fields of a message", "metadata", "tools", "stop", "prompts", "logit_bias"],
)
def test_what_is_far_too_much_is_refused_soon_and_in_few_words(llm, body):
    from time import process_time

    start = process_time()
    error = refused(llm, body)
    assert process_time() - start < 5
    assert len(error.message) < 20_000


def test_texts_become_tokens_and_come_back(llm):
    def tokens(**body):
        return tokenize_of(body, llm, OPTIONS)

    assert tokens(prompt="Hello") == {"tokens": HELLO, "count": 5, "max_model_len": 256}
    assert tokens(prompt="Hello", add_special_tokens=False)["tokens"] == HELLO
    assert tokens(messages=USER)["tokens"] == asked_of(llm, {"messages": USER}).prompts[0]
    assert detokenize_of({"tokens": [*HELLO, 256]}, llm, OPTIONS) == {"prompt": "Hello<end>"}
    assert detokenize_of({"tokens": [*HELLO, 256], "skip_special_tokens": True}, llm, OPTIONS) == {"prompt": "Hello"}
    assert detokenize_of({"tokens": [HELLO[0], 150]}, llm, OPTIONS) == {"prompt": "H\ufffd"}
    assert detokenize_of({"tokens": []}, llm, OPTIONS) == {"prompt": ""}


@pytest.mark.parametrize(
    "body, param",
    [
        ({}, "prompt"), ({"prompt": 5}, "prompt"), ({"prompt": "x", "messages": USER}, "prompt"),
        ({"prompt": "x", "tools": []}, "tools"), ({"messages": USER, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": [{"role": "user"}]}, "messages"), ({"prompt": "x", "promt": 1}, "promt"),
    ],
)  # fmt: skip
def test_what_cannot_be_tokenized(llm, body, param):
    with pytest.raises(ApiError) as caught:
        tokenize_of(body, llm, OPTIONS)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "body", [{}, {"tokens": [257]}, {"tokens": [-1]}, {"tokens": ["x"] * 10**6}, {"tokens": [True]}]
)
def test_what_has_no_text(llm, body):
    with pytest.raises(ApiError) as caught:
        detokenize_of(body, llm, OPTIONS)
    assert caught.value.param.startswith("tokens")
    assert len(caught.value.message) < 1000
