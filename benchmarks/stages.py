"""What the stages of a step cost: `python -m benchmarks.stages` (a minute or so), a Markdown table.

A step of a Sampler (`step_of`, `sample_async`; for the finish also `update_requests`) over 1, 16, 64 and 256 peaked
rows of 128,256 tokens, histories of 1,000 tokens, one thread: with a stage and without it, in turns, and the median of
what the pairs differ by, in microseconds of processor time. Appends to results/stages.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import THREADS, machine, report
from benchmarks.cases import V, peaked_rows
from benchmarks.rewriting import BIAS, HISTORY, PENALTIES, bitmasks, tokens_like_text
from klero import Sampler, SamplingParams, Seat
from klero.finish import Finish, TokenBytes

RESULTS = Path(__file__).parent / "results" / "stages.jsonl"
SIZES = (1, 16, 64, 256)
BUDGET = 0.5  # seconds for the pairs of a stage and a size
LEAST, MOST, WARM = 9, 300, 2  # pairs
END = V - 1  # an id that does not come
BAD = [(i, i + 1) for i in range(20)]


@dataclass(frozen=True)
class Asked:
    """What a step has to do. fields: of SamplingParams, the same for all rows. logits: how they come, see `forms_of`.

    finish: "" (`update_requests` is not called), "ids" (end ids and a limit), "text" (a stop string and the text too).
    """

    fields: dict[str, Any] = field(default_factory=dict)
    mask: bool = False
    logits: str = "numpy"
    finish: str = ""

    def but(self, **fields: Any) -> Asked:
        """The same with more fields of SamplingParams."""
        return replace(self, fields=self.fields | fields)


GREEDY, ALL = Asked({"temperature": 0.0}), Asked({"temperature": 1.0})
FILTERED = ALL.but(top_k=50, top_p=0.9)
WHOLE = (  # beside themselves: whole steps
    ("a whole step, greedy", GREEDY, GREEDY),
    ("a whole step, temperature 1", ALL, ALL),
    ("a whole step, top-k 50, top-p .9", FILTERED, FILTERED),
)
STAGES = (  # what is told, with, without
    ("bias: 20 entries", FILTERED.but(logit_bias=BIAS), FILTERED),
    ("penalties: all three", FILTERED.but(**PENALTIES), FILTERED),
    ("bans: trigrams, 20 bad sequences", FILTERED.but(no_repeat_ngram_size=3, bad_token_ids=BAD), FILTERED),
    ("mask: half of the tokens", replace(FILTERED, mask=True), FILTERED),
    ("filters: top-k 50 and top-p .9, lots of what they keep", FILTERED, GREEDY),
    ("filters: top-p .9", ALL.but(top_p=0.9), ALL),
    ("lots: a draw among all tokens", ALL, GREEDY),
    ("logprobs: 20", FILTERED.but(logprobs=20), FILTERED),
    ("copies: torch in, torch out", replace(FILTERED, logits="torch"), FILTERED),
    ("copies: columns of a wider tensor", replace(FILTERED, logits="wider"), replace(FILTERED, logits="torch")),
    ("finish: end ids, a limit", replace(FILTERED, finish="ids"), FILTERED),
    ("finish: a stop string, the text", replace(FILTERED, finish="text"), replace(FILTERED, finish="ids")),
)


def forms_of(rows: Any) -> dict[str, Any]:
    """The same logits as NumPy has them, as torch has them, and as columns of a wider tensor."""
    wide = torch.zeros(len(rows), V + 64)
    wide[:, :V] = torch.from_numpy(rows)
    return {"numpy": rows, "torch": torch.from_numpy(rows), "wider": wide[:, :V]}


class Batch:
    """Sequences in a Sampler, sampled again and again from the same rows."""

    def __init__(self, asked: Asked, forms: dict[str, Any], vocabulary: TokenBytes) -> None:
        self._asked, self._logits = asked, forms[asked.logits]
        num_rows, rng, half = len(self._logits), np.random.default_rng(3), HISTORY // 2
        self._masks = bitmasks(rng.random((num_rows, V)) < 0.5) if asked.mask else None
        more = {"stop": ["\n never comes"]} if asked.finish == "text" else {}
        self._params = SamplingParams(**asked.fields, **more)
        self._sampler = Sampler(num_slots=num_rows, vocab_size=V, max_len=HISTORY + 2 * (MOST + WARM))
        self._slots = self._sampler.setup_step(
            Seat(
                f"{i}", self._params, tokens_like_text(rng, half), seed=i, output_ids=tokens_like_text(rng, half),
                finish=self._finish(vocabulary),
            )
            for i in range(num_rows)
        )  # fmt: skip

    def _finish(self, vocabulary: TokenBytes) -> Finish | None:
        if not self._asked.finish:
            return None
        known = vocabulary if self._asked.finish == "text" else None
        return Finish(self._params, end_token_ids=[END], vocabulary=known, max_tokens=10**6)

    def step(self) -> float:
        """One step; microseconds of processor time."""
        begin = time.process_time()
        sampler = self._sampler
        state = sampler.sample_async(sampler.step_of(self._slots), self._logits, self._masks)
        if self._asked.finish:
            sampler.update_requests(state)
        return (time.process_time() - begin) * 1e6


def paired(one: Batch, other: Batch) -> tuple[float, float]:
    """Medians of `one`, and of what it takes more than `other`, in turns."""
    first = [(one.step(), other.step()) for _ in range(WARM)][-1]
    took = []
    for i in range(max(LEAST, min(MOST, int(BUDGET * 1e6 / max(1.0, sum(first)))))):
        pair = (one.step(), other.step()) if i % 2 else (other.step(), one.step())[::-1]
        took.append(pair)
    one_us, other_us = np.array(took).T
    return float(np.median(one_us)), float(np.median(one_us - other_us))


def measure(num_rows: int, vocabulary: TokenBytes) -> dict[str, float]:
    """Microseconds of whole steps and of stages, for so many rows."""
    forms, took = forms_of(peaked_rows(num_rows)), {}
    for name, asked, without in (*WHOLE, *STAGES):
        print(f"{num_rows} rows, {name}", file=sys.stderr, flush=True)
        one = Batch(asked, forms, vocabulary)
        whole, more = paired(one, one if without is asked else Batch(without, forms, vocabulary))
        took[name] = whole if without is asked else more
    return took


def main(arguments: Sequence[str] | None = None) -> int:
    """Time, print, keep."""
    about = (__doc__ or "").partition("\n")[0]
    argparse.ArgumentParser(prog="python -m benchmarks.stages", description=about).parse_args(arguments)
    torch.set_num_threads(THREADS)
    before, described = machine.load_average(), machine.describe(THREADS)
    vocabulary = TokenBytes.from_list([b"%d " % i for i in range(V)])
    gc.disable()
    took = {num_rows: measure(num_rows, vocabulary) for num_rows in SIZES}
    lines = [("stage, microseconds a step", *(f"{n} row{'s' * (n > 1)}" for n in SIZES))]
    lines += [(name, *(report.us(took[n][name]) for n in SIZES)) for name in took[1]]
    print(report.layout(lines, markdown=True))
    load = [before, machine.load_average()]
    print(f"\nload {load[0]} before, {load[1]} after")
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with RESULTS.open("a") as file:
        file.write(json.dumps({"when": now, "us": took, "load": load, "machine": described}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
