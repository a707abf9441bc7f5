"""What `klero.sample` and `klero.explain` are told about histories, as one Context per row that is rewritten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from klero.errors import Fault, ParameterError
from klero.params import SamplingParams
from klero.params.width import check_width
from klero.rewrite import Context
from klero.rows.inputs import ids_of

I32 = npt.NDArray[np.int32]


def contexts_of(
    params: Sequence[SamplingParams],
    width: int,
    *,
    padded_from: int,
    prompts: Any,
    outputs: Any,
    masks: Any,
    end_token_ids: Any,
) -> dict[int, Context]:
    """The contexts of the rows that anything rewrites, by row. Raises ParameterError for what does not fit.

    prompts, outputs: None, or R lists of token ids. masks: None or int32 [R, W]. end_token_ids: None or the model's.
    """
    prompt_of = histories("prompts", prompts, len(params), width)
    output_of = histories("outputs", outputs, len(params), width)
    mask_of = read_masks(masks, len(params), width, padded_from)
    masked = np.zeros(len(params), bool) if mask_of is None else (mask_of != -1).any(axis=1)
    ends = () if end_token_ids is None else tuple(ids_of("end_token_ids", end_token_ids, width).tolist())
    told = prompts is not None and outputs is not None
    contexts = {}
    for r, one in enumerate(params):
        if masked[r] or one.rewrites or one.min_tokens or one.decay or one.has_own_filters or one.asks:
            check_width(one, width, padded_from)
            _check_told(one, told, end_token_ids is not None)
            mask = mask_of[r] if mask_of is not None and masked[r] else None
            contexts[r] = Context(one, prompt_of[r], output_of[r], ends, (), mask)
    return contexts


def histories(name: str, given: Any, num_rows: int, width: int) -> list[I32]:
    """prompts or outputs as R arrays of token ids; None: all empty."""
    if given is None:
        return [np.empty(0, np.int32)] * num_rows
    if isinstance(given, str | dict) or not hasattr(given, "__len__") or len(given) != num_rows:
        raise ParameterError([Fault(name, given, f"must be {num_rows} lists of token ids, one for each row")])
    return [ids_of(name, ids, width) for ids in given]


def read_masks(masks: Any, num_rows: int, width: int, padded_from: int) -> I32 | None:
    """Masks as int32 [R, W] for the columns before the padding; what lies beyond a narrower mask is banned."""
    if masks is None:
        return None
    words = -(-width // 32)
    given = masks.numpy() if type(masks).__module__.partition(".")[0] == "torch" else np.asarray(masks)
    if given.ndim != 2 or len(given) != num_rows or given.dtype.kind not in "iu" or given.dtype.itemsize != 4:
        rule = f"must be int32 [{num_rows}, {words}], bit i & 31 of word i >> 5 set where token i is allowed"
        raise ParameterError([Fault("masks", f"{given.dtype} {given.shape}", rule)])
    if given.shape[1] > words:
        rule = f"must not be wider than the logits: {words} words hold {width} bits"
        raise ParameterError([Fault("masks", given.shape, rule)])
    given, kept = given.astype(given.dtype.newbyteorder("="), copy=False), -(-padded_from // 32)
    if given.shape[1] == kept and given.flags.c_contiguous and given.flags.writeable:  # one kind of array for kernels
        return given.view(np.int32)
    whole = np.zeros((num_rows, kept), np.int32)
    whole[:, : given.shape[1]] = given[:, :kept].view(np.int32)
    return whole


def _check_told(params: SamplingParams, told: bool, ends_told: bool) -> None:
    """Refuse what would be ignored for want of a history, end ids or a tokenizer."""
    faults = []
    if params.bad_words:
        rule = "are text, and there is no tokenizer here; give bad_token_ids, with and without the leading space"
        faults.append(Fault("bad_words", params.bad_words, rule))
    if not told:
        rule = "reads the history; give prompts= and outputs= (empty lists where nothing was generated yet)"
        faults += [Fault(name, getattr(params, name), rule) for name in _reads_history(params)]
    if params.min_tokens and not ends_told and not params.ignore_eos:
        rule = "bans the model's end ids; give end_token_ids= (an empty list for a model without)"
        faults.append(Fault("min_tokens", params.min_tokens, rule))
    if faults:
        raise ParameterError(faults)


def _reads_history(params: SamplingParams) -> list[str]:
    """The fields that ask what was said before."""
    asked = {
        "top_p_decay": params.decay is not None,
        "repetition_penalty": params.repetition_penalty != 1,
        "presence_penalty": params.presence_penalty != 0,
        "frequency_penalty": params.frequency_penalty != 0,
        "bad_token_ids": any(len(word) > 1 for word in params.bad_token_ids),
        "no_repeat_ngram_size": params.no_repeat_ngram_size > 0,
        "logits_processors": bool(params.logits_processors),
        "min_tokens": params.min_tokens > 0,
    }
    return [name for name, reads in asked.items() if reads]
