"""What logprobs cost: `python -m benchmarks.logprobs` (a minute), `--rounds 15`, `--engine` (two more minutes).

64 peaked rows of 128,256 in a Sampler, one thread, top-k 50 and top-p .9, with and without logprobs, beside a pinned
mass pass and beside the way of torch: log_softmax, topk, and the rank by comparison. --engine: SmolLM2
with 64 requests, with and without logprobs=5 on all of them, in turns. Appends to results/logprobs.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import THREADS, machine
from benchmarks.cases import R, Rows, V, peaked_rows
from benchmarks.engine import prompts_of
from benchmarks.floors import floor_of
from benchmarks.timing import Candidate, interleave
from klero import LLM, Sampler, SamplingParams, Seat, score

RESULTS = Path(__file__).parent / "results" / "logprobs.jsonl"
SHAPE: dict[str, Any] = {"temperature": 1.0, "top_k": 50, "top_p": 0.9}
ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "logprobs=0": {"logprobs": 0},
    "logprobs=20": {"logprobs": 20},
    "logprobs=20, processed": {"logprobs": 20, "logprobs_mode": "processed"},
    "logprobs=20, temperature .7": {"logprobs": 20, "temperature": 0.7},
    "at .7": {"temperature": 0.7},
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


def engine_ratio(rounds: int) -> float:
    """Seconds of 64 requests with logprobs=5 over those without, on SmolLM2 in float32; the ratio of medians."""
    llm = LLM("smollm2", dtype="float32", max_num_seqs=64, num_blocks=64 * 8, seed=1)
    prompts = [prompt[:8] for prompt in prompts_of(64)]  # decoding is what is asked about
    plain = SamplingParams(temperature=1.0, top_p=0.9, seed=1, max_tokens=24, ignore_eos=True)
    asking = SamplingParams(temperature=1.0, top_p=0.9, seed=1, max_tokens=24, ignore_eos=True, logprobs=5)
    seconds: dict[int, list[float]] = {0: [], 1: []}
    for turn in range(2 * (rounds + 1)):
        begin = time.perf_counter()
        llm.generate(prompts, (plain, asking)[turn % 2])
        if turn > 1:
            seconds[turn % 2].append(time.perf_counter() - begin)
    llm.close()
    return statistics.median(seconds[1]) / statistics.median(seconds[0])


def main(arguments: Sequence[str] | None = None) -> int:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.logprobs", description=about)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--engine", action="store_true", help="SmolLM2 with 64 requests as well")
    options = parser.parse_args(arguments)
    if options.engine:
        ratio = engine_ratio(4)
        print(f"64 requests with logprobs=5 take {ratio:.3f} times as long; at most 1.05 is wanted", flush=True)
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
    judged = {}
    for temperature, name, without in ((1, "logprobs=20", "nothing"), (0.7, "logprobs=20, temperature .7", "at .7")):
        more = medians[f"klero {name}"] - medians[f"klero {without}"]
        judged[f"temperature {temperature}"] = {"passes": round(more / floor, 3), "torch": round(torch_us / more, 2)}
        passes, times = f"{more / floor:.2f} mass passes ({EXTRA_PASSES:g} wanted)", f"{torch_us / more:.1f}"
        print(f"  temperature {temperature}: logprobs=20 adds {passes}; torch takes {times}x ({TORCH:g}x wanted)")
    record: dict[str, Any] = {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "about": machine.describe(THREADS),
        "us_per_row": {name: round(us, 2) for name, us in medians.items()},
        "judged": judged,
    }  # fmt: skip
    if options.engine:
        record["engine"] = round(ratio, 4)
    with RESULTS.open("a") as file:
        file.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
