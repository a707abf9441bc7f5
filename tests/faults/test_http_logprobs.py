"""Cases from the field, kinds logprobs and prompt_logprobs, over HTTP."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("transformers")

from tests.faults.served import CHAT, COMPLETIONS, END, NUM_USER, USER, WIDTH, Quick, ids

from klero import SamplingParams
from klero.engine import LLM
from klero.testing.models import PagedToyModel, ToyModel

LEAST = -9999.0
A, B, C, D = ids("abcd")


def near(values):
    return pytest.approx(values, abs=2e-6)


def row(*logits):
    """The logits of "a", "b", "c", ..."""
    return dict(zip(ids("abcdefgh"), logits, strict=False))


def of_completion(stage, **body):
    """The legacy lists, of a request whose stream says the same."""
    whole, _ = stage.both({"prompt": [0], "max_tokens": 1, "seed": 0, **body})
    return whole["choices"][0]["logprobs"]


def of_chat(stage, **body):
    """What is said about each token, of a request whose stream says the same."""
    fields = {"messages": USER, "max_tokens": 1, "seed": 0, "logprobs": True, **body}
    whole, _ = stage.both(fields)
    return whole["choices"][0]["logprobs"]["content"]


def test_LP_01_raw_and_processed_are_two_distributions(stage):
    stage.rows([row(1.5, 0.75, -0.5, -2.0)])
    raw_of, processed_of = {"a": -0.493414, "b": -1.243414, "c": -2.493414}, {"a": -0.217011, "b": -1.717011}
    asked = {"temperature": 0.5, "logprobs": 3, "allowed_token_ids": [A]}
    for mode in ({}, {"logprobs_mode": "raw"}):
        lists = of_completion(stage, **asked, **mode)
        assert lists["top_logprobs"] == [near(raw_of)]
        assert lists["token_logprobs"] == near([-0.493414])
    del asked["allowed_token_ids"]
    lists = of_completion(stage, **asked, logprobs_mode="processed", seed=1)
    assert lists["top_logprobs"] == [near({**processed_of, "c": -4.217011})]
    assert lists["token_logprobs"][0] == lists["top_logprobs"][0][lists["tokens"][0]]


@pytest.mark.parametrize("mode, right", [("raw", -0.493414), ("processed", -0.217011)])
def test_LP_01_in_a_chat(stage, mode, right):
    stage.rows([row(1.5, 0.75, -0.5, -2.0)])
    (said,) = of_chat(stage, temperature=0.5, top_logprobs=2, logprobs_mode=mode)
    assert (said["top_logprobs"][0]["token"], said["top_logprobs"][0]["logprob"]) == ("a", near(right))


def test_LP_03_filters_do_not_touch_the_prompt_and_removed_tokens_are_a_number(stage):
    body = {"prompt": [5, 1, 7, 2], "echo": True, "logprobs": 1, "top_k": 1, "temperature": 1.0, "max_tokens": 2}
    lists = of_completion(stage, **body)
    assert len(lists["token_logprobs"]) == 6
    assert all(value > -20 for value in lists["token_logprobs"][1:])  # the noise is in [0, 4]
    stage.rows([row(2, 1, 0, -1)])
    lists = of_completion(stage, top_k=1, temperature=1.0, logprobs=3, logprobs_mode="processed")
    assert (lists["token_logprobs"], sorted(lists["top_logprobs"][0].values())) == ([0.0], [LEAST, LEAST, 0.0])
    (said,) = of_chat(stage, top_k=1, temperature=1.0, top_logprobs=3, logprobs_mode="processed")
    assert [one["logprob"] for one in said["top_logprobs"]] == [0.0, LEAST, LEAST]
    (said,) = of_chat(stage, temperature=0, top_logprobs=6)  # raw, and two tokens that the model itself excludes
    assert [one["logprob"] for one in said["top_logprobs"]][4:] == [LEAST, LEAST]


def test_LP_06_the_rank_counts_the_strictly_greater(stage):
    stage.rows([row(3, 3, 1, 0)])
    body = {"prompt": [A, B, C], "allowed_token_ids": [B], "return_receipts": True, "prompt_logprobs": 0}
    (choice,) = stage.both({**body, "max_tokens": 1})[0]["choices"]
    (receipt,) = choice["receipts"]
    assert (receipt["token_id"], receipt["rank"], receipt["logprob"]) == (B, 1, near(-0.781672))
    assert [(said["token_id"], said["rank"]) for said in choice["prompt_logprobs"][1:]] == [(B, 1), (C, 3)]


def test_LP_07_zero_is_not_off(stage):
    stage.says(ids("ab"), 1)
    assert of_completion(stage, logprobs=None) is None
    lists = of_completion(stage, logprobs=0, max_tokens=2)
    assert [len(top) for top in lists["top_logprobs"]] == [1, 1]
    own = [top[token] for token, top in zip(lists["tokens"], lists["top_logprobs"], strict=True)]
    assert own == lists["token_logprobs"]
    stage.says(ids("ab"), NUM_USER)
    for asked in ({"top_logprobs": 0}, {}):
        said = of_chat(stage, max_tokens=2, **asked)
        assert [(one["token"], one["top_logprobs"]) for one in said] == [("a", []), ("b", [])]
        assert all(-1e-6 < one["logprob"] <= 0 for one in said)
    error = stage.refused({"messages": USER, "logprobs": False, "top_logprobs": 2})
    assert error["param"] == "top_logprobs"
    assert "logprobs" in error["message"].partition(":")[2]


def test_LP_09_more_than_the_vocabulary_is_refused_and_the_neighbour_goes_on(stage):
    with Quick(lambda: LLM(ToyModel(vocab_size=8))) as live:
        answer = live.post(COMPLETIONS, {"prompt": [1], "logprobs": 9, "max_tokens": 2})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logprobs")
        (choice,) = live.complete(prompt=[1], logprobs=2, max_tokens=2, temperature=0)["choices"]
        assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [2, 2]
        (choice,) = live.complete(prompt=[1], logprobs=8, max_tokens=1)["choices"]
        assert len(choice["logprobs"]["top_logprobs"][0]) == 8
    assert stage.refused({"messages": USER, "logprobs": True, "top_logprobs": 21})["param"] == "top_logprobs"
    assert stage.refused({"prompt": [1], "logprobs": WIDTH})["param"] == "logprobs"


def test_LP_10_parts_of_a_character_have_their_own_bytes(stage):
    first, second, other = ids(b"\xf0\x9f", b"\x98\x80", b"\xc4")
    stage.rows([{first: 3, other: 2, END: 0}, {second: 3, other: 2}], NUM_USER - 1)
    content = of_chat(stage, top_logprobs=2, max_tokens=2, temperature=0)
    assert [one["bytes"] for one in content] == [[240, 159], [152, 128]]
    assert bytes(byte for one in content for byte in one["bytes"]).decode() == "\U0001f600"
    assert [one["bytes"] for one in content[0]["top_logprobs"]] == [[240, 159], [196]]
    assert "\ufffd" not in str(content)
    stage.rows([{first: 3, other: 2, END: 0}, {second: 3, other: 2}])
    lists = of_completion(stage, logprobs=2, max_tokens=2, temperature=0)
    assert lists["tokens"] == ["bytes:\\xf0\\x9f", "bytes:\\x98\\x80"]
    assert lists["top_logprobs"][0].keys() == {"bytes:\\xf0\\x9f", "bytes:\\xc4"}


def test_LP_12_processed_is_what_was_drawn_from(stage):
    stage.rows([row(3, 2, 1, 0)])
    asked = {"choice": ["b", "c"], "temperature": 1.0, "logprobs": 4}
    (processed,) = of_completion(stage, **asked, logprobs_mode="processed")["top_logprobs"]
    assert [math.exp(value) for value in processed.values()] == near([0.731059, 0.268941, 0, 0])
    assert list(processed)[:2] == ["b", "c"]
    (raw,) = of_completion(stage, **asked)["top_logprobs"]
    right = {"a": 0.643914, "b": 0.236883, "c": 0.087144, "d": 0.032059}
    assert {token: math.exp(raw[token]) for token in "abcd"} == near(right)


def test_LP_13_a_greedy_row_reports_a_sorted_list(stage):
    stage.rows([row(0.1, 5.0, -2.0, 4.0, 4.5)])
    (said,) = of_chat(stage, temperature=0, top_logprobs=3)
    assert said["token"] == "b"
    assert [one["token"] for one in said["top_logprobs"]] == ["b", "e", "d"]
    assert [one["logprob"] for one in said["top_logprobs"]] == near([-0.684494, -1.184494, -1.684494])


PL_01 = [[0, 2, 1, 0], [1, 0, 3, 0], [0, 0, 0, 5]]


def test_PL_01_a_prompt_is_scored_without_generating(stage):
    stage.rows([row(*logits) for logits in PL_01])
    body = {"prompt": [D, B, C], "echo": True, "logprobs": 1, "max_tokens": 0}
    whole, chunks = stage.both(body)
    assert len(chunks) == 1
    (choice,) = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("dbc", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, near(-0.493812), near(-0.210998)]
    assert choice["logprobs"]["top_logprobs"] == [None, {"b": near(-0.493812)}, {"c": near(-0.210998)}]
    assert whole["usage"]["completion_tokens"] == 0
    lists = of_completion(stage, **{**body, "max_tokens": 2, "temperature": 0})
    assert lists["tokens"] == ["d", "b", "c", "d", "d"]
    assert lists["token_logprobs"][3] == near(-0.020012)


@pytest.mark.parametrize("order", ["AB", "BA"])
def test_PL_03_a_prefix_that_another_request_had_is_scored_anew(stage, order):
    """Blocks have four tokens; eight of the nine are cached for the second."""
    prompts = {"A": [1, 2, 3, 4, 5, 6, 7, 8, 9], "B": [1, 2, 3, 4, 5, 6, 7, 8, 10]}
    model = PagedToyModel(vocab_size=WIDTH, end_token_ids=())
    for name in order:
        body = {"prompt": prompts[name], "echo": True, "logprobs": 0, "max_tokens": 1, "cache_salt": f"PL-03 {order}"}
        lists = of_completion(stage, **body)
        (cold,) = LLM(model, block_size=4).generate([prompts[name]], SamplingParams(max_tokens=1, prompt_logprobs=0))
        assert lists["token_logprobs"][0] is None
        assert lists["token_logprobs"][1:9] == cold.prompt_logprobs.sampled[1:].tolist()
        warm = stage.complete(**{**body, "echo": False, "logprobs": None})["usage"]
        assert warm["prompt_tokens_details"]["cached_tokens"] == 8


def test_PL_04_nothing_is_said_of_the_first_token_and_the_ids_come_back(stage):
    body = {"prompt": [7, 4, 4], "prompt_logprobs": 1, "return_token_ids": True, "max_tokens": 1, "seed": 0}
    (choice,) = stage.both(body)[0]["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert [said["token_id"] for said in others] == [4, 4]
    assert choice["prompt_token_ids"] == [7, 4, 4]


# Neighbours of these.


@pytest.mark.parametrize("n", [1, 2])
def test_offsets_count_characters_of_the_text_with_echo_in_a_stream_too(stage, n):
    """Beyond 16 bits a character is still one, and offsets go on behind the prompt, in every chunk."""
    stage.says([*ids("\U0001f600", "al", "\u00e9"), END], len(ids("\U0001f600 x")))
    body = {"prompt": "\U0001f600 x", "echo": True, "logprobs": 0, "max_tokens": 16, "temperature": 0, "n": n}
    for choice in stage.both(body)[0]["choices"]:
        assert choice["text"] == "\U0001f600 x\U0001f600al\u00e9"
        assert choice["logprobs"]["text_offset"] == [0, 0, 0, 0, 1, 2, 3, 3, 3, 3, 4, 6, 6, 7]
        lists = choice["logprobs"]
        assert {len(values) for values in lists.values()} == {14}
        assert lists["token_logprobs"][0] is None
        assert None not in lists["token_logprobs"][1:]


@pytest.mark.parametrize("stop", [{"stop": "bc"}, {"stop_token_ids": ids("c")}, {"stop_token_ids": [ids("bc")]}])
def test_there_are_as_many_entries_as_ids_whatever_is_cut_off(stage, stop):
    stage.says(ids("abcd"), NUM_USER)
    body = {"messages": USER, "logprobs": True, "temperature": 0, "return_token_ids": True, **stop}
    (choice,) = stage.both(body)[0]["choices"]
    assert choice["token_ids"] == ids("abc")
    assert [one["token"] for one in choice["logprobs"]["content"]] == ["a", "b", "c"]


def test_raw_logprobs_are_the_model_s_whatever_changes_the_draw(stage):
    stage.rows([row(3, 2, 1, 0)])
    plain = of_completion(stage, logprobs=4, temperature=0)["top_logprobs"]
    for changed in ({"logit_bias": {str(C): 100}}, {"temperature": 0.1, "top_p": 0.5}, {"bad_token_ids": [A]}):
        lists = of_completion(stage, **{"temperature": 0, "logprobs": 4, **changed})
        assert lists["top_logprobs"] == plain
    assert of_completion(stage, logprobs=4, temperature=0, logit_bias={str(C): 100})["tokens"] == ["c"]


def test_a_prompt_that_is_scored_counts_as_not_cached(stage):
    prompt = [9, 8, 7, 6, 5, 4, 3, 2, 1]
    for _ in range(2):
        usage = stage.complete(prompt=prompt, echo=True, logprobs=0, max_tokens=1)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_nothing_is_said_where_nothing_was_asked(stage, path):
    body = {"prompt": [1], "max_tokens": 2} if path == COMPLETIONS else {"messages": USER, "max_tokens": 2}
    for choice in stage.both({**body, "seed": 0})[0]["choices"]:
        assert choice["logprobs"] is None
        assert not {"token_ids", "receipts", "prompt_logprobs", "prompt_token_ids"} & set(choice)
