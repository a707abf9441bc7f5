"""SamplingParams: everything that one request may ask for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from klero.errors import Fault, ParameterError
from klero.params import checks
from klero.params.aliases import accepts_aliases
from klero.params.row import RowParams, resolve_row, seed_bits

CHECKS: dict[str, checks.Check] = {
    "temperature": checks.optional(checks.real(0, 1e6)),
    "top_k": checks.optional(checks.integer(-1, way_out="0 or -1 switches it off")),
    "top_p": checks.optional(checks.real(0, 1)),
    "min_p": checks.optional(checks.real(0, 1)),
    "seed": checks.optional(checks.integer(-(2**63), 2**64 - 1, way_out="leave it out for a fresh seed")),
    "n": checks.none_is(1, checks.integer(1, 2**32 - 1)),
    "max_tokens": checks.optional(checks.integer(1, way_out="None: as many as fit")),
    "min_tokens": checks.none_is(0, checks.integer(0)),
    "stop": checks.none_is((), checks.stop_strings),
    "stop_token_ids": checks.none_is((), checks.token_sequences),
    "end_token_ids": checks.none_is((), checks.end_ids),
    "ignore_eos": checks.none_is(False, checks.boolean),
    "include_stop_str_in_output": checks.none_is(False, checks.boolean),
    "detokenize": checks.none_is(True, checks.boolean),
    "skip_special_tokens": checks.none_is(True, checks.boolean),
    "spaces_between_special_tokens": checks.none_is(False, checks.boolean),
    "echo": checks.none_is(False, checks.boolean),
    "truncate_prompt_tokens": checks.optional(checks.integer(1)),
}


@accepts_aliases
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What one request asks for. `None` means "not asked"; all faults are reported at once in a `ParameterError`.

    Silence means greedy: with temperature, top_p and top_k all unset (and no min_p) the most likely token is taken.
    Spellings of other engines are accepted (`klero.params.aliases.ALIASES`): max_new_tokens, n_predict, temp, ...

    Shaping (docs/draw.md):
        temperature: [0, 1e6]; unset 1. Below float32(1e-6) greedy.
        top_k: >= 0, or -1; 0, -1, unset or >= vocabulary: off. Exactly k tokens, ties to the lowest ids. 1 is greedy.
        top_p: [0, 1]; unset 1. The shortest prefix whose mass reaches top_p of what min_p and top_k left.
        min_p: [0, 1]; unset 0. Keeps tokens at least min_p times as likely as the most likely one.
    Seed and children:
        seed: 0 .. 2^64-1, or -2^63 .. -1 as the same bit patterns; unset: a fresh one, reported with the answer.
        n: >= 1 choices; choice i draws as child i.
    Length and end:
        max_tokens: >= 1, or None for what fits. min_tokens: 0 .. max_tokens; until then every end id and stop id is
            banned and stop strings are not acted on; generated tokens count.
        stop: string or list of them, matched on text. stop_token_ids: ids or id sequences.
        end_token_ids: further end ids beside the model's own. ignore_eos: ignore the model's, not the caller's.
        include_stop_str_in_output: keep the text of what stopped it.
    Text (never changes a token):
        detokenize, skip_special_tokens; spaces_between_special_tokens: one space between a shown special token and its
        neighbours; echo: the prompt's text comes first; truncate_prompt_tokens: keep the last so many prompt tokens
        (this one is applied before the model sees the prompt).
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] | list[str] | str = ()
    stop_token_ids: Any = ()
    end_token_ids: Any = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = False
    echo: bool = False
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        faults: list[Fault] = self.__dict__.pop("_faults")
        for field, check in CHECKS.items():
            value = getattr(self, field)
            try:
                object.__setattr__(self, field, check(value))
            except checks.Broken as broken:
                faults.append(Fault(field, value, str(broken)))
        if not faults and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            faults.append(Fault("min_tokens", self.min_tokens, f"must not be above max_tokens={self.max_tokens}"))
        if faults:
            raise ParameterError(faults)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping of fields or aliases, such as a JSON object; the same checks."""
        return cls(**{str(name): value for name, value in fields.items()})

    @functools.cached_property
    def row(self) -> RowParams:
        """What these parameters come to for one row: greedy or not, and the rounded values (docs/draw.md, 1)."""
        return resolve_row(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken without a draw."""
        return self.row.greedy

    def for_prompt(self, i: int) -> SamplingParams:
        """These parameters for prompt i of several: a seed becomes seed + i (mod 2^64), so that no lots are shared."""
        if self.seed is None or i == 0:
            return self
        return dataclasses.replace(self, seed=seed_bits(self.seed + i))

    def asked(self) -> dict[str, Any]:
        """The fields that differ from silence."""
        fields = dataclasses.fields(self)
        return {f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default}

    def __repr__(self) -> str:
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in self.asked().items())})"


def check_seed(field: str, seed: Any) -> int | None:
    """A seed given outside SamplingParams, by the same rule; None stays None. Raises ParameterError naming `field`."""
    try:
        checked: int | None = CHECKS["seed"](seed)
    except checks.Broken as broken:
        raise ParameterError([Fault(field, seed, str(broken))]) from None
    return checked
