"""What grammars cost: `python -m benchmarks.grammar` (a minute), `--rounds 12`, `--engine` (three more minutes).

The vocabulary of SmolLM2 (49,152 tokens) and a JSON schema of a small record. Compiling a schema that was never seen,
to its first mask; the masks of 64 rows at once; a token taken; 64 rows sampled with and without masks, at the states
of 64 random texts of the schema, beside 64 rows of which one has a mask. --engine: SmolLM2 with 64 requests, with and
without a grammar on all of them, in turns. One thread, medians of processor time. Appends to results/grammar.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import THREADS, machine
from benchmarks.cases import R, peaked_rows
from benchmarks.engine import prompts_of
from benchmarks.timing import Candidate, interleave
from klero import LLM, Sampler, SamplingParams, Seat
from klero.grammar.llguidance import LLGuidance
from klero.grammar.matchers import fill_all
from klero.grammar.protocol import Matcher
from klero.grammar.source import Source

RESULTS = Path(__file__).parent / "results" / "grammar.jsonl"
FIRST_MASK_MS, APPLY, STEP_SHARE = 20.0, 1.4, 0.05  # targets
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue", "violet"]}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "code": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "code"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 500}
SHAPE: dict[str, Any] = {"temperature": 1.0, "top_k": 50, "top_p": 0.9}


def unseen(i: int) -> Source:
    """The record with one more property, of which nobody has heard."""
    properties = RECORD["properties"] | {f"p{i}": {"const": i}}  # type: ignore[operator]
    return Source("json", json.dumps(RECORD | {"properties": properties}, separators=(",", ":")))


def first_masks(backend: LLGuidance, count: int) -> list[float]:
    """Milliseconds from a schema that was never seen to its first mask."""
    words, took = np.zeros(-(-backend.num_tokens // 32), np.int32), []
    for i in range(count):
        begin = time.perf_counter()
        backend.compile(unseen(i)).matcher((2,)).fill(words)
        took.append(1e3 * (time.perf_counter() - begin))
    return took


def walked(backend: LLGuidance, count: int) -> list[Matcher]:
    """Matchers of the record, each some random tokens further."""
    rng, made = np.random.default_rng(1), backend.compile(Source("json", json.dumps(RECORD)))
    words = np.zeros(-(-backend.num_tokens // 32), np.int32)
    matchers: list[Matcher] = []
    for n in range(count):
        matcher = made.matcher((2,))
        for _ in range(n):
            matcher.fill(words)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[: backend.num_tokens])
            if not matcher.accept(int(rng.choice(allowed))) or allowed.tolist() == [2]:
                break
        matchers.append(matcher)
    return matchers


class Fixed:
    """A matcher whose mask is always the same."""

    def __init__(self, mask: Any) -> None:
        self.mask = mask

    def fill(self, words: Any) -> None:
        words[:] = self.mask

    def accept(self, token_id: int) -> bool:
        return True

    def rewind(self, num_tokens: int) -> None:
        pass


def sampling(rows: Any, masks: Any, calls: int, given: Any = None) -> Callable[[], object]:
    """The rows in a Sampler, the first of them with matchers of these masks, again and again. given: masks as such."""
    sampler, params = Sampler(num_slots=R, vocab_size=rows.shape[1], max_len=calls + 2), SamplingParams(**SHAPE)
    makes = [partial(Fixed, mask) for mask in masks] + [None] * (R - len(masks))
    slots = sampler.setup_step(Seat(f"{i}", params, [1], seed=i, make_matcher=make) for i, make in enumerate(makes))
    return lambda: sampler.sample_async(sampler.step_of(slots), rows, given)


def engine_times(rounds: int) -> dict[str, dict[str, float]]:
    """SmolLM2 with 64 requests, free and with a grammar: seconds of a run, and milliseconds of the parts of a step."""
    llm = LLM("smollm2", dtype="float32", max_num_seqs=64, num_blocks=64 * 8, seed=1)
    prompts = [prompt[:8] for prompt in prompts_of(64)]  # decoding is what is asked about
    asked = {"temperature": 1.0, "top_p": 0.9, "seed": 1, "max_tokens": 24}
    ways = {"free": SamplingParams(**asked, ignore_eos=True), "grammar": SamplingParams(**asked, json=NUMBERS)}
    found: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "sample ms": []} for name in ways}
    for turn in range(2 * (rounds + 1)):
        name = list(ways)[turn % 2]
        before, begin = llm.engine.times.seconds["sample"], time.perf_counter()
        llm.generate(prompts, ways[name])
        if turn > 1:
            found[name]["seconds"].append(time.perf_counter() - begin)
            found[name]["sample ms"].append(1e3 * (llm.engine.times.seconds["sample"] - before) / 24)
    llm.close()
    return {name: {what: statistics.median(all) for what, all in of.items()} for name, of in found.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grammar", description=about)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--engine", action="store_true", help="SmolLM2 with 64 requests as well")
    options = parser.parse_args(arguments)
    judged: dict[str, Any] = {}
    if options.engine:
        times = judged["engine"] = engine_times(4)
        print(f"64 requests of 24 tokens: {times}", flush=True)
    with LLM("smollm2", dtype="float32") as llm:
        text, num = llm.engine.vocabulary, llm.engine.sampler.padded_from
    assert text is not None
    begin = time.perf_counter()
    backend = LLGuidance(text, num)
    print(f"the vocabulary, once: {time.perf_counter() - begin:.2f} s", flush=True)
    first = first_masks(backend, 40)
    judged["first mask ms"] = [round(statistics.median(first), 2), round(max(first), 2)]
    print(f"a schema never seen, to its first mask: {judged['first mask ms']} ms, median and most ({FIRST_MASK_MS:g})")
    matchers = walked(backend, R)
    words, calls = np.zeros((R, -(-num // 32)), np.int32), 25 * (options.rounds + 1) + 5
    assert not any(fill_all(matchers, words))
    rows = peaked_rows()[:, :num].copy()
    two_threads = LLGuidance(text, num, num_threads=2)
    others = walked(two_threads, R)
    candidates = {
        "fill, 1 thread": lambda: fill_all(matchers, words.copy()),
        "fill, 2 threads": lambda: fill_all(others, words.copy()),
        "sample, no masks": sampling(rows, [], calls),
        "sample, 64 masks": sampling(rows, words, calls),
        "sample, 64 masks given": sampling(rows, [], calls, words),
        "sample, one mask of 64": sampling(rows, words[-1:], calls),
    }
    made = [Candidate(("klero", name), call, R) for name, call in candidates.items()]
    share = interleave(made, options.rounds, lambda message: print(message, file=sys.stderr, flush=True))
    us = {candidate.key[1]: candidate.stats.cpu for candidate in made}
    allowed = np.unpackbits(words.view(np.uint8), axis=1).sum(1)
    print(f"R={R}, V={num}, {THREADS} thread, processor time, {share:.2f} of a core was ours; tokens allowed: "
          f"{int(allowed.min())} to {int(allowed.max())}, median {int(np.median(allowed))}")  # fmt: skip
    for name, value in us.items():
        print(f"  {name:26} {value:9.1f} us a row")
    judged["applied"] = round(us["sample, 64 masks given"] / us["sample, no masks"], 3)
    judged["filled and applied"] = round(us["sample, 64 masks"] / us["sample, no masks"], 3)
    judged["one of 64"] = round(us["sample, one mask of 64"] / us["sample, no masks"], 3)
    print(f"  masks on all rows {judged['applied']}x ({APPLY:g} wanted), with their matchers' filling "
          f"{judged['filled and applied']}x, on one row of 64 {judged['one of 64']}x")  # fmt: skip
    record = {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "about": machine.describe(THREADS),
        "us_per_row": {name: round(value, 2) for name, value in us.items()}, "judged": judged,
    }  # fmt: skip
    with RESULTS.open("a") as file:
        file.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
