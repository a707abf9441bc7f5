"""Facts that follow from other facts, and which of them hold: the least set, in time linear in what is said."""

from __future__ import annotations

from collections.abc import Sequence


class Facts:
    """Facts by number, each of which holds once enough of its causes do. What only follows from itself does not."""

    def __init__(self) -> None:
        self._missing: list[int] = []
        self._effects: list[list[int]] = []

    def add(self) -> int:
        """A new fact, which does not hold unless `follows` says from what it follows."""
        self._missing.append(-1)
        self._effects.append([])
        return len(self._missing) - 1

    def follows(self, fact: int, causes: Sequence[int], num_needed: int) -> None:
        """Say, once for a fact, that it holds when so many of its causes hold; one that is there twice counts twice."""
        self._missing[fact] = num_needed
        for cause in causes:
            self._effects[cause].append(fact)

    def all_of(self, causes: Sequence[int]) -> int:
        """A new fact that holds when all of these do."""
        fact = self.add()
        self.follows(fact, causes, len(causes))
        return fact

    def any_of(self, causes: Sequence[int]) -> int:
        """A new fact that holds when one of these does."""
        fact = self.add()
        self.follows(fact, causes, 1)
        return fact

    def holding(self) -> list[bool]:
        """Whether each fact holds."""
        missing = list(self._missing)
        holds = [needed == 0 for needed in missing]
        left = [fact for fact, held in enumerate(holds) if held]
        while left:
            for effect in self._effects[left.pop()]:
                missing[effect] -= 1
                if missing[effect] == 0:
                    holds[effect] = True
                    left.append(effect)
        return holds
