"""What rewriting costs: `python -m benchmarks.rewriting` (a minute), `--rounds 15`.

64 peaked rows of 128,256 in a Sampler, one thread, beside the same rows without the rule, and beside the way of torch:
dense counts [R, V] and an operation for each rule. Ratios are the result. Appends to results/rewriting.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import THREADS, machine
from benchmarks.cases import R, V, peaked_rows
from benchmarks.timing import Candidate, interleave
from klero import Sampler, SamplingParams, Seat, Slot
from klero.batch.counts import Counts

RESULTS = Path(__file__).parent / "results" / "rewriting.jsonl"
HISTORY = 1000  # tokens, half of them prompt
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2}
BIAS = {int(i): 1.0 for i in np.random.default_rng(2).choice(V, 20, replace=False)}
FILTERS: dict[str, dict[str, Any]] = {
    "top-k 50, top-p .9": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
    "temperature .8": {"temperature": 0.8},
    "greedy": {"temperature": 0.0},
}
RULES: dict[str, tuple[dict[str, Any], float]] = {  # fields, target: times the same rows without
    "penalties": (PENALTIES, 1.3),
    "20 bias entries": ({"logit_bias": BIAS}, 1.1),
    "top-n-sigma": ({"top_n_sigma": 2.0}, 1.5),
    "no repeated trigram": ({"no_repeat_ngram_size": 3}, 0.0),
    "20 bad sequences": ({"bad_token_ids": [(i, i + 1) for i in range(20)]}, 0.0),
}


def tokens_like_text(rng: np.random.Generator, size: int) -> np.ndarray[Any, Any]:
    """Ids with the skew of text: a few hundred distinct ones in a thousand."""
    return np.minimum((rng.pareto(0.5, size) * 40).astype(np.int64), V - 1).astype(np.int32)


def bitmasks(allowed: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """bool [R, V] as int32 [R, ceil(V / 32)]."""
    return np.packbits(allowed, axis=1, bitorder="little").view("<i4")


class Batch:
    """R sequences in a Sampler, sampled again and again from the same rows."""

    def __init__(self, params: Sequence[SamplingParams], calls: int) -> None:
        rng = np.random.default_rng(3)
        self.sampler = Sampler(num_slots=len(params), vocab_size=V, max_len=HISTORY + calls)
        half = HISTORY // 2
        self.slots: list[Slot] = self.sampler.setup_step(
            Seat(f"{i}", p, tokens_like_text(rng, half), seed=i, output_ids=tokens_like_text(rng, half))
            for i, p in enumerate(params)
        )

    def call(self, rows: Any, masks: Any = None) -> None:
        self.sampler.sample_async(self.sampler.step_of(self.slots), rows, masks)


def candidates(rows: Any, calls: int) -> list[Candidate]:
    """Every rule under every filter, and what it is measured against."""
    made = []
    rng = np.random.default_rng(4)
    masks = {f"mask, {share:g} allowed": bitmasks(rng.random((R, V)) < share) for share in (0.001, 0.5, 0.999)}
    for filters, fields in FILTERS.items():
        plain = SamplingParams(**fields)
        batches = {"plain": Batch([plain] * R, calls)}
        batches["one penalised row"] = Batch([SamplingParams(**fields, **PENALTIES), *[plain] * (R - 1)], calls)
        for rule, (asked, _) in RULES.items():
            batches[rule] = Batch([SamplingParams(**fields, **asked)] * R, calls)
        for rule, batch in batches.items():
            made.append(Candidate((filters, rule, "klero"), lambda batch=batch: batch.call(rows), R))
        masked = Batch([plain] * R, 3 * calls)
        for name, mask in masks.items():
            key = (filters, name, "klero")
            made.append(Candidate(key, lambda masked=masked, mask=mask: masked.call(rows, mask), R))
    made.append(Candidate(("", "penalties alone", "torch, dense counts"), torch_penalties(rows), R))
    return made


def torch_penalties(rows: Any) -> Callable[[], object]:
    """Penalties as engines do them on the CPU: dense counts kept from step to step, one operation after the other."""
    logits, rng = torch.from_numpy(rows), np.random.default_rng(3)
    ids = torch.from_numpy(np.stack([tokens_like_text(rng, HISTORY) for _ in range(R)]).astype(np.int64))
    counts = torch.zeros(R, V, dtype=torch.int32).scatter_add_(1, ids, torch.ones_like(ids, dtype=torch.int32))

    def call() -> object:
        seen = counts > 0
        out = torch.where(seen, torch.where(logits > 0, logits / 1.1, logits * 1.1), logits)
        out = out - 0.2 * counts
        return out - 0.3 * seen

    return call


def update_requests(num_rows: int, rounds: int) -> float:
    """Microseconds (processor time) of `update_requests` for so many sequences without finish rules; the median."""
    sampler = Sampler(num_slots=num_rows, vocab_size=64, max_len=rounds + 2)
    slots = sampler.setup_step(Seat(f"{i}", SamplingParams(temperature=1.0), [1], seed=i) for i in range(num_rows))
    rows, took = np.zeros((num_rows, 64), np.float32), []
    for _ in range(rounds):
        state = sampler.sample_async(sampler.step_of(slots), rows)
        begin = time.process_time()
        sampler.update_requests(state)
        took.append(time.process_time() - begin)
    return float(np.median(took) * 1e6)


def memory_of_counts(num_slots: int) -> tuple[float, float]:
    """MB in use for penalties over histories of HISTORY tokens, and MB of a dense table int32 [S, V]."""
    rng, counts = np.random.default_rng(5), Counts(num_slots, HISTORY)
    before = machine.resident_bytes()
    for i in range(num_slots):
        counts.start(i, tokens_like_text(rng, HISTORY), [], HISTORY)
    return (machine.resident_bytes() - before) / 1e6, num_slots * V * 4 / 1e6


def main(arguments: Sequence[str] | None = None) -> int:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rewriting", description=about)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args(arguments)
    rows = peaked_rows()
    made = candidates(rows, calls=25 * (options.rounds + 1) + 5)
    share = interleave(made, options.rounds, lambda message: print(message, file=sys.stderr, flush=True))
    medians = {candidate.key: candidate.stats.cpu for candidate in made}
    print(f"R={R}, V={V}, {HISTORY}-token histories, {THREADS} thread, processor time, {share:.2f} of a core was ours")
    record: dict[str, Any] = {"us_per_row": {}, "ratios": {}}
    for (filters, rule, who), median in medians.items():
        record["us_per_row"][f"{filters}, {rule}, {who}"] = round(median, 2)
        if who == "klero" and rule != "plain":
            ratio = median / medians[filters, "plain", who]
            record["ratios"][f"{filters}, {rule}"] = round(ratio, 3)
            print(f"  {filters:20} {rule:22} {median:8.1f} us a row   {ratio:6.3f}x the plain rows")
        else:
            print(f"  {filters:20} {rule:22} {median:8.1f} us a row   {who}")
    ours, dense = memory_of_counts(256)
    record |= {"counts_mb": round(ours, 1), "dense_mb": round(dense, 1)}
    record["update_requests_256_us"] = round(update_requests(256, 300), 1)
    print(f"  counts of 256 slots: {ours:.1f} MB in use; a dense table: {dense:.1f} MB")
    print(f"  update_requests for 256 rows: {record['update_requests_256_us']} us")
    record["when"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    record["about"] = machine.describe(THREADS)
    with RESULTS.open("a") as file:
        file.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
