"""Find patterns in a stream, one element at a time (the automaton of Aho and Corasick, 1975).

One class serves stop strings (elements are characters) and stop id sequences (elements are token ids). A node
of the automaton stands for the longest tail of the stream that begins some pattern, so one step of O(1)
amortised time gives both answers that a stream needs: which pattern ends here, and how much of the tail may
still become one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

Element = TypeVar("Element", bound=Hashable)

ROOT = 0


class Patterns(Generic[Element]):
    """A set of non-empty patterns, compiled. Immutable: share it, and keep a node (an int) per stream.

    `num_open[node]`: length of the longest tail that is a proper prefix of some pattern, in elements.
    """

    def __init__(self, patterns: Sequence[Sequence[Element]]) -> None:
        self.patterns = tuple(patterns)
        self._children: list[dict[Element, int]] = [{}]
        self._depth = [0]
        self._own: list[int | None] = [None]
        for index, pattern in enumerate(self.patterns):
            self._insert(index, pattern)
        self._fallback = [ROOT] * len(self._depth)
        self._ends = list(self._own)
        self._open_node = [ROOT] * len(self._depth)
        for node in self._link():
            self._complete(node)
        self.num_open = [self._depth[node] for node in self._open_node]

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def step(self, node: int, element: Element) -> int:
        """Return the node after `element`."""
        children = self._children
        while node and element not in children[node]:
            node = self._fallback[node]
        return children[node].get(element, ROOT)

    def end_of_node(self, node: int) -> int | None:
        """Return the index of the longest pattern that ends at `node`, or None."""
        return self._ends[node]

    def _insert(self, index: int, pattern: Sequence[Element]) -> None:
        node = ROOT
        for element in pattern:
            if element not in self._children[node]:
                self._children[node][element] = len(self._depth)
                self._children.append({})
                self._depth.append(self._depth[node] + 1)
                self._own.append(None)
            node = self._children[node][element]
        if self._own[node] is None:
            self._own[node] = index

    def _link(self) -> Iterator[int]:
        """Set fallbacks breadth first; yield each node once its own is set and its fallback was yielded."""
        waiting = deque(self._children[ROOT].values())
        while waiting:
            node = waiting.popleft()
            yield node
            for element, child in self._children[node].items():
                self._fallback[child] = self.step(self._fallback[node], element)
                waiting.append(child)

    def _complete(self, node: int) -> None:
        fallback = self._fallback[node]
        if self._ends[node] is None:
            self._ends[node] = self._ends[fallback]
        # A leaf is a whole pattern and nothing longer: what may still grow is a shorter tail.
        self._open_node[node] = node if self._children[node] else self._open_node[fallback]
