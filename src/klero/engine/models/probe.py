"""Two short requests, packed and chunked, against the same module's own eager attention.

A configuration does not tell whether a model can be paged: a layer may keep a state of its own, ignore
positions, or mix neighbours in the packed row, and all of that computes without complaint. So the first thing
a model does is a prefill next to half a prefill, then a decode next to the other half, and the logits must be
those of two plain forwards. Whether a module takes embeddings in place of ids is found out in the same way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from klero.batch import StepArrays
from klero.engine.models.attention import ATTENTION_NAME
from klero.engine.models.forward import call, run_step, use_attention
from klero.engine.models.invariant.forward import Audit
from klero.engine.models.paging import PagedCache
from klero.errors import ModelError

BLOCK_SIZE = 4
WINDOW = 5  # of layers with a sliding window; not a multiple of the block
# Allowed distance of the logits, root mean square, relative to their spread. Measured on SmolLM2 and tiny models:
# both ways agree to 1e-6 in float32, 0.003 in float16, 0.02 in bfloat16; ignored positions give 0.35 and more,
# one per cent of a neighbour's state 0.002 to 0.01, which only a probe in float32 can tell from rounding.
TOLERANCE, COARSE_TOLERANCE = 2e-3, 0.1
# Half precision is probed on a float32 copy of the weights as long as that copy stays below 4 GiB.
MAX_COPIED_WEIGHTS = 2**30
Weights = dict[str, torch.Tensor] | None


@dataclass(frozen=True)
class ProbeResult:
    """What the probe learned of a model that passed."""

    vocab_size: int
    layer_shapes: dict[int, tuple[int, int, int]]  # layer -> key heads, key width, value width


def pack(chunks: list[tuple[np.ndarray, int, int]], block_tables: np.ndarray) -> StepArrays:
    """Return the step in which each sequence computes its tokens start:stop, with all rows asked for."""
    positions = np.concatenate([np.arange(start, stop) for _, start, stop in chunks])
    sequences = np.repeat(np.arange(len(chunks)), [stop - start for _, start, stop in chunks])
    blocks = block_tables[sequences, positions // BLOCK_SIZE]
    return StepArrays(
        input_ids=np.concatenate([ids[start:stop] for ids, start, stop in chunks]).astype(np.int32),
        positions=positions.astype(np.int32),
        slot_mapping=blocks.astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE,
        query_starts=np.cumsum([0] + [stop - start for _, start, stop in chunks]).astype(np.int32),
        seq_lens=np.array([stop for *_, stop in chunks], np.int32),
        block_tables=block_tables,
        slots=np.arange(len(chunks), dtype=np.int32),
        logits_rows=np.arange(len(positions), dtype=np.int64),
        num_sampled=len(positions),
    )


def probe(module: Any) -> ProbeResult:
    """Compare `module`, switched to klero's attention before and after, with its eager attention.

    ModelError, with the cause attached, if it cannot compute packed steps or computes something else.
    """
    name = type(module).__name__
    weights = _float32_copy(module)
    cache = PagedCache(num_blocks=8, block_size=BLOCK_SIZE)
    first, second = _requests(module)
    with _named(f"{name} cannot compute a packed step"), _short_windows(module):
        expected = _eager_logits(module, weights, (first, second))
        packed = _packed_logits(module, weights, first, second, cache)
    missing = sorted(set(range(module.config.get_text_config().num_hidden_layers)) - set(cache.layers))
    if missing:
        raise ModelError(
            f"{name}: the layers {missing} never called klero's attention, so they keep something other than "
            "keys and values (or stay on an attention of their own); such a model needs a Model of its own"
        )
    _compare(name, packed.float(), expected.float(), module.dtype if weights is None else torch.float32)
    return ProbeResult(vocab_size=int(packed.shape[1]), layer_shapes=cache.shapes())


@contextmanager
def _named(failed: str) -> Iterator[None]:
    """Turn whatever a foreign forward raises into a ModelError: the way out is the same."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{failed}: {type(error).__name__}: {error}") from error


@contextmanager
def _short_windows(module: Any) -> Iterator[None]:
    """Cut sliding windows to WINDOW tokens in this block: short requests would not show a larger one.

    One as long as the context cuts nothing off, so that an architecture may as well ignore it: it stays.
    """
    text = module.config.get_text_config()
    context = getattr(text, "max_position_embeddings", None) or float("inf")
    windows = [(place, vars(place).get("sliding_window")) for place in (module.config, text, *module.modules())]
    former = [(place, window) for place, window in windows if isinstance(window, int) and window < context]
    try:
        for place, window in former:
            place.sliding_window = min(window, WINDOW)
        yield
    finally:
        for place, window in former:
            place.sliding_window = window


def _requests(module: Any) -> tuple[np.ndarray, np.ndarray]:
    """Two prompts of 8 and 9 different ids, spread over the vocabulary."""
    ids = (np.arange(17) * 7919 + 17) % module.config.get_text_config().vocab_size
    return ids[:8], ids[8:]


def _packed_logits(
    module: Any,
    weights: Weights,
    first: np.ndarray,
    second: np.ndarray,
    cache: PagedCache,
    *,
    deterministic: bool = False,
) -> torch.Tensor:
    """Return the logits of all 17 tokens, first request first, from two packed steps over shuffled blocks."""
    tables = np.array([[5, 2, 0], [1, 7, 3]], np.int32)
    early = run_step(module, pack([(first, 0, 7), (second, 0, 4)], tables), cache, weights, deterministic=deterministic)
    late = run_step(module, pack([(first, 7, 8), (second, 4, 9)], tables), cache, weights, deterministic=deterministic)
    return torch.cat([early[:7], late[:1], early[7:], late[1:]])


def check_bits(module: Any) -> None:
    """Raise ModelError unless `module`, attending through klero, is batch-invariant, as far as a load can tell.

    No operator that nobody measured may be reached, and two requests in packed steps must have, in bits and in the
    module's own dtype, the logits of each of them alone.
    """
    name = type(module).__name__
    cache = PagedCache(num_blocks=8, block_size=BLOCK_SIZE)
    first, second = _requests(module)
    with _named(f"{name} cannot compute a packed step"):
        with Audit():
            packed = _packed_logits(module, None, first, second, cache, deterministic=True)
        steps = [pack([(ids, 0, len(ids))], np.array([[6, 4, 5]], np.int32)) for ids in (first, second)]
        alone = torch.cat([run_step(module, step, cache, deterministic=True) for step in steps])
    if not torch.equal(alone, packed):
        raise ModelError(
            f"{name}: a request alone and the same one in company give other bits on this machine, with all "
            "products in one class; pass deterministic=False to run it all the same"
        )


def _eager_logits(module: Any, weights: Weights, requests: tuple[np.ndarray, ...]) -> torch.Tensor:
    """Return the logits of all tokens of the requests, each computed alone by the module's own attention."""
    use_attention(module, "eager")
    try:
        with torch.inference_mode():
            rows = [call(module, weights, input_ids=torch.from_numpy(ids).to(module.device)[None]) for ids in requests]
    finally:
        use_attention(module, ATTENTION_NAME)
    return torch.cat(rows)


def _float32_copy(module: Any) -> Weights:
    """Return the weights in float32 by name; None if they are that already, too many, or not plain floats."""
    weights = dict(module.named_parameters())
    if all(weight.dtype == torch.float32 for weight in weights.values()):
        return None
    if not all(weight.is_floating_point() for weight in weights.values()):
        return None
    if sum(weight.numel() for weight in weights.values()) > MAX_COPIED_WEIGHTS:
        return None
    return {name: weight.detach().float() for name, weight in weights.items()}


def _compare(name: str, packed: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise ModelError if the logits [17, V] differ by more than rounding, relative to their spread."""
    if packed.shape != expected.shape:
        raise ModelError(f"{name}: packed logits are {tuple(packed.shape)}, plain ones {tuple(expected.shape)}")
    if told := _differ(packed, expected, dtype):
        raise ModelError(
            f"{name}: two packed requests give other logits than its eager attention ({told}), so klero would serve "
            "wrong tokens; the architecture needs a Model of its own"
        )


def _differ(logits: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> str | None:
    """Say by how much two tensors of logits of one shape differ; None if that is rounding, relative to their spread."""
    tolerance = TOLERANCE if dtype == torch.float32 else COARSE_TOLERANCE
    spread = float(expected.std())
    distance = float((logits - expected).square().mean().sqrt())
    if distance <= tolerance * max(spread, 1e-12):  # not when either is NaN
        return None
    return f"distance {distance:.3g}, spread {spread:.3g}, allowed {tolerance:g} of it in {dtype}"


def embedding_width(module: Any, *, deterministic: bool) -> int:
    """Return H, the width of the embeddings that `module`, switched to klero's attention, takes in place of ids.

    ModelError unless the embeddings of ids give the logits of the ids: in bits, where the same step twice gives the
    same bits. Most architectures do to embeddings, once they are looked up, what they do to given ones. Some need the
    ids for more than that, or do something to ids alone, which may be little; a configuration does not tell.
    """
    name = f"{type(module).__name__} takes ids only"
    tables = np.array([[5, 2, 0], [1, 7, 3]], np.int32)
    step = pack([(ids, 0, len(ids)) for ids in _requests(module)], tables)
    with _named(f"{name}, and fails with embeddings in place of them"):
        with torch.inference_mode():
            ids = torch.from_numpy(step.input_ids).long().to(module.device)
            embeds = module.get_input_embeddings()(ids).float().cpu().numpy()
        given = {"inputs_embeds": embeds, "is_embedded": np.ones(len(embeds), bool)}
        embedded = dataclasses.replace(step, input_ids=np.zeros_like(step.input_ids), **given)
        of_ids, again, of_embeddings = (
            run_step(module, one, PagedCache(8, BLOCK_SIZE), deterministic=deterministic)
            for one in (step, step, embedded)
        )
    told = _differ(of_embeddings.float(), of_ids.float(), module.dtype)
    if told is None and torch.equal(of_ids, again) and not torch.equal(of_ids, of_embeddings):
        told = f"by {float((of_ids - of_embeddings).abs().max()):.1g} at most, where rounding is the same"
    if told:
        raise ModelError(f"{name}: the embeddings of two requests give other logits than their ids ({told})")
    return int(embeds.shape[1])
