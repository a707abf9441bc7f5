"""Neighbours of the server's cases: what servers of the same kind get wrong, each with the right result."""

from __future__ import annotations

import json
import time

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("transformers")

from tests.faults.served import CHAT, COMPLETIONS, END, NUM_USER, OTHER_END, USER, Quick, ids, make_tokenizer, texts
from tests.server.live import OPTIONS

from klero.engine import LLM
from klero.testing.models import PagedToyModel

BOTH = pytest.mark.parametrize("of", [{"prompt": [1, 2]}, {"messages": USER}], ids=["completion", "chat"])
SEEDED = {"seed": 5, "max_tokens": 6, "ignore_eos": True}


def path_of(body):
    return CHAT if "messages" in body else COMPLETIONS


def answer_of(stage, body):
    """A whole answer without what is new in each."""
    answer = stage.post(path_of(body), body)
    assert answer.status_code == 200, answer.text
    return {name: value for name, value in answer.json().items() if name not in ("id", "created", "usage")}


SILENT = [
    "model", "temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids", "logprobs", "logit_bias",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "max_tokens", "max_completion_tokens", "min_tokens",
    "stream", "stream_options", "response_format", "user", "json", "regex", "choice", "grammar", "ignore_eos", "seed",
    "skip_special_tokens", "priority", "request_id", "cache_salt", "return_token_ids", "logits_processors",
    "truncate_prompt_tokens",
]  # fmt: skip
OF_COMPLETIONS = ["best_of", "suffix", "echo"]
OF_CHATS = [
    "top_logprobs", "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "metadata", "store",
    "service_tier", "prediction", "modalities", "reasoning_effort", "chat_template_kwargs",
]  # fmt: skip


@BOTH
def test_null_is_silence_in_every_field(stage, of):
    """Clients that write every field they know send null for those that nobody set."""
    nulls = dict.fromkeys([*SILENT, *(OF_CHATS if "messages" in of else OF_COMPLETIONS)])
    assert answer_of(stage, {**nulls, **of, **SEEDED}) == answer_of(stage, {**of, **SEEDED})


GREEDY = {"temperature": 0}
SAME = [
    ({"top_k": 0}, {}), ({"top_k": -1}, {}), ({"top_k": 10**9}, {}), ({"top_k": 1}, GREEDY),
    ({"temperature": 1}, {}), ({"temperature": 1.0, "top_p": 1}, {}), ({"temperature": 1e-320}, GREEDY),
    ({"top_p": 0}, GREEDY), ({"temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.5}, GREEDY),
    ({"stop": []}, {}), ({"stop": "\u00e9\u00e9\u00e9"}, {}), ({"stop": ["x", "x"]}, {"stop": "x"}),
    ({"logit_bias": {}}, {}), ({"logit_bias": {"5": 0}}, {}), ({"logit_bias": {"05": 100}}, {"logit_bias": {"5": 100}}),
    ({"presence_penalty": 0, "frequency_penalty": -0.0}, {}), ({"min_tokens": 0}, {}), ({"bad_words": []}, {}),
    ({"n": 1}, {}), ({"stream": False}, {}), ({"response_format": {"type": "text"}}, {}), ({"model": "toy"}, {}),
    ({"max_tokens": None, "max_completion_tokens": 6}, {}), ({"user": ""}, {}),
]


@BOTH
@pytest.mark.parametrize("number", range(len(SAME)))
def test_two_ways_to_ask_for_one_thing(stage, of, number):
    one, other = SAME[number]
    assert answer_of(stage, {**of, **SEEDED, **one}) == answer_of(stage, {**of, **SEEDED, **other})


JSON_SCHEMA = {"type": "json_schema"}
REFUSED = {
    "max_tokens": [0, -1, 2**70, "6", 6.5, True], "n": [10**9, 0, -1, 1.0, "2", True],
    "stop": [[None], {"a": 1}, [["a"]], 5, [""]],
    "temperature": ["0.5", True, -0.1, [1]], "top_p": [1.1, -1, "1"],
    "frequency_penalty": [2.1, "0"], "presence_penalty": [-3], "stream": ["true", 1], "model": [["toy"], 5],
    "response_format": [
        "json_object", {}, {"type": "xml"}, JSON_SCHEMA, {**JSON_SCHEMA, "json_schema": {"schema": "{}"}},
    ],
    "user": [7],
    "json": ["{", 5], "regex": ["(", ""], "grammar": ["root ::= (", ""], "choice": [[], ["a", "a"], "a"],
    "min_tokens": [-1, "1"], "logits_processors": [["x"]], "top_kk": [1], "logprobs": ["2", -2, 10**6],
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_by_name(stage, of, name):
    steps = len(stage.model.seen)
    for value in REFUSED[name]:
        answer = stage.post(path_of(of), {"stream": True, **of, name: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), answer.text
    assert len(stage.model.seen) == steps


TWICE = [
    ({"max_tokens": 3, "max_completion_tokens": 3}, "max_completion_tokens"),
    ({"seed": 1, "random_seed": 1}, "random_seed"), ({"choice": ["a"], "regex": "a"}, "choice"),
    ({"json_object": True, "response_format": {"type": "json_object"}}, "response_format"),
    ({"min_tokens": 7, "max_tokens": 6}, "min_tokens"), ({"n": 10**9, "max_tokens": 10**9}, "n"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
]  # fmt: skip


@BOTH
@pytest.mark.parametrize("number", range(len(TWICE)))
def test_fields_that_do_not_go_together(stage, of, number):
    fields, param = TWICE[number]
    answer = stage.post(path_of(of), {**of, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


PROMPTS = ["", [], [[]], [""], ["x", ""], ["x", []], [["x"]], {"a": 1}, 5, True, [[1], 2], [1, "x"], [[[1]]]]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompts_that_are_none(stage, prompt):
    assert stage.refused({"prompt": prompt})["param"].startswith("prompt")


def test_choices_of_several_prompts_stand_in_their_order_with_the_prompts_echoed(stage):
    prompts = ["one", "two", ids("three"), "one"]
    body = {"prompt": prompts, "n": 2, "echo": True, **SEEDED, "return_token_ids": True, "logprobs": 1}
    whole, _ = stage.both(body)
    choices = whole["choices"]
    assert [choice["index"] for choice in choices] == list(range(8))
    for choice in choices:
        prompt = ["one", "two", "three", "one"][choice["index"] // 2]
        assert choice["text"].startswith(prompt)
        assert choice["prompt_token_ids"] == ids(*prompt)
        assert choice["logprobs"]["text_offset"][: len(prompt) + 1] == list(range(len(prompt) + 1))
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 8  # seeds go on from prompt to prompt
    usage = whole["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (14, 48, 62)


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 0, "stop": "e"}])
def test_greedy_choices_are_equal_and_all_there(stage, fields):
    one, other, third = stage.both({"messages": USER, "n": 3, "max_tokens": 5, **fields})[0]["choices"]
    same = [{**choice, "index": 0, "seed": 0} for choice in (one, other, third)]
    assert same[0] == same[1] == same[2]


def test_names_and_times_of_answers(stage):
    before, bodies = int(time.time()), [{"prompt": [1], **SEEDED}, {"messages": USER, **SEEDED}]
    answers = [stage.both(body) for body in bodies]
    wholes = [whole for whole, _ in answers]
    chunks = [chunk for _, all_of_one in answers for chunk in all_of_one]
    assert len({whole["id"] for whole in wholes} | {chunk["id"] for chunk in chunks}) == 4
    assert len({one["system_fingerprint"] for one in [*wholes, *chunks]}) == 1
    assert all(before <= one["created"] <= time.time() for one in [*wholes, *chunks])
    for _, of_one in answers:
        assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in of_one}) == 1
    assert {one["model"] for one in [*wholes, *chunks]} == {"toy"}


@pytest.mark.parametrize("name", ["other", "", "TOY", "toy ", "toy/", "\u0000"])
def test_another_model_is_not_answered_for(stage, name):
    for of in ({"prompt": [1]}, {"messages": USER}):
        error = stage.refused({**of, "model": name}, 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")


def contents_of(stage, content, **more):
    """The prompt of one message of the assistant."""
    answer = stage.post("/tokenize", {"messages": [{"role": "assistant", "content": content, **more}]})
    return answer.json().get("tokens", answer.status_code)


def test_contents_are_texts_and_parts_of_texts(stage):
    text, parts = [{"type": "text", "text": "Hi"}], [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert contents_of(stage, "Hi") == contents_of(stage, text) == contents_of(stage, parts) == ids(*"[assistant]Hi")
    assert contents_of(stage, "") == contents_of(stage, [{"type": "text", "text": ""}]) == ids(*"[assistant]")
    picture = {"type": "image_url", "image_url": {"url": "x"}}
    for wrong in (None, [], [{"type": "text"}], [picture], [*text, picture], ["Hi"], 5, {"text": "Hi"}):
        assert contents_of(stage, wrong) == 400


CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def test_a_turn_of_calls_alone_has_no_content_and_no_calls_are_as_if_unsaid(stage):
    """Agents send back `content: null` beside calls, and `tool_calls: []` where there were none."""
    called = contents_of(stage, None, tool_calls=[CALL])
    assert called == ids(*"[assistant](1){}")
    plain = contents_of(stage, "Hi")
    assert contents_of(stage, "Hi", tool_calls=[]) == contents_of(stage, "Hi", tool_calls=None) == plain
    assert contents_of(stage, None, tool_calls=[]) == 400


ARGUMENTS_OF_OLD = [("", "{}"), ('{"a":1}', '{"a": 1}'), ('{"a":', '"{\\"a\\":"'), ("[1]", '"[1]"')]


@pytest.mark.parametrize("arguments, shown", ARGUMENTS_OF_OLD)
def test_arguments_of_earlier_calls_are_objects_where_they_are(stage, arguments, shown):
    """A call without arguments may have none at all; what is no JSON was cut off, and stays what the model wrote."""
    call = {**CALL, "function": {"name": "look", "arguments": arguments}}
    assert contents_of(stage, None, tool_calls=[call]) == ids(*f"[assistant](1){shown}")


def test_what_a_template_refuses_is_the_client_s_fault(stage):
    error = stage.refused({"messages": [{"role": "nobody", "content": "x"}]})
    assert (error["param"], "who is that?" in error["message"]) == ("messages", True)
    assert stage.post("/tokenize", {"messages": [{"role": "nobody", "content": "x"}]}).status_code == 400


def test_the_prompt_is_what_tokenize_says(stage):
    for of in ({"prompt": "wawater <end>\u00e9"}, {"messages": [{"role": "user", "content": "water<stop>"}]}):
        (choice,) = answer_of(stage, {**of, **SEEDED, "return_token_ids": True})["choices"]
        assert choice["prompt_token_ids"] == stage.post("/tokenize", of).json()["tokens"]


def test_a_beginning_of_text_comes_once():
    """The tokenizer puts one before texts, the template writes one itself."""
    from tokenizers import processors

    tokenizer = make_tokenizer()
    start = ids("<stop>")[0]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<stop> $A", special_tokens=[("<stop>", start)]
    )
    tokenizer.chat_template = "<stop>{% for m in messages %}{{ m.content }}{% endfor %}"
    with Quick(lambda: LLM(PagedToyModel(vocab_size=300), tokenizer=tokenizer, **OPTIONS)) as live:
        for of in ({"prompt": "ab"}, {"messages": [{"role": "user", "content": "ab"}]}):
            answer = live.post(path_of(of), {**of, "max_tokens": 1, "return_token_ids": True}).json()
            assert answer["choices"][0]["prompt_token_ids"] == [start, *ids("ab")]
            assert answer["usage"]["prompt_tokens"] == 3
            assert live.post("/tokenize", of).json()["tokens"] == [start, *ids("ab")]
        plain = live.post("/tokenize", {"prompt": "ab", "add_special_tokens": False}).json()["tokens"]
        assert plain == ids("ab")


ARGUMENTS = '{"at": "\u00e9 \U0001f600 \\"</tool_call>\\" {}"}'
CALLS = "Well" + "".join(
    f'\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    for name, arguments in (("look", ARGUMENTS), ("wait", "{}"))
)
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("look", "wait")]


def test_calls_whose_arguments_come_in_many_tokens(stage):
    stage.says([*ids(*CALLS), END], NUM_USER)
    whole, chunks = stage.both({"messages": USER, "tools": TOOLS, "temperature": 0, "max_tokens": 200, "n": 2})
    names = set()
    for choice in whole["choices"]:
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Well\n")
        first, second = choice["message"]["tool_calls"]
        assert json.loads(first["function"]["arguments"]) == json.loads(ARGUMENTS)
        assert (first["function"]["name"], second["function"]) == ("look", {"name": "wait", "arguments": "{}"})
        names |= {first["id"], second["id"]}
    assert len(names) == 4
    assert "".join(texts(chunks)) == "Well\n"


def test_calls_that_are_cut_off_are_text(stage):
    stage.says(ids(*CALLS), NUM_USER)
    (choice,) = stage.both({"messages": USER, "tools": TOOLS, "temperature": 0, "max_tokens": 30})[0]["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", CALLS[:30])
    assert "tool_calls" not in choice["message"]


@BOTH
def test_a_context_that_is_full_is_a_length(stage, of):
    """As many tokens as fit, where nobody says how many."""
    long = {"prompt": [1] * 250} if "prompt" in of else {"messages": [{"role": "user", "content": "x" * 244}]}
    answer = stage.post(path_of(of), {**long, "ignore_eos": True}).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 6


def test_json_that_is_cut_off_says_so(stage):
    body = {"messages": USER, "response_format": {"type": "json_object"}, "max_tokens": 1}
    (choice,) = stage.both(body)[0]["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "{")


def test_a_full_stop_of_a_model_with_two_end_ids_stands_beside_a_grammar(stage):
    stage.rows([{ids("yes")[0]: 1, OTHER_END: 5}])
    (choice,) = stage.both({"prompt": [1], "choice": ["yes"], "temperature": 0})[0]["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("yes", "stop")
