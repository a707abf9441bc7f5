"""What only the width of the logits can tell: whether the ids of a request, and its dense bias, fit the model."""

from __future__ import annotations

from collections.abc import Iterable

from klero.errors import Fault, ParameterError
from klero.params.sampling_params import SamplingParams


def check_width(params: SamplingParams, width: int) -> None:
    """Raise ParameterError naming every field with an id outside [0, width - 1], or a dense bias of another width."""
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
    dense = params.embedding_bias
    if dense is not None and len(dense) != width:
        faults.append(Fault("embedding_bias", dense, f"must have one number per column of the logits, {width}"))
    if faults:
        raise ParameterError(faults)
