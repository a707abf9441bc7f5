"""Answers: OpenAI's shapes, to the letter, and a stream that adds up to the whole in every field."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

import numpy as np
from tests.server.toys import TOKENIZER, USER, answer_of, asked_of, chunks, put_together, refused, saying, toy, whole

from klero.engine import LLM
from klero.finish import TokenBytes
from klero.logprobs import nothing
from klero.server import responses
from klero.server.answers import new_id
from klero.server.errors import ApiError
from klero.server.fingerprint import fingerprint_of
from klero.server.json_bytes import dump, in_pieces
from klero.server.logprobs import LEAST, TokenTexts, number, pairs, receipts
from klero.testing.models import PagedToyModel, ToyModel


@pytest.fixture(scope="module")
def llm():
    return toy()


HELLO = [39, 68, 75, 75, 78]  # "Hello" in bytes


def test_a_completion_is_openai_s_and_says_its_seed(llm):
    answer = whole(llm, {"prompt": "Hello", "max_tokens": 3, "seed": 3, "request_id": "mine"})
    (choice,) = answer.pop("choices")
    assert answer == {
        "id": "0", "object": "text_completion", "created": 7, "model": "toy", "system_fingerprint": "fp",
        "request_id": "mine",
        "usage": {
            "prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8, "prompt_tokens_details": {"cached_tokens": 0}
        },
    }  # fmt: skip
    assert choice == {
        "index": 0, "text": choice["text"], "logprobs": None, "finish_reason": "length", "stop_reason": None, "seed": 3,
        "reproducible": True,
    }  # fmt: skip


def test_openai_s_own_models_read_the_answers(llm):
    from openai.types import Completion
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    body = {"prompt": "Hello", "max_tokens": 3, "logprobs": 2, "n": 2, "seed": 1}
    Completion.model_validate_json(dump(whole(llm, body)), strict=True)
    chat = {"messages": USER, "max_tokens": 3, "logprobs": True, "top_logprobs": 2, "n": 2, "return_token_ids": True}
    ChatCompletion.model_validate_json(dump(whole(llm, chat)), strict=True)
    for event in chunks(llm, {**chat, "stream_options": {"include_usage": True}}):
        ChatCompletionChunk.model_validate_json(dump(event), strict=True)


def test_logprobs_with_echo_have_the_prompt_first_and_nothing_of_its_first_token():
    llm = saying("ab", 3)
    answer = whole(llm, {"prompt": "xyz", "max_tokens": 2, "echo": True, "logprobs": 1, "temperature": 0})
    (choice,) = answer["choices"]
    lists = choice["logprobs"]
    assert choice["text"] == "xyzab"
    assert lists["tokens"] == ["x", "y", "z", "a", "b"]
    assert lists["text_offset"] == [0, 1, 2, 3, 4]
    # Logits are 50 for what is scripted and 0 for 256 others; before the script begins, its first token is scripted.
    lse = math.log(math.exp(50) + 256)
    assert lists["token_logprobs"][0] is None
    assert lists["token_logprobs"][1:] == pytest.approx([-lse, -lse, 50 - lse, 50 - lse], abs=1e-5)
    assert lists["top_logprobs"][0] is None
    assert set(lists["top_logprobs"][1]) == {"a", "y"}  # the likeliest, and the one that is there
    assert lists["top_logprobs"][4] == {"b": lists["token_logprobs"][4]}


def test_a_prompt_is_scored_without_a_new_token(llm):
    body = {"prompt": HELLO, "max_tokens": 0, "echo": True, "logprobs": 1, "seed": 3}
    answer = whole(llm, body)
    (choice,) = answer["choices"]
    assert choice["text"] == "Hello"
    assert [len(values) for values in choice["logprobs"].values()] == [5, 5, 5, 5]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    (event,) = chunks(llm, body)
    assert event["choices"] == answer["choices"]


def test_a_harness_finds_the_greedy_continuation():
    """It asks for one more token, leaves it out, and compares each logprob with the largest of its list."""
    llm = saying("ab", 3)
    for text, greedy in (("xyzab", True), ("xyzac", False)):
        body = {"prompt": text, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0, "seed": 1234}
        lists = whole(llm, body)["choices"][0]["logprobs"]
        values, tops = lists["token_logprobs"][3:-1], lists["top_logprobs"][3:-1]
        assert all(v == max(top.values()) for v, top in zip(values, tops, strict=True)) == greedy


def test_zero_logprobs_are_not_none():
    llm = saying("ab", 3)
    body = {"prompt": "xyz", "max_tokens": 2}
    assert whole(llm, body)["choices"][0]["logprobs"] is None
    lists = whole(llm, {**body, "logprobs": 0})["choices"][0]["logprobs"]
    assert [list(top) for top in lists["top_logprobs"]] == [["a"], ["b"]]
    chat = {"messages": USER, "max_tokens": 2}
    assert whole(llm, {**chat, "logprobs": False})["choices"][0]["logprobs"] is None
    for asked in ({"logprobs": True}, {"logprobs": True, "top_logprobs": 0}):
        content = whole(llm, {**chat, **asked})["choices"][0]["logprobs"]["content"]
        assert content
        assert all(entry["top_logprobs"] == [] for entry in content)


def test_parts_of_a_character_keep_their_own_bytes():
    grin = "\N{GRINNING FACE}"
    llm = saying(grin, 3)
    body = {"prompt": "xyz", "max_tokens": 9, "temperature": 0, "logprobs": 0, "return_token_ids": True}
    (choice,) = whole(llm, body)["choices"]
    assert choice["text"] == grin
    assert choice["logprobs"]["tokens"] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80", "<end>"]
    assert choice["logprobs"]["text_offset"] == [3, 3, 3, 3, 4]  # counted from the prompt, echo or not
    assert len(choice["token_ids"]) == 5
    texts = TokenTexts(TokenBytes.from_list([b"\xf0\x9f", b"\x98\x80", b"<end>"], special=[2]), hides=True)
    assert [texts.shown(i) for i in range(3)] == [[240, 159], [152, 128], []]
    assert bytes(texts.shown(0) + texts.shown(1) + texts.shown(2)).decode() == grin
    assert texts.text(0) == "\\xf0\\x9f"
    assert texts.text(3) == "token_id:3"  # a column that is no token


def test_offsets_are_those_of_the_text_though_characters_break():
    e_acute = TOKENIZER.encode("\u00e9")
    llm = saying([e_acute[0], *TOKENIZER.encode("a"), e_acute[0], 256], 3)
    body = {"prompt": "xyz", "max_tokens": 9, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    (choice,) = whole(llm, {**body, "max_tokens": 5, "skip_special_tokens": False})["choices"]
    assert choice["text"] == "\ufffda\ufffd<end><end>"
    assert choice["logprobs"]["text_offset"] == [3, 4, 5, 6, 11]
    halved = saying([e_acute[1]], 4)  # carries on what the prompt began
    asked = {**body, "prompt": [*TOKENIZER.encode("xyz"), e_acute[0]], "max_tokens": 2}
    for echo, text, offsets in ((False, "\u00e9", [3, 4]), (True, "xyz\u00e9", [0, 1, 2, 3, 3, 4])):
        (choice,) = whole(halved, {**asked, "echo": echo})["choices"]
        assert (choice["text"], choice["logprobs"]["text_offset"]) == (text, offsets)


@given(
    prompt=st.lists(st.sampled_from([39, 256, *TOKENIZER.encode("\u20ac")]), min_size=1, max_size=6),
    shows=st.fixed_dictionaries({}, optional={
        "skip_special_tokens": st.booleans(), "spaces_between_special_tokens": st.booleans(),
        "truncate_prompt_tokens": st.just(2),
    }),
    seed=st.integers(0, 9),
)  # fmt: skip
def test_offsets_are_the_same_with_and_without_echo(llm, prompt, shows, seed):
    """Though the prompt ends in half a character, or in a special token with spaces around."""
    body = {"prompt": prompt, "max_tokens": 3, "logprobs": 0, "seed": seed, "ignore_eos": True, **shows}
    (with_echo,) = whole(llm, {**body, "echo": True})["choices"]
    (choice,) = whole(llm, body)["choices"]
    assert choice["logprobs"]["text_offset"] == with_echo["logprobs"]["text_offset"][-3:]
    assert max(with_echo["logprobs"]["text_offset"]) <= len(with_echo["text"])


def test_bytes_of_a_chat_are_those_of_its_text():
    prompt = TOKENIZER.apply_chat_template(USER, add_generation_prompt=True, return_dict=False)
    llm = saying("d\u00e9j\u00e0", len(prompt))
    (choice,) = whole(llm, {"messages": USER, "logprobs": True, "temperature": 0})["choices"]
    content = choice["logprobs"]["content"]
    assert choice["message"] == {"role": "assistant", "content": "d\u00e9j\u00e0", "refusal": None}
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "d\u00e9j\u00e0"
    assert content[-1]["token"] == "<end>"
    assert choice["finish_reason"] == "stop"


def test_stops_are_told_and_cut():
    llm = saying("alpha beta", 3)
    body = {"prompt": "xyz", "temperature": 0, "max_tokens": 20, "stop": ["beta"], "logprobs": 0}
    (choice,) = whole(llm, body)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("alpha ", "stop", "beta")
    assert choice["logprobs"]["text_offset"] == list(range(3, 13))  # as if it were there
    events = chunks(llm, body)
    assert "".join(event["choices"][0]["text"] for event in events) == "alpha "
    ids = [llm.tokenizer.encode(letter)[0] for letter in "ph"]
    for stop in (ids, ids[0]):
        asked = {"prompt": "xyz", "temperature": 0, "max_tokens": 20, "stop_token_ids": [stop]}
        assert whole(llm, asked)["choices"][0]["stop_reason"] == stop


def test_choices_are_counted_through_all_prompts(llm):
    body = {"prompt": ["ab", HELLO, "c"], "n": 2, "max_tokens": 2, "seed": 2**64 - 1, "return_token_ids": True}
    choices = whole(llm, body)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3, 4, 5]
    assert [choice["seed"] for choice in choices] == [2**64 - 1, 2**64 - 1, 0, 0, 1, 1]
    assert choices[2]["prompt_token_ids"] == HELLO
    alone = whole(llm, {"prompt": HELLO, "n": 2, "max_tokens": 2, "seed": 0})["choices"]
    assert [choice["text"] for choice in choices[2:4]] == [choice["text"] for choice in alone]


def test_usage_counts_prompts_once_and_what_was_cached():
    llm = LLM(PagedToyModel(vocab_size=257), tokenizer=TOKENIZER, block_size=4, num_blocks=64)
    body = {"prompt": [[*range(9)], [1, 2]], "n": 3, "max_tokens": 4}
    first, second = whole(llm, body)["usage"], whole(llm, body)["usage"]
    assert first == {
        "prompt_tokens": 11, "completion_tokens": 24, "total_tokens": 35, "prompt_tokens_details": {"cached_tokens": 0}
    }  # fmt: skip
    assert second == {**first, "prompt_tokens_details": {"cached_tokens": 8}}  # two whole blocks of the nine tokens


def test_usage_comes_in_one_more_chunk_where_it_is_asked_for(llm):
    body = {"prompt": "Hello", "max_tokens": 2, "seed": 1}
    for options in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}):
        assert all("usage" not in event and event["choices"] for event in chunks(llm, {**body, **options}))
    *events, last = chunks(llm, {**body, "stream_options": {"include_usage": True}})
    assert [event["usage"] for event in events] == [None, None]
    assert last["choices"] == []
    assert last["usage"] == whole(llm, body)["usage"]


def test_the_role_and_the_seed_come_first_and_the_reason_last(llm):
    events = [event["choices"][0] for event in chunks(llm, {"messages": USER, "max_tokens": 3, "seed": 5})]
    assert [event["delta"].get("role") for event in events] == ["assistant", None, None]
    assert [event.get("seed") for event in events] == [5, None, None]
    assert [event["finish_reason"] for event in events] == [None, None, "length"]


def test_what_the_prompt_says_comes_with_the_end_of_its_first_choice(llm):
    body = {"prompt": ["ab", "c"], "n": 2, "max_tokens": 2, "prompt_logprobs": 1, "seed": 1}
    events = [event["choices"][0] for event in chunks(llm, body)]
    told = [event["index"] for event in events if "prompt_logprobs" in event]
    assert told == [0, 2]
    assert all(event["finish_reason"] == "length" for event in events if "prompt_logprobs" in event)
    first, second = whole(llm, body)["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second["token_id"] == 65
    assert len(second["top"]) == 1


BODIES = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 6), "seed": st.integers(0, 2**64 - 1), "n": st.integers(1, 2)},
    optional={
        "temperature": st.sampled_from([0, 1, 2.5]), "top_k": st.sampled_from([2, 7]),
        "return_token_ids": st.just(True), "return_receipts": st.just(True), "prompt_logprobs": st.integers(0, 2),
        "return_probs": st.just(True),
        "logprob_token_ids": st.just([5, 256, 9]), "stop": st.just(["a", "bc", "\ufffd\ufffd"]),
        "stop_token_ids": st.just([[3, 4], 200]), "skip_special_tokens": st.booleans(),
        "include_stop_str_in_output": st.booleans(), "detokenize": st.booleans(), "truncate_prompt_tokens": st.just(3),
    },
)  # fmt: skip
OF_COMPLETIONS = st.fixed_dictionaries(
    {"prompt": st.sampled_from(["xyz", [HELLO, [226, 130], [5]], ["d\u00e9j\u00e0"]])},
    optional={"echo": st.booleans(), "logprobs": st.integers(0, 3)},
)
OF_CHATS = st.fixed_dictionaries(
    {"messages": st.just(USER)}, optional={"logprobs": st.just(True), "return_kept": st.booleans()}
)


@settings(max_examples=60, deadline=None)
@given(body=BODIES, route=OF_COMPLETIONS | OF_CHATS)
def test_a_stream_adds_up_to_the_whole_in_every_field(llm, body, route):
    body = {**body, **route}
    answer, events = whole(llm, body), chunks(llm, body)
    assert put_together(events, len(answer["choices"])) == answer["choices"]
    kinds = (responses.CompletionResponse, responses.CompletionChunk)
    if "messages" in body:
        kinds = (responses.ChatCompletionResponse, responses.ChatCompletionChunk)
    kinds[0].model_validate_json(dump(answer), strict=True)
    for event in events:
        kinds[1].model_validate_json(dump(event), strict=True)
    for choice in answer["choices"]:
        lists = choice["logprobs"] or {}
        if "tokens" in lists and body.get("detokenize", True) and "stop" not in body and "stop_token_ids" not in body:
            num_prompt = 0 if body.get("echo") else len(llm.tokenizer.decode(asked_of(llm, body).prompts[0]))
            assert max(lists["text_offset"]) <= num_prompt + len(choice["text"])


def test_receipts_say_what_a_token_was_drawn_from(llm):
    fields = {"temperature": 0.5, "top_k": 2, "return_probs": True, "logprob_token_ids": [9]}
    body = {"prompt": HELLO, "max_tokens": 1, "seed": 1, "logprobs_mode": "processed", **fields}
    (choice,) = whole(llm, body)["choices"]
    assert choice["logprobs"] is None
    (receipt,) = choice["receipts"]
    assert list(receipt) == [
        "token_id", "logprob", "rank", "raw", "processed", "kept_mass", "num_kept", "listed", "kept_ids", "kept_probs"
    ]  # fmt: skip
    assert receipt["logprob"] == receipt["processed"] > receipt["raw"]
    assert receipt["num_kept"] == 2 == len(receipt["kept_ids"])
    assert receipt["listed"] == [[9, LEAST]]  # it was removed
    probs = dict(zip(receipt["kept_ids"], receipt["kept_probs"], strict=True))
    assert math.exp(receipt["processed"]) == pytest.approx(probs[receipt["token_id"]])


def test_what_cannot_be_has_a_number_and_what_is_not_known_has_none():
    assert number(-math.inf) == -9999.0
    assert number(float(np.float32(-0.1))) == np.float32(-0.1)
    ids, values = np.array([3, 4, -1], np.int32), np.array([-1.5, -np.inf, np.nan], np.float32)
    assert list(pairs(ids, values, -1)) == [(3, -1.5), (4, -9999.0)]
    assert list(pairs(ids, values, 1)) == [(3, -1.5)]
    assert receipts(nothing(2), 0) == [None, None]
    with pytest.raises(ValueError, match="not JSON compliant"):
        dump({"x": math.nan})


def test_removed_tokens_are_written_as_a_number():
    """Processed, with one token kept, and three wanted."""
    llm = saying("ab", 3)
    body = {"prompt": "xyz", "top_k": 1, "temperature": 1.0, "max_tokens": 2, "echo": True, "logprobs": 3}
    (choice,) = whole(llm, {**body, "logprobs_mode": "processed"})["choices"]
    assert sorted(choice["logprobs"]["top_logprobs"][3].values()) == [LEAST, LEAST, 0.0]
    assert all(value > LEAST for value in choice["logprobs"]["token_logprobs"][1:])  # the prompt is always raw
    dump(choice)


@pytest.mark.parametrize(
    "reason, message, status, told",
    [
        ("error", "no token is left for position 3: every logit is -inf", 500, "no token is left for position 3"),
        ("error", "RuntimeError: /home/somebody/model.bin", 500, "the server could not do this"),
        ("abort", "the AsyncLLM was closed", 503, "before its answer was whole"),
    ],
)  # fmt: skip
def test_no_answer_is_half_of_one(llm, reason, message, status, told):
    asked = asked_of(llm, {"prompt": HELLO, "max_tokens": 2})
    (output,) = llm.generate(asked.prompts, asked.params)
    failed = dataclasses.replace(output.outputs[0], finish_reason=reason, error=message)
    with pytest.raises(ApiError, match=told) as caught:
        answer_of(llm, asked).whole([dataclasses.replace(output, outputs=(failed,))])
    assert caught.value.status == status
    assert "home" not in str(caught.value.body())
    (delta, *_) = llm.stream(asked.prompts, asked.params)
    with pytest.raises(ApiError, match=told):
        answer_of(llm, asked).chunks(0, dataclasses.replace(delta, finish_reason=reason, error=message))


def test_a_model_without_texts_has_ids():
    llm = LLM(ToyModel(vocab_size=9))
    body = {"prompt": [1, 2], "max_tokens": 1, "logprobs": 0, "echo": True, "return_token_ids": True}
    (choice,) = whole(llm, body)["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in [1, 2, *choice["token_ids"]]]
    assert choice["text"] == ""
    assert "needs a tokenizer" in refused(llm, {"prompt": "x"}).message
    assert "needs a tokenizer" in refused(llm, {"messages": USER}).message


def test_names_tell_answers_and_servers_apart(llm):
    assert new_id("chat").startswith("chatcmpl-")
    assert len({new_id("completion") for _ in range(99)}) == 99
    assert fingerprint_of(llm) == fingerprint_of(toy()) == fingerprint_of(toy(max_num_seqs=3))
    assert fingerprint_of(llm) != fingerprint_of(LLM(ToyModel(vocab_size=300), tokenizer=TOKENIZER))
    assert json.loads(dump({"x": "\N{GRINNING FACE}"})) == {"x": "\N{GRINNING FACE}"}


NESTED = {"a": {"b": list(range(200)), "ü": ["x"] * 65}}


@pytest.mark.parametrize("value", [{}, {"a": []}, NESTED, [1] * 64, [[2] * 70]])
def test_json_in_pieces_is_the_same_json(value):
    assert b"".join(in_pieces(value)) == dump(value)


def test_an_answer_is_written_as_it_is_told(llm):
    body = {"prompt": ["ab", "c"], "n": 2, "seed": 7, "logprobs": 2, "echo": True, "request_id": '"choices":[]'}
    asked = asked_of(llm, body)
    outputs = llm.generate(asked.prompts, asked.params)
    assert answer_of(llm, asked).written(outputs) == dump(answer_of(llm, asked).whole(outputs))


def test_the_fingerprint_looks_at_the_weights():
    torch = pytest.importorskip("torch")
    llm = toy()

    def fingerprint(weight):
        llm.engine.model.module = torch.nn.ParameterDict({"w": torch.full((3, 3), weight)})
        return fingerprint_of(llm)

    assert len({fingerprint(1.0), fingerprint(2.0), fingerprint_of(toy())}) == 3
    assert fingerprint(1.0) == fingerprint(1.0)
