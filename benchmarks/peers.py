"""What klero is compared with. Each peer does only the parts that a parameter set needs, and never writes to its input.

"torch sort": what inference engines run on a CPU for a batch of mixed requests: sort, mask, scatter back, softmax, then
a race of exponential clocks (the largest probability / noise wins). "torch topk": torch written for one top-k and no
more, as everything after `torch.topk` works on k columns; only for sets with top-k. "numpy": NumPy written well, no
sort of the vocabulary, and the draw is an inverse CDF over what was kept. None of them is pinned, seeded by row or
batch-invariant, and none looks for NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.cases import Rows, Setting

NEVER = float("-inf")


def as_tensor(rows: Rows) -> torch.Tensor:
    """The rows as torch has them, float32 or bfloat16, in the same memory."""
    tensor = torch.from_numpy(rows.values)
    return tensor.view(torch.bfloat16) if rows.is_bfloat16 else tensor


def sort_chain(logits: torch.Tensor, setting: Setting) -> torch.Tensor:
    """Token ids [R] of logits [R, V]."""
    if setting.greedy:
        return logits.argmax(dim=-1)
    return race(sort_filtered(logits, setting).softmax(dim=-1))


def race(probs: torch.Tensor) -> torch.Tensor:
    """One draw from each row of weights [R, N], which are overwritten: the columns [R]."""
    return probs.div_(torch.empty_like(probs).exponential_()).argmax(dim=-1)


def sort_filtered(logits: torch.Tensor, setting: Setting) -> torch.Tensor:
    """Logits [R, V] at their temperature, float32, with -inf where a filter removed the token."""
    x = logits.float()
    if setting.temperature != 1:
        x = x / setting.temperature
    if setting.min_p is not None:
        probs = x.softmax(dim=-1)
        x = x.masked_fill(probs < setting.min_p * probs.amax(dim=-1, keepdim=True), NEVER)
    if setting.top_k is None and setting.top_p is None:
        return x
    values, ids = x.sort(dim=-1)
    if setting.top_k is not None:
        smallest = values[:, -setting.top_k, None]
        values = values.masked_fill_(values < smallest, NEVER)
    if setting.top_p is not None:
        below = values.softmax(dim=-1).cumsum(dim=-1)  # ascending: the mass up to and with each token
        gone = below <= 1 - setting.top_p
        gone[:, -1] = False
        values = values.masked_fill_(gone, NEVER)
    return torch.empty_like(values).scatter_(-1, ids, values)


def topk_chain(logits: torch.Tensor, setting: Setting) -> torch.Tensor:
    """Token ids [R] of logits [R, V], for a setting with top-k."""
    values, ids = topk_filtered(logits, setting)
    return ids.gather(-1, race(values.softmax(dim=-1))[:, None])[:, 0]


def topk_filtered(logits: torch.Tensor, setting: Setting) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest logits of each row, -inf where top-p removed the token, and their ids; both [R, k]."""
    values, ids = logits.topk(setting.top_k, dim=-1)
    values = values.float()
    if setting.temperature != 1:
        values = values / setting.temperature
    if setting.top_p is not None:
        probs = values.softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs
        values = values.masked_fill(before >= setting.top_p, NEVER)
    return values, ids


def numpy_sampler(rows: Rows, setting: Setting, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Token ids [R] of the rows."""
    logits = rows.as_float32()
    if setting.greedy:
        return np.asarray(logits.argmax(axis=1), np.int64)
    tokens = np.empty(len(logits), np.int64)
    for r, row in enumerate(logits):
        ids, weights = numpy_kept(row, setting)
        mass = weights.cumsum(dtype=np.float64)
        place = int(mass.searchsorted(rng.random() * mass[-1], side="right"))
        tokens[r] = place if ids is None else ids[place]
    return tokens


def numpy_kept(row: npt.NDArray[np.float32], setting: Setting) -> tuple[Any, npt.NDArray[np.float32]]:
    """What the filters leave of one row: ids (None: all of them) and weights."""
    ids: Any = None
    if setting.top_k is not None and setting.top_k < len(row):
        ids = np.argpartition(row, -setting.top_k)[-setting.top_k :]
        row = row[ids]
    weights = row - row.max()
    if setting.temperature != 1:
        weights *= np.float32(1 / setting.temperature)
    np.exp(weights, out=weights)
    if setting.min_p is not None:
        ids, weights = _chosen(ids, weights, np.flatnonzero(weights >= setting.min_p))
    if setting.top_p is not None:
        ids, weights = _nucleus(ids, weights, setting.top_p)
    return ids, weights


def _nucleus(ids: Any, weights: npt.NDArray[np.float32], top_p: float) -> tuple[Any, npt.NDArray[np.float32]]:
    """Sort only what can be in the nucleus: tokens below the bound hold less than 1 - top_p even if all lie at it."""
    total = float(weights.sum(dtype=np.float64))
    ids, weights = _chosen(ids, weights, np.flatnonzero(weights > total * (1 - top_p) / len(weights)))
    order = np.argsort(-weights)
    mass = weights[order].cumsum(dtype=np.float64)
    return _chosen(ids, weights, order[: int(mass.searchsorted(top_p * total)) + 1])


def _chosen(ids: Any, weights: npt.NDArray[np.float32], places: Any) -> tuple[Any, npt.NDArray[np.float32]]:
    return places if ids is None else ids[places], weights[places]


def kept_sets(peer: str, rows: Rows, setting: Setting) -> Iterator[set[int]]:
    """The ids that a peer keeps of each row, for the gate."""
    if peer == "numpy":
        for row in rows.as_float32():
            ids, _ = numpy_kept(row, setting)
            yield set(range(len(row)) if ids is None else ids.tolist())
    elif peer == "torch topk":
        values, ids = topk_filtered(as_tensor(rows), setting)
        for value, some in zip(values, ids, strict=True):
            yield set(some[value > NEVER].tolist())
    else:
        for row in sort_filtered(as_tensor(rows), setting):
            yield set((row > NEVER).nonzero()[:, 0].tolist())


def peers_of(setting: Setting) -> list[str]:
    """The peers that can serve a setting; the first is the one that targets speak of."""
    has_top_k = setting.top_k is not None and not setting.greedy
    return ["torch sort", "torch topk", "numpy"] if has_top_k else ["torch sort", "numpy"]


def draw(peer: str, rows: Rows, tensor: torch.Tensor, setting: Setting, rng: np.random.Generator) -> Any:
    """Token ids [R] from a peer. tensor: the rows as torch has them."""
    if peer == "numpy":
        return numpy_sampler(rows, setting, rng)
    return topk_chain(tensor, setting) if peer == "torch topk" else sort_chain(tensor, setting)
