"""The rules between fields: what each field may say alone, but not beside another.

Each rule is asked only when none of the fields it reads is at fault itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from klero.errors import Fault
from klero.params.guided import GUIDED, OF_JSON

Rule = Callable[[Any], Fault | None]


def faults_together(params: Any, new: Iterable[str], broken: set[str]) -> Iterator[Fault]:
    """What is wrong between the normalised fields of a SamplingParams. broken: fields that are at fault alone.

    new: the fields that may break a rule; the others were checked before.
    """
    names = frozenset(new)
    for fields, rule in TOGETHER.items():
        if broken.isdisjoint(fields) and not names.isdisjoint(fields):
            fault = rule(params)
            if fault is not None:
                yield fault


def _min_tokens(params: Any) -> Fault | None:
    least, most = params.min_tokens, params.max_tokens
    if most is None or least <= most:
        return None
    return Fault("min_tokens", least, f"must not be above max_tokens={most}")


def _max_tokens(params: Any) -> Fault | None:
    if params.max_tokens != 0 or params.scores_prompt:
        return None
    rule = "must be at least 1; 0 only scores a prompt, which prompt_logprobs or return_context_logits ask for"
    return Fault("max_tokens", 0, rule)


def _logprobs_mode(params: Any) -> Fault | None:
    mode = params.logprobs_mode
    if mode == "raw" or params.scores:
        return None
    also = "; prompt_logprobs are always raw" if params.prompt_logprobs is not None else ""
    way_out = "give one of them (logprobs=0 is enough), or leave this out"
    rule = f"means nothing without logprobs or logprob_token_ids; {way_out}{also}"
    return Fault("logprobs_mode", mode, rule)


def _of_decay(name: str) -> Rule:
    def rule(params: Any) -> Fault | None:
        value = getattr(params, name)
        if value is None or params.top_p_decay is not None:
            return None
        return Fault(name, value, "means nothing without top_p_decay; give that too, or leave this out")

    return rule


def _one_grammar(params: Any) -> Fault | None:
    asked = [name for name in GUIDED if getattr(params, name) not in (None, False)]
    if len(asked) < 2:
        return None
    rule = f"stands beside {asked[0]}; a text follows one grammar: give one of {', '.join(GUIDED)}"
    return Fault(asked[1], getattr(params, asked[1]), rule)


def _json_whitespace(params: Any) -> Fault | None:
    if params.json_whitespace == 0 or params.guided in OF_JSON:
        return None
    rule = f"means nothing without {', '.join(OF_JSON[:-1])} or {OF_JSON[-1]}; give one of them, or leave this out"
    return Fault("json_whitespace", params.json_whitespace, rule)


def _end_of_grammar(params: Any) -> Fault | None:
    if params.guided is None or not params.ignore_eos or params.end_token_ids:
        return None
    rule = f"leaves nothing that may come at the end of {params.guided}; give end_token_ids, or leave this out"
    return Fault("ignore_eos", True, rule)


def nothing_allowed(params: Any, bad_word_ids: Iterable[tuple[int, ...]] = ()) -> Fault | None:
    """Nothing may be left to allow by bans that hold at every step. Longer bad sequences depend on the history.

    bad_word_ids: `params.bad_words` as id sequences, once somebody with a tokenizer has them.
    """
    if params.allowed_token_ids is None:
        return None
    banned = {sequence[0] for sequence in (*params.bad_token_ids, *bad_word_ids) if len(sequence) == 1}
    banned |= {token_id for token_id, bias in params.logit_bias if bias == -math.inf}
    if not banned.issuperset(params.allowed_token_ids):
        return None
    by = "bad_token_ids, bad_words and logit_bias" if bad_word_ids else "bad_token_ids and logit_bias"
    rule = f"allows nothing that {by} do not ban; allow another token, or ban fewer"
    return Fault("allowed_token_ids", params.allowed_token_ids, rule)


TOGETHER: dict[tuple[str, ...], Rule] = {
    ("max_tokens", "prompt_logprobs", "return_context_logits"): _max_tokens,
    ("min_tokens", "max_tokens"): _min_tokens,
    ("top_p_min", "top_p_decay"): _of_decay("top_p_min"),
    ("top_p_reset_id", "top_p_decay"): _of_decay("top_p_reset_id"),
    ("allowed_token_ids", "bad_token_ids", "logit_bias"): nothing_allowed,
    GUIDED: _one_grammar,
    (*GUIDED, "json_whitespace"): _json_whitespace,
    (*GUIDED, "ignore_eos", "end_token_ids"): _end_of_grammar,
    ("logprobs_mode", "logprobs", "logprob_token_ids", "prompt_logprobs"): _logprobs_mode,
}
