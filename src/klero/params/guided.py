"""The fields that say which text may come: one grammar of six kinds, each checked as far as it can be uncompiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from klero.errors import name_of, told
from klero.params.checks import Broken, items_of
from klero.params.json_text import MAX_BYTES, check_text, read_json, write_json

GUIDED = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
OF_JSON = ("json", "json_object", "structural_tag")
MAX_CHOICES = 10_000
MAX_TAGS = 128
SCHEMA = "must be a JSON schema: a dict, a bool, JSON text of either, or a class with model_json_schema()"
TAG = (
    'must be {"structures": [{"begin": text, "schema": JSON schema, "end": text}, ...], "triggers": [text, ...]}, '
    f"as a dict or as JSON text, with at most {MAX_TAGS} structures and {MAX_TAGS} triggers"
)


def guided_field(params: Any) -> str | None:
    """Which of the six fields is asked for; of several the first."""
    return next((name for name in GUIDED if getattr(params, name) not in (None, False)), None)


def json_schema(value: Any) -> str:
    """A JSON schema as canonical JSON text: from a dict, a bool, JSON text, or a class that can say its own."""
    return write_json(_schema(value))


def _schema(value: Any) -> Any:
    if isinstance(value, type) and callable(getattr(value, "model_json_schema", None)):
        try:
            value = value.model_json_schema()  # type: ignore[attr-defined]
        except Exception as error:
            raise Broken(f"{SCHEMA}, and that of {name_of(value)} raised {told(error)}") from None
    if isinstance(value, str):
        value = read_json(value)
    if not isinstance(value, Mapping | bool | np.bool_):
        raise Broken(SCHEMA)
    return value


def pattern(value: Any) -> str:
    """A text that is not empty: a regular expression, or a grammar."""
    if not isinstance(value, str) or not value:
        raise Broken(f"must be a non-empty string of at most {MAX_BYTES} bytes")
    return check_text(str.__str__(value))


def choices(value: Any) -> tuple[str, ...]:
    """A list of texts, none empty and none twice; in the order given."""
    rule = f"must be a list of 1 to {MAX_CHOICES} different non-empty strings"
    texts = items_of(value, rule)
    if not 1 <= len(texts) <= MAX_CHOICES or any(not isinstance(text, str) or not text for text in texts):
        raise Broken(rule)
    check_text("".join(texts))
    seen: set[str] = set()
    for text in texts:
        if text in seen:
            raise Broken(f"{rule}, and {text!r:.40} is there twice")
        seen.add(text)
    return tuple(str.__str__(text) for text in texts)  # of an enumeration, what it stands for


def structural_tag(value: Any) -> str:
    """Free text with structures in it, as canonical JSON text: begins, schemas and ends, and the triggers of begins."""
    given = read_json(value) if isinstance(value, str) else value
    if not isinstance(given, Mapping) or given.get("type", "structural_tag") != "structural_tag":
        raise Broken(TAG)
    _check_keys(given, {"structures", "triggers"}, {"type"})
    triggers = _texts(given["triggers"])
    structures = [_structure(item) for item in _list(given["structures"])]
    for structure in structures:
        if not any(structure["begin"].startswith(trigger) for trigger in triggers):
            raise Broken(f"must be structures that a trigger begins, and none begins {structure['begin']!r:.40}")
    for trigger in triggers:
        if not any(structure["begin"].startswith(trigger) for structure in structures):
            raise Broken(f"must be triggers that begin a structure, and {trigger!r:.40} begins none")
    return write_json({"structures": structures, "triggers": triggers})


def _structure(item: Any) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise Broken(TAG)
    _check_keys(item, {"begin", "schema", "end"}, set())
    if not isinstance(item["begin"], str) or not isinstance(item["end"], str):
        raise Broken(TAG)
    return {"begin": item["begin"], "schema": _schema(item["schema"]), "end": item["end"]}


def _check_keys(given: Mapping[Any, Any], needed: set[str], known: set[str]) -> None:
    if missing := sorted(needed - set(given)):
        raise Broken(f"{TAG}; {missing[0]!r} is missing")
    if unknown := [key for key in given if key not in needed | known]:
        shown = repr(unknown[0]) if isinstance(unknown[0], str) else f"a {type(unknown[0]).__name__}"
        raise Broken(f"{TAG}; {shown:.40} is not known")


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= MAX_TAGS:
        raise Broken(TAG)
    return list(value)


def _texts(value: Any) -> list[str]:
    texts = _list(value)
    if any(not isinstance(text, str) or not text for text in texts):
        raise Broken(TAG)
    return list(dict.fromkeys(texts))
