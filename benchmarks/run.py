"""klero beside its peers and its floors: `python -m benchmarks.run` (a minute or two), `--full` for more of everything.

Ratios are the result; microseconds belong to this machine. One thread on both sides; KLERO_NUM_THREADS sets another
number. Every run appends to benchmarks/results/runs.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import klero
from benchmarks import THREADS, generate, machine, peers, report, verify
from benchmarks.cases import SETTINGS, Rows, Setting, all_rows
from benchmarks.floors import FLOORS, floor_of
from benchmarks.timing import Candidate, interleave

SHORT_ROUNDS, FULL_ROUNDS = 4, 15


def say(message: str) -> None:
    """Progress goes to stderr, the result to stdout."""
    print(message, file=sys.stderr, flush=True)


def candidates_of(rows: Rows, setting: Setting) -> list[Candidate]:
    """klero and every peer that can serve the setting."""

    def candidate(who: str, call: Callable[[], object]) -> Candidate:
        return Candidate((rows.name, setting.name, who), call, len(rows.values))

    params, positions = setting.params, itertools.count(1)
    made = [candidate("klero", lambda: klero.sample(rows.values, params, positions=next(positions)))]
    tensor, rng = peers.as_tensor(rows), np.random.default_rng(1)
    for peer in peers.peers_of(setting):
        made.append(candidate(peer, lambda peer=peer: peers.draw(peer, rows, tensor, setting, rng)))
    return made


def all_candidates(inputs: Sequence[Rows], *, full: bool) -> list[Candidate]:
    """Everything that this run times."""
    made = []
    for rows in inputs:
        made += [Candidate((rows.name, floor, "floor"), floor_of(floor, rows), len(rows.values)) for floor in FLOORS]
        for setting in SETTINGS:
            if full or rows.short or setting.short:
                made += candidates_of(rows, setting)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, time, print, keep. Returns 1 if the gate is red."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--full", action="store_true", help="all parameter sets on all rows, more rounds, LLM.generate")
    full = parser.parse_args(arguments).full
    torch.set_num_threads(THREADS)
    torch.manual_seed(1)
    before = machine.load_average()
    about = machine.describe(THREADS)
    print_machine(about)
    say("checking klero against its golden file and its reference, and the peers against klero")
    inputs = all_rows(say)
    if found := verify.faults(inputs, say):
        print("the gate is red, so nothing was timed:", *found, sep="\n  ")
        return 1
    say("green")
    candidates = all_candidates(inputs, full=full)
    share = interleave(candidates, FULL_ROUNDS if full else SHORT_ROUNDS, say)
    after = machine.load_average()
    print(report.table(inputs, {candidate.key: candidate.stats for candidate in candidates}))
    print(f"load {before} before, {after} after; {share:.2f} cores had while timing, of {THREADS} asked for")
    rate = generate.tokens_per_second(say) if full else None
    if rate:
        print("LLM.generate, {requests} requests: {median:.0f} tokens/s ({min:.0f}-{max:.0f})".format(**rate))
    if machine.source_hash() != about["source"]:
        print("the source changed while this ran: the numbers may be of the former or of the new one; run again")
        return 1
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    run = {"run": now, "full": full, "load": [before, after], "share": round(share, 3), "machine": about}
    report.append(run, candidates, rate)
    return 0


def print_machine(about: dict[str, Any]) -> None:
    """What the numbers depend on, and what the columns are."""
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items() if number)
    print(f"{about['cpu']}, {about['cores']} cores, {about['threads']} thread(s), Python {about['python']}, {versions}")
    print(
        "64 rows of 128256 tokens (SmolLM2: 49152). Medians in microseconds a row. ratio: peer / klero, wall clock; cpu"
    )
    print(
        "ratio: in processor time; a target takes both. x floor: klero / its floor (max or mass pass). at floor: peer /"
    )
    print("floor, the ratio of a sampler that costs its floor and no more.")


if __name__ == "__main__":
    sys.exit(main())
