"""What the rewriting of one row depends on: its request, its history, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from klero.params import SamplingParams
from klero.rewrite.bans.reference import allows_only, end_ids_of, min_tokens_words

IDS = npt.NDArray[np.integer]
NO_IDS: IDS = np.empty(0, np.int32)


@dataclass(frozen=True)
class Context:
    """One row's request and history.

    prompt_ids, output_ids: token ids, all of them real and accepted. end_token_ids: the model's end ids. bad_word_ids:
    `params.bad_words` as token sequences, in both tokenisations. mask: int32 [ceil(V / 32)], None for all tokens; its
    bits from V on are 0, unless all are 1.
    """

    params: SamplingParams
    prompt_ids: IDS = field(default_factory=lambda: NO_IDS)
    output_ids: IDS = field(default_factory=lambda: NO_IDS)
    end_token_ids: tuple[int, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    mask: npt.NDArray[np.int32] | None = None

    @cached_property
    def history(self) -> IDS:
        """Prompt and output, int32."""
        return np.concatenate([self.prompt_ids, self.output_ids]).astype(np.int32)

    @property
    def awaits_min_tokens(self) -> bool:
        """Whether the next token is one of the first min_tokens; no longer where the mask has nothing but the end."""
        return len(self.output_ids) < self.params.min_tokens and not self.may_only_end

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """What ends the output: the caller's end ids, and the model's unless they are ignored."""
        return end_ids_of(self.params, self.end_token_ids)

    @cached_property
    def may_only_end(self) -> bool:
        """Whether the mask allows an end id and nothing else."""
        return self.mask is not None and allows_only(self.mask, self.end_ids)

    @cached_property
    def min_tokens_words(self) -> tuple[tuple[int, ...], ...]:
        """What may not end the output before min_tokens."""
        return min_tokens_words(self.params, self.end_token_ids)
