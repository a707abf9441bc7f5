"""Microbatches and padded steps of a transformers model: the logits of the whole step, in bits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tests.batch.steps import BLOCK_SIZE, Part, before, lay_out, tables_of

from klero.batch.microbatch import merge, split
from klero.batch.padded import Buckets, Scratch, pad
from klero.engine.models.transformers import TransformersModel

BUCKETS = Buckets(tokens=(7, 33, 64, 150), rows=(1, 5, 9, 70))
LIMITS = [(4, None), (16, 2), (None, 1), (33, 3)]


def random_parts(seed):
    """Up to six sequences: decodes, drafts, chunks, prompts of up to 40 tokens, scored ones."""
    rng = np.random.default_rng(seed)
    parts = []
    for slot in rng.permutation(int(rng.integers(2, 7))).tolist():
        computed, new = int(rng.integers(0, 30)), int(rng.integers(1, 40))
        kind = rng.integers(0, 4)
        if kind == 0:
            parts.append(Part(slot, computed, 1, 1))
        elif kind == 1:
            parts.append(Part(slot, computed, min(new, 4), min(new, 4)))
        else:
            scored_from = computed + new // 2 if kind == 2 else 10**6
            parts.append(Part(slot, computed, new, int(rng.integers(0, 2)), scored_from))
    return parts


def started(model, parts, seed):
    """A model whose cache holds what the parts find computed, NaN in every other block; and the step."""
    tables = tables_of(parts, seed)
    model.allocate(tables.size + 3, BLOCK_SIZE)
    for layer in model._cache.layers.values():
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    if earlier := before(parts):
        model.forward(lay_out(earlier, tables[[part.num_computed > 0 for part in parts]]))
    return lay_out(parts, tables)


def cached(model):
    """Every block but the scratch block."""
    return [
        tensor[:-BLOCK_SIZE].clone() for layer in model._cache.layers.values() for tensor in (layer.keys, layer.values)
    ]


def same_bits(some, other):
    """Also where both are NaN."""
    return torch.equal(some.view(torch.int32), other.view(torch.int32))


def assert_same(model, parts, seed, logits, run):
    step = started(model, parts, seed)
    result = run(step)
    assert same_bits(result, logits[0])
    assert all(same_bits(some, other) for some, other in zip(cached(model), logits[1], strict=True))


@pytest.mark.parametrize("kind, seeds", [("Llama", range(5)), ("Gemma2", range(5, 7))])
def test_microbatches(tiny, kind, seeds):
    model = TransformersModel(tiny(kind), deterministic=True)
    num_cut = 0
    for seed in seeds:
        parts = random_parts(seed)
        whole = model.forward(started(model, parts, seed)), cached(model)
        for number, (max_tokens, max_requests) in enumerate(LIMITS):
            options = {"apart": bool(number & 1), "by_length": bool(number & 2)}

            def run(step, limits=(max_tokens, max_requests), options=options):
                nonlocal num_cut
                microbatches = split(step, max_tokens=limits[0], max_requests=limits[1], **options)
                slots = [slot for m in microbatches for slot in m.arrays.slots.tolist()]
                num_cut += len(slots) > len(set(slots))
                return merge([model.forward(m.arrays) for m in microbatches], microbatches)

            assert_same(model, parts, seed, whole, run)
    assert num_cut >= len(seeds)


@pytest.mark.parametrize("kind", ["Llama", "Gemma2"])
def test_padded_steps(tiny, kind):
    """And nobody's block is touched, NaN or not."""
    model = TransformersModel(tiny(kind), deterministic=True)
    for seed in range(6):
        parts = random_parts(seed)
        whole = model.forward(started(model, parts, seed)), cached(model)

        def run(step):
            padded = pad(step, BUCKETS, scratch=Scratch(BUCKETS, step.block_tables.shape[1] + 2))
            assert len(padded.arrays.input_ids) > padded.num_tokens
            logits = model.forward(padded.arrays)
            assert logits.shape[0] == len(padded.arrays.logits_rows)
            assert torch.isfinite(logits).all()
            return logits[: padded.num_rows]

        assert_same(model, parts, seed, whole, run)


def test_padded_microbatches(tiny):
    model = TransformersModel(tiny("Llama"), deterministic=True)
    parts = random_parts(4)
    whole = model.forward(started(model, parts, 4)), cached(model)
    scratch = Scratch(BUCKETS, 40)

    def run(step):
        microbatches, logits = split(step, max_tokens=9), []
        for microbatch in microbatches:
            padded = pad(microbatch.arrays, BUCKETS, scratch=scratch)
            logits.append(model.forward(padded.arrays)[: padded.num_rows])
        return merge(logits, microbatches)

    assert_same(model, parts, 4, whole, run)


@pytest.mark.parametrize("block_size", [1, 4])
def test_padding_goes_to_the_scratch_block(tiny, packer, block_size):
    """Also with blocks of one token, where -1 looks like the first row of a block."""
    model = TransformersModel(tiny("Llama"), deterministic=False)
    model.allocate(8, block_size)
    p = packer(8, block_size)
    p.join(0)
    step = p.step([(0, np.arange(3, 8))])
    for layer in model._cache.layers.values():
        layer.keys.fill_(5.0)
    longer = {name: np.append(getattr(step, name), 0).astype(np.int32) for name in ("input_ids", "positions")}
    model.forward(dataclasses.replace(step, slot_mapping=np.append(step.slot_mapping, -1), **longer))
    written = set(step.slot_mapping.tolist())
    cleared = {row for block in p.tables[0] for row in range(block * block_size, (block + 1) * block_size)}
    for layer in model._cache.layers.values():
        kept = (layer.keys == 5.0).flatten(1).all(1).tolist()
        assert len(kept) == 9 * block_size
        assert [row for row in range(8 * block_size) if not kept[row]] == sorted(cleared | written)
        assert not kept[8 * block_size]
