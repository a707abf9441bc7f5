"""The default model itself, out of its wheel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from klero.engine.models import load_model

pytestmark = pytest.mark.smollm2

BLOCK = 16


@pytest.fixture(scope="module")
def loaded():
    return load_model("smollm2")


def test_what_it_is(loaded):
    model, tokenizer = loaded
    assert model.vocab_size == 49152
    assert model.max_model_len == 8192
    assert model.end_token_ids == (0, 2)  # <|endoftext|> and <|im_end|>
    assert model.module.dtype == torch.float32
    assert model.bytes_per_block(16) == 16 * 30 * 2 * 3 * 64 * 4
    assert tokenizer.eos_token_id == 2
    assert tokenizer.chat_template is not None


def test_digits_stand_alone(loaded):
    _, tokenizer = loaded
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("In 2023, 1,234.5 it's", add_special_tokens=False)["input_ids"])
    assert pieces == ["In", "Ġ", *"2023", ",", "Ġ", "1", ",", *"234", ".", "5", "Ġit", "'s"]


@pytest.mark.parametrize("text", ["  two  spaces\n\n\tand tabs", "naïve café 北京 🙂 ÿ", "a<|im_end|>\nb", "007"])
def test_text_survives_the_round_trip(loaded, text):
    _, tokenizer = loaded
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_answers_several_questions_at_once(loaded, packer):
    model, tokenizer = loaded
    expected = {0: ("What is the capital of France?", "Paris"), 1: ("What is 2+2?", "4")}
    expected[2] = ("Which planet do people live on?", "Earth")
    model.allocate(64, BLOCK)
    p = packer(64, BLOCK)
    waiting, texts = {}, {}
    for slot, (question, _) in expected.items():
        p.join(slot)
        message = [{"role": "user", "content": question}]
        waiting[slot] = list(tokenizer.apply_chat_template(message, add_generation_prompt=True)["input_ids"])
        texts[slot] = []
    while waiting:
        take = {slot: 1 if texts[slot] else 11 + 6 * slot for slot in waiting}  # prompts in chunks, out of step
        chunks = [(slot, np.array(ids[: take[slot]])) for slot, ids in waiting.items()]
        logits = model.forward(p.step(chunks, every_row=False))
        for row, slot in zip(logits, list(waiting), strict=True):
            del waiting[slot][: take[slot]]
            if waiting[slot]:
                continue
            token = int(row.argmax())
            if token in model.end_token_ids or len(texts[slot]) == 16:
                del waiting[slot]
                p.leave(slot)
            else:
                texts[slot].append(token)
                waiting[slot].append(token)
    for slot, (_, answer) in expected.items():
        assert answer in tokenizer.decode(texts[slot]), tokenizer.decode(texts[slot])


def test_mixed_steps_equal_plain_forwards(loaded, packer):
    model, tokenizer = loaded
    words = "The lot machine of the Athenians had rows of slots, and bronze tickets in them, in 362 BC. "
    ids = np.array(tokenizer(words * 3, add_special_tokens=False)["input_ids"])
    texts = {0: ids[:70], 1: ids[5:40], 2: ids[20:60]}
    model.allocate(40, BLOCK)
    p = packer(40, BLOCK)
    got = {n: [] for n in texts}
    plan = [{0: 33, 1: 35}, {0: 35, 2: 17}, {2: 22, 0: 1}, {0: 1, 2: 1}]
    for take in plan:
        for n in take:
            if n not in p.done:
                p.join(n)
        step = p.step([(n, texts[n][p.done[n] : p.done[n] + count]) for n, count in take.items()])
        logits = model.forward(step)
        for i, n in enumerate(take):
            got[n].append(logits[step.query_starts[i] : step.query_starts[i + 1]])
    model.module.set_attn_implementation("eager")
    for n, text in texts.items():
        with torch.inference_mode():
            expected = model.module(input_ids=torch.from_numpy(text)[None], use_cache=False).logits[0]
        torch.testing.assert_close(torch.cat(got[n]), expected, rtol=0, atol=5e-4)
        assert (torch.cat(got[n]).argmax(-1) == expected.argmax(-1)).all()
