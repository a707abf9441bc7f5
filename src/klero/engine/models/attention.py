"""Attention over paged keys and values, as transformers' models call it.

`paged_attention` computes a whole step: decodes as padded batches, longer chunks one sequence at a time.
`reference` is the definition it is tested against. `klero_attention` is what a model's layers call:
transformers knows it as the attention "klero", and it finds the step it belongs to in a context variable, so
that two models, in one thread or in two, never see each other's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from klero.engine.models.paging import LayerCache, PagedCache, PagedStep, PrefillChunk
from klero.errors import ModelError

if TYPE_CHECKING:
    from klero.batch import StepArrays

ATTENTION_NAME = "klero"
_UNSAID: Any = object()  # a layer may pass sliding_window=None, which is not the same as not passing it
_running: ContextVar[tuple[PagedStep, PagedCache] | None] = ContextVar("klero_running_step", default=None)


def reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    step: StepArrays,
    block_size: int,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention output [T, H, Dv] of one layer, token by token and head by head, in float64.

    `query` is [T, H, D]; `keys` [rows, Hk, D] and `values` [rows, Hk, Dv] are the layer's cache with this
    step's tokens already written. A query at position p weighs the keys of its own sequence at the positions
    j <= p, and j > p - sliding_window if there is a window: score = scaling * q.k, then softcap * tanh(score
    / softcap) if there is a cap; weight = exp(score) / (sum of exp(scores), plus exp(sinks[head]) if there
    are sinks). Head h reads the key head h // (H // Hk).
    """
    num_tokens, num_heads, _ = query.shape
    group = num_heads // keys.shape[1]
    output = torch.zeros(num_tokens, num_heads, values.shape[2], dtype=torch.float64)
    for n in range(len(step.seq_lens)):
        for token in range(int(step.query_starts[n]), int(step.query_starts[n + 1])):
            position = int(step.positions[token])
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            places = [
                int(step.block_tables[n, j // block_size]) * block_size + j % block_size
                for j in range(first, position + 1)
            ]
            for head in range(num_heads):
                scores = keys[places, head // group].double() @ query[token, head].double() * scaling
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1].double()])
                weights = torch.softmax(scores, dim=0)[: len(places)]
                output[token, head] = weights @ values[places, head // group].double()
    return output


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    scaling: float | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention [B, H, Q, Dv] of `query` [B, H, Q, D] over [B, Hk, L, D] keys; a new tensor.

    `bias` is added to the scores (0 or -inf, broadcast to [B, 1, Q, L]); None means causal, with Q = L.
    """
    grouped = keys.shape[1] != query.shape[1]
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=bias, is_causal=bias is None, scale=scaling, enable_gqa=grouped
        )
    if bias is None:
        raise ValueError("attention with a soft cap or sinks needs its mask")
    if grouped:
        repeats = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    scores = (query @ keys.transpose(2, 3)).float() * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + bias
    if sinks is not None:
        # A sink is one more key whose value is zero: it takes weight and gives nothing.
        column = sinks.float().view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[2]].to(values.dtype)
    return weights @ values


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layer: int,
    step: PagedStep,
    cache: PagedCache,
    *,
    scaling: float | None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the step's keys and values into the cache and return the attention [T, H, Dv] of `query`.

    `query` is [T, H, D], `keys` [T, Hk, D], `values` [T, Hk, Dv]. Agrees with `reference` within rounding.
    """
    stored = cache.write(layer, keys, values, step)
    attend_here = partial(attend, scaling=scaling, softcap=softcap, sinks=sinks)
    output = query.new_empty(query.shape[0], query.shape[1], values.shape[2])
    for group in step.decodes:
        batch = group.tokens.shape[0]
        queries = query.index_select(0, group.tokens).unsqueeze(2)
        if softcap is None and sinks is None:
            # The heads that share a key head become its query rows, so that no key is copied for them.
            queries = queries.view(batch, keys.shape[1], -1, query.shape[2])
        attended = attend_here(
            queries,
            cache.gather(stored.keys, group.blocks, batch).to(query.dtype),
            cache.gather(stored.values, group.blocks, batch).to(query.dtype),
            group.bias(sliding_window, query.dtype),
        )
        output.index_copy_(0, group.tokens, attended.reshape(batch, query.shape[1], -1))
    for chunk in step.prefills:
        tokens = slice(chunk.start, chunk.stop)
        past = None if chunk.is_whole else stored
        output[tokens] = _attend_chunk(
            query[tokens], keys[tokens], values[tokens], chunk, past, cache, sliding_window, attend_here
        )
    return output


def _attend_chunk(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chunk: PrefillChunk,
    past: LayerCache | None,
    cache: PagedCache,
    window: int | None,
    attend_here: partial[torch.Tensor],
) -> torch.Tensor:
    """Return the attention [tokens, H, Dv] of one chunk; its keys come from the cache if it has a `past`."""
    if past is None:
        keys, values = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (keys, values))
    else:
        keys, values = (
            cache.gather(tensor, chunk.blocks, 1)[:, :, : chunk.seq_len].to(query.dtype)
            for tensor in (past.keys, past.values)
        )
    plain = attend_here.keywords["softcap"] is None and attend_here.keywords["sinks"] is None
    seen_whole = window is None or window >= chunk.seq_len
    causal = past is None and plain and seen_whole  # the case that needs no mask
    bias = None if causal else chunk.bias(window, query.dtype)
    return attend_here(query.transpose(0, 1).unsqueeze(0), keys, values, bias)[0].transpose(0, 1)


@contextmanager
def running(step: PagedStep, cache: PagedCache) -> Iterator[None]:
    """Let the layers called in this block, by this thread, attend within `step` and `cache`."""
    token = _running.set((step, cache))
    try:
        yield
    finally:
        _running.reset(token)


def klero_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = _UNSAID,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend for one layer of a transformers model: query [1, H, T, D], key and value [1, Hk, T, D].

    Returns the output [1, T, H, Dv] and no weights. ModelError if no engine step is running here, or if the
    layer asks for something that would be ignored.
    """
    context = _running.get()
    if context is None:
        raise ModelError(
            "this module attends through a klero engine and was called outside of one; to use it elsewhere "
            "call module.set_attn_implementation('sdpa') first (the engine takes it back at its next step)"
        )
    step, cache = context
    layer = _checked_layer(module, attention_mask, others)
    output = paged_attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        layer,
        step,
        cache,
        scaling=scaling,
        sliding_window=_window_of_config(module, layer) if sliding_window is _UNSAID else sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return output.unsqueeze(0), None


def _checked_layer(module: Any, mask: torch.Tensor | None, others: dict[str, Any]) -> int:
    """Return the layer's number; ModelError for what this attention would otherwise silently leave out."""
    name = type(module).__name__
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ModelError(f"{name} has no layer_idx, so klero cannot tell which layer's cache it needs")
    if mask is not None:
        raise ModelError(f"{name} brings an attention mask of its own, which paged attention does not apply")
    if others.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise ModelError(f"{name} attends to later tokens; klero runs causal models only")
    for extra in ("position_bias", "indices", "block_indices", "sinks", "head_mask"):
        if others.get(extra) is not None:
            raise ModelError(f"{name} passes {extra} to its attention, which klero does not know")
    return layer


def _window_of_config(module: Any, layer: int) -> int | None:
    """Return the window of a layer that leaves it to the mask (which klero does not have) to say."""
    config = module.config
    window: int | None = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and layer_types[layer] != "sliding_attention":
        return None
    return window


def register() -> None:
    """Make `klero_attention` known to transformers; harmless when done again."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, klero_attention)
