"""Paged attention against the per-token definition, and against what must not leak or be ignored."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from klero.engine.models.attention import Scores, klero_attention, paged_attention, reference, running
from klero.engine.models.paging import PagedCache, PagedStep
from klero.errors import ModelError

HEADS, KEY_HEADS, WIDTH, BLOCK = 6, 2, 8, 4

OPTIONS = [
    {},
    {"sliding_window": 1},
    {"sliding_window": 5},
    {"softcap": 1.5},
    {"sinks": True},
    {"softcap": 1.5, "sliding_window": 5, "sinks": True},
]


def schedule(packer):
    """Steps of a mixed run: whole prompts, chunks, decodes, joins and leaves, in changing order."""
    p = packer(num_blocks=40, block_size=BLOCK)
    tokens = lambda n: np.zeros(n, np.int64)  # noqa: E731
    for slot in (0, 1, 2):
        p.join(slot)
    yield p.step([(0, tokens(9)), (1, tokens(3)), (2, tokens(1))])
    yield p.step([(1, tokens(1)), (0, tokens(4)), (2, tokens(6))])
    p.leave(1)
    p.join(7)
    yield p.step([(7, tokens(17)), (2, tokens(1)), (0, tokens(1))])
    p.join(1)
    yield p.step([(1, tokens(2)), (0, tokens(1)), (7, tokens(1)), (2, tokens(1))])
    yield p.step([(2, tokens(1)), (7, tokens(1)), (1, tokens(1)), (0, tokens(1))])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("value_width", [WIDTH, 12])
def test_equals_the_reference(packer, options, value_width, deterministic):
    generator = torch.Generator().manual_seed(3)
    options = dict(options)
    if options.pop("sinks", False):
        options["sinks"] = torch.randn(HEADS, generator=generator)
    cache = PagedCache(40, BLOCK)
    for step in schedule(packer):
        num_tokens = len(step.input_ids)
        query = torch.randn(num_tokens, HEADS, WIDTH, generator=generator) * 2
        keys = torch.randn(num_tokens, KEY_HEADS, WIDTH, generator=generator) * 2
        values = torch.randn(num_tokens, KEY_HEADS, value_width, generator=generator)
        scores = Scores(0.3, options.get("sliding_window"), options.get("softcap"), options.get("sinks"))
        paged = PagedStep(step, cache, deterministic=deterministic)
        got = paged_attention(query, keys, values, 0, paged, cache, scores)
        layer = cache.layers[0]
        expected = reference(query, layer.keys, layer.values, step, BLOCK, scaling=0.3, **options)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("deterministic", [False, True])
def test_nan_of_one_sequence_reaches_no_other(packer, deterministic):
    p = packer(num_blocks=24, block_size=BLOCK)
    cache = PagedCache(24, BLOCK)
    generator = torch.Generator().manual_seed(5)

    def run(chunks, sick):
        step = p.step([(slot, np.zeros(n, np.int64)) for slot, n in chunks])
        draw = lambda heads: torch.randn(len(step.input_ids), heads, WIDTH, generator=generator)  # noqa: E731
        query, keys, values = draw(HEADS), draw(KEY_HEADS), draw(KEY_HEADS)
        slots = np.repeat(step.slots, np.diff(step.query_starts))
        ill = torch.from_numpy(np.isin(slots, sick))
        keys[ill], values[ill] = float("nan"), float("nan")
        paged = PagedStep(step, cache, deterministic=deterministic)
        output = paged_attention(query, keys, values, 0, paged, cache, Scores(WIDTH**-0.5))
        assert torch.isfinite(output[~ill]).all()

    for slot in range(5):
        p.join(slot)
    p.free.remove(0)
    p.free.append(0)  # slot 0 gets block 0, which the unused places of every block table name
    # Slots 0 and 4 are ill and fill whole blocks; the healthy ones are padded next to them in each decode.
    run([(0, 16), (1, 5), (2, 9), (3, 14), (4, 16)], sick=[0, 4])
    run([(n, 1) for n in range(5)], sick=[0, 4])
    p.leave(0)
    p.leave(4)
    for slot in (10, 11, 12):  # these take blocks that the ill have left
        p.join(slot)
    run([(1, 1), (10, 6), (2, 1), (11, 1), (12, 10), (3, 1)], sick=[])
    for _ in range(6):
        run([(n, 1) for n in (1, 10, 2, 11, 12, 3)], sick=[])


def test_no_decode_is_padded_to_more_than_twice_its_length(packer):
    p = packer(num_blocks=300, block_size=BLOCK)
    lengths = [3, 200, 17, 90, 101, 8, 450]
    for slot in range(len(lengths)):
        p.join(slot)
    p.step([(slot, np.zeros(n, np.int64)) for slot, n in enumerate(lengths)])
    step = p.step([(slot, np.zeros(1, np.int64)) for slot in range(len(lengths))])
    spans = PagedStep(step, PagedCache(300, BLOCK)).spans(None)
    assert sorted(int(t) for span in spans for t in span.tokens) == list(range(len(lengths)))
    for span in spans:
        assert (span.num_keys <= 2 * (span.positions + BLOCK)).all()


def test_a_call_outside_of_a_step_is_refused():
    tensor = torch.zeros(1, 1, 1, 4)
    with pytest.raises(ModelError, match="set_attn_implementation"):
        klero_attention(SimpleNamespace(layer_idx=0), tensor, tensor, tensor, None)


@pytest.mark.parametrize(
    "module, others, says",
    [
        (SimpleNamespace(), {}, "layer_idx"),
        (SimpleNamespace(layer_idx=0), {"mask": torch.zeros(1)}, "mask of its own"),
        (SimpleNamespace(layer_idx=0, is_causal=False), {}, "causal"),
        (SimpleNamespace(layer_idx=0), {"is_causal": False}, "causal"),
        (SimpleNamespace(layer_idx=0), {"position_bias": torch.zeros(1)}, "position_bias"),
    ],
)
def test_what_would_be_ignored_is_refused(packer, module, others, says):
    p = packer(num_blocks=2, block_size=BLOCK)
    p.join(0)
    cache = PagedCache(2, BLOCK)
    step = PagedStep(p.step([(0, np.zeros(1, np.int64))]), cache)
    mask = others.pop("mask", None)
    tensor = torch.zeros(1, 1, 1, 4)
    with running(step, cache), pytest.raises(ModelError, match=says):
        klero_attention(module, tensor, tensor, tensor, mask, sliding_window=None, **others)


@pytest.mark.parametrize(
    "config, window",
    [
        ({"sliding_window": 7}, 7),
        ({"sliding_window": None}, None),
        ({}, None),
        ({"sliding_window": 7, "layer_types": ["full_attention"]}, None),
        ({"sliding_window": 7, "layer_types": ["sliding_attention"]}, 7),
    ],
)
def test_a_window_left_to_the_mask_comes_from_the_configuration(packer, monkeypatch, config, window):
    from klero.engine.models import attention

    seen = []

    def spy(query, *arguments):
        seen.append(arguments[-1].window)
        return query

    monkeypatch.setattr(attention, "paged_attention", spy)
    module = SimpleNamespace(layer_idx=0, config=SimpleNamespace(**config))
    tensor = torch.zeros(1, 1, 1, 4)
    with running(None, None):  # the spy needs neither
        klero_attention(module, tensor, tensor, tensor, None)
        klero_attention(module, tensor, tensor, tensor, None, sliding_window=None)
    assert seen == [window, None]


def test_padding_attends_to_nothing(packer):
    """What lies in the memory of its output may be anything, NaN too; the layers behind must not meet it."""
    p, cache = packer(num_blocks=4, block_size=BLOCK), PagedCache(4, BLOCK)
    p.join(0)
    step = p.step([(0, np.zeros(3, np.int64))])
    step = dataclasses.replace(step, slot_mapping=np.append(step.slot_mapping, [-1, -1]))
    query, keys, values = (torch.ones(5, heads, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        output = paged_attention(query, keys, values, 0, PagedStep(step, cache), cache, Scores(1.0))
    finally:
        torch.use_deterministic_algorithms(False)
    assert output.flatten(1).unique(dim=1).tolist() == [[1.0], [1.0], [1.0], [0.0], [0.0]]
