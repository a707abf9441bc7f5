"""Whole workloads in many ways: chunks, blocks, cache, swap, microbatches, padding, order. Every answer stays the same.

The reference is a request that runs alone, whole, on a toy model that owns its sequences; no block is involved there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from tests.engine.free import assert_all_free
from tests.engine.said import assert_same

from klero import SamplingParams
from klero.batch import Buckets
from klero.engine import Engine
from klero.engine.models import load_model
from klero.testing.models import PagedToyModel, ToyModel

CONTEXT = 96


@dataclass(frozen=True)
class Asked:
    """A request of a workload. arrives: in which step."""

    name: str
    prompt: list[int]
    params: SamplingParams
    embeds: Any = None
    salt: str | None = None
    priority: int = 0
    arrives: int = 0


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_p": 0.9, "n": 3},
    {"temperature": 0.8, "min_p": 0.02, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 1.0, "repetition_penalty": 1.7, "n": 2, "logprobs": 2},
    {"temperature": 1.0, "no_repeat_ngram_size": 2, "bad_token_ids": [[3], [5, 6]]},
    {"temperature": 1.5, "top_p": 0.9, "top_p_decay": 0.8, "logit_bias": {4: 2.0, 9: float("-inf")}},
    {"temperature": 1.0, "allowed_token_ids": [1, 2, 3, 5, 8], "min_tokens": 3, "stop_token_ids": [8]},
    {"temperature": 1.0, "top_k": 6, "stop_token_ids": [7, 11, 13], "xtc_probability": 0.5, "n": 4},
]
ABOUT_PROMPTS: list[dict[str, Any]] = [
    {"prompt_logprobs": 1},
    {"prompt_logprobs": 0, "return_context_logits": True, "return_generation_logits": True},
    {"prompt_logprobs": 2, "max_tokens": 0, "temperature": 0.0, "n": 1},
]


def workload(seed: int, *, vocab_size: int = 64, width: int = 4, num: int = 9) -> list[Asked]:
    """Requests of every kind, many of which begin alike; two are the same to the last token."""
    source = random.Random(seed)
    stems = [[source.randrange(vocab_size) for _ in range(length)] for length in (33, 16, 50)]
    asked = []
    for i in range(num):
        prompt = source.choice([[], *stems])[: source.choice([4, 16, 32, 50])]
        prompt = prompt + [source.randrange(vocab_size) for _ in range(source.choice([0, 1, 2, 7, 20]))]
        embeds = None
        if source.random() < 0.2:
            embeds = np.random.default_rng(seed).normal(size=(source.choice([1, 5, 17]), width)).astype(np.float32)
        elif not prompt:
            prompt = [source.randrange(vocab_size)]
        fields = {"seed": source.randrange(2**64), "max_tokens": source.choice([1, 2, 9, 20]), **source.choice(KINDS)}
        if embeds is None and source.random() < 0.35:
            fields |= source.choice(ABOUT_PROMPTS)
        fields["min_tokens"] = min(fields.get("min_tokens", 0), fields["max_tokens"])
        asked.append(Asked(str(i), prompt, SamplingParams(**fields), embeds, source.choice([None, None, "mine"])))
    twin = source.choice(asked)
    return [*asked, replace(twin, name="twin")]


def add(engine: Engine, one: Asked) -> None:
    engine.add_request(
        one.name, one.prompt, one.params, prompt_embeds=one.embeds, cache_salt=one.salt, priority=one.priority
    )


def alone(model: Any, one: Asked, **options: Any) -> Any:
    """The answer of a request that runs by itself, whole."""
    engine = Engine(model, max_num_batched_tokens=512, enable_prefix_caching=False, **options)
    add(engine, replace(one, priority=0))
    while not (outputs := engine.step()):
        pass
    return outputs[0]


def run(engine: Engine, asked: list[Asked], *, preempt: float = 0.0, seed: int = 0) -> dict[str, Any]:
    """The answers by name. preempt: how often somebody who runs is preempted."""
    source, left, found, steps = random.Random(seed), sorted(asked, key=lambda one: one.arrives), {}, 0
    num_left = 30  # preemptions; else a long prompt in small chunks would never come to its end
    while left or engine.num_unfinished:
        while left and left[0].arrives <= steps:
            add(engine, left.pop(0))
        if engine.scheduler.running and num_left and source.random() < preempt:
            num_left -= 1
            engine.scheduler.preempt(source.choice(engine.scheduler.running))
        if engine.num_unfinished:
            found.update({output.request_id: output for output in engine.step()})
        steps += 1
        assert steps < 9000, "it does not come to an end"
    assert_all_free(engine)
    return found


def assert_equal(found: Any, expected: Any) -> None:
    """The same tokens, ends, logprobs and rows, in bits."""
    assert found.prompt_token_ids == expected.prompt_token_ids
    for ours, theirs in zip(found.outputs, expected.outputs, strict=True):
        assert ours.token_ids == theirs.token_ids, (ours.index, ours.finish_reason, ours.error)
        assert (ours.finish_reason, ours.stop_reason, ours.seed) == (
            theirs.finish_reason, theirs.stop_reason, theirs.seed,
        )  # fmt: skip
        if theirs.logprobs is not None:
            assert_same(ours.logprobs, theirs.logprobs)
        if theirs.generation_logits is not None:
            assert np.array_equal(ours.generation_logits, theirs.generation_logits)
    if expected.prompt_logprobs is not None:
        assert_same(found.prompt_logprobs, expected.prompt_logprobs)
    if expected.context_logits is not None:
        assert np.array_equal(found.context_logits, expected.context_logits)
        assert found.context_mask.all()


def swap_space(model: Any, block_size: int, num_blocks: int) -> float:
    return num_blocks * model.bytes_per_block(block_size) / 2**30


def ways(source: random.Random, model: Any) -> dict[str, dict[str, Any]]:
    """Options of an engine, by what they are about; sizes that are drawn are odd ones too."""

    def tight(size: int) -> dict[str, Any]:
        return {"block_size": size, "num_blocks": -(-CONTEXT // size) + source.randrange(3)}

    budget = source.choice([1, 2, 3, 5, 7])
    return {
        "one block a token": {"block_size": 1},
        "blocks of 16": {"block_size": 16, "max_num_batched_tokens": 16},
        "blocks of 64": {"block_size": 64, "max_num_batched_tokens": 48, "max_num_seqs": 3},
        "no cache": {"enable_prefix_caching": False, "block_size": 4},
        "small chunks": {"max_num_batched_tokens": budget, "block_size": source.choice([1, 3, 16])},
        "recomputed": tight(size := source.choice([1, 3, 4, 16])),
        "recomputed, no cache": {**tight(size), "enable_prefix_caching": False},
        "swapped": {**tight(size), "swap_space": swap_space(model, size, source.choice([3, 20, 200]))},
        "swapped, no cache": {
            **tight(size), "swap_space": swap_space(model, size, 200), "enable_prefix_caching": False,
        },
        "few tokens at once": {"max_microbatch_tokens": source.choice([1, 2, 5])},
        "few requests at once": {"max_microbatch_requests": source.choice([1, 2, 3])},
        "padded": {"buckets": Buckets.doubling(512, 512), "block_size": 8},
        "everything": {
            **tight(4), "swap_space": swap_space(model, 4, 30), "max_microbatch_tokens": source.choice([2, 9]),
            "max_microbatch_requests": 2, "buckets": Buckets.doubling(32, 32), "max_num_batched_tokens": 32,
            "max_num_seqs": source.choice([2, 5, 40]), "scheduling_policy": "priority",
        },
    }  # fmt: skip


def check_ways(
    seed: int, asked: list[Asked], expected: dict[str, Any], make: Callable[[], Any], only: Sequence[str] = ()
) -> None:
    """One workload in every way, or only in these; each in an order of arrival of its own."""
    source = random.Random(seed + 1000)
    every = ways(source, make())
    for way, options in {way: every[way] for way in only or every}.items():
        arriving = source.sample(asked, len(asked))
        if source.random() < 0.7:
            arriving = [replace(one, arrives=source.randrange(20)) for one in arriving]
        if options.get("scheduling_policy"):
            arriving = [replace(one, priority=source.randrange(-2, 3)) for one in arriving]
        preempt = source.choice([0.0, 0.0, 0.3])
        engine = Engine(make(), max_model_len=CONTEXT, **options)
        found = run(engine, arriving, preempt=preempt, seed=seed)
        for name, output in expected.items():
            try:
                assert_equal(found[name], output)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {way}, request {name}: {error}") from error


def check_toys(seed: int) -> None:
    source, asked = random.Random(seed), workload(seed)
    expected = {one.name: alone(ToyModel(max_model_len=CONTEXT), one) for one in asked}
    check_ways(seed, asked, expected, lambda: PagedToyModel(max_model_len=CONTEXT))
    own = {"max_num_seqs": source.choice([2, 5]), "max_num_batched_tokens": source.choice([2, 16])}
    found = run(Engine(ToyModel(max_model_len=CONTEXT), **own), asked, preempt=0.1, seed=seed)
    for name, output in expected.items():
        assert_equal(found[name], output)


@pytest.mark.parametrize("seed", range(8))
def test_answers_do_not_depend_on_the_way_they_come_about(seed):
    check_toys(seed)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(8, 40))
def test_at_length(seed):
    check_toys(seed)


def check_smollm2(seed: int, *, num: int, most: int, longest: int = CONTEXT, only: Sequence[str] = ()) -> None:
    model, _ = load_model("smollm2", dtype="float32")
    assert model.deterministic
    asked = [
        replace(
            one,
            prompt=one.prompt[:longest],
            params=replace(one.params, max_tokens=min(one.params.max_tokens, most), min_tokens=0),
        )
        for one in workload(seed, vocab_size=model.vocab_size, width=model.hidden_size, num=num)
    ]
    expected = {one.name: alone(model, one, max_model_len=CONTEXT) for one in asked}
    check_ways(seed, asked, expected, lambda: model, only)


@pytest.mark.smollm2
def test_smollm2():
    check_smollm2(3, num=3, most=3, longest=20, only=["swapped", "few requests at once", "padded"])


@pytest.mark.smollm2
@pytest.mark.deep
@pytest.mark.parametrize("seed", range(10))
def test_smollm2_at_length(seed):
    check_smollm2(seed, num=8, most=12)
