"""Runner: one step on a model, whole or in microbatches, as it is or padded, and what its blocks need before."""

from __future__ import annotations

from typing import Any

from klero.batch import BlockMoves, Scratch, StepArrays, merge, pad, split
from klero.engine.models.protocol import Model
from klero.engine.options import EngineOptions


class Runner:
    """Runs steps on a model. The logits do not depend on how, where the model is deterministic.

    options: the limits of a microbatch, and the buckets that each is padded to; a step that is larger than the largest
    bucket runs in parts. table_width: of the block tables.
    """

    def __init__(self, model: Model, options: EngineOptions, table_width: int) -> None:
        self.model, self._buckets = model, options.buckets
        self._max_tokens, self._max_requests = options.max_microbatch_tokens, options.max_microbatch_requests
        self._scratch = None if options.buckets is None else Scratch(options.buckets, table_width)

    def forward(self, moves: BlockMoves, arrays: StepArrays) -> Any:
        """Move blocks, then return the logits [R, V] of the step, in the order of its rows."""
        if moves.any:
            self.model.move_blocks(moves)  # type: ignore[attr-defined]  # none moves where a model cannot
        max_tokens, max_requests = self._limits(len(arrays.logits_rows))
        parts = split(arrays, max_tokens=max_tokens, max_requests=max_requests)
        if len(parts) == 1:
            return self._run(arrays)
        return merge([self._run(part.arrays) for part in parts], parts)

    def _limits(self, num_rows: int) -> tuple[int | None, int | None]:
        """Tokens and requests of a part, of a step with so many rows."""
        if self._buckets is None:
            return self._max_tokens, self._max_requests
        tokens, rows = self._buckets.tokens[-1], self._buckets.rows[-1]
        if num_rows > rows:  # a prompt that is scored has a row for each of its tokens
            tokens = min(tokens, rows)
        return min(self._max_tokens or tokens, tokens), min(self._max_requests or rows, rows)

    def _run(self, arrays: StepArrays) -> Any:
        if self._buckets is None or self._scratch is None:
            return self.model.forward(arrays)
        padded = pad(arrays, self._buckets, scratch=self._scratch)
        return self.model.forward(padded.arrays)[: padded.num_rows]


def weights_version(model: Model) -> int | None:
    """What the model says of its weights; None: nothing."""
    version = getattr(model, "weights_version", None)
    return None if version is None else version()
