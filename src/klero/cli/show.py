"""How an answer looks: as text, or as a JSON line."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from klero.cli.requests import Asked

if TYPE_CHECKING:
    from klero.engine import CompletionOutput, RequestOutput


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
    """One line for each choice; metrics are the request's, of all its choices together."""
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
        if asked.kind == "messages":
            line["messages"] = asked.content
        print(json.dumps(line, ensure_ascii=False))
