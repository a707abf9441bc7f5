"""From what callers write to lists: prompts, parameters, request ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from klero.errors import Fault, ParameterError, RequestError
from klero.params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or {"prompt_embeds": [E, H], "prompt_token_ids": ids that follow them, which may be left out}."""


def listed(prompts: Any) -> list[Prompt]:
    """One prompt or many, as a list. RequestError for anything else."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items: list[Any] = [item if isinstance(item, str | Mapping) else _plain(item) for item in ids_of(prompts)]
    if items and not any(isinstance(item, str | list | Mapping) for item in items):
        return [items]
    return items


def ids_of(prompt: Any) -> list[Any]:
    """The entries of a list, a tuple or an array. RequestError for anything else."""
    prompt = _plain(prompt)
    if not isinstance(prompt, list):
        raise RequestError(f"prompt {prompt!r}: must be a text or a list of token ids")
    return prompt


def parts_of(prompt: Prompt) -> tuple[str | Sequence[int], Any]:
    """The text or ids of a prompt, and the embeddings that stand before them, None where there are none."""
    if not isinstance(prompt, Mapping):
        return prompt, None
    unknown = [name for name in prompt if name not in ("prompt_embeds", "prompt_token_ids")]
    if unknown or prompt.get("prompt_embeds") is None:
        what = f"{unknown[0]!r}: unknown here" if unknown else "prompt_embeds is missing"
        raise RequestError(f"a prompt as a dict: {what}; it has 'prompt_embeds' and may have 'prompt_token_ids'")
    ids = prompt.get("prompt_token_ids")
    return [] if ids is None else ids_of(ids), prompt["prompt_embeds"]


def priorities_of(priority: int | Sequence[int], num_prompts: int) -> list[Any]:
    """The priority of each prompt, from one for all or one for each."""
    if not isinstance(priority, Sequence):
        return [priority] * num_prompts
    if len(priority) != num_prompts:
        raise RequestError(f"priority: {len(priority)} for {num_prompts} prompts; give one for all, or one for each")
    return list(priority)


def params_of(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    """The parameters of each prompt; a seed given once is spread over the prompts."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params.for_prompt(i) for i in range(num_prompts)]
    several = isinstance(params, Iterable) and not isinstance(params, dict)
    if not several or not all(isinstance(one, SamplingParams) for one in params):
        raise RequestError("params: must be SamplingParams or a list of them; SamplingParams.from_dict reads a dict")
    if len(params) != num_prompts:
        raise RequestError(f"params: {len(params)} for {num_prompts} prompts; give one for all, or one for each")
    return list(params)


def names_of(request_ids: str | Sequence[str], num_prompts: int) -> list[str]:
    """The names that the caller gives to the requests of a call, one for each prompt."""
    several = isinstance(request_ids, Sequence) and not isinstance(request_ids, str)
    names: list[Any] = list(request_ids) if several else [request_ids]
    if len(names) != num_prompts:
        raise RequestError(f"request_ids: {len(names)} for {num_prompts} prompts; give one for each")
    bad = [name for name in names if not isinstance(name, str) or not name]
    if bad:
        raise RequestError(f"request_ids: {bad[0]!r}: must be a non-empty string")
    twice = [name for name in names if names.count(name) > 1] if len(set(names)) < len(names) else []
    if twice:
        raise RequestError(f"request_ids: {twice[0]!r} stands there {names.count(twice[0])} times; each must be unique")
    return names


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Put `where`, the place in the call, into the errors of one prompt."""
    try:
        yield
    except RequestError as error:
        raise type(error)(f"{where}: {error}") from None
    except ParameterError as error:
        raise type(error)(
            [Fault(fault.field, fault.value, f"{fault.rule} ({where})") for fault in error.faults]
        ) from None


def _plain(item: Any) -> Any:
    """Arrays and tensors as lists and numbers; tuples as lists."""
    item = item.tolist() if hasattr(item, "tolist") else item
    return list(item) if isinstance(item, tuple | range) else item
