"""klero beside its peers and its floors: `python -m benchmarks.run` (a minute or two), `--full` for more of everything.

Ratios are the result; microseconds belong to this machine. One thread on both sides; KLERO_NUM_THREADS sets another
number. `--full` times all cases of `benchmarks.cases`, two threads as well, and `LLM.generate`, and tells which targets
are met. Every run appends to benchmarks/results/runs.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import sys
from collections.abc import Callable, Sequence

import torch

import klero
from benchmarks import THREADS, generate, machine, peers, report, targets, threads, verify
from benchmarks.cases import Rows, Setting, all_rows
from benchmarks.floors import FLOORS, floor_of
from benchmarks.timing import Candidate, interleave

SHORT_ROUNDS, FULL_ROUNDS = 6, 21
SLOW_CALLS = {False: 3, True: 5}  # of candidates such as a sort of 64 rows, a second each


def say(message: str) -> None:
    """Progress goes to stderr, the result to stdout."""
    print(message, file=sys.stderr, flush=True)


def candidates_of(rows: Rows) -> list[Candidate]:
    """Floors and klero, close together, and then every peer that can serve a setting."""

    def candidate(asked: str, who: str, call: Callable[[], object]) -> Candidate:
        return Candidate((rows.name, asked, who), call, len(rows.values))

    def ours(setting: Setting) -> Callable[[], object]:
        params, positions = setting.params, itertools.count(1)
        return lambda: klero.sample(rows.values, params, positions=next(positions))

    made = [candidate(floor, report.FLOOR, floor_of(floor, rows)) for floor in FLOORS]
    made += [candidate(setting.name, report.KLERO, ours(setting)) for setting in rows.settings]
    for setting in rows.settings:
        for peer in peers.timed_with(rows, setting):
            made.append(candidate(setting.name, peer, peers.draw_call(peer, rows, setting)))
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, time, print, keep. Returns 1 if the gate is red."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--full", action="store_true", help="all cases, more rounds, two threads, LLM.generate")
    parser.add_argument("--markdown", action="store_true", help="tables as docs/performance.md has them")
    options = parser.parse_args(arguments)
    torch.set_num_threads(THREADS)
    torch.manual_seed(1)
    load, about = machine.load_average(), machine.describe(THREADS)
    for line in peers.missing():
        say(line)
    say("checking klero against its golden file and its reference, and the peers against klero")
    inputs = all_rows(say, full=options.full)
    if found := verify.faults(inputs, say):
        print("the gate is red, so nothing was timed:", *found, sep="\n  ")
        return 1
    say("green")
    candidates = [candidate for rows in inputs for candidate in candidates_of(rows)]
    rounds = FULL_ROUNDS if options.full else SHORT_ROUNDS
    share = interleave(candidates, rounds, say, slow_calls=SLOW_CALLS[options.full])
    after = machine.load_average()
    with_two, busy = threads.timed(inputs, say) if options.full else ([], None)
    candidates += with_two
    rate = generate.tokens_per_second(say) if options.full else None
    if machine.source_hash() != about["source"]:
        print("the source changed while this ran: the numbers may be of the former or of the new one; run again")
        return 1
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    run = {"run": now, "full": options.full, "load": [load, after], "share": round(share, 3)}
    run |= {"two_threads": busy, "machine": about}
    report.append(run, candidates, rate)
    measured = {candidate.key: candidate.stats for candidate in candidates}
    report.show(run, measured, markdown=options.markdown)
    print("", report.layout(targets.table(measured), markdown=options.markdown, flush_left=6), sep="\n")
    if rate:
        print("\nLLM.generate, {requests} requests: {median:.0f} tokens/s ({min:.0f}-{max:.0f})".format(**rate))
    return 0


if __name__ == "__main__":
    sys.exit(main())
