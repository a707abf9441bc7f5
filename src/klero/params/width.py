"""What only the width of the logits can tell: whether the ids and numbers of a request, and its bias, fit."""

from __future__ import annotations

from collections.abc import Iterable

from klero.errors import Fault, ParameterError
from klero.params.sampling_params import SamplingParams


def check_width(params: SamplingParams, width: int) -> None:
    """Raise ParameterError naming every field that does not fit a row of `width` logits.

    An id outside [0, width - 1], more logprobs than tokens, or a dense bias of another width.
    """
    bias = params.logit_bias or ()
    named: tuple[tuple[str, Iterable[int]], ...] = (
        ("stop_token_ids", [i for sequence in params.stop_token_ids for i in sequence]),
        ("end_token_ids", params.end_token_ids),
        ("logit_bias", [i for i, _ in bias]),
        ("bad_token_ids", [i for sequence in params.bad_token_ids for i in sequence]),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("logprob_token_ids", params.logprob_token_ids),
        ("top_p_reset_id", [] if params.top_p_reset_id is None else [params.top_p_reset_id]),
    )
    rule = f"ids must be in [0, {width - 1}], the width of the model's logits"
    faults = [Fault(name, most, rule) for name, ids in named if (most := max(ids, default=0)) >= width]
    for name, num in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if num is not None and num > width:
            faults.append(Fault(name, num, f"must be at most {width}, the width of the model's logits (-1 is all)"))
    dense = params.embedding_bias
    if dense is not None and len(dense) != width:
        faults.append(Fault("embedding_bias", dense, f"must have one number per column of the logits, {width}"))
    if faults:
        raise ParameterError(faults)
