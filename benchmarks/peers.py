"""What klero is compared with. Each peer does only the parts that a parameter set needs, and never writes to its input.

"torch sort": what inference engines run on a CPU for a batch of mixed requests: sort, mask, scatter back, softmax, then
a race of exponential clocks (the largest probability / noise wins). "torch topk": torch written for one top-k and no
more, as everything after `torch.topk` works on k columns; only for sets with top-k. "warpers": transformers' own logits
processors, then softmax and torch.multinomial, as its `generate` does. "llama.cpp": its sampler chain, where
llama-cpp-python is installed. "numpy": NumPy written well, no sort of the vocabulary, and the draw is an inverse CDF
over what was kept. None of them is pinned or batch-invariant, and none looks for NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks import llamacpp
from benchmarks.cases import Rows, Setting

try:
    from transformers.generation import logits_process
except ImportError:
    logits_process = None

NEVER = float("-inf")
NAMES = ("torch sort", "torch topk", "warpers", "llama.cpp", "numpy")


def as_tensor(rows: Rows) -> torch.Tensor:
    """The rows as torch has them, of their own dtype and in the same memory."""
    tensor = torch.from_numpy(rows.values)
    return tensor.view(torch.bfloat16) if rows.dtype == "bfloat16" else tensor


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


@functools.cache
def warpers_of(setting: Setting) -> Any:
    """transformers' processors for a setting, in the order in which its `generate` runs them."""
    made = logits_process.LogitsProcessorList()
    if setting.temperature != 1:
        made.append(logits_process.TemperatureLogitsWarper(setting.temperature))
    if setting.top_k is not None:
        made.append(logits_process.TopKLogitsWarper(setting.top_k))
    if setting.top_p is not None:
        made.append(logits_process.TopPLogitsWarper(setting.top_p))
    if setting.min_p is not None:
        made.append(logits_process.MinPLogitsWarper(setting.min_p))
    return made


def warped(logits: torch.Tensor, setting: Setting) -> torch.Tensor:
    """Logits [R, V] after transformers' processors, float32; -inf where one removed the token."""
    return warpers_of(setting)(None, logits.float())


def warper_chain(logits: torch.Tensor, setting: Setting) -> torch.Tensor:
    """Token ids [R] of logits [R, V], as transformers' `generate` samples."""
    return torch.multinomial(warped(logits, setting).softmax(dim=-1), num_samples=1)[:, 0]


@functools.cache
def llama_chain(setting: Setting, width: int) -> llamacpp.Chain:
    """llama.cpp's samplers for a setting, over rows of one width."""
    return llamacpp.Chain(setting, width)


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
    elif peer == "llama.cpp":
        chain = llama_chain(setting, rows.values.shape[1])
        yield from (chain.kept(row) for row in rows.as_float32())
    elif peer == "torch topk":
        values, ids = topk_filtered(as_tensor(rows), setting)
        for value, some in zip(values, ids, strict=True):
            yield set(some[value > NEVER].tolist())
    else:
        filtered = (warped if peer == "warpers" else sort_filtered)(as_tensor(rows), setting)
        for row in filtered:
            yield set((row > NEVER).nonzero()[:, 0].tolist())


def missing() -> list[str]:
    """What is left out here, and what to install for it."""
    left_out = []
    if logits_process is None:
        left_out.append("transformers' warpers are left out: pip install 'klero[engine]'")
    if llamacpp.api is None:
        left_out.append("llama.cpp's sampler chain is left out: pip install 'klero[llamacpp]'")
    return left_out


def peers_of(setting: Setting) -> list[str]:
    """The peers that are installed and can serve a setting."""
    top_k = setting.top_k is not None and not setting.greedy
    able = {
        "torch topk": top_k,
        "warpers": logits_process is not None and not setting.greedy,  # greedy, transformers calls torch.argmax too
        "llama.cpp": llamacpp.api is not None,
    }
    return [peer for peer in NAMES if able.get(peer, True)]


def sorts(peer: str, setting: Setting) -> bool:
    """Whether a peer sorts whole rows for a setting: some 17 ms for a row of 128,256."""
    asked = setting.top_p is not None or (setting.top_k is not None and peer == "torch sort")
    return peer in ("torch sort", "warpers") and asked


def timed_with(rows: Rows, setting: Setting) -> list[str]:
    """The peers that run beside klero on these rows."""
    if rows.peers == "none":
        return []
    return [peer for peer in peers_of(setting) if rows.peers == "all" or not sorts(peer, setting)]


def draw_call(peer: str, rows: Rows, setting: Setting) -> Callable[[], Any]:
    """A call that draws token ids [R] from a peer once."""
    if peer == "numpy":
        rng = np.random.default_rng(1)
        return lambda: numpy_sampler(rows, setting, rng)
    if peer == "llama.cpp":
        chain = llama_chain(setting, rows.values.shape[1])
        return lambda: chain.draw(rows)
    tensor = as_tensor(rows)
    chain_of = {"torch sort": sort_chain, "torch topk": topk_chain, "warpers": warper_chain}[peer]
    return lambda: chain_of(tensor, setting)
