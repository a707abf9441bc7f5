"""What a sequence must bring to be seated: everything that its parameters need and that the sampler cannot know."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from klero.batch.seats import CheckedSeat, Seat, check_room
from klero.errors import Fault, ParameterError, RequestError
from klero.params import check_seed, seed_bits
from klero.params.together import nothing_allowed
from klero.params.width import check_width
from klero.rows.inputs import ids_of
from klero.sampling.stateless import counters


def checked_seat(seat: Seat, vocab_size: int, padded_from: int, max_len: int, by: object) -> CheckedSeat:
    """The seat with its seed as bits and its tokens as arrays. Raises RequestError or ParameterError."""
    prompt, output = _ids("prompt_ids", seat, vocab_size), _ids("output_ids", seat, vocab_size)
    check_room(seat, len(prompt), len(output), max_len)
    check_width(seat.params, vocab_size, padded_from)
    (child,) = counters("child", seat.child, 1)
    seed = check_seed("seed", seat.seed)
    if faults := list(_faults(seat, seed)):
        raise ParameterError(faults)
    ends = tuple(ids_of("end_token_ids", seat.end_token_ids or (), vocab_size).tolist())
    return CheckedSeat(**vars(seat) | {
        "prompt_ids": prompt, "output_ids": output, "seed": seed_bits(seed or 0), "child": int(child),
        "end_token_ids": ends, "bad_word_ids": _words(seat, vocab_size), "by": by,
    })  # fmt: skip


def _faults(seat: Seat, seed: int | None) -> Iterator[Fault]:
    params = seat.params
    if seed is None:
        yield Fault("seed", None, "must be given: the engine draws one at admission")
    if params.min_tokens and seat.end_token_ids is None and not params.ignore_eos:
        rule = "bans the model's end ids; give Seat.end_token_ids (empty for a model without)"
        yield Fault("min_tokens", params.min_tokens, rule)
    if params.bad_words and seat.bad_word_ids is None:
        rule = "are text, and the sampler has no tokenizer; give Seat.bad_word_ids"
        yield Fault("bad_words", params.bad_words, rule)
    if seat.bad_word_ids and not params.bad_words:
        rule = "stand without bad_words, which they spell; give them as bad_token_ids"
        yield Fault("bad_word_ids", seat.bad_word_ids, rule)
    field = params.guided or (None if params.thinking_token_budget is None else "thinking_token_budget")
    if field is not None and seat.make_matcher is None:
        rule = "is about text, and the sampler has no tokenizer; give Seat.make_matcher"
        yield Fault(field, getattr(params, field), rule)
    if not (seat.make_matcher is None or callable(seat.make_matcher)):
        yield Fault("make_matcher", seat.make_matcher, "must be a function that makes a klero.grammar.Matcher, or None")
    if fault := nothing_allowed(params, seat.bad_word_ids or ()):
        yield fault


def _ids(name: str, seat: Seat, width: int) -> npt.NDArray[np.int32]:
    """prompt_ids or output_ids of a seat as int32."""
    try:
        return ids_of(name, getattr(seat, name), width)
    except ParameterError as error:
        raise RequestError(f"{seat.owner}: {error}") from None


def _words(seat: Seat, width: int) -> tuple[tuple[int, ...], ...]:
    """The bad words of a seat, if all their ids are ids."""
    words = [tuple(ids_of("bad_word_ids", ids, width).tolist()) for ids in seat.bad_word_ids or ()]
    if not all(words):
        raise ParameterError([Fault("bad_word_ids", seat.bad_word_ids, "must not hold an empty word; leave it out")])
    return tuple(words)
