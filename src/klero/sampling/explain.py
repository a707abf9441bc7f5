"""klero.explain: one row's way from logits to its token, stage by stage, on the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from klero.errors import Fault, ParameterError
from klero.lots.mass import masses, scaled, weights
from klero.params import RowParams, SamplingParams, check_seed, seed_bits
from klero.params.decay import top_p_after
from klero.rewrite import Context, Rewritten, rewrite_row
from klero.rows.inputs import as_float32, read_logits, width_without_padding
from klero.sampling.contexts import OF_ONE_ROW, contexts_of
from klero.sampling.fused.reference import DrawnRow, sample_row
from klero.sampling.stateless import counters, positions_of
from klero.sampling.status import BAD, EMPTY, FAILED, NO_TOKEN, OK, message


@dataclass(frozen=True)
class Stage:
    """One stage: its name, how many tokens are left after it, and their share of the probability mass.

    A stage that rewrites has no mass, and `changed`: how many logits it changed.
    """

    name: str
    tokens: int
    mass: float | None = None
    changed: int | None = None


@dataclass(frozen=True)
class Explanation:
    """What happened to one row.

    kept: ids that survived, ascending; token: the drawn id, -1 if none; status as in Sampled, with a message where it
    is not 0. seed: None for a greedy row that was given none. stages: first those that rewrite, then "logits", the row
    that the filters see, and the filters.
    mass of a stage: the probability of the tokens left, at the row's temperature, in [0, 1]. `print` shows a table.
    """

    token: int
    kept: npt.NDArray[np.int64]
    stages: tuple[Stage, ...]
    status: int
    seed: int | None
    position: int
    child: int
    message: str | None = None

    def __str__(self) -> str:
        lines = _table(self.stages) if self.stages else []
        what = f"token {self.token}" if self.status == OK else f"error: {self.message}"
        seed = "no seed" if self.seed is None else f"seed {self.seed}"
        return "\n".join([*lines, f"-> {what}   {seed}, position {self.position}, child {self.child}"])


def _table(stages: tuple[Stage, ...]) -> list[str]:
    """The stages as lines; the column of changes only where something rewrites."""
    width = max(12, *(len(stage.name) for stage in stages))
    rewrites = any(stage.changed is not None for stage in stages)
    lines = []
    for name, changed, tokens, mass in [("stage", "changed", "tokens", "mass"), *map(_cells, stages)]:
        middle = f" {changed:>8}" if rewrites else ""
        lines.append(f"{name:<{width}}{middle} {tokens:>8} {mass:>9}".rstrip())
    return lines


def _cells(stage: Stage) -> tuple[str, str, str, str]:
    changed = "" if stage.changed is None else str(stage.changed)
    mass = "" if stage.mass is None else f"{stage.mass:.6f}"
    return stage.name, changed, str(stage.tokens), mass


def explain(
    logits_row: Any,
    params: SamplingParams,
    *,
    seed: int | None = None,
    position: int | None = None,
    child: int = 0,
    prompt: Any = None,
    output: Any = None,
    mask: Any = None,
    end_token_ids: Any = None,
    padded_from: int | None = None,
) -> Explanation:
    """Follow one row [V] through every stage; the token is the one `klero.sample` draws.

    seed: None takes params.seed; one of them must be given, unless the row is greedy. prompt, output: token ids; mask:
    int32 [ceil(V / 32)]; position (None: from prompt and output), end_token_ids, padded_from: as in `klero.sample`.
    """
    if not isinstance(params, SamplingParams):
        raise ParameterError([Fault("params", params, "must be SamplingParams")])
    read = read_logits(logits_row if isinstance(logits_row, np.ndarray) and logits_row.ndim == 2 else _row(logits_row))
    raw = as_float32(read.rows)
    if raw.shape[0] != 1:
        raise ParameterError([Fault("logits_row", raw.shape, "must be one row [V]")])
    prompts, outputs, masks = (None if given is None else [given] for given in (prompt, output, mask))
    width = width_without_padding(padded_from, raw.shape[1])
    contexts = contexts_of(
        [params], 1, raw.shape[1], padded_from=width, prompts=prompts, outputs=outputs, end_token_ids=end_token_ids,
        masks=None if masks is None else np.asarray(mask)[None], names=OF_ONE_ROW,
    )  # fmt: skip
    at = contexts.get(0, Context(params))
    decay = params.decay
    asked = params.row if decay is None else params.row_at(top_p_after(decay, at.output_ids.tolist()))
    bits = _one_seed(params, seed, asked.greedy)
    where = counters("position", positions_of(prompts, outputs, OF_ONE_ROW) if position is None else position, 1)
    children = counters("child", child, 1)
    raw_row = raw[0, :width]
    return _explained(raw_row, at, asked, bits, int(where[0]), int(children[0]))


def _explained(
    raw: npt.NDArray[np.float32], at: Context, asked: RowParams, seed: int | None, position: int, child: int
) -> Explanation:
    params, nothing = at.params, np.empty(0, np.int64)
    if np.isnan(raw).any() or np.isposinf(raw).any():
        return Explanation(NO_TOKEN, nothing, (), BAD, seed, position, child, message(BAD, position))
    row = rewrite_row(raw, at)
    rewrites = tuple(Stage(name, left, changed=changed) for name, changed, left in row.stages)
    if row.error is not None:
        return Explanation(NO_TOKEN, nothing, rewrites, FAILED, seed, position, child, row.error)
    drawn = sample_row(row.logits, asked, seed or 0, position, child, filters=params.filters)
    what = message(EMPTY, position, row.rules) if drawn.status == EMPTY else drawn.message
    stages = rewrites + _stages(row, asked.reciprocal, drawn)
    return Explanation(drawn.token, np.sort(drawn.kept), stages, drawn.status, seed, position, child, what)


def _row(logits_row: Any) -> Any:
    if not hasattr(logits_row, "ndim"):
        logits_row = np.asarray(logits_row, dtype=np.float32)
    return logits_row[None] if logits_row.ndim == 1 else logits_row


def _one_seed(params: SamplingParams, seed: int | None, greedy: bool) -> int | None:
    if seed is not None and params.seed is not None:
        raise ParameterError([Fault("seed", seed, "stands beside a seed in params; give one of them")])
    given = params.seed if seed is None else check_seed("seed", seed)
    if given is None and not greedy:
        raise ParameterError([Fault("seed", seed, "must be given, here or in params, for a row that draws")])
    return None if given is None else seed_bits(given)


def _stages(row: Rewritten, reciprocal: float, drawn: DrawnRow) -> tuple[Stage, ...]:
    """The stages with their masses; a row that cannot be drawn has none."""
    if drawn.status:
        return ()
    logits = row.logits[row.logits > -np.inf]
    q = masses(weights(scaled(logits, logits.max(), np.float32(reciprocal))))
    left_of_stage = drawn.masses or (int(q.max()),) * len(drawn.stages)  # greedy keeps the likeliest token
    named = ((*stage, left) for stage, left in zip(drawn.stages, left_of_stage, strict=True))
    return Stage("logits", len(logits), 1.0), *(Stage(name, left, mass / int(q.sum())) for name, left, mass in named)
