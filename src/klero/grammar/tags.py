"""Structural tags: free text, in which a trigger begins a structure that has to be kept to its end."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def lark_of_tags(tag: dict[str, Any], rule_of_schema: Callable[[Any], str]) -> str:
    """Return {"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]} as a Lark grammar.

    Text is free until the first trigger in it is complete. What follows must complete the begin of a structure that
    begins with this trigger, then come a JSON value under its schema and its end, and the text is free again. It may
    end wherever it is free, in the middle of a trigger too. ValueError for a trigger that begins no structure or that
    contains another, and for a begin without a trigger: the text could not be told apart, or go on.
    """
    structures: list[dict[str, Any]] = tag["structures"]
    triggers: list[str] = list(dict.fromkeys(tag["triggers"]))
    check_tags(tag)
    lines = ["start: tag* FREE", "tag: " + " | ".join(f"tag{i}" for i in range(len(triggers)))]
    for i, trigger in enumerate(triggers):
        bodies = [
            f"{_text(item['begin'][len(trigger) :])} {rule_of_schema(item['schema'])} {_text(item['end'])}"
            for item in structures
            if item["begin"].startswith(trigger)
        ]
        lines.append(f"tag{i}: head{i} ({' | '.join(bodies)})")
        lines.append(f"head{i}[lazy]: ANY {_text(trigger)}")
    found = " | ".join(_text(trigger) for trigger in triggers)
    lines.append("ANY: /(?s:.*)/")
    lines.append(f"FREE: ANY & ~(ANY ({found}) ANY)")
    return "\n".join(lines)


def check_tags(tag: dict[str, Any]) -> None:
    """Raise ValueError for triggers and begins that do not fit each other."""
    structures, triggers = tag["structures"], tag["triggers"]
    if "" in triggers:
        raise ValueError("a trigger is empty, and would begin a structure everywhere")
    for trigger in triggers:
        if not any(item["begin"].startswith(trigger) for item in structures):
            raise ValueError(f"no structure begins with the trigger {trigger!r:.40}, so that no text could follow it")
        inside = next((other for other in triggers if other != trigger and other in trigger), None)
        if inside is not None:
            raise ValueError(f"the trigger {inside!r:.40} is in the trigger {trigger!r:.40}; leave out the longer one")
    for item in structures:
        if not any(item["begin"].startswith(trigger) for trigger in triggers):
            raise ValueError(f"no trigger begins {item['begin']!r:.40}, so that it would never be kept")


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
