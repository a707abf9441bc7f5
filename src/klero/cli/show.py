"""How an answer looks: as text, or as a JSON line."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from klero.cli.requests import Asked

if TYPE_CHECKING:
    from klero.engine import CompletionOutput, RequestOutput
    from klero.logprobs import Logprobs


GENERATED = frozenset(
    """
    request_id index prompt messages text prompt_token_ids token_ids finish_reason stop_reason seed error reproducible
    metrics cumulative_logprob logprobs prompt_logprobs
    """.split()  # noqa: SIM905  a table of words
)
"""The fields of a line of `print_json`, for those who read it."""


def entries(said: Logprobs) -> list[dict[str, Any] | None]:
    """One object for each token, of what was asked for; None where nothing is said."""
    return [entry(said, i) for i in range(len(said))]


def entry(said: Logprobs, i: int) -> dict[str, Any] | None:
    """The object of one token."""
    out: dict[str, Any] = {}
    if said.rank[i] > 0:
        out |= {"token_id": int(said.token_ids[i]), "logprob": number(said.sampled[i]), "rank": int(said.rank[i])}
    if not np.isnan(said.processed[i]):
        out |= {name: number(getattr(said, name)[i]) for name in ("raw", "processed", "kept_mass")}
    if said.num_kept[i] > 0:
        out["num_kept"] = int(said.num_kept[i])
    for name, (ids, values) in (("top", said.top_of(i)), ("listed", said.listed_of(i))):
        if len(ids) and ids[0] >= 0 and not np.isnan(values[0]):  # else its row could not be scored
            out[name] = [[token, number(value)] for token, value in zip(ids.tolist(), values, strict=True)]
    ids, probs = said.kept_of(i)
    if len(ids):
        out["kept_ids"] = ids.tolist()
        if len(probs) and not np.isnan(probs[0]):  # else the ids alone were asked for
            out["kept_probs"] = [number(p) for p in probs]
    return out or None


def number(value: Any) -> float | str | None:
    """A number as JSON has it: the shortest that reads back as the same binary32; "-inf", as JSON has no infinity.

    null where there is none, which in an array is NaN.
    """
    if value is None or np.isnan(value):
        return None
    if isinstance(value, float):
        return "-inf" if value == -math.inf else value
    return "-inf" if value == -math.inf else float(str(value))


def print_text(asked: Asked, output: RequestOutput) -> None:
    """Every choice between two rules: the prompt above, how it ended below."""
    for choice in output.outputs:
        print(f"=== {asked.shown}\n{choice.text}")
        print_end(choice)


def print_end(choice: CompletionOutput) -> None:
    """The line below a choice."""
    reason = choice.finish_reason + (f" {choice.stop_reason!r}" if choice.stop_reason is not None else "")
    reason += f": {choice.error}" if choice.error else ""
    facts = [reason, f"seed {choice.seed}", f"child {choice.index}", f"{len(choice.token_ids)} tokens"]
    print("---", " · ".join(facts if choice.reproducible else [*facts, "not reproducible in other company"]))


def print_json(asked: Asked, output: RequestOutput) -> None:
    """One line for each choice, GENERATED; metrics are the request's, of all its choices together."""
    for choice in output.outputs:
        line = {
            "request_id": output.request_id,
            "index": choice.index,
            "prompt": asked.content if asked.kind == "prompt" else None,
            "text": choice.text,
            "prompt_token_ids": output.prompt_token_ids,
            "token_ids": choice.token_ids,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "seed": choice.seed,
            "error": choice.error,
            "reproducible": choice.reproducible,
            "metrics": dataclasses.asdict(output.metrics),
        }
        if choice.logprobs is not None:
            line |= {"cumulative_logprob": number(choice.cumulative_logprob), "logprobs": entries(choice.logprobs)}
        if output.prompt_logprobs is not None:
            line["prompt_logprobs"] = entries(output.prompt_logprobs)
        if asked.kind == "messages":
            line["messages"] = asked.content
        print(json.dumps(line, ensure_ascii=False, allow_nan=False))
