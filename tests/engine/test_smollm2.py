"""The engine on a real model, beside plain transformers."""

from __future__ import annotations

import pytest

from klero import SamplingParams
from klero.engine import LLM
from klero.errors import ModelError

pytestmark = pytest.mark.smollm2

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "The three primary colours are red,",
    "Water boils at",
    "1, 2, 3, 5, 8,",
    "Dear Sir or Madam,\n\nI am writing to",
    "Grüße aus Köln! 你好",
]
NUM_TOKENS = 64


@pytest.fixture(scope="module")
def llm():
    return LLM("smollm2", dtype="float32", max_num_batched_tokens=16, num_blocks=256)


@pytest.fixture(scope="module")
def plain(llm):
    """What transformers' own greedy search says, one prompt at a time, on eager attention."""
    import torch

    module = llm.engine.model.module
    ours = module.config._attn_implementation
    module.set_attn_implementation("eager")
    try:
        texts = []
        for prompt in PROMPTS:
            ids = llm.tokenizer(prompt, return_tensors="pt").input_ids
            with torch.inference_mode():
                out = module.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS,
                    eos_token_id=list(llm.engine.model.end_token_ids), pad_token_id=0,
                )  # fmt: skip
            texts.append(tuple(out[0, ids.shape[1] :].tolist()))
    finally:
        module.set_attn_implementation(ours)
    return texts


def test_greedy_in_one_batch_equals_plain_transformers(llm, plain):
    """A token budget of 16: prompts come in chunks, and decodes and prefills mix."""
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=NUM_TOKENS))
    assert [o.outputs[0].token_ids for o in outputs] == plain


def test_greedy_alone_equals_plain_transformers(llm, plain):
    for prompt, expected in zip(PROMPTS, plain, strict=True):
        (output,) = llm.generate(prompt, SamplingParams(max_tokens=NUM_TOKENS))
        assert output.outputs[0].token_ids == expected


@pytest.mark.parametrize("deterministic", [True, False])
def test_logits_are_within_1e_4_of_plain_transformers(llm, deterministic):
    """The same prefixes, in chunks of 5 beside each other, against one plain forward each."""
    import numpy as np
    import torch

    from klero.engine.models.forward import run_step
    from klero.engine.models.paging import PagedCache
    from klero.engine.models.probe import BLOCK_SIZE, pack

    module = llm.engine.model.module
    texts = [(llm.tokenizer.encode(prompt) * 25)[:25] for prompt in PROMPTS]
    tables = np.arange(8 * 7, dtype=np.int32).reshape(8, 7)[:, ::-1].copy()
    cache, rows = PagedCache(8 * 7, BLOCK_SIZE), [[] for _ in texts]
    llm.engine.model._take_over()
    for start in range(0, 25, 5):
        chunks = [(np.array(ids), start, start + 5) for ids in texts]
        logits = run_step(module, pack(chunks, tables), cache, deterministic=deterministic)
        for found, some in zip(rows, logits.split(5), strict=True):
            found.append(some)
    module.set_attn_implementation("eager")
    with torch.inference_mode():
        plain = [module(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in texts]
    llm.engine.model._take_over()
    distances = [float((torch.cat(found) - expected).abs().max()) for found, expected in zip(rows, plain, strict=True)]
    assert max(distances) <= 1e-4, distances


def test_text_is_what_the_tokenizer_decodes(llm):
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=1.2, seed=1, max_tokens=12))
    for output in outputs:
        choice = output.outputs[0]
        assert choice.text == llm.tokenizer.decode(choice.token_ids, skip_special_tokens=True)


def test_the_end_of_the_text_ends_it(llm):
    chat = "<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n"
    (output,) = llm.generate(chat, SamplingParams(max_tokens=60))
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].token_ids[-1] in llm.engine.model.end_token_ids
    assert "<|im_end|>" not in output.outputs[0].text
    (on,) = llm.generate(chat, SamplingParams(max_tokens=60, ignore_eos=True))
    assert len(on.outputs[0].token_ids) == 60


def test_a_stop_string_and_echo(llm):
    (output,) = llm.generate("1 2 3 4", SamplingParams(max_tokens=30, stop=" 8", echo=True))
    assert output.outputs[0].text == "1 2 3 4 5 6 7"
    assert output.outputs[0].stop_reason == " 8"


def test_the_prompt_can_be_truncated(llm):
    ids = llm.tokenizer("one two three four five").input_ids
    full = llm.generate([ids[-3:]], SamplingParams(max_tokens=5))[0]
    cut = llm.generate([ids], SamplingParams(max_tokens=5, truncate_prompt_tokens=3))[0]
    assert cut.prompt_token_ids == tuple(ids[-3:])
    assert cut.outputs[0].token_ids == full.outputs[0].token_ids


def test_chat_is_generate_on_the_templates_ids_and_streams_the_same(llm):
    messages = [{"role": "user", "content": "Say hi."}]
    params = SamplingParams(max_tokens=12)
    (output,) = llm.chat(messages, params)
    text = llm.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert output.prompt_token_ids == tuple(llm.tokenizer(text, add_special_tokens=False).input_ids)
    deltas = list(llm.stream(llm.render(messages), params))
    assert "".join(delta.text for delta in deltas) == output.outputs[0].text
    assert output.outputs[0].reproducible == llm.engine.model.deterministic
    assert 0 < output.metrics.seconds_to_first_token < output.metrics.seconds_total


def test_an_unknown_model_says_what_was_tried():
    with pytest.raises(ModelError, match="no-such-model"):
        LLM("./no-such-model")
