"""The order in which a row is rewritten, the one list, with the reason for each place. Also the definition, in NumPy.

Kernels do the same per token: what a change does to one logit depends on no other, so all changes of a token are made
at once, in this order, and only tokens that a rule lists are touched at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from klero.batch.ngrams.reference import followers
from klero.lots.mass import canonical
from klero.params import SamplingParams
from klero.rewrite.bans import reference as bans
from klero.rewrite.bias import reference as bias
from klero.rewrite.context import Context
from klero.rewrite.penalties import penalties_of
from klero.rewrite.penalties import reference as penalties
from klero.rewrite.processors import process

F32 = npt.NDArray[np.float32]
BOOL = npt.NDArray[np.bool_]


class Change(NamedTuple):
    """A rule that changes logits. name: its fields; asked: whether a request asks for it; apply: the row after it."""

    name: str
    asked: Callable[[SamplingParams], bool]
    apply: Callable[[F32, Context], F32]
    why: str


class Ban(NamedTuple):
    """A rule that bans. banned(context, V): ids, or bool [V]; an empty list while it bans nothing."""

    name: str
    asked: Callable[[Context], bool]
    banned: Callable[[Context, int], list[int] | BOOL]
    why: str


CHANGES = (
    Change(
        "embedding_bias",
        lambda params: params.embedding_bias is not None,
        lambda row, at: bias.add(row, at.params.embedding_bias.array[: len(row)]),
        "the model's own side: a part of what it says, before what the request wants",
    ),
    Change(
        "logit_bias",
        lambda params: bool(params.logit_bias),
        lambda row, at: bias.logit_bias(row, at.params.logit_bias),  # type: ignore[arg-type]
        "before the penalties, because repetition branches on the sign of what it finds",
    ),
    Change(
        "repetition_penalty",
        lambda params: params.repetition_penalty != 1,
        lambda row, at: penalties.repetition(row, penalties_of(at.params), at.history),
        "scales, so it must not scale what presence and frequency take off",
    ),
    Change(
        "presence_penalty and frequency_penalty",
        lambda params: params.presence_penalty != 0 or params.frequency_penalty != 0,
        lambda row, at: penalties.presence_and_frequency(
            row, penalties_of(at.params), penalties.counted_ids(at.params, at.prompt_ids, at.output_ids)
        ),
        "last of the changes: a difference in logits is a ratio of probabilities, whatever came before",
    ),
)

BANS = (
    Ban(
        "allowed_token_ids",
        lambda at: at.params.allowed_token_ids is not None,
        lambda at, width: bans.disallowed(bans.bitmask(at.params.allowed_token_ids or (), width), width),
        "all bans come after all changes: -inf is a meaning and not a number, and nothing may lift it",
    ),
    Ban(
        "grammar and masks",
        lambda at: at.mask is not None,
        lambda at, width: bans.disallowed(at.mask, width),  # type: ignore[arg-type]
        "a ban like the others; their order among themselves changes nothing",
    ),
    Ban(
        "bad_token_ids",
        lambda at: bool(at.params.bad_token_ids),
        lambda at, width: bans.suffixes(at.params.bad_token_ids, at.history),
        "as above",
    ),
    Ban(
        "bad_words",
        lambda at: bool(at.bad_word_ids),
        lambda at, width: bans.suffixes(at.bad_word_ids, at.history),
        "as above",
    ),
    Ban(
        "no_repeat_ngram_size",
        lambda at: at.params.no_repeat_ngram_size > 0,
        lambda at, width: sorted(followers(at.params.no_repeat_ngram_size, at.history.tolist())),
        "as above",
    ),
    Ban(
        "min_tokens",
        lambda at: at.awaits_min_tokens,
        lambda at, width: bans.suffixes(at.min_tokens_words, at.output_ids),
        "as above",
    ),
)


@dataclass(frozen=True)
class Rewritten:
    """A row after rewriting. logits: float32 [V], canonical. stages: those asked for, as (rule, logits it changed,
    tokens left).

    rules: those that took tokens away. error: what a processor did wrong, else None.
    """

    logits: F32
    stages: tuple[tuple[str, int, int], ...]
    rules: tuple[str, ...]
    error: str | None = None


def rewrite_row(raw: F32, at: Context) -> Rewritten:
    """Rewrite one row. raw: float32 [V], without NaN and +inf. New array."""
    row, error = canonical(raw), None
    stages: list[tuple[str, int, int]] = []
    rules: list[str] = []

    def note(name: str, after: F32) -> F32:
        stages.append((name, int(np.count_nonzero(after != row)), int(np.count_nonzero(after > -np.inf))))
        if np.any(np.isneginf(after) & ~np.isneginf(row)):
            rules.append(name)
        return after

    for name, after in _stages(row, at):
        row = note(name, after)
    if at.params.logits_processors:
        after, error = process(row, at)
        row = note("logits_processors", after)
    return Rewritten(canonical(row), tuple(stages), tuple(rules), error)


def _stages(row: F32, at: Context) -> Iterator[tuple[str, F32]]:
    """Each rule that is asked for, with the row after it."""
    for change in CHANGES:
        if change.asked(at.params):
            row = change.apply(row, at)
            yield change.name, row
    for ban in BANS:
        if ban.asked(at):
            banned = ban.banned(at, len(row))
            if isinstance(banned, list):
                banned = [i for i in banned if i < len(row)]
            row = row.copy()
            row[banned] = -np.inf
            yield ban.name, row
