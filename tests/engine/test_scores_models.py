"""What is said about tokens on transformers models: tiny ones, and SmolLM2 beside plain transformers."""

from __future__ import annotations

import numpy as np
import pytest
from tests.engine.said import assert_same
from tests.engine.test_deterministic import tiny

from klero import SamplingParams, score
from klero.engine import LLM, Engine
from klero.engine.models import load_model

torch = pytest.importorskip("torch")

TEXTS = [
    "The capital of France is Paris.",
    "Once upon a time there was a fox who lived under a hill and never went out.",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)",
    "The three primary colours are red, yellow and blue.",
    "Water boils at 100 degrees Celsius at sea level.",
    "1, 2, 3, 5, 8, 13, 21, 34",
    "Dear Sir or Madam,\n\nI am writing to complain about the noise.",
    "Grüße aus Köln! 你好",
    "The derivative of x^2 is 2x.",
    "SELECT name FROM users WHERE age > 30;",
    "To be, or not to be, that is the question",
    "a",
    "No no no no no no no no no no no no",
    "The mitochondria is the powerhouse of the cell.",
    "Photosynthesis turns light into sugar.",
    "<|im_start|>user\nHi<|im_end|>\n",
    "Stockholm, Oslo, Copenhagen, Helsinki and Reykjavik",
    "x = [i * i for i in range(10)]",
    "🙂🙃",
    "It was the best of times, it was the worst of times, it was the age of wisdom",
]


def told(model, prompts, params, **options):
    """The outputs of one batch on an engine of these options."""
    engine = Engine(model, num_blocks=400, **options)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    found = {}
    while engine.num_unfinished:
        found |= {output.request_id: output for output in engine.step()}
    return [found[str(i)] for i in range(len(prompts))]


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_generation_logprobs_are_the_prompt_logprobs_of_the_same_text_afterwards(kind):
    """In bits, in other chunks, in other company; and the logits are the module's own, within rounding."""
    model = tiny(kind)
    prompts = [list(range(3, 3 + n)) for n in (1, 2, 17, 40)]
    params = SamplingParams(
        temperature=1.1, seed=1, max_tokens=9, logprobs=3, prompt_logprobs=3, return_context_logits=True,
        return_generation_logits=True, ignore_eos=True,
    )  # fmt: skip
    outputs = told(model, prompts, params, max_num_batched_tokens=16)
    texts = [prompt + list(output.outputs[0].token_ids) for prompt, output in zip(prompts, outputs, strict=True)]
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=3, return_context_logits=True)
    again = told(model, texts, scoring, max_num_batched_tokens=7)
    for prompt, text, before, after in zip(prompts, texts, outputs, again, strict=True):
        num, (choice,) = len(prompt), before.outputs
        raw, found = after.prompt_logprobs, choice.logprobs
        assert_same(before.prompt_logprobs, raw.rows(0, num))
        assert np.array_equal(found.sampled, raw.sampled[num:])
        assert np.array_equal(found.rank, raw.rank[num:])
        assert np.array_equal(found.top_ids, raw.top_ids[raw.top_starts[num] :])
        assert np.array_equal(found.top, raw.top[raw.top_starts[num] :])
        logits = np.concatenate([before.context_logits[:-1], choice.generation_logits])
        assert np.array_equal(logits, after.context_logits[:-1])
        model.module.set_attn_implementation("eager")
        with torch.inference_mode():
            plain = model.module(input_ids=torch.tensor([text]), use_cache=False).logits[0]
        assert np.abs(after.context_logits - plain.numpy()).max() < 1e-4


def test_logits_of_bfloat16_are_scored_as_they_are():
    module = tiny("Llama").module.to(torch.bfloat16)
    model, _ = load_model(module)
    params = SamplingParams(
        max_tokens=3, logprobs=0, prompt_logprobs=2, return_context_logits=True, return_generation_logits=True
    )
    (output,) = told(model, [[5, 6, 7, 8, 9]], params, max_num_batched_tokens=2)
    (choice,), context = output.outputs, output.context_logits
    assert np.array_equal(torch.from_numpy(context).bfloat16().float().numpy(), context)
    assert_same(output.prompt_logprobs.rows(1, 5), score(context[:-1], [6, 7, 8, 9], num_top=2))
    assert np.array_equal(choice.logprobs.sampled, score(choice.generation_logits, choice.token_ids).sampled)


@pytest.fixture(scope="module")
def llm():
    return LLM("smollm2", dtype="float32", max_num_batched_tokens=48, num_blocks=256)


@pytest.mark.smollm2
def test_prompt_logprobs_are_those_of_a_plain_transformers_forward(llm):
    ids = [llm.tokenizer.encode(text) for text in TEXTS]
    outputs = llm.generate(ids, SamplingParams(max_tokens=0, prompt_logprobs=0))
    module, plain = llm.engine.model.module, []
    module.set_attn_implementation("eager")
    with torch.inference_mode():
        for one in ids:
            logits = module(input_ids=torch.tensor([one]), use_cache=False).logits[0].double()
            plain.append(logits.log_softmax(1)[:-1].gather(1, torch.tensor(one[1:])[:, None])[:, 0].numpy())
    for output, expected in zip(outputs, plain, strict=True):
        assert np.abs(output.prompt_logprobs.sampled[1:] - expected).max(initial=0) < 1e-4


@pytest.mark.smollm2
def test_generation_logprobs_are_the_prompt_logprobs_of_the_same_text_in_bits(llm):
    assert llm.engine.model.deterministic
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12, logprobs=2, ignore_eos=True)
    outputs = llm.generate(TEXTS[:6], params)
    texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    again = llm.generate(texts[::-1], SamplingParams(max_tokens=0, prompt_logprobs=2))[::-1]
    for output, scored in zip(outputs, again, strict=True):
        num, (choice,), raw = len(output.prompt_token_ids), output.outputs, scored.prompt_logprobs
        assert np.array_equal(choice.logprobs.sampled, raw.sampled[num:])
        assert np.array_equal(choice.logprobs.rank, raw.rank[num:])
        assert np.array_equal(choice.logprobs.top, raw.top[raw.top_starts[num] :])
