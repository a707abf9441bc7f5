"""What logprobs cost: `python -m benchmarks.logprobs` (a minute), `--rounds 15`.

64 peaked rows of 128,256 in a Sampler, one thread, top-k 50 and top-p .9, with and without logprobs, beside a pinned
mass pass and beside the way of torch: log_softmax, topk, and the rank by comparison. Appends to
results/logprobs.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import THREADS, machine
from benchmarks.cases import R, Rows, V, peaked_rows
from benchmarks.floors import floor_of
from benchmarks.timing import Candidate, interleave
from klero import Sampler, SamplingParams, Seat, score

RESULTS = Path(__file__).parent / "results" / "logprobs.jsonl"
SHAPE: dict[str, Any] = {"temperature": 1.0, "top_k": 50, "top_p": 0.9}
ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "logprobs=0": {"logprobs": 0},
    "logprobs=20": {"logprobs": 20},
    "logprobs=20, processed": {"logprobs": 20, "logprobs_mode": "processed"},
    "logprobs=20, temperature .7": {"logprobs": 20, "temperature": 0.7},
    "return_kept": {"return_kept": True},
}
EXTRA_PASSES, TORCH = 2.0, 8.0  # targets: at most so many mass passes more; at least so many times faster than torch


class Batch:
    """Sequences in a Sampler, sampled again and again from the same rows."""

    def __init__(self, params: Sequence[SamplingParams], calls: int) -> None:
        self.sampler = Sampler(num_slots=len(params), vocab_size=V, max_len=calls + 2)
        self.slots = self.sampler.setup_step(Seat(f"{i}", p, [1], seed=i) for i, p in enumerate(params))

    def call(self, rows: Any) -> None:
        self.sampler.sample_async(self.sampler.step_of(self.slots), rows)


def torch_logprobs(rows: Any) -> Callable[[], object]:
    """The sampled token's logprob, the top 20 and the rank, as engines compute them."""
    logits, tokens = torch.from_numpy(rows), torch.from_numpy(rows.argmax(1))[:, None]

    def call() -> object:
        logprobs = torch.log_softmax(logits, dim=-1)
        chosen = logprobs.gather(1, tokens)
        return chosen, logprobs.topk(20), (logprobs > chosen).sum(1) + 1

    return call


def main(arguments: Sequence[str] | None = None) -> int:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.logprobs", description=about)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args(arguments)
    rows, calls = peaked_rows(), 25 * (options.rounds + 1) + 5
    made = []
    for name, fields in ASKED.items():
        batch = Batch([SamplingParams(**SHAPE | fields)] * R, calls)
        made.append(Candidate(("klero", name), lambda batch=batch: batch.call(rows), R))
    one = Batch([SamplingParams(**SHAPE, logprobs=-1), *[SamplingParams(**SHAPE)] * (R - 1)], calls)
    made.append(Candidate(("klero", "logprobs=-1 on one row of 64"), lambda: one.call(rows), R))
    tokens = rows.argmax(1)
    made.append(Candidate(("klero", "score, top 20"), lambda: score(rows, tokens, num_top=20), R))
    made.append(Candidate(("floor", "mass pass"), floor_of("mass pass", Rows("peaked", rows)), R))
    made.append(Candidate(("torch", "log_softmax, topk 20, rank"), torch_logprobs(rows), R))
    share = interleave(made, options.rounds, lambda message: print(message, file=sys.stderr, flush=True))
    medians = {" ".join(candidate.key): candidate.stats.cpu for candidate in made}
    plain, floor = medians["klero nothing"], medians["floor mass pass"]
    torch_us = medians["torch log_softmax, topk 20, rank"]
    print(f"R={R}, V={V}, {THREADS} thread, processor time, {share:.2f} of a core was ours")
    for name, us in medians.items():
        more = us - plain
        note = f"{more:8.1f} more: {more / floor:5.2f} mass passes" if name.startswith("klero log") else ""
        print(f"  {name:36} {us:9.1f} us a row {note}")
    more = medians["klero logprobs=20"] - plain
    print(f"  logprobs=20 adds {more / floor:.2f} mass passes; at most {EXTRA_PASSES:g} are wanted")
    print(f"  torch takes {torch_us / more:.1f} times as long for its part; at least {TORCH:g} are wanted")
    record = {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "about": machine.describe(THREADS),
        "us_per_row": {name: round(us, 2) for name, us in medians.items()},
        "mass_passes": round(more / floor, 3), "times_torch": round(torch_us / more, 2),
    }  # fmt: skip
    with RESULTS.open("a") as file:
        file.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
