"""SamplingParams: everything that one request may ask for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from klero.errors import Fault, ParameterError
from klero.params import checks, guided
from klero.params.aliases import accepts_aliases
from klero.params.decay import Decay, resolve_decay
from klero.params.row import (
    TOP_P_OFF,
    RowParams,
    bytes_of_row,
    resolve_others,
    resolve_row,
    round_fraction,
    seed_bits,
    with_top_p,
)
from klero.params.together import faults_together

NO_LIST = "-1: every token; None: nothing"
CHECKS: dict[str, checks.Check] = {
    "temperature": checks.optional(checks.real(0, 1e6)),
    "top_k": checks.optional(checks.integer(-1, way_out="0 or -1 switches it off")),
    "top_p": checks.optional(checks.real(0, 1)),
    "min_p": checks.optional(checks.real(0, 1)),
    "top_p_decay": checks.optional(checks.real(0, 1, low_open=True)),
    "top_p_min": checks.optional(checks.real(0, 1, low_open=True)),
    "top_p_reset_id": checks.optional(checks.integer(0)),
    "top_n_sigma": checks.optional(checks.real(0, 1e6, off=-1)),
    "epsilon_cutoff": checks.none_is(0.0, checks.real(0, 1, high_open=True)),
    "eta_cutoff": checks.none_is(0.0, checks.real(0, 1, high_open=True)),
    "top_a": checks.none_is(0.0, checks.real(0, 1)),
    "typical_p": checks.none_is(1.0, checks.real(0, 1, low_open=True)),
    "xtc_probability": checks.none_is(0.0, checks.real(0, 1)),
    "xtc_threshold": checks.none_is(0.1, checks.real(0, 1)),
    "filters": checks.none_is((), checks.callables),
    "logit_bias": checks.none_is((), checks.logit_bias),
    "embedding_bias": checks.optional(checks.vector),
    "repetition_penalty": checks.none_is(1.0, checks.real(0, 1e6, low_open=True)),
    "presence_penalty": checks.none_is(0.0, checks.real(-2, 2)),
    "frequency_penalty": checks.none_is(0.0, checks.real(-2, 2)),
    "prompt_ignore_length": checks.optional(checks.integer(0, way_out="None: no prompt token counts")),
    "bad_words": checks.none_is((), checks.strings("bad words")),
    "bad_token_ids": checks.none_is((), checks.token_sequences),
    "no_repeat_ngram_size": checks.none_is(0, checks.integer(0, way_out="0 switches it off")),
    "allowed_token_ids": checks.optional(checks.allowed_ids),
    "logits_processors": checks.none_is((), checks.callables),
    "json": checks.optional(guided.json_schema),
    "json_object": checks.none_is(False, checks.boolean),
    "regex": checks.optional(guided.pattern),
    "choice": checks.optional(guided.choices),
    "grammar": checks.optional(guided.pattern),
    "structural_tag": checks.optional(guided.structural_tag),
    "json_whitespace": checks.none_is(0, checks.integer(0, 16, way_out="0: compact")),
    "thinking_token_budget": checks.optional(checks.integer(0, way_out="None: no limit")),
    "seed": checks.optional(checks.integer(-(2**63), 2**64 - 1, way_out="leave it out for a fresh seed")),
    "n": checks.none_is(1, checks.integer(1, 2**32 - 1)),
    "max_tokens": checks.optional(checks.integer(0, way_out="None: as many as fit")),
    "min_tokens": checks.none_is(0, checks.integer(0)),
    "stop": checks.none_is((), checks.strings("stop")),
    "stop_token_ids": checks.none_is((), checks.token_sequences),
    "end_token_ids": checks.none_is((), checks.end_ids),
    "ignore_eos": checks.none_is(False, checks.boolean),
    "include_stop_str_in_output": checks.none_is(False, checks.boolean),
    "detokenize": checks.none_is(True, checks.boolean),
    "skip_special_tokens": checks.none_is(True, checks.boolean),
    "spaces_between_special_tokens": checks.none_is(False, checks.boolean),
    "echo": checks.none_is(False, checks.boolean),
    "truncate_prompt_tokens": checks.optional(checks.integer(1)),
    "logprobs": checks.optional(checks.integer(-1, way_out=f"0: the sampled token alone; {NO_LIST}")),
    "prompt_logprobs": checks.optional(checks.integer(-1, way_out=f"0: the prompt's tokens alone; {NO_LIST}")),
    "logprobs_mode": checks.none_is("raw", checks.one_of("raw", "processed")),
    "logprob_token_ids": checks.none_is((), checks.listed_ids),
    "return_kept": checks.none_is(False, checks.boolean),
    "return_probs": checks.none_is(False, checks.boolean),
    "return_context_logits": checks.none_is(False, checks.boolean),
    "return_generation_logits": checks.none_is(False, checks.boolean),
}


@accepts_aliases
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What one request asks for. `None` means "not asked"; all faults are reported at once in a `ParameterError`.

    Silence means greedy: with temperature, top_p and top_k all unset (and no other filter) the most likely token is
    taken.
    Spellings of other engines are accepted (`klero.params.aliases.ALIASES`): max_new_tokens, n_predict, temp, ...

    Shaping (docs/draw.md):
        temperature: [0, 1e6]; unset 1. Below float32(1e-6) greedy.
        top_k: >= 0, or -1; 0, -1, unset or >= vocabulary: off. Exactly k tokens, ties to the lowest ids. 1 is greedy.
        top_p: [0, 1]; unset 1. The shortest prefix whose mass reaches top_p of what min_p and top_k left.
        min_p: [0, 1]; unset 0. Keeps tokens at least min_p times as likely as the most likely one.
        top_p_decay, top_p_min: (0, 1]; after each token top_p becomes max(top_p * top_p_decay, top_p_min), and what it
            was at first after the token top_p_reset_id. top_p_min: 1e-6 unless given.
        top_n_sigma: [0, 1e6] or -1; keeps logits within so many standard deviations of the largest. 0, -1: off.
        epsilon_cutoff, eta_cutoff: [0, 1); a least probability, and one that falls with the entropy. top_a: [0, 1];
            a least probability of top_a times the square of the largest. 0: off.
        typical_p: (0, 1]; the tokens nearest to the expected surprise, up to this mass. 1: off.
        xtc_probability: [0, 1]; how often all but the least likely of the tokens that reach xtc_threshold ([0, 1], 0.1)
            are left out. 0, or a threshold above 0.5: off.
        filters: callables of one's own, from a sorted row to what stays (`klero.SortedRow`).
    What the logits become first (docs/rules.md):
        logit_bias: {id: number}, added; embedding_bias: one number per token; -inf bans.
        repetition_penalty: (0, 1e6]; once for each token of prompt and output. presence_penalty, frequency_penalty:
            [-2, 2]; over the output, and over the prompt after its first prompt_ignore_length tokens.
        bad_words: strings; bad_token_ids: ids or id sequences; no_repeat_ngram_size: no n-gram twice;
            allowed_token_ids: nothing else.
        logits_processors: callables (token_ids, row) -> row; a banned token stays banned.
    Which text may come, at most one of six (docs/rules.md, Structured output):
        json: a JSON schema: a dict, a bool, JSON text or a class with model_json_schema(); kept as JSON text.
            json_object: any JSON object. regex: a regular expression. choice: a list of different texts.
            grammar: Lark, or EBNF (`root ::= ...`). structural_tag: free text with structures between marks.
        json_whitespace: 0 .. 16 spaces and line breaks wherever JSON allows any; 0: compact.
        thinking_token_budget: after so many tokens thinking ends; the grammar begins after it.
    Seed and children:
        seed: 0 .. 2^64-1, or -2^63 .. -1 as the same bit patterns; unset: a fresh one, reported with the answer.
        n: >= 1 choices; choice i draws as child i.
    Length and end:
        max_tokens: >= 1, or None for what fits; 0, beside prompt_logprobs or return_context_logits, generates nothing.
        min_tokens: 0 .. max_tokens; until then every end id and stop id is banned and stop strings are not acted on;
            generated tokens count. Where a grammar allows nothing but the end, it ends.
        stop: string or list of them, matched on text. stop_token_ids: ids or id sequences.
        end_token_ids: further end ids beside the model's own. ignore_eos: ignore the model's, not the caller's.
        include_stop_str_in_output: keep the text of what stopped it.
    Text (never changes a token):
        detokenize, skip_special_tokens; spaces_between_special_tokens: one space between a shown special token and its
        neighbours; echo: the prompt's text comes first; truncate_prompt_tokens: keep the last so many prompt tokens
        (this one is applied before the model sees the prompt).
    What is said about a token (never changes one):
        logprobs: of each sampled token, with its rank and receipt, and of the k most likely ones. 0: the sampled one
            alone; -1: every token; None: nothing is said. logprob_token_ids: of these tokens too.
        logprobs_mode: "raw", the model's own row, or "processed", the distribution that the token was drawn from.
        prompt_logprobs: the same for the prompt's tokens, always raw.
        return_kept: the ids that the filters left for each sampled token; return_probs: with their probabilities.
        return_context_logits, return_generation_logits: the model's own rows.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_p_decay: float | None = None
    top_p_min: float | None = None
    top_p_reset_id: int | None = None
    top_n_sigma: float | None = None
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    top_a: float = 0.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    filters: Any = field(default=(), hash=False)  # a callable need not have a hash
    logit_bias: Mapping[Any, float] | tuple[tuple[int, float], ...] = ()
    embedding_bias: Any = None  # a Vector, from a list or an array
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt_ignore_length: int | None = None
    bad_words: tuple[str, ...] | list[str] | str = ()
    bad_token_ids: Any = ()
    no_repeat_ngram_size: int = 0
    allowed_token_ids: Any = None
    logits_processors: Any = field(default=(), hash=False)
    json: Any = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    grammar: str | None = None
    structural_tag: Any = None
    json_whitespace: int = 0
    thinking_token_budget: int | None = None
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
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str = "raw"
    logprob_token_ids: tuple[int, ...] | list[int] = ()
    return_kept: bool = False
    return_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False

    def __post_init__(self) -> None:
        self._check(CHECKS, self.__dict__.pop("_faults"))

    def _check(self, fields: Iterable[str], faults: list[Fault]) -> None:
        """Normalise fields, and check what they are together with others; ParameterError with these faults too."""
        for name in fields:
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, CHECKS[name](value))
            except checks.Broken as broken:
                faults.append(Fault(name, value, str(broken)))
        faults += list(faults_together(self, fields, {fault.field for fault in faults}))
        if faults:
            raise ParameterError(faults)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping of fields or aliases, such as a JSON object; the same checks."""
        return cls(**{str(name): value for name, value in fields.items()})

    @functools.cached_property
    def row(self) -> RowParams:
        """What they come to for the first token: greedy or not, and the rounded values (docs/draw.md, 1)."""
        return self.row_at(TOP_P_OFF if self.top_p is None else round_fraction(self.top_p))

    @functools.cached_property
    def row_bytes(self) -> bytes:
        """The same as it stands in an array of ROW_DTYPE."""
        return bytes_of_row(self.row)

    def row_at(self, top_p: int) -> RowParams:
        """The same while P is top_p, an integer of 2^32: with a decay, P follows the output (`klero.params.decay`)."""
        return with_top_p(self._row_without_top_p, top_p)

    @functools.cached_property
    def _row_without_top_p(self) -> RowParams:
        others = resolve_others(
            self.top_n_sigma, self.epsilon_cutoff, self.eta_cutoff, self.top_a, self.typical_p,
            self.xtc_probability, self.xtc_threshold,
        )  # fmt: skip
        top_p = None if self.top_p is None else 1.0
        drawn = self.decay is not None or bool(self.filters)
        return resolve_row(self.temperature, self.top_k, top_p, self.min_p, others=others, drawn=drawn)

    @functools.cached_property
    def decay(self) -> Decay | None:
        """How P moves from token to token, None where it never does."""
        return resolve_decay(self.top_p, self.top_p_decay, self.top_p_min, self.top_p_reset_id)

    @functools.cached_property
    def penalises(self) -> bool:
        """Whether logits depend on which tokens occurred."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @functools.cached_property
    def rewrites(self) -> bool:
        """Whether anything but min_tokens and masks changes or bans logits."""
        listed = self.logit_bias or self.bad_words or self.bad_token_ids or self.logits_processors
        whole = self.embedding_bias is not None or self.allowed_token_ids is not None
        return bool(listed) or whole or self.penalises or self.no_repeat_ngram_size > 0

    @functools.cached_property
    def guided(self) -> str | None:
        """Which of json, json_object, regex, choice, grammar and structural_tag is asked for."""
        return guided.guided_field(self)

    @functools.cached_property
    def needs_mask(self) -> bool:
        """Whether something that follows the text decides which tokens may come: a grammar, or the end of thinking."""
        return self.guided is not None or self.thinking_token_budget is not None

    @functools.cached_property
    def has_own_filters(self) -> bool:
        """Whether a draw calls filters of one's own."""
        return bool(self.filters) and not self._row_without_top_p.greedy

    @functools.cached_property
    def plain(self) -> bool:
        """Whether a row of the model is sampled as it is, from these parameters, and nothing is said but the token."""
        followed = self.decay is not None or self.needs_mask or self.min_tokens > 0
        return not (followed or self.rewrites or self.has_own_filters or self.asks)

    @functools.cached_property
    def scores(self) -> bool:
        """Whether every sampled token gets its logprob, rank and receipt."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    @functools.cached_property
    def asks(self) -> bool:
        """Whether anything is said about a sampled token: its logprobs, or what the filters left."""
        return self.scores or self.return_kept or self.return_probs

    @functools.cached_property
    def scores_prompt(self) -> bool:
        """Whether the model's rows of the prompt are wanted: its logprobs, or the rows themselves."""
        return self.prompt_logprobs is not None or self.return_context_logits

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken without a draw; with a decay, whether the first one is."""
        return self.row.greedy

    def but(self, **changes: Any) -> SamplingParams:
        """These parameters with other values of some fields, given by their own names; ParameterError.

        Unlike `dataclasses.replace` it checks these fields alone, so that a long list in another costs nothing.
        """
        unknown = changes.keys() - CHECKS.keys()
        if unknown:
            raise ParameterError([Fault(name, changes[name], "is not a field of SamplingParams") for name in unknown])
        made = object.__new__(type(self))
        made.__dict__.update({name: getattr(self, name) for name in CHECKS}, **changes)
        made._check(changes, [])
        return made

    def for_prompt(self, i: int) -> SamplingParams:
        """These parameters for prompt i of several: a seed becomes seed + i (mod 2^64), so that no lots are shared."""
        if self.seed is None or i == 0:
            return self
        return self.but(seed=seed_bits(self.seed + i))

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
