"""What preparing a step costs: `python -m benchmarks.batching` (half a minute), `--rounds 300`.

`InputBatch.update` and `fill` for 256 and 1,024 decoding requests with contexts of 4,096 tokens, and for a prompt of
2,048 tokens that enters beside 255 decodes, in blocks of 16, seated in a Sampler; one thread. Beside it a plain loop
over the requests, with NumPy for the tokens of each, that fills the same arrays. Both are checked to be equal first.
Medians of processor time, and of the wall clock. Appends to results/batching.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import THREADS, machine
from klero import Sampler, SamplingParams, Seat
from klero.batch.input_batch import InputBatch
from klero.batch.scheduler_output import ChangedSequence, NewSequence, SchedulerOutput, SequenceId

RESULTS = Path(__file__).parent / "results" / "batching.jsonl"
CONTEXT, BLOCK, PROMPT, V = 4096, 16, 2048, 128256
SLICE = 20  # steps of one way, before the other has its turn
PARAMS = SamplingParams(temperature=1.0)
CASES = {  # decodes, tokens of a prompt beside them, microseconds wanted
    "256 decodes": (256, 0, 300),
    "1,024 decodes": (1024, 0, 1200),
    "2,048 tokens of a prompt, 255 decodes": (255, PROMPT, 500),
}


class Loop:
    """The way of a plain loop: what is known of each request in a dictionary, arrays filled request by request."""

    def __init__(self, num_seqs: int, max_len: int, max_tokens: int) -> None:
        self.requests: dict[SequenceId, dict[str, Any]] = {}
        self.input_ids, self.positions = np.zeros((2, max_tokens), np.int32)
        self.slot_mapping = np.zeros(max_tokens, np.int64)
        self.tables = np.zeros((num_seqs, -(-max_len // BLOCK)), np.int32)

    def update(self, output: SchedulerOutput) -> None:
        for request in self.requests.values():
            request["computed"] += request["scheduled"]
            request["scheduled"] = 0
        for id in output.finished:
            del self.requests[id]
        for new in output.new:
            tokens = np.zeros(self.tables.shape[1] * BLOCK, np.int32)
            prompt = np.asarray(new.seat.prompt_ids)
            tokens[: len(prompt)] = prompt
            known = {"tokens": tokens, "length": len(prompt), "blocks": np.zeros(self.tables.shape[1], np.int32)}
            known["blocks"][: len(new.block_ids)] = new.block_ids
            self.requests[new.id] = known | {
                "num_blocks": len(new.block_ids), "computed": new.num_computed, "scheduled": 0,
            }  # fmt: skip
        for change in output.changed:
            request, more = self.requests[change.id], len(change.new_block_ids)
            request["blocks"][request["num_blocks"] : request["num_blocks"] + more] = change.new_block_ids
            request["num_blocks"] += more
        for id, num in output.num_tokens.items():
            self.requests[id]["scheduled"] = num

    def fill(self, output: SchedulerOutput) -> tuple[Any, ...]:
        start, starts, lens, rows = 0, [0], [], []
        self.tables[:] = 0
        for k, (id, num) in enumerate(output.num_tokens.items()):
            request = self.requests[id]
            first, end = request["computed"], start + num
            where = np.arange(first, first + num)
            self.input_ids[start:end] = request["tokens"][first : first + num]
            self.positions[start:end] = where
            self.slot_mapping[start:end] = request["blocks"][where // BLOCK] * BLOCK + where % BLOCK
            self.tables[k, : request["num_blocks"]] = request["blocks"][: request["num_blocks"]]
            start = end
            starts.append(end)
            lens.append(first + num)
            if first + num == request["length"]:
                rows.append(end - 1)
        made = np.array(starts, np.int32), np.array(lens, np.int32), np.array(rows, np.int64)
        return self.input_ids[:start], self.positions[:start], self.slot_mapping[:start], *made, self.tables

    def append(self, ids: Sequence[SequenceId]) -> None:
        for token, id in enumerate(ids):
            request = self.requests[id]
            request["tokens"][request["length"]] = token
            request["length"] += 1


class Measured(NamedTuple):
    """Microseconds of one step."""

    cpu: float
    wall: float


class Case:
    """Requests that decode, each step one token more, and perhaps a prompt that enters in every step."""

    def __init__(self, num_decodes: int, num_prompt: int, steps: int) -> None:
        max_len, self.num_prompt = CONTEXT + steps + 2, num_prompt
        num_seqs, max_tokens = num_decodes + (num_prompt > 0), num_decodes + num_prompt
        sampler = Sampler(num_slots=num_seqs, vocab_size=V, max_len=max_len)
        sizes: dict[str, int] = {"max_num_seqs": num_seqs, "max_num_batched_tokens": max_tokens, "max_len": max_len}
        self.batch = InputBatch(**sizes, block_size=BLOCK, seats=sampler)
        self.loop = Loop(num_seqs, max_len, max_tokens)
        self.num_blocks, self.step, self.rng = 0, 0, np.random.default_rng(1)
        lengths = [CONTEXT - k % BLOCK for k in range(num_decodes)]  # blocks fill up in different steps
        new = tuple(self.sequence(f"{k}", length, length - 1) for k, length in enumerate(lengths))
        self.ids = [sequence.id for sequence in new]
        self.lengths = dict(zip(self.ids, lengths, strict=True))
        self.entered: SequenceId | None = None
        first = SchedulerOutput(dict.fromkeys(self.ids, 1), new=new)
        self.batch.update(first)
        self.loop.update(first)
        self.calls: dict[str, Callable[[SchedulerOutput], object]] = {
            "klero": lambda output: (self.batch.update(output), self.batch.fill()),
            "loop": lambda output: (self.loop.update(output), self.loop.fill(output)),
        }
        self.slots = np.array([self.batch.slot_of(id).index for id in self.ids], np.int32)

    def blocks(self, num: int) -> tuple[int, ...]:
        self.num_blocks += num
        return tuple(range(self.num_blocks - num, self.num_blocks))

    def sequence(self, name: str, length: int, num_computed: int = 0) -> NewSequence:
        prompt = self.rng.integers(0, V, length).astype(np.int32)
        return NewSequence(name, Seat(name, PARAMS, prompt, seed=1), self.blocks(-(-length // BLOCK)), num_computed)

    def next(self) -> SchedulerOutput:
        """The record of the next step, when every decode has its token."""
        self.step += 1
        changed = tuple(
            ChangedSequence(id, self.blocks(1)) for id in self.ids if (self.lengths[id] + self.step - 1) % BLOCK == 0
        )
        num_tokens, new, finished = dict.fromkeys(self.ids, 1), (), ()
        if self.num_prompt:
            finished = () if self.entered is None else (self.entered,)
            new = (self.sequence(f"prompt {self.step}", self.num_prompt),)
            self.entered = new[0].id
            num_tokens[self.entered] = self.num_prompt
        return SchedulerOutput(num_tokens, new, changed, finished)

    def append(self, who: str) -> None:
        """What a sampler does between two steps; not timed."""
        if who == "klero":
            self.batch.seats.append(self.slots, np.arange(len(self.ids), dtype=np.int32))
        else:
            self.loop.append(self.ids)

    def check(self, output: SchedulerOutput) -> None:
        """Both ways must come to the same arrays."""
        for who, side in (("klero", self.batch), ("loop", self.loop)):
            self.append(who)
            side.update(output)
        arrays, _ = self.batch.fill()
        ids, positions, mapping, starts, lens, rows, tables = self.loop.fill(output)
        for name, ours, other in (
            ("input_ids", arrays.input_ids, ids), ("positions", arrays.positions, positions),
            ("slot_mapping", arrays.slot_mapping, mapping), ("query_starts", arrays.query_starts, starts),
            ("seq_lens", arrays.seq_lens, lens), ("logits_rows", arrays.logits_rows, rows),
            ("block_tables", arrays.block_tables, tables[:, : arrays.block_tables.shape[1]]),
        ):  # fmt: skip
            if not np.array_equal(ours, other):
                raise RuntimeError(f"{name}: the batch and the loop differ")

    def run(self, rounds: int) -> dict[str, list[Measured]]:
        """Time both ways in turns of SLICE steps, every second turn the loop first."""
        took: dict[str, list[Measured]] = {"klero": [], "loop": []}
        self.check(self.next())
        for k in range(rounds // SLICE):
            outputs = [self.next() for _ in range(SLICE)]
            for who in list(took)[:: 1 if k % 2 else -1]:
                for output in outputs:
                    self.append(who)
                    took[who].append(timed(self.calls[who], output))
        self.check(self.next())
        return took


def timed(call: Callable[[SchedulerOutput], object], output: SchedulerOutput) -> Measured:
    begin, cpu = time.perf_counter(), time.process_time()
    call(output)
    used, wall = time.process_time() - cpu, time.perf_counter() - begin
    return Measured(used * 1e6, wall * 1e6)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, time, print, keep. Returns 1 if a target is missed."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batching", description=about)
    parser.add_argument("--rounds", type=int, default=300)
    options = parser.parse_args(arguments)
    record: dict[str, Any] = {"us": {}, "loop_us": {}, "wall_us": {}, "wanted_us": {}, "load": machine.load_average()}
    print(f"{THREADS} thread, blocks of {BLOCK}, contexts of {CONTEXT}, medians of {options.rounds} steps")
    gc.collect()
    gc.disable()
    for name, (num_decodes, num_prompt, wanted) in CASES.items():
        took = Case(num_decodes, num_prompt, options.rounds + 2).run(options.rounds)
        ours, loop = np.median(took["klero"], axis=0), np.median(took["loop"], axis=0)
        record["us"][name], record["loop_us"][name] = round(float(ours[0]), 1), round(float(loop[0]), 1)
        record["wall_us"][name], record["wanted_us"][name] = round(float(ours[1]), 1), wanted
        times = f"{ours[0]:7.0f} us of processor time ({wanted} wanted), {ours[1]:7.0f} us on the wall"
        print(f"  {name:38} {times}; a plain loop {loop[0]:8.0f} us, {loop[0] / ours[0]:.1f}x")
    record["when"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    record["about"] = machine.describe(THREADS)
    with RESULTS.open("a") as file:
        file.write(json.dumps(record) + "\n")
    return int(any(record["us"][name] > wanted for name, wanted in record["wanted_us"].items()))


if __name__ == "__main__":
    sys.exit(main())
