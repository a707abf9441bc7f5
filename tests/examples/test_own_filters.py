"""The example of processors and filters of one's own: what it prints, and that each of them acts."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import numpy as np

import klero

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "own_filters.py"))


def test_what_it_prints(capsys):
    EXAMPLE["main"]()
    *table, sampled, generated = capsys.readouterr().out.splitlines()
    assert table == [
        "stage               changed   tokens      mass",
        "repetition_penalty        3        5",
        "logits_processors         2        5",
        "logits                             5  1.000000",
        "even_ids                           3  0.607503",
        "half_of_the_first                  2  0.529219",
        "-> token 0   seed 7, position 3, child 0",
    ]
    assert sampled == "[0]"
    ids = [int(token_id) for token_id in re.findall(r"\d+", generated)]
    assert generated.endswith(") length")
    assert len(ids) == 8
    assert all(token_id % 2 == 0 for token_id in ids)


def test_the_processor_takes_one_off_the_last_two():
    explained = klero.explain([0.5, 1.0, 0.75], klero.SamplingParams(logits_processors=EXAMPLE["no_echo"]),
                              prompt=[0, 1], output=[2])  # fmt: skip
    assert explained.token == 0  # 0.5 is left as it was, 1.0 and 0.75 lost 1


def test_a_row_without_an_even_id_keeps_all():
    params = klero.SamplingParams(filters=EXAMPLE["even_ids"], seed=0)
    banned = [-np.inf, 1.0, -np.inf, 1.0]
    assert klero.explain(banned, params, position=0).kept.tolist() == [1, 3]
    assert klero.explain([1.0, 1.0, 1.0, 1.0], params, position=0).kept.tolist() == [0, 2]
