"""klero.sample: logits in, tokens out, nothing remembered."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from klero.device import Backend, choose_backend, first_use, num_threads, over_rows
from klero.errors import Fault, ParameterError
from klero.params import RowParams, SamplingParams, check_seed, seed_bits, stack_rows
from klero.sampling import fused
from klero.sampling.fused import reference
from klero.sampling.inputs import as_bits, as_float32, read_logits


@dataclass(frozen=True)
class Sampled:
    """What R rows came to; arrays live where the logits live (NumPy, or torch for torch logits).

    token_ids: int32 [R], -1 where the status is not 0. status: uint8 [R], 0 ok, 1 NaN or +inf in the row, 2 every token
    is -inf. num_kept: int32 [R], tokens that survived the filters (greedy: 1). seeds: uint64 [R], the seed of each row.
    """

    token_ids: Any
    status: Any
    num_kept: Any
    seeds: Any


def sample(
    logits: Any,
    params: SamplingParams | Sequence[SamplingParams],
    *,
    positions: Any,
    seeds: Any = None,
    children: Any = None,
    backend: Backend = "auto",
) -> Sampled:
    """Draw one token from each row: a pure function of the row's bits, its parameters, seed, position and child.

    Args:
        logits: [R, V] float32, float16 or bfloat16; NumPy (bfloat16 also as uint16 bits), torch on the CPU, or anything
            with DLPack. Read, never modified. R may be 0; V is at most 2^22.
        params: one SamplingParams for all rows, or a sequence of R. Only the shaping fields and `seed` are read; n,
        stop,
            max_tokens, min_tokens and the text fields belong to a request, which this function does not know.
        positions: int or int [R], >= 0: the absolute index of the token being produced (prompt length for the first).
        seeds: None, int or int [R] (as SamplingParams.seed). A row's seed comes from here or from its params, not from
            both; without either it gets a fresh one from the operating system, reported in `Sampled.seeds`.
            Rows with the same seed, position and child share their lots: give each its own unless you mean that.
        children: None (0), int or int [R], >= 0: the index of the choice.
        backend: "auto", "cpu" (Numba) or "reference" (NumPy); the tokens are the same, bit for bit.

    Returns: Sampled. Raises: LogitsError for what is not logits, ParameterError for parameters.
    Formula: docs/draw.md.
    """
    read = read_logits(logits)
    num_rows = read.rows.shape[0]
    rows = stack_rows(rows_of(params, num_rows))
    seed_of_row = resolve_seeds(params, seeds, num_rows)
    position_of_row = counters("positions", positions, num_rows)
    child_of_row = counters("children", 0 if children is None else children, num_rows)
    token_ids, status, num_kept = run(
        read.rows, rows, seed_of_row, position_of_row, child_of_row, choose_backend(backend)
    )
    return Sampled(*(read.home(array) for array in (token_ids, status, num_kept, seed_of_row)))


def run(
    rows: npt.NDArray[Any],
    params: npt.NDArray[Any],
    seeds: npt.NDArray[np.uint64],
    positions: npt.NDArray[np.uint32],
    children: npt.NDArray[np.uint32],
    backend: Backend,
    chosen: npt.NDArray[np.int64] | None = None,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    """Run the fused pass on a backend: (token_ids, status, num_kept), each [R].

    rows: from `read_logits`; params: ROW_DTYPE [R]; chosen: the rows to sample, None for all; the others stay unset.
    """
    num_rows = rows.shape[0]
    out = (np.empty(num_rows, np.int32), np.empty(num_rows, np.uint8), np.empty(num_rows, np.int32))
    which = np.arange(num_rows) if chosen is None else chosen
    if backend == "reference":
        reference.sample_rows(as_float32(rows), which, params, seeds, positions, children, *out)
        return out
    kernel, bits = fused.cpu_kernel(), as_bits(rows)

    def work(begin: int, end: int) -> None:
        kernel(bits, which[begin:end], params, seeds, positions, children, *out)

    with first_use(bits.dtype.name):
        over_rows(work, len(which), num_threads())
    return out


def warm_up(dtype: npt.DTypeLike = np.float32) -> None:
    """Compile the kernels for logits of a dtype, or load them from the cache; the first `sample` does it otherwise."""
    sample(np.zeros((1, 8), dtype), SamplingParams(temperature=1.0, seed=0), positions=0)


def rows_of(params: SamplingParams | Sequence[SamplingParams], num_rows: int) -> list[RowParams]:
    """The row parameters of R rows from one SamplingParams or R of them."""
    if isinstance(params, SamplingParams):
        return [params.row] * num_rows
    listed = isinstance(params, Sequence) and all(isinstance(p, SamplingParams) for p in params)
    if not listed or len(params) != num_rows:
        fault = Fault("params", params, f"must be one SamplingParams, or as many as there are rows ({num_rows})")
        raise ParameterError([fault])
    return [p.row for p in params]


def resolve_seeds(
    params: SamplingParams | Sequence[SamplingParams], seeds: Any, num_rows: int
) -> npt.NDArray[np.uint64]:
    """The seed of each row, uint64 [R]: from params, from `seeds`, or fresh from the operating system."""
    asked = [params.seed] if isinstance(params, SamplingParams) else [p.seed for p in params]
    fresh = np.frombuffer(secrets.token_bytes(8 * num_rows), np.uint64).copy()
    if seeds is None:
        given = asked * num_rows if isinstance(params, SamplingParams) else asked
    elif any(seed is not None for seed in asked):
        raise ParameterError([Fault("seeds", seeds, "stands beside a seed in params; give one of them")])
    else:
        given = [seeds] * num_rows if np.ndim(seeds) == 0 else list(seeds)
    if len(given) != num_rows:
        raise ParameterError([Fault("seeds", seeds, f"must be one integer or one for each of the {num_rows} rows")])
    for r, seed in enumerate(given):
        if seed is not None:
            fresh[r] = seed_bits(check_seed("seeds", seed) or 0)
    return fresh


def counters(name: str, given: Any, num_rows: int) -> npt.NDArray[np.uint32]:
    """positions or children as uint32 [R]: integers in [0, 2^32 - 1]."""
    if type(given) is int and 0 <= given < 2**32:
        return np.full(num_rows, given, np.uint32)
    fault = Fault(name, given, f"must be an integer in [0, 2^32-1], or one for each of the {num_rows} rows")
    try:
        array = np.asarray(given)
    except (ValueError, RuntimeError, TypeError):
        raise ParameterError([fault]) from None
    if array.dtype == object or array.dtype.kind not in "iu" or array.shape not in ((), (num_rows,)):
        if not (array.size == 0 and num_rows == 0):
            raise ParameterError([fault])
        array = np.zeros(0, np.uint32)
    if array.size and (array.min() < 0 or array.max() > 2**32 - 1):
        raise ParameterError([fault])
    return np.array(np.broadcast_to(array, num_rows), dtype=np.uint32)
