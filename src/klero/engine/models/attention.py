"""Attention over paged keys and values, as transformers' models call it.

`paged_attention` computes a whole step, span by span: decodes as padded batches, chunks of prompts one by one.
`reference` is the definition it is tested against. `klero_attention` is what a model's layers call:
transformers knows it as the attention "klero", and it finds the step it belongs to in a context variable, so
that two models, in one thread or in two, never see each other's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from klero.engine.models.invariant.attention import (
    REGISTERS,
    Head,
    KeyClass,
    attend_fused,
    attend_in_blocks,
    key_class,
    whole_registers,
)
from klero.engine.models.invariant.forward import measured
from klero.engine.models.paging import PagedCache, PagedStep, Span
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


@dataclass(frozen=True)
class Scores:
    """How a layer scores its keys: scale, window, soft cap, and what its sinks take."""

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether torch's fused attention knows such scores."""
        return self.softcap is None and self.sinks is None


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layer: int,
    step: PagedStep,
    cache: PagedCache,
    scores: Scores,
) -> torch.Tensor:
    """Write the step's keys and values into the cache and return the attention [T, H, Dv] of `query`.

    `query` is [T, H, D], `keys` [T, Hk, D], `values` [T, Hk, Dv]. Agrees with `reference` within rounding. With
    step.deterministic a token's output is the same bits whatever else the step computes, and however its prompt was
    cut. Tokens behind the last sequence are padding: 0.
    """
    stored = cache.write(layer, keys, values, step)
    num_heads, num_key_heads, width = query.shape[1], keys.shape[1], values.shape[2]
    shape = None
    if step.deterministic:
        query = whole_registers(query)
        widths = query.shape[2], width + -width % REGISTERS
        shape = key_class(Head(num_heads // num_key_heads, *widths, query.dtype, scores.plain))
    output = query.new_empty(query.shape[0], num_heads, width)
    output[step.num_tokens :] = 0  # padding attends to nothing
    for span in step.spans(shape):
        queries = query.index_select(0, span.tokens).view(span.batch, -1, num_heads, query.shape[2]).transpose(1, 2)
        if folded := scores.plain and queries.shape[2] == 1:
            # the heads that share a key head become its query rows, so that no key is copied for them
            queries = queries.view(span.batch, num_key_heads, -1, query.shape[2])
        if shape is None and (whole := span.whole) is not None:
            seen = [tensor[whole].transpose(0, 1).unsqueeze(0) for tensor in (keys, values)]
        else:
            seen = [cache.gather(tensor, span).to(query.dtype) for tensor in (stored.keys, stored.values)]
        if shape is not None:
            queries, seen = queries.contiguous(), [whole_registers(tensor) for tensor in seen]
        attended = _attend(queries, seen[0], seen[1], span, shape, scores)
        if not folded:
            attended = attended.transpose(1, 2)
        output.index_copy_(0, span.tokens, attended.reshape(-1, num_heads, attended.shape[3])[:, :, :width])
    return output


def _attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: Span, shape: KeyClass | None, scores: Scores
) -> torch.Tensor:
    """Return the attention [B, H, Q, Dv] of one span, called as `shape` says."""
    num_rows = queries.shape[2]
    if shape is not None:
        queries = F.pad(queries, (0, 0, 0, shape.num_rows(num_rows) - num_rows))
    fused = scores.plain if shape is None else shape.fused
    seen_whole = scores.window is None or scores.window >= span.num_keys
    causal = shape is None and fused and seen_whole and span.whole is not None  # the case that needs no mask
    bias = None if causal else span.bias(scores.window, queries.dtype, queries.shape[2])
    if fused:
        return attend_fused(queries, keys, values, bias, scores.scaling)[:, :, :num_rows]
    assert bias is not None
    attended = attend_in_blocks(queries, keys, values, bias, scores.scaling, scores.softcap, scores.sinks)
    return attended[:, :, :num_rows]


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
    window = _window_of_config(module, layer) if sliding_window is _UNSAID else sliding_window
    with measured(), torch._C.DisableTorchFunction():
        output = paged_attention(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            layer,
            step,
            cache,
            Scores(query.shape[3] ** -0.5 if scaling is None else scaling, window, softcap, s_aux),
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
