"""Parts of a schema that only endless texts would meet: a required property that requires itself."""

from __future__ import annotations

from typing import Any

from klero.grammar.least import Facts
from klero.grammar.references import References, schemas


def endless_references(root: Any, references: References) -> set[str]:
    """The references to parts that no finite text meets. In doubt, and where a reference is not followed, one may."""
    return _Meetable(references).endless(root)


class _Meetable:
    def __init__(self, references: References) -> None:
        self._references = references
        self._facts = Facts()
        self._of: dict[int, int] = {}
        self._left: list[tuple[int, dict[str, Any]]] = []

    def endless(self, root: Any) -> set[str]:
        asked = {schema["$ref"] for schema in schemas(root) if "$ref" in schema}
        targets = {ref: target for ref in asked if (target := self._references.target(ref)) is not None}
        fact_of = {ref: self._fact(target) for ref, target in targets.items()}
        while self._left:
            fact, schema = self._left.pop()
            causes = self._causes(schema)
            self._facts.follows(fact, causes, len(causes))
        holds = self._facts.holding()
        return {ref for ref, fact in fact_of.items() if not holds[fact]}

    def _fact(self, schema: Any) -> int:
        """The fact that a finite text may meet a schema."""
        if not isinstance(schema, dict):
            return self._facts.add() if schema is False else self._facts.all_of(())
        if id(schema) not in self._of:
            self._of[id(schema)] = fact = self._facts.add()
            self._left.append((fact, schema))
        return self._of[id(schema)]

    def _causes(self, schema: dict[str, Any]) -> list[int]:
        """What all has to hold for a schema to be met."""
        causes = [self._fact(item) for item in schema.get("allOf", [])]
        target = self._references.target(schema["$ref"]) if "$ref" in schema else None
        if target is not None:
            causes.append(self._fact(target))
        for options in (schema[key] for key in ("anyOf", "oneOf") if key in schema):
            causes.append(self._facts.any_of([self._fact(option) for option in options]))
        types = schema.get("type")
        types = types if isinstance(types, list) else [types]
        if "const" not in schema and "enum" not in schema and set(types) <= {"object", "array"}:
            causes.append(self._facts.any_of([self._facts.all_of(self._of_type(kind, schema)) for kind in set(types)]))
        return causes

    def _of_type(self, kind: str, schema: dict[str, Any]) -> list[int]:
        """What has to hold for a finite object, or array, to meet a schema."""
        if kind == "object":
            listed, others = schema.get("properties", {}), schema.get("additionalProperties", True)
            return [self._fact(listed.get(name, others)) for name in schema.get("required", [])]
        first, least = schema.get("prefixItems", []), schema.get("minItems", 0)
        rest = [schema.get("items", True)] if least > len(first) else []
        return [self._fact(item) for item in [*first[:least], *rest]]
