"""Toy models behind the pure part of the server: bodies in, answers out, whole and as streams."""

from __future__ import annotations

import pytest

from klero.engine import LLM
from klero.server import ServerOptions
from klero.server.answers import Answer
from klero.server.asked import chat_of, completion_of
from klero.server.errors import ApiError
from klero.testing.models import ScriptedModel, ToyModel

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<{{ call.function.name }} {{ call.function.arguments | tojson }}>{% endfor %}"
    "{% endfor %}{% for tool in tools or [] %}({{ tool.function.name }}){% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
OPTIONS = ServerOptions()
USER = [{"role": "user", "content": "Hi"}]


def make_tokenizer(template=TEMPLATE, special=("<end>",)):
    """Bytes as tokens, and special tokens behind them: <end> is 256."""
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    tokenizer.chat_template = template
    return tokenizer


TOKENIZER = make_tokenizer()


def toy(tokenizer=TOKENIZER, **options):
    """An LLM on a model of bytes: noise, and the same noise for the same request."""
    return LLM(ToyModel(vocab_size=len(tokenizer), end_token_ids=(256,)), tokenizer=tokenizer, **options)


def saying(text, prompt_len, tokenizer=TOKENIZER, **options):
    """An LLM that says a text and then ends, after every prompt of this length."""
    ids = text if isinstance(text, list) else tokenizer.encode(text)
    size = {"vocab_size": len(tokenizer), "end_token_ids": (256,), **options}
    return LLM(ScriptedModel([*ids, 256], prompt_len, **size), tokenizer=tokenizer)


def asked_of(llm, body, options=OPTIONS):
    """What a body asks, of the route that it fits."""
    return (chat_of if "messages" in body else completion_of)(body, llm, options)


def answer_of(llm, asked):
    """An empty answer to it, named 0."""
    return Answer(asked, llm, model="toy", answer_id="0", created=7, fingerprint="fp")


def whole(llm, body, options=OPTIONS):
    """The answer to a body."""
    asked = asked_of(llm, body, options)
    return answer_of(llm, asked).whole(llm.generate(asked.prompts, asked.params))


def chunks(llm, body, options=OPTIONS):
    """The events of its stream."""
    asked = asked_of(llm, {**body, "stream": True}, options)
    answer, found = answer_of(llm, asked), []
    deltas = llm.stream(asked.prompts, asked.params)
    while True:
        try:
            delta = next(deltas)
        except StopIteration as end:
            outputs = end.value
            break
        found += answer.chunks(delta.prompt_index, delta)
    for i, output in enumerate(outputs):
        found += answer.release(i, output)
    return [*found, answer.usage_chunk(outputs)] if asked.include_usage else found


def refused(llm, body, options=OPTIONS):
    """The 400 that a body gets."""
    with pytest.raises(ApiError) as caught:
        asked_of(llm, body, options)
    assert caught.value.status == 400
    return caught.value


def put_together(events, n_choices):
    """The choices of a whole answer, put together from the events of a stream."""
    made = [{"index": i} for i in range(n_choices)]
    for event in events:
        for choice in event["choices"]:
            one = made[choice["index"]]
            for name, value in choice.items():
                if name == "delta":
                    message = one.setdefault("message", {"refusal": None, "content": None})
                    for key, piece in value.items():
                        message[key] = piece if key == "role" else _joined(message.get(key), piece)
                elif name in ("text", "token_ids", "receipts", "logprobs"):
                    one[name] = _joined(one.get(name), value)
                elif name != "index":
                    one[name] = value
    for one in made:
        message = one.get("message", {})
        if "tool_calls" in message:
            message["content"] = message["content"] or None
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in message["tool_calls"]]
    return made


def _joined(before, new):
    if before is None or new is None:
        return new if before is None else before
    if isinstance(new, dict):
        return {name: _joined(before[name], new[name]) for name in new}
    return before + new
