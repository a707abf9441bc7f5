"""Generations under twenty schemas: every finished one is valid, every unfinished one can still become valid."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from tests.grammar.conformance.checks import byte_backend
from tests.grammar.conformance.judge import judged
from tests.grammar.schemas import SCHEMAS
from tests.grammar.walks import BYTES, END, NUM_BYTES, fragments, num_read, write

import klero
from klero import SamplingParams
from klero.engine import LLM
from klero.grammar.source import source_of
from klero.testing.models import ToyModel

PROMPT = "Answer with one JSON value.\nQuestion: what is there to say about Köln?\nAnswer: "
TEMPERATURES = (0.7, 1.0, 1.5)
NUM_TOKENS = 48


def check(llm: LLM, name: str, choice: Any) -> bool:
    """Whether a choice is finished. Finished, it must be valid; unfinished, a fresh matcher must take all of it."""
    schema, end_ids = SCHEMAS[name], llm.engine.model.end_token_ids
    where = f"{name}: {choice.text!r}"
    assert choice.finish_reason in ("stop", "length"), where
    if choice.finish_reason == "stop":
        assert judged(schema, choice.text) is True, where
        assert choice.token_ids[-1] in end_ids, where
        return True
    source = source_of(SamplingParams(json=schema))
    assert source is not None
    matcher = llm.engine.guides.grammars.compiled(source).matcher(end_ids)
    assert num_read(matcher, choice.token_ids, llm.engine.model.vocab_size) == NUM_TOKENS, where
    return False


def num_finished(llm: LLM, asked: list[tuple[str, float, int]], prompt: Any, **fields: Any) -> int:
    """Generate all of (schema, temperature, seed) in one batch; how many came to their end."""
    params = [
        SamplingParams(json=SCHEMAS[name], temperature=temperature, seed=seed, max_tokens=NUM_TOKENS, **fields)
        for name, temperature, seed in asked
    ]
    outputs = llm.generate([prompt] * len(asked), params)
    return sum(check(llm, name, output.outputs[0]) for (name, _, _), output in zip(asked, outputs, strict=True))


@pytest.fixture(scope="module")
def smollm2():
    with LLM("smollm2", dtype="float32", max_num_seqs=20) as llm:
        yield llm


@pytest.mark.smollm2
def test_a_generation_under_each_schema(smollm2):
    asked = [(name, TEMPERATURES[i % 3], i) for i, name in enumerate(SCHEMAS)]
    assert num_finished(smollm2, asked, PROMPT) >= 8


@pytest.mark.deep
@pytest.mark.smollm2
def test_ten_generations_under_each_schema(smollm2):
    asked = [(name, TEMPERATURES[i % 3], 1000 + i) for i in range(10) for name in SCHEMAS]
    assert num_finished(smollm2, asked, PROMPT) >= 80


@pytest.mark.smollm2
def test_an_answer_is_the_same_alone(smollm2):
    one = SamplingParams(json=SCHEMAS["names of all alphabets"], temperature=1.5, seed=7, max_tokens=12)
    others = [SamplingParams(temperature=1.0, seed=1, max_tokens=9), SamplingParams(json=True, seed=2, max_tokens=14)]
    (alone,) = smollm2.generate(PROMPT, one)
    among = smollm2.generate([PROMPT] * 3, [others[0], one, others[1]])[1]
    assert alone.outputs[0].reproducible
    assert among.outputs[0].token_ids == alone.outputs[0].token_ids


def test_an_engine_with_bytes_for_tokens():
    """A model whose logits are noise says whatever it may, at any temperature."""
    model = ToyModel(NUM_BYTES, 256, [END], scale=12.0, vocabulary=BYTES)
    with LLM(model, max_num_seqs=32) as llm:
        asked = [(name, TEMPERATURES[seed % 3], seed) for seed in range(6) for name in SCHEMAS]
        assert num_finished(llm, asked, [1, 2, 3]) >= 20


def rows_of_noise(chance: np.random.Generator, num_rows: int, step: int) -> Any:
    """Logits that want what is forbidden: quotes, backslashes, halves of characters; later whatever closes."""
    logits = chance.normal(0, 8, (num_rows, NUM_BYTES)).astype(np.float32)
    logits[:, chance.integers(0, NUM_BYTES, 8)] += 40
    logits[:, list(b'"\\\n\x00\xff\xc3')] += chance.normal(0, 10, (num_rows, 6)).astype(np.float32)
    if step > 40:
        logits[:, [*b'"}]', END]] += np.float32(4 + step / 10)
    return logits


def test_noise_through_masks_is_valid():
    """The same without an engine: rows of masks, one token each, hundreds of texts beside each other."""
    backend, chance = byte_backend(), np.random.default_rng(0)
    names = [name for name in SCHEMAS for _ in range(12)]
    matchers = [backend.compile(source_of(SamplingParams(json=SCHEMAS[name]))).matcher((END,)) for name in names]
    texts: list[list[int]] = [[] for _ in names]
    running = list(range(len(names)))
    params = [SamplingParams(temperature=TEMPERATURES[i % 3], top_p=(1.0, 0.9)[i % 2]) for i in range(len(names))]
    for step in range(200):
        masks = np.zeros((len(running), -(-NUM_BYTES // 32)), np.int32)
        assert not any(backend.fill_all([matchers[i] for i in running], masks))
        drawn = klero.sample(
            rows_of_noise(chance, len(running), step), [params[i] for i in running], positions=step, masks=masks,
            seeds=[2026 + i for i in running],
        )  # fmt: skip
        for i, token_id in zip(running, drawn.token_ids.tolist(), strict=True):
            assert matchers[i].accept(token_id), (names[i], bytes(texts[i]), token_id)
            texts[i].append(token_id)
        running = [i for i in running if texts[i][-1] != END]
    for name, text in zip(names, texts, strict=True):
        if text[-1] == END:
            assert judged(SCHEMAS[name], bytes(text[:-1]).decode()) is True, (name, bytes(text[:-1]))
    assert len(running) < len(names) / 3
    for i in running:
        assert_can_be_completed(backend, names[i], texts[i])


def assert_can_be_completed(backend: Any, name: str, text: list[int]) -> None:
    """An unfinished text: a fresh matcher takes it, and what closes it makes it valid."""
    matcher = backend.compile(source_of(SamplingParams(json=SCHEMAS[name]))).matcher((END,))
    assert num_read(matcher, text, NUM_BYTES) == len(text)
    rest, ended = write(matcher, random.Random(0), list(fragments(SCHEMAS[name])), patience=0, limit=2000)
    whole = bytes(text) + rest
    assert ended, (name, whole)
    assert judged(SCHEMAS[name], whole.decode()) is True, (name, whole)


def test_there_are_twenty_schemas_and_the_judge_knows_them():
    assert len(SCHEMAS) == 20
    for schema in SCHEMAS.values():
        assert judged(schema, "[" + json.dumps(schema) + "]") is False
