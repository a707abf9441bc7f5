"""Where the schemas of a document are, and what its references name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")
OF_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
OF_ONE = ("items", "additionalProperties", "additionalItems")
"""The keywords below which there are schemas: by name, in a list, one."""


def schemas(root: Any) -> Iterator[dict[str, Any]]:
    """A schema and those below it, in the shape that the walk of schema.py has checked."""
    left = [root]
    while left:
        schema = left.pop()
        if isinstance(schema, dict):
            yield schema
            for key, value in schema.items():
                if key in OF_NAMES and isinstance(value, dict):
                    left.extend(value.values())
                elif key in OF_LISTS and isinstance(value, list):
                    left.extend(value)
                elif key in OF_ONE:
                    left.append(value)


class References:
    """The references of a document.

    Followed are those of the form #/a/b, and #name where an $anchor says it. Where a schema inside has an $id, what a
    reference names depends on where it stands, and none is followed.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._anchors: dict[str, Any] = {}
        self._known: set[int] = set()
        self.has_inner_id = False
        for schema in schemas(root):
            self._known.add(id(schema))
            self.has_inner_id |= schema is not root and "$id" in schema
            if isinstance(schema.get("$anchor"), str):
                self._anchors["#" + schema["$anchor"]] = schema

    def target(self, ref: str) -> Any:
        """The schema that a reference names; None for one that is not followed, or names nothing."""
        if self.has_inner_id:
            return None
        if ref in self._anchors:
            return self._anchors[ref]
        return at_pointer(self._root, ref[1:]) if ref == "#" or ref.startswith("#/") else None

    def names_a_value(self, ref: str) -> bool:
        """Whether a reference may lead into a const, an enum or a list of names, which are no schemas."""
        target = self.target(ref)
        if target is not None:
            return not isinstance(target, bool) and id(target) not in self._known
        _, _, pointer = ref.partition("#")
        return bool({"const", "enum"} & {unquote(step) for step in pointer.split("/")})


def at_pointer(root: Any, pointer: str) -> Any:
    """What is at a place /a/b; None if nothing is."""
    found = root
    for step in pointer.split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found
