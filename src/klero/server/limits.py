"""What one request may ask for at most, beside the rules of SamplingParams (docs/rules.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from klero.errors import Fault

if TYPE_CHECKING:
    from klero.server.options import ServerOptions

EVERY_TOKEN = -1
LISTED = ("stop", "stop_token_ids", "bad_words", "bad_token_ids", "logit_bias")
MOST_BIAS = 100


def faults_beyond(fields: Mapping[str, Any], options: ServerOptions, num_prompts: int) -> list[Fault]:
    """What is beyond the server's limits. fields: of SamplingParams, as they came: of any type."""
    faults = list(_of_counts(fields, options))
    n = fields.get("n", 1)
    if num_prompts > options.max_prompts:
        rule = f"must be at most {options.max_prompts} prompts in one request; send the others in another"
        faults.append(Fault("prompt", f"{num_prompts} prompts", rule))
    elif _is_integer(n) and n <= options.max_n and n * num_prompts > options.max_choices:
        rule = f"makes {n * num_prompts} choices of {num_prompts} prompts; at most {options.max_choices} are made"
        faults.append(Fault("n", n, rule))
    return faults


def _of_counts(fields: Mapping[str, Any], options: ServerOptions) -> Iterator[Fault]:
    entries = {
        "stop": options.max_stop, "stop_token_ids": options.max_logit_bias, "bad_words": options.max_logit_bias,
        "bad_token_ids": options.max_logit_bias, "logit_bias": options.max_logit_bias,
    }  # fmt: skip
    limited = options.max_logprobs != EVERY_TOKEN
    if limited:
        entries["logprob_token_ids"] = options.max_logprobs
    for name, most in entries.items():
        listed = fields.get(name)
        if isinstance(listed, list | dict) and len(listed) > most:
            yield Fault(name, f"{len(listed)} entries", f"must have at most {most} entries")
    n: Any = fields.get("n")
    if _is_integer(n) and n > options.max_n:
        yield Fault("n", n, f"must be at most {options.max_n}")
    for name in ("logprobs", "prompt_logprobs") if limited else ():
        value: Any = fields.get(name)
        if _is_integer(value) and (value > options.max_logprobs or value == EVERY_TOKEN):
            yield Fault(name, value, f"must be in [0, {options.max_logprobs}]; this server lists no more")
    bias = fields.get("logit_bias")
    for key, number in bias.items() if isinstance(bias, dict) else ():
        if isinstance(number, int | float) and not isinstance(number, bool) and not -MOST_BIAS <= number <= MOST_BIAS:
            rule = f"must be in [{-MOST_BIAS}, {MOST_BIAS}]; allowed_token_ids and bad_token_ids ban altogether"
            yield Fault("logit_bias", {key: number}, rule)
            break


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
