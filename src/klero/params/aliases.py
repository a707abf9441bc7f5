"""The spellings people bring from other engines, in one table."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from typing import Any, TypeVar

from klero.errors import Fault

T = TypeVar("T")

ALIASES: dict[str, str] = {
    "max_new_tokens": "max_tokens",  # transformers, TensorRT-LLM
    "max_completion_tokens": "max_tokens",  # OpenAI chat
    "n_predict": "max_tokens",  # llama.cpp
    "num_predict": "max_tokens",  # ollama
    "min_new_tokens": "min_tokens",  # transformers
    "num_return_sequences": "n",  # transformers
    "random_seed": "seed",  # TensorRT-LLM
    "sampling_seed": "seed",  # SGLang
    "temp": "temperature",  # llama.cpp, MLX
    "repeat_penalty": "repetition_penalty",  # llama.cpp, ollama
    "bad": "bad_words",  # TensorRT-LLM
    "bad_words_ids": "bad_token_ids",  # transformers
    "suppress_tokens": "bad_token_ids",  # transformers
    "logits_processor": "logits_processors",  # TensorRT-LLM, transformers
    "top_p_reset_ids": "top_p_reset_id",  # TensorRT-LLM
    "nsigma": "top_n_sigma",
    "top_nsigma": "top_n_sigma",  # llama.cpp's command
    "typical": "typical_p",  # llama.cpp's command
    "stop_strings": "stop",  # transformers
    "eos_token_id": "end_token_ids",  # transformers
    "end_id": "end_token_ids",  # TensorRT-LLM
    "include_stop_str": "include_stop_str_in_output",
    "no_stop_trim": "include_stop_str_in_output",  # SGLang
    "top_logprobs": "logprobs",  # OpenAI chat
    "token_ids_logprob": "logprob_token_ids",  # SGLang
    "guided_json": "json",  # vLLM
    "json_schema": "json",  # SGLang, llama.cpp
    "guided_json_object": "json_object",
    "guided_regex": "regex",  # vLLM
    "guided_choice": "choice",  # vLLM
    "guided_grammar": "grammar",  # vLLM
    "ebnf": "grammar",  # SGLang
    "thinking_budget": "thinking_token_budget",  # SGLang
}

NEAREST: dict[str, str] = {
    "n_probs": "logprobs",  # llama.cpp; 0 is off there
    "post_sampling_probs": "logprobs_mode",  # llama.cpp
    "return_logprob": "logprobs",  # SGLang
    "top_logprobs_num": "logprobs",  # SGLang; 0 is off there
    "logprob_start_len": "prompt_logprobs",  # SGLang
    "output_scores": "logprobs",  # transformers
    "output_logits": "return_generation_logits",  # transformers
    "guided_whitespace_pattern": "json_whitespace",  # vLLM; a regular expression there
    "structured_outputs": "json",  # vLLM; holds the fields there
    "guided_decoding": "json",  # TensorRT-LLM; holds the fields there
    "response_format": "json",  # OpenAI; names the kind there
    "reasoning_budget_tokens": "thinking_token_budget",  # llama.cpp; -1 is off there
}
"""What an error suggests for names whose values mean something else here, so that they are no aliases."""

RESERVED = frozenset(
    """
    use_beam_search beam_width beam_width_array length_penalty early_stopping beam_search_diversity_rate
    """.split()  # noqa: SIM905  a table of words
)
"""Fields of later versions: absent until they work, and known by name, so that the error can say so."""


def resolve_aliases(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
    """Rename aliases to their fields. An alias beside its field is a fault, even when both agree."""
    fields: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    faults: list[Fault] = []
    for name, value in given.items():
        field = ALIASES.get(name, name)
        if field in fields:
            faults.append(Fault(name, value, f"stands beside {spelled[field]}, which means the same; give one of them"))
            continue
        fields[field] = value
        spelled[field] = name
    return fields, faults


def accepts_aliases(cls: type[T]) -> type[T]:
    """Let a dataclass be constructed with aliases; an unknown field is a fault reported with all others."""
    generated = cls.__init__
    known = tuple(cls.__dataclass_fields__)  # type: ignore[attr-defined]

    @functools.wraps(generated)
    def init(self: T, **given: Any) -> None:
        fields, faults = resolve_aliases(given)
        unknown = [name for name in fields if name not in known]
        faults += [Fault(name, fields.pop(name), _rule_of_unknown(name, known)) for name in unknown]
        object.__setattr__(self, "_faults", faults)
        generated(self, **fields)

    cls.__init__ = init  # type: ignore[assignment]
    return cls


def _rule_of_unknown(name: str, known: tuple[str, ...]) -> str:
    if name in RESERVED:
        return "is not supported yet; docs/rules.md lists what is reserved for later versions"
    if name in NEAREST:
        return f"is not a field of SamplingParams; did you mean {NEAREST[name]}? docs/porting.md says what differs"
    close = difflib.get_close_matches(name, [*known, *ALIASES], n=1)
    return "is not a field of SamplingParams" + (f"; did you mean {close[0]}?" if close else "")
