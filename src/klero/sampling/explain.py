"""klero.explain: one row's way from logits to its token, stage by stage, on the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from klero.errors import Fault, ParameterError
from klero.lots.mass import canonical, masses, scaled, weights
from klero.params import SamplingParams, check_seed, seed_bits
from klero.sampling.filters import total_order
from klero.sampling.fused.reference import sample_row
from klero.sampling.inputs import as_float32, read_logits
from klero.sampling.stateless import counters
from klero.sampling.status import BAD, EMPTY


@dataclass(frozen=True)
class Stage:
    """One stage: its name, how many tokens are left after it, and their share of the probability mass."""

    name: str
    tokens: int
    mass: float


@dataclass(frozen=True)
class Explanation:
    """What happened to one row.

    kept: ids that survived, ascending; token: the drawn id, -1 if none; status as in Sampled. seed:
    None for a greedy row that was given none.
    mass of a stage: the probability of the tokens left, at the row's temperature, in [0, 1]. `print` shows a table.
    """

    token: int
    kept: npt.NDArray[np.int64]
    stages: tuple[Stage, ...]
    status: int
    seed: int | None
    position: int
    child: int

    def __str__(self) -> str:
        lines = [f"{'stage':<12} {'tokens':>8} {'mass':>9}"] if self.stages else []
        lines += [f"{stage.name:<12} {stage.tokens:>8} {stage.mass:>9.6f}" for stage in self.stages]
        end = {BAD: "error: NaN or +inf in the row", EMPTY: "error: every token is -inf"}
        what = end.get(self.status, f"token {self.token}")
        seed = "no seed" if self.seed is None else f"seed {self.seed}"
        return "\n".join([*lines, f"-> {what}   {seed}, position {self.position}, child {self.child}"])


def explain(
    logits_row: Any, params: SamplingParams, *, seed: int | None = None, position: int, child: int = 0
) -> Explanation:
    """Follow one row [V] through every stage; the token is the one `klero.sample` draws.

    seed: None takes params.seed; one of them must be given, unless the row is greedy.
    """
    if not isinstance(params, SamplingParams):
        raise ParameterError([Fault("params", params, "must be SamplingParams")])
    row = read_logits(logits_row if isinstance(logits_row, np.ndarray) and logits_row.ndim == 2 else _row(logits_row))
    raw = as_float32(row.rows)
    if raw.shape[0] != 1:
        raise ParameterError([Fault("logits_row", raw.shape, "must be one row [V]")])
    bits = _one_seed(params, seed)
    positions, children = counters("position", position, 1), counters("child", child, 1)
    drawn = sample_row(raw[0], params.row, bits or 0, int(positions[0]), int(children[0]))
    return Explanation(
        drawn.token, np.sort(drawn.kept), _stages(raw[0], params, drawn), drawn.status, bits, position, child
    )


def _row(logits_row: Any) -> Any:
    if not hasattr(logits_row, "ndim"):
        logits_row = np.asarray(logits_row, dtype=np.float32)
    return logits_row[None] if logits_row.ndim == 1 else logits_row


def _one_seed(params: SamplingParams, seed: int | None) -> int | None:
    if seed is not None and params.seed is not None:
        raise ParameterError([Fault("seed", seed, "stands beside a seed in params; give one of them")])
    given = params.seed if seed is None else check_seed("seed", seed)
    if given is None and not params.greedy:
        raise ParameterError([Fault("seed", seed, "must be given, here or in params, for a row that draws")])
    return None if given is None else seed_bits(given)


def _stages(raw: npt.NDArray[np.float32], params: SamplingParams, drawn: Any) -> tuple[Stage, ...]:
    """The stages with their masses; a row that cannot be drawn has none."""
    if drawn.status:
        return ()
    logits = canonical(raw)
    order = total_order(logits)
    s = scaled(logits[order], logits[order[0]], np.float32(params.row.reciprocal))
    sums = np.cumsum(masses(weights(s)))
    total = int(sums[-1])
    named = (("logits", len(order)), *drawn.stages)
    return tuple(Stage(name, left, int(sums[left - 1]) / total) for name, left in named)
