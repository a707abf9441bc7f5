"""Embeds: prompts that are given as embeddings instead of ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from klero.errors import Fault, ParameterError, RequestError
from klero.params import SamplingParams


def checked_embeds(
    request_id: str, given: Any, params: SamplingParams, width: int | None
) -> npt.NDArray[np.float32] | None:
    """Return embeddings as float32 [E, H], a copy; None where there are none. RequestError for what is none.

    given: [E, H] of any float dtype, NumPy or torch. width: H of the model; None: it takes ids only. ParameterError for
    parameters that need the ids of the whole prompt.
    """
    if given is None:
        return None
    what = f"{request_id}: prompt_embeds"
    if width is None:
        raise RequestError(f"{what}: this model takes token ids only")
    embeds = copied(given, what)
    if embeds.ndim != 2 or embeds.shape[1] != width or not len(embeds):
        raise RequestError(f"{what}: has shape {embeds.shape}, must be [positions, {width}] with at least one position")
    if not np.isfinite(embeds).all():
        raise RequestError(f"{what}: must be finite; there is NaN or infinity in it")
    rule = "needs the ids of the whole prompt; leave it out, or give ids"
    asked = {name: getattr(params, name) for name in ("prompt_logprobs", "return_context_logits", "echo")}
    if faults := [Fault(name, value, rule) for name, value in asked.items() if value not in (None, False)]:
        raise ParameterError(faults)
    return embeds


def copied(given: Any, what: str = "prompt_embeds") -> npt.NDArray[np.float32]:
    """Floats of NumPy, torch or nested lists as float32, in memory that nobody else writes to."""
    if hasattr(given, "detach"):  # torch, whatever dtype and device
        given = given.detach().float().cpu().numpy()
    try:
        array = np.asarray(given)
    except (TypeError, ValueError):
        array = np.empty(0, object)
    if array.dtype.kind != "f":
        raise RequestError(f"{what}: must be an array [positions, width] of floats, and this is {array.dtype}")
    return array.astype(np.float32)
