"""score: raw logprobs of given tokens, of a prompt or of any rows; no parameters and no draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from klero.device import Backend, choose_backend, first_use, num_threads, over_rows
from klero.errors import Fault, ParameterError
from klero.logprobs import reference
from klero.logprobs.asks import EVERY_TOKEN, Asks, logprobs_of, room_for, starts_of
from klero.logprobs.record import Logprobs
from klero.params.checks import Broken, as_integer
from klero.rows.inputs import as_bits, as_float32, ids_of, read_logits, width_without_padding


def score(
    logits: Any,
    token_ids: npt.ArrayLike,
    *,
    num_top: int = 0,
    listed: npt.ArrayLike = (),
    padded_from: int | None = None,
    backend: Backend = "auto",
) -> Logprobs:
    """Return the logprob of one token for each row of logits, in the model's own distribution (raw).

    logits: [R, V], as for `klero.sample`, unchanged. token_ids: int [R]. num_top: 0 to V likeliest tokens of each row
    beside it, or -1 for all. listed: ids whose logprobs are wanted at every row, in the order given; a repeated id
    counts once. padded_from: columns from here on are padding. A row with NaN or +inf, or without a token above -inf,
    gets NaN, rank 0 and -1 for top ids; -inf stays -inf. The receipt of a scored token has its raw logprob alone.
    Raises LogitsError, ParameterError. Agreement of backends: *bits*. Formula: docs/draw.md, 8.
    """
    rows = read_logits(logits).rows
    width = width_without_padding(padded_from, rows.shape[1])
    tokens = ids_of("token_ids", token_ids, width)
    if len(tokens) != len(rows):
        raise ParameterError([Fault("token_ids", token_ids, f"must be a list of {len(rows)} ids, one for each row")])
    asks = _asks(len(rows), _num_top(num_top, width), _each_once(ids_of("listed", listed, width)))
    said = room_for(asks, width)
    if choose_backend(backend) == "reference":
        for r, raw in enumerate(as_float32(rows)[:, :width]):
            if not (np.isnan(raw).any() or raw.max() in (np.inf, -np.inf)):
                reference.say_raw(raw, int(tokens[r]), asks, said, r)
    else:
        kernel, bits = raw_kernel(), as_bits(rows)
        with first_use("given tokens " + rows.dtype.name):
            over_rows(lambda i, j: kernel(bits, width, i, j, tokens, asks, said), len(rows), num_threads())
    return logprobs_of(asks, said, tokens, np.zeros(len(rows), np.int32))


def raw_kernel() -> Callable[..., Any]:
    """The Numba kernel that says what is raw about given tokens."""
    from klero.logprobs.cpu import score_rows
    from klero.rows.room import in_room

    return in_room(score_rows)


def _num_top(num_top: int, width: int) -> int:
    """num_top as a number of tokens."""
    try:
        asked = as_integer(num_top, "")
    except Broken:
        asked = EVERY_TOKEN - 1
    if not EVERY_TOKEN <= asked <= width:
        rule = f"must be an integer in [0, {width}], the width of the logits, or -1 for the whole row"
        raise ParameterError([Fault("num_top", num_top, rule)])
    return width if asked == EVERY_TOKEN else asked


def _each_once(ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """The ids in their order, without repetitions: as `SamplingParams.logprob_token_ids`."""
    return np.array(list(dict.fromkeys(ids.tolist())), np.int32)


def _asks(num_rows: int, num_top: int, listed: npt.NDArray[np.int32]) -> Asks:
    """The same for every row."""
    no, yes = np.zeros(num_rows, bool), np.ones(num_rows, bool)
    return Asks(
        scored=yes, processed=no, num_top=np.full(num_rows, num_top, np.int32),
        listed_starts=starts_of(np.full(num_rows, len(listed))), listed_ids=np.tile(listed, num_rows), kept=no,
        probs=no,
    )  # fmt: skip
