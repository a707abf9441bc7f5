"""What only the width of the logits can tell: whether the ids and numbers of a request, and its bias, fit."""

from __future__ import annotations

from collections.abc import Iterable

from klero.errors import Fault, ParameterError
from klero.params.sampling_params import SamplingParams


def check_width(params: SamplingParams, width: int, padded_from: int | None = None) -> None:
    """Raise ParameterError naming every field that does not fit a row of `width` logits.

    An id outside [0, width - 1], a dense bias of another width; more logprobs than there are tokens, or of a column
    that is none: those from padded_from on are padding, which nobody reads.
    """
    num = width if padded_from is None else padded_from
    bias = params.logit_bias or ()
    named: tuple[tuple[str, Iterable[int]], ...] = (
        ("stop_token_ids", [i for sequence in params.stop_token_ids for i in sequence]),
        ("end_token_ids", params.end_token_ids),
        ("logit_bias", [i for i, _ in bias]),
        ("bad_token_ids", [i for sequence in params.bad_token_ids for i in sequence]),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("top_p_reset_id", [] if params.top_p_reset_id is None else [params.top_p_reset_id]),
    )
    rule = f"ids must be in [0, {width - 1}], the width of the model's logits"
    faults = [Fault(name, most, rule) for name, ids in named if (most := max(ids, default=0)) >= width]
    what = "the width of the model's logits" if num == width else "the tokens of this model, without padding"
    for name, asked in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if asked is not None and asked > num:
            faults.append(Fault(name, asked, f"must be at most {num}, {what} (-1 is all)"))
    if params.logprob_token_ids and (most := max(params.logprob_token_ids)) >= num:
        faults.append(Fault("logprob_token_ids", most, f"ids must be in [0, {num - 1}], {what}"))
    dense = params.embedding_bias
    if dense is not None and len(dense) != width:
        faults.append(Fault("embedding_bias", dense, f"must have one number per column of the logits, {width}"))
    if faults:
        raise ParameterError(faults)
