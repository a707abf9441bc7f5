"""What one request may ask for at most, beside the rules of SamplingParams (docs/rules.md)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from klero.engine.admission import ENTRY, answer_bytes, fault_of_bytes
from klero.errors import Fault
from klero.params.guided import GUIDED
from klero.params.json_text import MAX_BYTES
from klero.server.prompts import num_kept, room_of

if TYPE_CHECKING:
    from klero.engine.admission import Limits
    from klero.params import SamplingParams
    from klero.server.options import ServerOptions

EVERY_TOKEN = -1
LISTED = ("stop", "stop_token_ids", "bad_words", "bad_token_ids", "logit_bias")
MOST_BIAS = 100
MOST_CHARACTERS = {"stop": 4096, "bad_words": 16384}
"""Of all texts of a field together: each character of a stop string is a state of what looks for it."""
MOST_KEPT = 1024
"""Entries of a kept set: writing one of a whole vocabulary would hold up every stream."""


def faults_beyond(fields: Mapping[str, Any], options: ServerOptions, num_prompts: int) -> list[Fault]:
    """What is beyond the server's limits. fields: of SamplingParams, as they came: of any type."""
    faults = [*_of_counts(fields, options), *_of_numbers(fields, options), *_of_sizes(fields, options)]
    n = fields.get("n", 1)
    if num_prompts > options.max_prompts:
        rule = f"must be at most {options.max_prompts} prompts in one request; send the others in another"
        faults.append(Fault("prompt", f"{num_prompts} prompts", rule))
    elif _is_integer(n) and n <= options.max_n and n * num_prompts > options.max_choices:
        rule = f"makes {n * num_prompts} choices of {num_prompts} prompts; at most {options.max_choices} are made"
        faults.append(Fault("n", n, rule))
    return faults


def _of_counts(fields: Mapping[str, Any], options: ServerOptions) -> Iterator[Fault]:
    """Of entries, and of texts. The entries of lists in a list count one by one."""
    entries = {
        "stop": options.max_stop, "stop_token_ids": options.max_logit_bias, "bad_words": options.max_logit_bias,
        "bad_token_ids": options.max_logit_bias, "logit_bias": options.max_logit_bias,
    }  # fmt: skip
    if options.max_logprobs != EVERY_TOKEN:
        entries["logprob_token_ids"] = options.max_logprobs
    for name, most in entries.items():
        listed = fields.get(name)
        if not isinstance(listed, list | dict):
            continue
        num = len(listed)
        if name in ("stop_token_ids", "bad_token_ids"):
            num = sum(max(1, len(item)) if isinstance(item, list) else 1 for item in listed)
        if num > most:
            yield Fault(name, f"{num} entries", f"must have at most {most} entries")
    for name, most in MOST_CHARACTERS.items():
        texts = fields.get(name)
        texts = texts if isinstance(texts, list) else [texts]
        num = sum(len(text) for text in texts if isinstance(text, str))
        if num > most:
            yield Fault(name, f"{num} characters", f"must have at most {most} characters in all")


def _of_numbers(fields: Mapping[str, Any], options: ServerOptions) -> Iterator[Fault]:
    n: Any = fields.get("n")
    if _is_integer(n) and n > options.max_n:
        yield Fault("n", n, f"must be at most {options.max_n}")
    for name in ("logprobs", "prompt_logprobs") if options.max_logprobs != EVERY_TOKEN else ():
        value: Any = fields.get(name)
        if _is_integer(value) and (value > options.max_logprobs or value == EVERY_TOKEN):
            yield Fault(name, value, f"must be in [0, {options.max_logprobs}]; this server lists no more")
    bias = fields.get("logit_bias")
    if isinstance(bias, list):
        yield Fault("logit_bias", bias, "must be an object from token ids to numbers")
    for key, number in bias.items() if isinstance(bias, dict) else ():
        if isinstance(number, int | float) and not isinstance(number, bool) and not -MOST_BIAS <= number <= MOST_BIAS:
            rule = f"must be in [{-MOST_BIAS}, {MOST_BIAS}]; allowed_token_ids and bad_token_ids ban altogether"
            yield Fault("logit_bias", {key: number}, rule)
            break


def _of_sizes(fields: Mapping[str, Any], options: ServerOptions) -> Iterator[Fault]:
    """Of schemas and grammars, where the server takes less of them than SamplingParams does."""
    most = options.max_schema_bytes
    for name in GUIDED:
        value = fields.get(name)
        if most == MAX_BYTES or not isinstance(value, str | dict | list):
            continue
        if isinstance(value, list):
            value = "".join(text for text in value if isinstance(text, str))
        elif isinstance(value, dict):
            value = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        size = len(value.encode("utf-8", "replace"))
        if size > most:
            yield Fault(name, f"{size} bytes", f"must be at most {most} bytes of UTF-8; this server compiles no more")


def faults_of_answer(
    prompts: Sequence[Sequence[int]], each: Sequence[SamplingParams], *, echo: bool, limits: Limits,
    options: ServerOptions,
) -> Iterator[Fault]:  # fmt: skip
    """Whether the answer to all prompts may be too large. each: parameters of each prompt, with its length."""
    params, total = each[0], Counter[str]()
    kept = min(params.top_k or limits.vocab_size, limits.vocab_size) if params.top_k != -1 else limits.vocab_size
    listed = [name for name in ("return_kept", "return_probs") if getattr(params, name)]
    if listed and kept > MOST_KEPT and options.max_logprobs != EVERY_TOKEN:
        rule = f"may list {kept} tokens beside each; give a top_k of at most {MOST_KEPT} too"
        yield from (Fault(name, True, rule) for name in listed)
        return
    for ids, one in zip(prompts, each, strict=True):
        num_prompt = num_kept(ids, one)
        max_tokens = room_of(ids, one, limits) if one.max_tokens is None else one.max_tokens
        sizes = answer_bytes(num_prompt, max_tokens, one, limits)
        sizes["prompt_logprobs"] *= one.n if echo else 1
        total.update(sizes | dict.fromkeys(listed, ENTRY * kept * one.n * max_tokens))
    fault = fault_of_bytes(total, params, limits.max_answer_bytes)
    if fault is not None:
        yield fault


def fault_of_waiting(num_choices: int, most: int | None, num_prompts: int) -> Fault | None:
    """Whether so many choices never fit into the queue: who is told to come again would come for ever."""
    if most is None or num_choices <= most:
        return None
    rule = f"make {num_choices} choices, and at most {most} wait here; ask for fewer at a time"
    return Fault("prompt" if num_prompts > 1 else "n", f"{num_prompts} prompts", rule)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
