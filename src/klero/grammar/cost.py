"""What all schemas of a request cost together, in measures that llguidance has no limits for."""

from __future__ import annotations

from typing import Any

from klero.grammar.bounds import num_remainders
from klero.grammar.patterns import MAX_OPTIONAL, num_optional
from klero.grammar.references import schemas

MAX_MULTIPLES = 100_000
MAX_NAME_PATTERNS = 128


class Cost:
    """The sums so far. What is there twice costs once, but for the patterns of names."""

    def __init__(self) -> None:
        self._steps: set[int] = set()
        self._texts: set[str] = set()
        self._num_names = 0

    def add(self, root: Any) -> None:
        """Add a schema whose shape is checked; ValueError where the sums are beyond what can be followed."""
        for schema in schemas(root):
            names = schema.get("patternProperties", {})
            self._num_names += len(names)
            self._texts.update(names)
            if "pattern" in schema:
                self._texts.add(schema["pattern"])
            if "multipleOf" in schema:
                self._steps.add(num_remainders(schema["multipleOf"]))
        if sum(self._steps) > MAX_MULTIPLES:
            raise ValueError(
                f"the digits of every multipleOf may be {MAX_MULTIPLES} in all, and are {sum(self._steps)}"
            )
        if self._num_names > MAX_NAME_PATTERNS:
            raise ValueError(f"has {self._num_names} patternProperties, and may have {MAX_NAME_PATTERNS} in all")
        if sum(num_optional(text) ** 2 for text in self._texts) > MAX_OPTIONAL**2:
            raise ValueError("too many pieces of its patterns may be left out or repeated; say some by a count")
