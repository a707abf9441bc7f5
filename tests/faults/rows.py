"""One row as each backend rewrites it, and engines whose rows are given, for the cases from the field."""

from __future__ import annotations

import numpy as np
import pytest

from klero import SamplingParams
from klero.device import HAVE_NUMBA
from klero.rewrite import Context, rewrite_row
from klero.testing.models import ToyModel

BACKENDS = ["reference", pytest.param("cpu", marks=pytest.mark.skipif(not HAVE_NUMBA, reason="needs Numba"))]


def row_after(backend, row, prompt=(), output=(), *, bad_word_ids=(), **fields):
    """The logits [V], float32, that the filters see."""
    params, row = SamplingParams(**fields), np.array(row, np.float32)
    at = Context(params, np.array(prompt, np.int32), np.array(output, np.int32), (), tuple(bad_word_ids))
    if backend == "reference":
        return rewrite_row(row, at).logits
    from tests.rewrite.kernels import rewrite_by_kernel

    by_block, by_token, *_ = rewrite_by_kernel(row, at)
    assert np.array_equal(by_block, by_token)
    return by_block


def banned(backend, width, *history, **fields):
    """The ids that are banned on a row of zeros."""
    return np.flatnonzero(np.isneginf(row_after(backend, [0.0] * width, *history, **fields))).tolist()


class RowsModel(ToyModel):
    """Row k, for every sequence, is the k-th given; past the end the last again. All prompts have prompt_len tokens."""

    def __init__(self, rows, prompt_len=1, **options):
        self.table, self.prompt_len = np.array(rows, np.float32), prompt_len
        super().__init__(vocab_size=self.table.shape[1], **options)

    def forward(self, step):
        """The rows of the positions asked for."""
        output = step.positions[step.logits_rows] + 1 - self.prompt_len
        return self.table[np.clip(output, 0, len(self.table) - 1)]
