"""From a body to what it asks: OpenAI's defaults, klero's fields, and every fault at once, by its own name."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

from tests.server.toys import OPTIONS, TOKENIZER, USER, asked_of, make_tokenizer, refused, toy

from klero import SamplingParams
from klero.engine import LLM
from klero.server import ServerOptions
from klero.server.asked import detokenize_of, read_body, tokenize_of
from klero.server.errors import ApiError, Unreadable
from klero.server.fields import FIELDS, NOT_OVER_HTTP
from klero.server.schemas import ChatCompletionRequest, CompletionRequest
from klero.testing.models import ToyModel

HELLO = [39, 68, 75, 75, 78]


@pytest.fixture(scope="module")
def llm():
    return toy()


def params_of(llm, **body):
    return asked_of(llm, body).params[0]


def test_defaults_are_openai_s(llm):
    assert params_of(llm, prompt="Hello") == SamplingParams(temperature=1.0, top_p=1.0, max_tokens=16)
    assert params_of(llm, messages=USER) == SamplingParams(temperature=1.0, top_p=1.0)
    assert params_of(llm, prompt="Hello", temperature=None, top_p=None, max_tokens=None).max_tokens == 16
    assert params_of(llm, prompt="Hello", temperature=0).greedy
    asked = asked_of(llm, {"prompt": "Hello"})
    assert asked.stream is asked.include_usage is asked.echo is asked.return_token_ids is False
    assert asked.logprobs is asked.model is asked.request_id is None


def test_every_field_of_the_library_is_taken_under_its_name_or_refused_with_a_reason(llm):
    values = {
        "top_k": 5, "min_p": 0.1, "top_p_decay": 0.9, "top_p_min": 0.1, "top_p_reset_id": 3, "top_n_sigma": 1.0,
        "epsilon_cutoff": 0.1, "eta_cutoff": 0.1, "top_a": 0.1, "typical_p": 0.9, "xtc_probability": 0.5,
        "xtc_threshold": 0.2, "logit_bias": {"5": 1.5}, "embedding_bias": [0.0] * 257, "repetition_penalty": 1.1,
        "presence_penalty": 0.5, "frequency_penalty": 0.5, "prompt_ignore_length": 1, "bad_words": ["no"],
        "bad_token_ids": [7, [8, 9]], "no_repeat_ngram_size": 3, "allowed_token_ids": [1, 2, 3],
        "json": {"type": "object"}, "json_object": True, "regex": "a+", "choice": ["a", "b"],
        "grammar": 'root ::= "a"', "json_whitespace": 2,
        "structural_tag": {"structures": [{"begin": "<", "schema": {}, "end": ">"}], "triggers": ["<"]},
        "thinking_token_budget": 3, "seed": 7, "n": 2, "max_tokens": 5, "min_tokens": 1, "stop": ["x"],
        "stop_token_ids": [5], "end_token_ids": [6], "ignore_eos": True, "include_stop_str_in_output": True,
        "detokenize": False, "skip_special_tokens": False, "spaces_between_special_tokens": True, "echo": True,
        "truncate_prompt_tokens": 2, "logprobs": 1, "prompt_logprobs": 1, "logprobs_mode": "processed",
        "logprob_token_ids": [4], "return_kept": True, "return_probs": True, "temperature": 0.5, "top_p": 0.5,
    }  # fmt: skip
    needs = {"top_p_min": "top_p_decay", "top_p_reset_id": "top_p_decay", "json_whitespace": "json"}
    needs["logprobs_mode"] = "logprobs"
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(values) == set(FIELDS) == names - set(NOT_OVER_HTTP)
    words = {"bad_words": values.pop("bad_words")}  # are told to the engine as ids, of both tokenisations
    assert params_of(llm, prompt="Hello", **words).bad_token_ids == tuple(
        tuple(TOKENIZER.encode(word)) for word in ("no", " no")
    )
    for name, value in values.items():
        beside = {needs[name]: values[needs[name]]} if name in needs else {}
        asked = params_of(llm, prompt="Hello", **beside, **{name: value})
        assert getattr(asked, name) == getattr(SamplingParams(**beside, **{name: value}), name), name
    for name in NOT_OVER_HTTP:
        assert refused(llm, {"prompt": "Hello", name: True}).param == name
        asked_of(llm, {"prompt": "Hello", name: None})


def test_other_engines_spellings_are_taken_and_told_back(llm):
    assert params_of(llm, prompt="Hello", n_predict=3, repeat_penalty=1.5).max_tokens == 3
    error = refused(llm, {"prompt": "Hello", "n_predict": 3, "max_tokens": 3, "temp": -1})
    assert error.message == (
        "max_tokens=3: stands beside n_predict, which means the same; give one of them; "
        "temp=-1: must be a number in [0, 1e+06]"
    )
    assert params_of(llm, messages=USER, max_completion_tokens=3, max_tokens=None).max_tokens == 3


@pytest.mark.parametrize(
    "prompt, ids",
    [
        ("Hello", [HELLO]),
        (["Hello", "x"], [HELLO, TOKENIZER.encode("x")]),
        (HELLO, [HELLO]),
        ([HELLO, [1]], [HELLO, [1]]),
        (["x", [1]], [TOKENIZER.encode("x"), [1]]),
    ],
)
def test_prompts_are_texts_and_ids_and_lists_of_them(llm, prompt, ids):
    asked = asked_of(llm, {"prompt": prompt, "seed": 2**64 - 1})
    assert asked.prompts == ids
    assert [params.seed for params in asked.params] == [2**64 - 1, 0, 1][: len(ids)]


@pytest.mark.parametrize(
    "prompt, words",
    [
        (None, "prompt=None: is missing"),
        ("", "prompt=[]: is empty"),
        ([], "must be a text, a list of token ids"),
        ([[]], "must be a text, a list of token ids"),
        ([257], "prompt=257: token ids must be in [0, 256]"),
        ([123456], "prompt=123456: token ids"),
        ([-1], r"token ids (integers >= 0)"),
        ([[3, -1]], r"token ids (integers >= 0)"),
        ([[3], [3, 2**70]], f"prompt[1]={2**70}: token ids"),
        ([1.5], "must be a text, a list of token ids"),
        ([True], "must be a text, a list of token ids"),
        ({"a": 1}, "must be a text, a list of token ids"),
        (7, "must be a text, a list of token ids"),
    ],
)
def test_prompts_that_are_none(llm, prompt, words):
    error = refused(llm, {"prompt": prompt})
    assert words in error.message
    assert error.param.startswith("prompt")


@pytest.mark.parametrize(
    "prompt_len, max_tokens, right",
    [
        (8, 8, 8), (8, 9, None), (8, None, 8), (15, None, 1), (16, None, None), (17, None, None), (8, -1, None),
        (1, None, 15),
    ],
)  # fmt: skip
def test_prompt_and_answer_fit_together(prompt_len, max_tokens, right):
    """A context of 16; unasked, as many as fit, and 16 at most."""
    llm = LLM(ToyModel(vocab_size=257, max_model_len=16), tokenizer=TOKENIZER)
    body = {"prompt": [5] * prompt_len, "max_tokens": max_tokens}
    if right is None:
        message = refused(llm, body).message
        assert max_tokens != 9 or all(number in message for number in ("16", "8", "9", "17"))
    else:
        assert asked_of(llm, body).params[0].max_tokens == right


def test_prompt_tokens_without_text_are_refused_where_their_text_is_needed():
    llm = LLM(ToyModel(vocab_size=300), tokenizer=TOKENIZER)
    assert "has no text" in refused(llm, {"prompt": [5, 299]}).message
    body = {"prompt": [299, 5, 6, 7], "max_tokens": 1}
    assert refused(llm, {**body, "echo": True}).message.startswith("prompt=299: has no text")
    asked = asked_of(llm, body)
    assert llm.generate(asked.prompts, asked.params)  # as the engine has it


def test_a_prompt_is_cut_before_it_is_measured():
    llm = LLM(ToyModel(vocab_size=257, max_model_len=16), tokenizer=TOKENIZER)
    body = {"prompt": [999, *[5] * 40], "truncate_prompt_tokens": 10}
    assert asked_of(llm, body).params[0].max_tokens == 6
    assert refused(llm, {**body, "min_tokens": 7}).message.endswith("at most 6 fit")


def test_every_fault_is_told_at_once(llm):
    error = refused(
        llm,
        {
            "prompt": ["x", "y"], "temperature": -1, "top_p": "a", "stream": 1, "strem": True, "n_probs": 3,
            "best_of": 3, "n": 2, "logit_bias": {"5": 200, "999": 1}, "stop": [""], "suffix": "x", "priority": 4,
            "stream_options": {"include_usage": True, "x": 1}, "response_format": {"type": "xml"}, "min_tokens": 17,
        },
    )  # fmt: skip
    faults = {fault.split("=")[0] for fault in error.message.split("; ") if "=" in fault}
    assert faults >= {
        "temperature", "top_p", "stream", "strem", "n_probs", "best_of", "logit_bias", "stop", "suffix", "priority",
        "stream_options.x", "response_format", "min_tokens",
    }  # fmt: skip
    assert "did you mean stream?" in error.message
    assert "did you mean logprobs? docs/porting.md" in error.message
    assert error.param == "stream"


@pytest.mark.parametrize(
    "body, param",
    [
        ({"n": 129}, "n"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"prompt": ["x"] * 129}, "prompt"),
        ({"prompt": ["x"] * 128, "n": 9}, "n"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"logit_bias": {str(i): 1 for i in range(4097)}}, "logit_bias"),
        ({"logit_bias": {"5": -101}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"257": 1}}, "logit_bias"),
        ({"logprobs": 101}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 101, "echo": True}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"logprob_token_ids": list(range(101))}, "logprob_token_ids"),
        ({"bad_words": ["x"] * 4097}, "bad_words"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5.0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"suffix": ""}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"priority": 1}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"request_id": 5}, "request_id"),
        ({"user": 5}, "user"),
        ({"json": {}, "response_format": {"type": "json_object"}}, "response_format"),
        ({"json_object": True, "response_format": {"type": "json_object"}}, "response_format"),
        ({"regex": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "regex"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format"),
        ({"response_format": []}, "response_format"),
        ({"messages": USER}, "prompt"),
    ],
)
def test_one_fault_by_its_name(llm, body, param):
    if "messages" in body:
        from klero.server.asked import completion_of

        with pytest.raises(ApiError, match="prompt=None: is missing") as caught:
            completion_of(body, llm, OPTIONS)
        assert "messages" in caught.value.message
        return
    assert refused(llm, {"prompt": HELLO, **body}).param == param


def test_limits_are_the_server_s_own(llm):
    options = ServerOptions(max_prompts=2, max_n=3, max_choices=4, max_stop=1, max_logit_bias=1, max_logprobs=2)
    for body in (
        {"prompt": ["x"] * 2, "n": 2}, {"prompt": "x", "n": 3}, {"prompt": "x", "stop": "a", "logprobs": 2},
        {"prompt": "x", "logit_bias": {"1": 1}},
    ):  # fmt: skip
        asked_of(llm, body, options)
    for body in (
        {"prompt": ["x"] * 3}, {"prompt": "x", "n": 4}, {"prompt": ["x"] * 2, "n": 3},
        {"prompt": "x", "stop": ["a", "b"]}, {"prompt": "x", "logprobs": 3},
        {"prompt": "x", "logit_bias": {"1": 1, "2": 1}},
    ):  # fmt: skip
        refused(llm, body, options)
    everything = ServerOptions(max_logprobs=-1)
    assert asked_of(llm, {"prompt": "x", "logprobs": -1}, everything).params[0].logprobs == -1
    assert refused(llm, {"prompt": "x", "logprobs": 258}, everything).param == "logprobs"  # there are 257 tokens


def test_echo_asks_for_the_prompt_s_logprobs(llm):
    def asked(**body):
        return asked_of(llm, {"prompt": HELLO, **body})

    assert asked(echo=True).params[0].prompt_logprobs is None
    assert asked(logprobs=2).params[0].prompt_logprobs is None
    both = asked(echo=True, logprobs=2)
    assert (both.params[0].prompt_logprobs, both.prompt_logprobs, both.logprobs) == (2, None, 2)
    more = asked(echo=True, logprobs=2, prompt_logprobs=5)
    assert (more.params[0].prompt_logprobs, more.prompt_logprobs) == (5, 5)
    assert asked(return_receipts=True).params[0].logprobs == 0
    assert asked(return_receipts=True).logprobs is None


def test_formats_become_grammars(llm):
    def guided(kind, **more):
        return params_of(llm, messages=USER, response_format={"type": kind, **more})

    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert guided("text").guided is None
    assert guided("json_object").json_object
    assert guided("json_schema", json_schema={"name": "x", "strict": True, "schema": schema}).json == json.dumps(
        schema, separators=(",", ":")
    )
    assert guided("structural_tag", structures=[{"begin": "<", "schema": {}, "end": ">"}], triggers=["<"]).guided


@pytest.mark.parametrize(
    "body, logprobs",
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_logprobs_of_chats(llm, body, logprobs):
    asked = asked_of(llm, {"messages": USER, **body})
    assert asked.logprobs == asked.params[0].logprobs == logprobs


@pytest.mark.parametrize(
    "body, param",
    [
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"max_tokens": 3, "max_completion_tokens": 3}, "max_completion_tokens"),
        ({"max_completion_tokens": 1000}, "max_completion_tokens"),
        ({"functions": []}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"store": True}, "store"),
        ({"store": 0}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {}}, "audio"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"verbosity": "low"}, "verbosity"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"unheard_of": 1}}, "chat_template_kwargs"),
        ({"prompt": "x"}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*USER, {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "x", "y": 1}]}, "messages[0].y"),
        ({"messages": [{"role": "assistant", "content": "x", "refusal": "no"}]}, "messages[0].refusal"),
        ({"messages": [{"role": "user", "content": "x"}] * 8193}, "messages"),
    ],
)
def test_one_fault_of_a_chat_by_its_name(llm, body, param):
    assert refused(llm, {"messages": USER, **body}).param == param


def test_what_changes_nothing_is_taken(llm):
    labels = {
        "user": "me", "safety_identifier": "me", "metadata": {"a": "b"}, "prompt_cache_key": "k", "store": False,
        "service_tier": "auto", "modalities": ["text"], "parallel_tool_calls": True, "tool_choice": "none",
        "prompt_cache_retention": "in_memory", "verbosity": None, "functions": None, "tools": None, "model": "any",
    }  # fmt: skip
    plain, labelled = asked_of(llm, {"messages": USER}), asked_of(llm, {"messages": USER, **labels})
    assert labelled == plain._replace(model="any")


def test_conversations_are_rendered_by_the_template():
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ reasoning_effort }}{{ loud }}"
    llm = toy(make_tokenizer(template))

    def text(**body):
        return llm.tokenizer.decode(asked_of(llm, {"messages": USER, **body}).prompts[0])

    assert text() == "[user]Hi"
    assert text(reasoning_effort="low", chat_template_kwargs={"loud": "!"}) == "[user]Hilow!"
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert text(messages=[{"role": "user", "content": parts, "name": None}]) == "[user]Hi"


def test_calls_of_earlier_turns_reach_a_template_that_knows_them(llm):
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "\\u00e9"}'}}
    turns = [*USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "42", "tool_call_id": "1"}]
    text = llm.tokenizer.decode(asked_of(llm, {"messages": turns}).prompts[0])
    assert text == '[user]Hi[assistant]<look {"at": "\u00e9"}>[tool]42[assistant]'
    deaf = toy(make_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}"))
    assert "does not use" in refused(deaf, {"messages": turns}).message


@pytest.mark.parametrize(
    "raw, words",
    [
        (b"", "must be JSON"),
        (b"{", "must be JSON"),
        (b"[]", "must be a JSON object"),
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


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = sorted({*FIELDS, *CompletionRequest.model_fields, *ChatCompletionRequest.model_fields, "nobodys"})


@settings(max_examples=400, deadline=None)
@given(body=st.dictionaries(st.sampled_from(NAMES), ANYTHING, max_size=5), chat=st.booleans())
def test_whatever_comes_is_taken_or_refused(llm, body, chat):
    body = {**({"messages": USER} if chat else {"prompt": "x"}), **body}
    try:
        asked = asked_of(llm, body)
    except ApiError as error:
        refusal = error
    else:
        assert len(asked.prompts) == len(asked.params) > 0
        return
    assert (refusal.status, bool(refusal.param)) == (400, True)
    json.dumps(refusal.body())


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
