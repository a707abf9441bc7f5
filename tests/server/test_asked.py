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
from klero.server.asked import completion_of
from klero.server.errors import ApiError
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
        (None, "prompt: is missing"),
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
    ],
)
def test_one_fault_by_its_name(llm, body, param):
    assert refused(llm, {"prompt": HELLO, **body}).param == param


def test_a_completion_has_no_messages(llm):
    with pytest.raises(ApiError, match=r"^prompt: is missing; messages=.*: is not known here") as caught:
        completion_of({"messages": USER}, llm, OPTIONS)
    assert caught.value.param == "prompt"


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


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = sorted({*FIELDS, *CompletionRequest.model_fields, *ChatCompletionRequest.model_fields, "nobodys"})


@settings(max_examples=max(100, settings().max_examples), deadline=None)
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


WIDE = ToyModel(vocab_size=2000, end_token_ids=(256,))


@pytest.mark.parametrize("name", ["return_kept", "return_probs"])
def test_kept_sets_of_a_wide_vocabulary_need_a_top_k(name):
    llm = LLM(WIDE, tokenizer=TOKENIZER)
    for top_k in (0, -1, 1025):
        error = refused(llm, {"prompt": "x", "top_k": top_k, name: True})
        assert error.param == name
        assert "top_k of at most 1024" in error.message
    asked_of(llm, {"prompt": "x", "top_k": 1024, name: True})


def test_the_size_of_an_answer_is_that_of_all_prompts_and_choices():
    """10 tokens with 2 listed beside each, 8 bytes an entry: 160 bytes a choice."""
    llm = toy(max_answer_bytes=480)
    ask = {"max_tokens": 10, "logprobs": 2}
    asked_of(llm, {"prompt": ["x"] * 3, **ask})
    asked_of(llm, {"prompt": "x", "n": 3, **ask})
    assert refused(llm, {"prompt": ["x"] * 4, **ask}).param == "logprobs"
    assert refused(llm, {"prompt": ["x"] * 2, "n": 2, **ask}).param == "logprobs"
    echo = {"prompt": [1] * 10, "echo": True, "logprobs": 2, "max_tokens": 1}  # 160 of the prompt and 16 of the token
    asked_of(llm, {**echo, "n": 2})
    assert refused(llm, {**echo, "n": 3}).param == "logprobs"  # the prompt's lists are told with each choice


def test_more_choices_than_may_wait_are_refused_at_once():
    llm = toy(max_num_waiting=3)
    asked_of(llm, {"prompt": "x", "n": 3})
    assert refused(llm, {"prompt": "x", "n": 4}).param == "n"
    assert refused(llm, {"prompt": ["x", "y"], "n": 2}).param == "prompt"


def test_receipts_are_logprobs_enough(llm):
    assert params_of(llm, prompt="x", return_receipts=True, logprobs_mode="processed").logprobs == 0


@pytest.mark.parametrize(
    "body, param",
    [
        ({"messages": USER, "echo": 0}, "echo"),
        ({"prompt": "x", "filters": 0}, "filters"),
        ({"prompt": "x", "json_object": 0, "response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_zero_is_not_silence(llm, body, param):
    assert refused(llm, body).param == param


@pytest.mark.parametrize("role", ["usr", "System", "", "USER"])
def test_a_role_that_neither_openai_nor_the_template_knows_is_refused(llm, role):
    error = refused(llm, {"messages": [*USER, {"role": role, "content": "x"}]})
    assert error.param.startswith("messages[1].role")


def test_a_role_of_the_template_s_own_is_taken():
    template = "{% for m in messages %}{% if m.role == 'critic' %}!{% endif %}{{ m.content }}{% endfor %}"
    llm = toy(make_tokenizer(template))
    (prompt,) = asked_of(llm, {"messages": [{"role": "critic", "content": "x"}]}).prompts
    assert prompt == TOKENIZER.encode("!x")


def test_a_developer_is_the_system_where_the_template_knows_none(llm):
    ask = {"messages": [{"role": "developer", "content": "x"}]}
    assert asked_of(llm, ask).prompts == asked_of(llm, {"messages": [{"role": "system", "content": "x"}]}).prompts
    knowing = toy(make_tokenizer("{% for m in messages %}{{ m.role }}{% endfor %}{# 'developer' #}"))
    assert asked_of(knowing, ask).prompts == [TOKENIZER.encode("developer")]


def test_tools_that_the_model_would_not_see_are_refused_with_a_way_out():
    llm = toy(make_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}"))
    tool = {"type": "function", "function": {"name": "look"}}
    for choice in ("auto", "required", {"type": "function", "function": {"name": "look"}}):
        error = refused(llm, {"messages": USER, "tools": [tool], "tool_choice": choice})
        assert error.param == "tools"
        assert "has no place for tools" in error.message
    asked_of(llm, {"messages": USER, "tools": [tool], "tool_choice": "none"})
