"""The spellings people bring from other engines, in one table."""

from __future__ import annotations

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
    "stop_strings": "stop",  # transformers
    "eos_token_id": "end_token_ids",  # transformers
    "end_id": "end_token_ids",  # TensorRT-LLM
    "include_stop_str": "include_stop_str_in_output",
    "no_stop_trim": "include_stop_str_in_output",  # SGLang
}


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
        rule = "is not a field of SamplingParams"
        faults += [Fault(name, fields.pop(name), rule + _nearest(name, known)) for name in unknown]
        object.__setattr__(self, "_faults", faults)
        generated(self, **fields)

    cls.__init__ = init  # type: ignore[assignment]
    return cls


def _nearest(name: str, known: tuple[str, ...]) -> str:
    import difflib

    close = difflib.get_close_matches(name, [*known, *ALIASES], n=1)
    return f"; did you mean {close[0]}?" if close else ""
