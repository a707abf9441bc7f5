"""klero.sample: logits in, tokens out, nothing remembered."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from klero.batch import History
from klero.device import HAVE_NUMBA, Backend, choose_backend
from klero.errors import Fault, ParameterError
from klero.grammar.masks import Masks
from klero.logprobs import asks_of, score
from klero.params import SamplingParams, check_seed, rows_of_bytes, seed_bits
from klero.params.decay import top_p_after
from klero.rewrite import Context, Rules
from klero.rows.inputs import read_logits, width_without_padding
from klero.rows.topk import topk
from klero.sampling.contexts import OF_ROWS, Names, contexts_of, of_each_row
from klero.sampling.work import WIDE, Patched, Sampled, Work, is_hosted


def sample(
    logits: Any,
    params: SamplingParams | Sequence[SamplingParams],
    *,
    positions: Any = None,
    seeds: Any = None,
    children: Any = None,
    prompts: Any = None,
    outputs: Any = None,
    masks: Any = None,
    end_token_ids: Any = None,
    padded_from: int | None = None,
    backend: Backend = "auto",
) -> Sampled:
    """Draw one token from each row: a pure function of row, parameters, history, mask, seed, position and child.

    Args:
        logits: [R, V] float32, float16 or bfloat16; NumPy (bfloat16 also as uint16 bits), torch on the CPU, or anything
            with DLPack. Read, never modified. R may be 0; V is at most 2^22.
        params: one SamplingParams for all rows, or a sequence of R. Everything that decides a token is read, and
            what is said about it; n, stop, max_tokens, the text fields, prompt_logprobs, return_context_logits and
            return_generation_logits belong to a request, which this function does not know. bad_words needs a tokenizer
            and is an error here.
        positions: int or int [R], >= 0: the absolute index of the token being produced (prompt length for the first).
            None: the length of the row's prompt and output.
        seeds: None, int or int [R] (as SamplingParams.seed). A row's seed comes from here or from its params, not from
            both; without either it gets a fresh one from the operating system, reported in `Sampled.seeds`.
            Rows with the same seed, position and child share their lots: give each its own unless you mean that.
        children: None (0), int or int [R], >= 0: the index of the choice.
        prompts, outputs: None, or R lists of token ids: what penalties, n-grams, bad sequences, min_tokens, decay and
            processors read. A row that reads its history must be told it, by empty lists if there is none.
        masks: None, or int32 [R, ceil(V / 32)], NumPy or torch: bit i & 31 of word i >> 5 is 1 where token i is
            allowed. Columns beyond a narrower mask are banned.
        end_token_ids: the model's end ids, for min_tokens.
        padded_from: columns from here on are padding: never read, never drawn. None: there is none.
        backend: "auto", "cpu" (Numba) or "reference" (NumPy); the tokens are the same, bit for bit.

    Returns: Sampled. With return_probs=True, `Sampled.probs` is the distribution that the token was drawn from, of the
    same filtering (else None); who wants probabilities alone leaves the token unused, and none of them depends on it.
    Raises: LogitsError for what is not logits, ParameterError for parameters. Formula: docs/draw.md.
    """
    read = read_logits(logits)
    num_rows, columns = read.rows.shape
    width = width_without_padding(padded_from, columns)
    given = params_of_rows(params, num_rows)
    contexts = contexts_of(
        given, num_rows, columns, padded_from=width, prompts=prompts, outputs=outputs, masks=masks,
        end_token_ids=end_token_ids,
    )  # fmt: skip
    rows = rows_of_bytes([one.row_bytes for one in given], num_rows)
    for r, at in contexts.items():
        if at.params.decay is not None:
            rows[r] = at.params.row_at(top_p_after(at.params.decay, at.output_ids))
    if positions is None:
        positions = positions_of(prompts, outputs)
    work = Work(
        read.rows, width, rows, resolve_seeds(given, seeds, num_rows), counters("positions", positions, num_rows),
        counters("children", 0 if children is None else children, num_rows), choose_backend(backend),
        asks_of(of_each_row(given, num_rows), width) if contexts else None,
    )  # fmt: skip
    plain = [r for r in range(num_rows) if r not in contexts] if contexts else range(num_rows)
    work.run_plain(np.array(plain, np.int64))
    if contexts:
        run_rewritten(work, contexts)
    return work.sampled(read.home)


def run_rewritten(work: Work, contexts: dict[int, Context]) -> None:
    """Sample the rows that are rewritten, by row: with the kernel where it has all they ask for."""
    hosted = {r: at for r, at in contexts.items() if work.backend == "reference" or is_hosted(at.params)}
    work.run_hosted(hosted)
    patched = [r for r in contexts if r not in hosted]
    if not patched:
        return
    longest = max(len(contexts[r].history) for r in patched)
    history = History(len(patched), longest + 1)
    rules, slots = Rules(len(patched), work.width, history), np.zeros(len(work.rows), np.int32)
    for slot, r in enumerate(patched):
        slots[r] = slot
        history.start(slot, contexts[r].prompt_ids, contexts[r].output_ids)
        rules.start(slot, contexts[r])
    masks = rules.masks(slots).joined(_masks_of(contexts, len(work.rows), work.width))
    free = [slots[r] for r in patched if not contexts[r].awaits_min_tokens]
    patch = Patched(rules.arrays(without_min_tokens=free), slots, *masks)
    work.run_patched(np.array(patched), patch, contexts.__getitem__)


def _masks_of(contexts: dict[int, Context], num_rows: int, num_tokens: int) -> Masks:
    """The masks of the rows that have one."""
    given = {r: at.mask for r, at in contexts.items() if at.mask is not None}
    if not given:
        return Masks.none(num_rows, num_tokens)
    of_row = np.full(num_rows, -1, np.int32)
    of_row[list(given)] = np.arange(len(given))
    return Masks(np.stack(list(given.values())), of_row)


def warm_up(dtype: npt.DTypeLike = np.float32, *, rewriting: bool = False, scoring: bool = False) -> None:
    """Compile the kernels for logits of a dtype, or load them from the cache; the first use does it otherwise.

    rewriting: those for rows that rules rewrite, and for what the rules remember, too. scoring: those for logprobs, for
    top-k alone and for wide rows.
    """
    rows, params = np.zeros((1, 8), dtype), SamplingParams(temperature=1.0, seed=0)
    sample(rows, params, positions=0)
    if scoring:
        sample(rows, SamplingParams(temperature=1.0, seed=0, logprobs=1, return_kept=True), positions=0)
        score(rows, [0], num_top=1)
        topk(rows, 1)
        sample(np.zeros((1, WIDE), dtype), params, positions=0)
    if rewriting and HAVE_NUMBA:
        params = SamplingParams(temperature=1.0, seed=0, repetition_penalty=2, no_repeat_ngram_size=2)
        sample(rows, params, prompts=[[1, 2]], outputs=[[1]])
        history, slot, token = History(1, 8), np.zeros(1, np.int32), np.ones(1, np.int32)
        rules = Rules(1, 8, history)
        history.start(0, token)
        rules.start(0, Context(params, token))
        history.append(slot, token)
        rules.append(slot, token)


def params_of_rows(params: SamplingParams | Sequence[SamplingParams], num_rows: int) -> list[SamplingParams]:
    """The parameters of R rows: one for each, or one for all."""
    if isinstance(params, SamplingParams):
        return [params]
    listed = isinstance(params, Sequence) and all(isinstance(p, SamplingParams) for p in params)
    if not listed or len(params) != num_rows:
        fault = Fault("params", params, f"must be one SamplingParams, or as many as there are rows ({num_rows})")
        raise ParameterError([fault])
    return list(params)


def positions_of(prompts: Any, outputs: Any, names: Names = OF_ROWS) -> Any:
    """Where the next token of each row stands, from its history."""
    if prompts is None or outputs is None:
        rule = f"must be given, or {names.prompts}= and {names.outputs}=, from which it follows"
        raise ParameterError([Fault(names.positions, None, rule)])
    return [len(prompt) + len(output) for prompt, output in zip(prompts, outputs, strict=True)]


def resolve_seeds(params: Sequence[SamplingParams], seeds: Any, num_rows: int) -> npt.NDArray[np.uint64]:
    """The seed of each row, uint64 [R]: from params (of each or of all), from `seeds`, or from the operating system."""
    given: list[int | None] = [one.seed for one in params]
    if seeds is not None:
        if any(seed is not None for seed in given):
            raise ParameterError([Fault("seeds", seeds, "stands beside a seed in params; give one of them")])
        given = _checked_seeds(seeds, num_rows)
    bits = np.array([seed_bits(seed) for seed in given if seed is not None], np.uint64)
    if len(bits) < len(given):
        known, bits = bits, np.frombuffer(secrets.token_bytes(8 * num_rows), np.uint64).copy()
        if len(given) == num_rows:
            bits[[seed is not None for seed in given]] = known
    return bits if len(bits) == num_rows else bits.repeat(num_rows)


def _checked_seeds(seeds: Any, num_rows: int) -> list[int | None]:
    """`seeds` as the integers of R rows, or as one for all."""
    if np.ndim(seeds) == 0:
        return [check_seed("seeds", seed) for seed in [seeds][:num_rows]]
    if len(seeds) != num_rows:
        raise ParameterError([Fault("seeds", seeds, f"must be one integer or one for each of the {num_rows} rows")])
    if isinstance(seeds, np.ndarray) and seeds.ndim == 1 and seeds.dtype.kind in "iu":
        integers: list[int | None] = seeds.tolist()
        return integers
    return [check_seed("seeds", seed) for seed in seeds]


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
