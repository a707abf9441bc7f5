"""Chat: conversations become token ids by the template, or are refused with a reason."""

from __future__ import annotations

import asyncio

import pytest

from klero import AsyncLLM, ParameterError, SamplingParams
from klero.engine import LLM
from klero.engine import chat as chats
from klero.errors import RequestError
from klero.testing.models import PagedToyModel, ToyModel

transformers = pytest.importorskip("transformers")

TEMPLATE = (
    "{{ bos_token }}"
    "{% for m in messages %}"
    "{% if m.role == 'villain' %}{{ raise_exception('no villains here') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% for call in m.tool_calls or [] %}({{ call.name }}){% endfor %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
WITH_TOOLS = TEMPLATE + "{% for tool in tools or [] %}<{{ tool.name }}>{% endfor %}{% if loud %}!{% endif %}"
HELLO = [{"role": "user", "content": "Hello"}]
SHORT = SamplingParams(temperature=1.0, seed=1, max_tokens=3)


def make_tokenizer(template):
    """Bytes as tokens, <s> as bos, which the tokenizer puts before every text by itself."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    tokenizer.chat_template = template
    return tokenizer


def make_llm(template=TEMPLATE):
    return LLM(ToyModel(vocab_size=257), tokenizer=make_tokenizer(template))


@pytest.fixture(scope="module")
def llm():
    return make_llm()


def test_a_conversation_is_answered_with_one_bos(llm):
    (output,) = llm.chat(HELLO, SHORT)
    assert llm.tokenizer.decode(output.prompt_token_ids) == "<s>[user]Hello[assistant]"
    assert output.prompt_token_ids.count(256) == 1
    assert llm.tokenize("x")[0] == 256  # a text does get it from the tokenizer
    assert output.outputs == llm.generate([llm.render(HELLO)], SHORT)[0].outputs


def test_several_conversations_are_answered_in_order(llm):
    params = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=4)]
    seen = []
    outputs = llm.chat([HELLO, [*HELLO, {"role": "user", "content": "You?"}]], params, request_ids=["a", "b"],
                       progress=seen.append)  # fmt: skip
    assert [len(o.outputs[0].token_ids) for o in outputs] == [2, 4]
    assert [o.request_id for o in outputs] == ["a", "b"]
    assert llm.tokenizer.decode(outputs[1].prompt_token_ids).endswith("[user]You?[assistant]")
    assert seen[-1].done == 2


def test_options_reach_the_template():
    llm = make_llm(WITH_TOOLS)

    def text(**options):
        return llm.tokenizer.decode(llm.render(HELLO, **options))

    assert text(add_generation_prompt=False) == "<s>[user]Hello"
    assert text(tools=[{"name": "look"}], chat_template_kwargs={"loud": True}) == "<s>[user]Hello[assistant]<look>!"
    assert text(chat_template="{{ messages[0].content }}") == "Hello"
    answer = [*HELLO, {"role": "assistant", "content": "Hi"}]
    goes_on = llm.render(answer, add_generation_prompt=False, chat_template_kwargs={"continue_final_message": True})
    assert llm.tokenizer.decode(goes_on).endswith("[assistant]Hi")
    (output,) = llm.chat(HELLO, SHORT, tools=[{"name": "look"}], chat_template_kwargs={"loud": True})
    assert llm.tokenizer.decode(output.prompt_token_ids).endswith("<look>!")


def test_named_templates_are_chosen_by_the_tokenizer():
    llm = make_llm({"default": TEMPLATE, "tool_use": WITH_TOOLS})
    assert llm.tokenizer.decode(llm.render(HELLO, tools=[{"name": "look"}])).endswith("<look>")
    assert llm.tokenizer.decode(llm.render(HELLO, chat_template="tool_use")).endswith("[assistant]")
    unfit = make_llm({"one": TEMPLATE, "two": TEMPLATE})
    with pytest.raises(RequestError, match="chat_template=None"):
        unfit.render(HELLO)


def test_text_parts_are_joined_and_calls_need_no_content(llm):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert llm.render([{"role": "user", "content": parts}]) == llm.render(HELLO)
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}]}
    assert "[assistant](look)" in llm.tokenizer.decode(llm.render([call]))


def user(content):
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    "messages, words",
    [
        ("Hello", "messages: a str"),
        (user("x"), "messages: a dict"),
        (5, "messages: a int"),
        ([], "messages: empty"),
        (["Hello"], r"messages\[0\]: a str; a conversation is a list"),
        ([HELLO, []], r"messages\[1\]: a conversation needs"),
        ([HELLO, HELLO[0]], r"messages\[1\]: a dict"),
        ([HELLO, [user("x"), "y"]], r"messages\[1\]\[1\]: a str; a message is a dict"),
        ([{"content": "x"}], r"messages\[0\]: role=None: must be a non-empty string"),
        ([{"role": "", "content": "x"}], "role=''"),
        ([{"role": "user"}], "content is missing"),
        ([user(5)], "content: a int"),
        ([user(["x"])], "content: a list"),
        ([user([{"type": "image_url", "image_url": "x"}])], "a part of type 'image_url'"),
        ([user([{"type": "text"}])], "a part of type 'text'"),
        ([{"role": "villain", "content": "x"}], "messages: the chat template refused.*no villains here"),
        ([HELLO, [{"role": "villain", "content": "x"}]], r"messages\[1\]: the chat template refused"),
        ([user("\ud800")], "the chat template refused"),
    ],
)  # fmt: skip
def test_malformed_conversations_are_refused_by_name_and_rule(llm, messages, words):
    with pytest.raises(RequestError, match=words):
        llm.chat(messages, SHORT)
    assert llm.engine.num_unfinished == 0


@pytest.mark.parametrize(
    "options, words",
    [
        ({"tools": [{"name": "look"}]}, "tools: the chat template does not use them"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "does not use 'enable_thinking'"),
        ({"chat_template_kwargs": {"tokenize": False}}, "'tokenize' is an argument of its own"),
        ({"chat_template": "{% if %}"}, "the chat template refused"),
        ({"chat_template": "{{ '' }}"}, "made no token"),
    ],
)
def test_nothing_is_dropped_without_a_word(llm, options, words):
    with pytest.raises(RequestError, match=words):
        llm.chat(HELLO, SHORT, **options)
    with pytest.raises(RequestError, match=words):
        llm.render(HELLO, **options)


def test_without_tokenizer_or_template_the_way_out_is_said():
    with pytest.raises(RequestError, match=r"needs a tokenizer; pass LLM\(tokenizer"):
        LLM(ToyModel()).chat(HELLO)
    with pytest.raises(RequestError, match="no chat template"):
        make_llm(None).chat(HELLO)
    backend = make_tokenizer(None).backend_tokenizer
    bare = LLM(ToyModel(vocab_size=257), tokenizer=backend)
    with pytest.raises(RequestError, match="AutoTokenizer"):
        bare.chat(HELLO)
    assert len(bare.generate("Hello", SHORT)[0].prompt_token_ids) == 6


def test_render_takes_one_conversation(llm):
    with pytest.raises(RequestError, match=r"messages\[0\]: a list; a message is a dict"):
        llm.render([HELLO])


def test_chat_streams_by_render_and_has_an_async_twin(llm):
    plain = llm.chat(HELLO, SHORT)[0]
    assert sum([d.token_ids for d in llm.stream(llm.render(HELLO), SHORT)], ()) == plain.outputs[0].token_ids

    async def main():
        async with AsyncLLM(llm) as twin:
            output = await twin.chat(HELLO, SHORT, add_generation_prompt=True, request_id="r")
            with pytest.raises(RequestError, match="role"):
                await twin.chat([{"content": "x"}], SHORT)
            return output, [d.text async for d in twin.stream(twin.render(HELLO), SHORT)]

    output, texts = asyncio.run(main())
    assert (output.request_id, output.outputs) == ("r", plain.outputs)
    assert "".join(texts) == plain.outputs[0].text


def test_the_context_is_checked_as_for_any_prompt(llm):
    with pytest.raises(RequestError, match=r"prompts\[0\].*context is 256"):
        llm.chat([user("x" * 300)], SHORT)
    with pytest.raises(ParameterError, match="max_tokens"):
        llm.chat(HELLO, SamplingParams(max_tokens=999))


def test_a_chat_has_a_salt_and_a_priority():
    options = {"block_size": 4, "num_blocks": 64, "scheduling_policy": "priority"}
    with LLM(PagedToyModel(vocab_size=257), tokenizer=make_tokenizer(TEMPLATE), **options) as llm:
        outputs = [llm.chat(HELLO, SHORT, cache_salt=salt, priority=3)[0] for salt in ("a", "b", "a")]
        cached = [output.metrics.num_cached_tokens for output in outputs]
        assert cached[:2] == [0, 0]
        assert cached[2] > 0

        async def later():
            async with AsyncLLM(llm) as one:
                return await one.chat(HELLO, SHORT, cache_salt="b", priority=-1)

        assert asyncio.run(later()).metrics.num_cached_tokens == cached[2]


def test_a_chat_without_the_policy_has_no_priority(llm):
    with pytest.raises(RequestError, match="scheduling_policy is 'fcfs'"):
        llm.chat(HELLO, SHORT, priority=1)


def test_names_of_a_template_are_those_of_its_code():
    template = (
        "{# documents #} thinking {{ a.budget }}{{ x['effort'] }}"
        "{% if enable_thinking is defined %}{{ tools | tojson }}{% endif %}{% generation %}{% endgeneration %}"
        "{% for m in messages %}{{ m }}{% endfor %}{% set date = date or 'today' %}"
    )
    names = chats.names_in(template)
    assert {"enable_thinking", "tools", "a", "x", "messages", "date"} <= names
    assert names.isdisjoint({"documents", "thinking", "budget", "effort", "", "m", "tojson", "defined"})
