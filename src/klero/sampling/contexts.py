"""What `klero.sample` and `klero.explain` are told about histories, as one Context per row that is rewritten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from klero.errors import Fault, ParameterError
from klero.params import SamplingParams
from klero.params.width import check_width
from klero.rewrite import Context
from klero.rows.inputs import ids_of

I32 = npt.NDArray[np.int32]


class Names(NamedTuple):
    """What a function calls its arguments, for messages."""

    positions: str
    prompts: str
    outputs: str
    masks: str


OF_ROWS = Names("positions", "prompts", "outputs", "masks")
OF_ONE_ROW = Names("position", "prompt", "output", "mask")


def contexts_of(
    params: Sequence[SamplingParams],
    num_rows: int,
    width: int,
    *,
    padded_from: int,
    prompts: Any,
    outputs: Any,
    masks: Any,
    end_token_ids: Any,
    names: Names = OF_ROWS,
) -> dict[int, Context]:
    """The contexts of the rows that anything rewrites, by row. Raises ParameterError for what does not fit.

    params: of R rows, or one for all. prompts, outputs: None, or R lists of token ids. masks: None or int32 [R, W].
    end_token_ids: None or the model's. names: what messages call them.
    """
    prompt_of = histories(names.prompts, prompts, num_rows, width)
    output_of = histories(names.outputs, outputs, num_rows, width)
    mask_of = read_masks(masks, num_rows, width, padded_from, names.masks)
    ends = () if end_token_ids is None else tuple(ids_of("end_token_ids", end_token_ids, width).tolist())
    if mask_of is None and all(one.plain for one in params):
        return {}
    masked = np.zeros(num_rows, bool) if mask_of is None else (mask_of != -1).any(axis=1)
    told = Told(prompts is not None and outputs is not None, masks is not None, end_token_ids is not None)
    contexts = {}
    for r, one in enumerate(of_each_row(params, num_rows)):
        if masked[r] or not one.plain:
            check_width(one, width, padded_from)
            _check_told(one, told, names)
            mask = mask_of[r] if mask_of is not None and masked[r] else None
            contexts[r] = Context(one, prompt_of[r], output_of[r], ends, (), mask)
    return contexts


def of_each_row(params: Sequence[SamplingParams], num_rows: int) -> Sequence[SamplingParams]:
    """The parameters of R rows, of which there is one for each or one for all."""
    return params if len(params) == num_rows else [params[0]] * num_rows


def histories(name: str, given: Any, num_rows: int, width: int) -> list[I32]:
    """prompts or outputs as R arrays of token ids; None: all empty."""
    if given is None:
        return [np.empty(0, np.int32)] * num_rows
    if isinstance(given, str | dict) or not hasattr(given, "__len__") or len(given) != num_rows:
        raise ParameterError([Fault(name, given, f"must be {num_rows} lists of token ids, one for each row")])
    return [ids_of(name, ids, width) for ids in given]


def read_masks(masks: Any, num_rows: int, width: int, padded_from: int, name: str = "masks") -> I32 | None:
    """Masks as int32 [R, W] for the columns before the padding; what lies beyond a narrower mask is banned.

    Bits of columns that do not exist are 0 in every row, except in one of ones alone, which masks nothing.
    """
    if masks is None:
        return None
    words = -(-width // 32)
    given = masks.numpy() if type(masks).__module__.partition(".")[0] == "torch" else np.asarray(masks)
    if given.ndim != 2 or len(given) != num_rows or given.dtype.kind not in "iu" or given.dtype.itemsize != 4:
        one = name == OF_ONE_ROW.masks
        shape, shown = (f"[{words}]", given.shape[1:]) if one else (f"[{num_rows}, {words}]", given.shape)
        rule = f"must be int32 {shape}, bit i & 31 of word i >> 5 set where token i is allowed"
        raise ParameterError([Fault(name, f"{given.dtype} {shown}", rule)])
    if given.shape[1] > words:
        rule = f"must not be wider than the logits: {words} words hold {width} bits"
        raise ParameterError([Fault(name, given.shape, rule)])
    given, kept = given.astype(given.dtype.newbyteorder("="), copy=False), -(-padded_from // 32)
    if given.shape[1] == kept and given.flags.c_contiguous and given.flags.writeable:  # one kind of array for kernels
        return _without_strays(given.view(np.int32), padded_from)
    whole = np.zeros((num_rows, kept), np.int32)
    whole[:, : given.shape[1]] = given[:, :kept].view(np.int32)
    return _without_strays(whole, padded_from)


def _without_strays(masks: I32, num_tokens: int) -> I32:
    """The masks without bits past the last token, which would look like something that is allowed."""
    if num_tokens % 32 == 0:
        return masks
    past = np.int32(-1 << num_tokens % 32)
    rows = np.flatnonzero(masks[:, -1] & past)
    rows = rows[(masks[rows] != -1).any(axis=1)]
    if rows.size:
        masks = masks.copy()
        masks[rows, -1] &= ~past
    return masks


class Told(NamedTuple):
    """What was told about rows: their histories, masks, and the model's end ids."""

    history: bool
    mask: bool
    ends: bool


def _check_told(params: SamplingParams, told: Told, names: Names) -> None:
    """Refuse what would be ignored for want of a history, a mask, end ids or a tokenizer."""
    faults = []
    if not told.mask:
        rule = f"is about text, and there is no tokenizer here; give {names.masks}=, or ask klero.LLM"
        asked = (params.guided, None if params.thinking_token_budget is None else "thinking_token_budget")
        faults += [Fault(name, getattr(params, name), rule) for name in asked if name is not None]
    if params.bad_words:
        rule = "are text, and there is no tokenizer here; give bad_token_ids, with and without the leading space"
        faults.append(Fault("bad_words", params.bad_words, rule))
    if not told.history:
        rule = f"reads the history; give {names.prompts}= and {names.outputs}= (empty where nothing was generated yet)"
        faults += [Fault(name, getattr(params, name), rule) for name in _reads_history(params)]
    if params.min_tokens and not told.ends and not params.ignore_eos:
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
