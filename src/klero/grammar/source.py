"""Which grammar a request asks for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from klero.errors import Fault, GrammarError

if TYPE_CHECKING:
    from klero.params import SamplingParams


class Source(NamedTuple):
    """A grammar as it is asked for, and the key of its cache: equal sources allow the same texts.

    kind: json, json_object, regex, choice, grammar or structural_tag, the field's name. text: the schema or the tag
    as canonical JSON, the choices as a JSON list, the regular expression or the grammar as it was given; "" for
    json_object. whitespace: at most so many spaces and line breaks wherever JSON allows them; 0 where there is no JSON.
    """

    kind: str
    text: str = ""
    whitespace: int = 0

    @property
    def field(self) -> str:
        """The field of the parameters that asked for it."""
        return self.kind

    def refused(self, rule: str) -> GrammarError:
        """An error about the field."""
        return GrammarError([Fault(self.field, self.text, rule)])


def source_of(params: SamplingParams) -> Source | None:
    """Return the grammar that parameters ask for; None without one."""
    kind = params.guided
    if kind is None:
        return None
    if kind == "json_object":
        return Source(kind, "", params.json_whitespace)
    if kind == "choice":
        return Source(kind, json.dumps(list(params.choice or ()), ensure_ascii=False))
    whitespace = params.json_whitespace if kind in ("json", "structural_tag") else 0
    return Source(kind, getattr(params, kind), whitespace)
