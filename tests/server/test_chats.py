"""From a body of a conversation to what it asks: OpenAI's fields of chats, and what the template gets."""

from __future__ import annotations

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("transformers")

from tests.server.toys import USER, asked_of, make_tokenizer, refused, toy


@pytest.fixture(scope="module")
def llm():
    return toy()


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
