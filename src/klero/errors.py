"""The exception tree of klero.

```
KleroError
├── ParameterError (ValueError)     a SamplingParams that breaks a rule; carries every fault at once
│   └── GrammarError                a grammar that cannot be compiled: malformed, unsatisfiable, too large, unsupported
├── OptionError (ValueError)        an option of a constructor, a function or the environment that breaks a rule
├── RequestError (ValueError)       a request that cannot be served: empty prompt, no room, ids out of range
│   └── QueueFullError              no more requests may wait now; try again later
├── LogitsError (ValueError)        an array of logits that is not one: rank, dtype, width
├── ModelError (RuntimeError)       a model that cannot be loaded or run
├── SlotError (RuntimeError)        a slot read or released by anyone but its owner; no slot free
├── BlockError (RuntimeError)       KV blocks: none free, freed twice, unknown
└── MissingExtra (ImportError)      an optional dependency is not installed
```
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

STOPS = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""What a caller's code may raise to stop more than its own row."""


def told(error: BaseException) -> str:
    """Say what a caller's code raised, even if the error cannot be printed."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def name_of(function: object) -> str:
    """What to call a caller's function in a message, even if it does not want to be asked."""
    try:
        return str(getattr(function, "__name__", type(function).__name__))
    except Exception:
        return type(function).__name__


class KleroError(Exception):
    """Base of everything that klero raises on purpose."""


@dataclass(frozen=True)
class Fault:
    """One broken rule: which field, the value that was given, and the rule with the way out."""

    field: str
    value: Any
    rule: str

    def __str__(self) -> str:
        try:
            shown = repr(self.value) if _can_be_shown(self.value) else f"<{type(self.value).__name__}>"
        except Exception:  # a value that cannot even be shown (an integer of 5000 digits) must not hide its fault
            shown = f"<{type(self.value).__name__}>"
        if len(shown) > 80:
            shown = shown[:77] + "..."
        return f"{self.field}={shown}: {self.rule}"


def _can_be_shown(value: Any, most: int = 100_000) -> bool:
    """Whether a value has so few parts that its repr ends soon: one that holds the same list often may never end."""
    left, seen = [value], 0
    while left:
        part = left.pop()
        seen += 1
        if seen > most:
            return False
        if isinstance(part, dict):
            left.extend(part.values())
        elif isinstance(part, list | tuple | set | frozenset):
            left.extend(part)
    return True


class ParameterError(KleroError, ValueError):
    """Parameters that break a rule. `faults` holds all of them; `field`, `value`, `rule` are the first's."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        first = self.faults[0]
        self.field, self.value, self.rule = first.field, first.value, first.rule
        super().__init__("; ".join(str(fault) for fault in self.faults))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.faults,)


class GrammarError(ParameterError):
    """A grammar that cannot be compiled or followed: malformed, unsatisfiable, too large, or unsupported."""


class OptionError(KleroError, ValueError):
    """An option that breaks a rule: field, value and rule in the message."""


class RequestError(KleroError, ValueError):
    """A request that cannot be served, found before it enters a batch."""


class QueueFullError(RequestError):
    """As many requests wait as may; the same one can be asked again later."""


class LogitsError(KleroError, ValueError):
    """Logits that cannot be read: rank, dtype, width or device."""


class ModelError(KleroError, RuntimeError):
    """A model that cannot be loaded, or that cannot be run as klero runs models."""


class SlotError(KleroError, RuntimeError):
    """A slot touched by anyone but its owner, or no slot free."""


class BlockError(KleroError, RuntimeError):
    """KV blocks: none free, freed twice, or unknown."""


class MissingExtra(KleroError, ImportError):
    """An optional dependency is not installed; the message names the extra to install."""

    def __init__(self, extra: str, wanted: str) -> None:
        self.extra, self.wanted = extra, wanted
        needs_torch = extra in ("engine", "lm-eval", "server")
        first = " (the CPU build of torch first: README, Installing)" if needs_torch else ""
        way = f"from a clone: pip install -c constraints.txt '.[{extra}]'{first}"
        super().__init__(f"{wanted} is not installed; klero[{extra}] brings it; {way}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.extra, self.wanted)
