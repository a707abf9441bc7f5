"""Evaluation: log-likelihoods of given tokens, and a model class for lm-evaluation-harness (the extra `lm-eval`).

`KleroLM` registers itself with the harness as "klero" when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from klero.evals.scoring import Pair, Scored, join_pair, score_pairs, windows

if TYPE_CHECKING:
    from klero.evals.harness import KleroLM

__all__ = ["KleroLM", "Pair", "Scored", "join_pair", "score_pairs", "windows"]


def __getattr__(name: str) -> Any:
    """Load the harness when it is asked for. MissingExtra without it."""
    if name == "KleroLM":
        from klero.evals.harness import KleroLM

        return KleroLM
    raise AttributeError(f"module 'klero.evals' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
