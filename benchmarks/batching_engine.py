"""What batching is worth on SmolLM2: `python -m benchmarks.batching_engine`, `--only prefix swap`, `--rounds 3`.

Time to the first token of 32 requests that share 1,000 tokens, with the prefix cache, empty at first, and without it;
eight choices of one prompt, with its blocks shared and without; the share of scheduler and batch in a step of 64
decoding requests; what microbatches cost; a preempted sequence of 1,000 tokens swapped and computed again. float32, one
thread, klero as it comes (deterministic). Candidates take turns in one process; medians, by the wall clock and in
processor time, which other processes disturb less. `--peers`: transformers as well. Appends to
results/batching_engine.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import THREADS, machine
from klero import LLM, SamplingParams
from klero.engine import Progress

RESULTS = Path(__file__).parent / "results" / "batching_engine.jsonl"
SHARED, OWN, REQUESTS = 1000, 8, 32
CHOICES, CHOICE_TOKENS = 8, 16
DECODES, DECODE_CONTEXT, STEPS = 64, 100, 16
SMALL, SMALL_PROMPT, SMALL_TOKENS, MICROBATCH = 16, 100, 8, 64
PREEMPTIONS = 5  # in a round
SPEEDUP, SHARE = 5.0, 0.03  # wanted: times less time to the first token, at least; share of a step, at most
BLOCK = 16

Numbers = dict[str, float]
Candidate = Callable[[], Numbers]


def tokens(*shape: int, seed: int = 0) -> Any:
    """Prompts, different in every token."""
    return np.random.default_rng(seed).integers(100, 40000, shape).tolist()


def shared_prompts() -> list[list[int]]:
    """REQUESTS prompts that have their first SHARED tokens in common."""
    shared = tokens(SHARED)
    return [shared + own for own in tokens(REQUESTS, OWN, seed=1)]


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **fields)


class Models:
    """Engines over one module, each with a cache of its own."""

    def __init__(self) -> None:
        self._sizes: dict[str, Any] = {"threads": THREADS, "seed": 1}
        first = LLM("smollm2", dtype="float32", num_blocks=512, **self._sizes)
        self.module: Any = first.engine.model.module  # type: ignore[attr-defined]
        self.tokenizer = first.tokenizer

    def llm(self, num_tokens: int, **options: Any) -> LLM:
        """With room for num_tokens."""
        blocks = -(-num_tokens // BLOCK)
        return LLM(self.module, tokenizer=self.tokenizer, num_blocks=blocks, block_size=BLOCK, **self._sizes | options)

    def continuous(self, prompts: list[list[int]], *, shares: bool) -> list[float]:
        """Seconds to the first token in transformers' continuous batching, over paged attention of its own."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        self.module.set_attn_implementation("paged|sdpa")
        asked = GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=-1)
        sizes = ContinuousBatchingConfig(
            page_size=BLOCK, num_blocks=4096, max_batch_tokens=512, allow_block_sharing=shares
        )
        outputs = self.module.generate_batch(
            prompts, generation_config=asked, continuous_batching_config=sizes, progress_bar=False
        ).values()
        if [len(output.generated_tokens) for output in outputs] != [1] * len(prompts):
            raise RuntimeError("continuous batching did not make one token for each prompt")
        begin = min(output.created_time for output in outputs)
        return [output.lifespan[1] - begin for output in outputs]

    def generate(self, prompt: list[int], num_choices: int, num_tokens: int) -> None:
        """transformers' own loop, dense cache: the prompt repeated for each choice."""
        import torch

        self.module.set_attn_implementation("sdpa")
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            self.module.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, num_return_sequences=num_choices,
                max_new_tokens=num_tokens, min_new_tokens=num_tokens, pad_token_id=0,
            )  # fmt: skip


def timed(call: Callable[[], Any]) -> tuple[Any, Numbers]:
    begin, cpu = time.perf_counter(), time.process_time()
    result = call()
    used, wall = time.process_time() - cpu, time.perf_counter() - begin
    return result, {"seconds": wall, "cpu": used}


def prefix(models: Models, peers: bool) -> dict[str, Candidate]:
    """Seconds to the first token, added up over the requests; the cache is empty when they come."""
    prompts, room = shared_prompts(), REQUESTS * (SHARED + OWN + BLOCK)

    def klero(llm: LLM) -> Numbers:
        llm.reset_prefix_cache()
        begin, firsts = time.process_time(), [0.0]

        def look(progress: Progress) -> None:  # a request is done with its first token
            firsts.extend([time.process_time() - begin] * (progress.done - len(firsts) + 1))

        outputs, took = timed(lambda: llm.generate(prompts, greedy(1), progress=look))
        took["to first token"] = sum(output.metrics.seconds_to_first_token or 0.0 for output in outputs)
        computed = sum(output.metrics.num_prompt_tokens_computed for output in outputs)
        return took | {"cpu to first token": sum(firsts), "prompt tokens computed": computed}

    def transformers(shares: bool) -> Numbers:
        firsts, took = timed(lambda: models.continuous(prompts, shares=shares))
        return took | {"to first token": sum(firsts)}

    on, off = models.llm(room), models.llm(room, enable_prefix_caching=False)
    made: dict[str, Candidate] = {"cache on": lambda: klero(on), "cache off": lambda: klero(off)}
    if peers:
        made["transformers continuous batching, sharing"] = lambda: transformers(True)
        made["transformers continuous batching"] = lambda: transformers(False)
    return made


def choices(models: Models, peers: bool) -> dict[str, Candidate]:
    """Eight choices of one prompt of 1,000 tokens, and the blocks in use at most."""
    (prompt,), room = tokens(1, SHARED, seed=2), (CHOICES + 1) * (SHARED + CHOICE_TOKENS + 2 * BLOCK)
    fields = {"max_tokens": CHOICE_TOKENS, "ignore_eos": True, "temperature": 1.0, "seed": 1}

    def klero(llm: LLM, num_prompts: int, n: int) -> Numbers:
        llm.reset_prefix_cache()
        assert llm.engine.kv is not None
        blocks, most = llm.engine.kv.blocks, 0

        def look(_: Any) -> None:
            nonlocal most
            most = max(most, blocks.num_blocks - blocks.num_free)

        _, took = timed(lambda: llm.generate([prompt] * num_prompts, SamplingParams(**fields, n=n), progress=look))
        return took | {"blocks": most}

    shared, apart = models.llm(room), models.llm(room, enable_prefix_caching=False)
    made: dict[str, Candidate] = {
        "n=8": lambda: klero(shared, 1, CHOICES),
        "8 requests, cache off": lambda: klero(apart, CHOICES, 1),
    }
    if peers:
        made["transformers generate"] = lambda: timed(lambda: models.generate(prompt, CHOICES, CHOICE_TOKENS))[1]
    return made


def step(models: Models, peers: bool) -> dict[str, Candidate]:
    """Parts of a step, in milliseconds, when 64 requests decode; STEPS steps a round."""
    llm = models.llm(DECODES * 512)
    engine, times = llm.engine, llm.engine.times

    def run() -> Numbers:
        room = engine.max_model_len - DECODE_CONTEXT
        if not engine.num_unfinished:
            for k, prompt in enumerate(tokens(DECODES, DECODE_CONTEXT, seed=3)):
                engine.add_request(f"{k}", prompt, SamplingParams(temperature=1.0, top_p=0.9, max_tokens=room, seed=k,
                                                                  ignore_eos=True))  # fmt: skip
        times.reset()
        while times.num_rows < DECODES * times.num_steps or not times.num_steps:  # until nobody is in its prompt
            times.reset()
            engine.step()
        times.reset()
        for _ in range(STEPS):
            engine.step()
        if times.num_tokens != times.num_rows or times.num_rows != DECODES * STEPS:
            raise RuntimeError("these were not steps of decodes alone")
        parts = {f"{part} ms": 1e3 * seconds / STEPS for part, seconds in times.seconds.items()}
        shares = times.shares()
        return parts | {"scheduler and batch": shares["schedule"] + shares["inputs"]}

    return {"64 decodes": run}


def microbatches(models: Models, peers: bool) -> dict[str, Candidate]:
    """16 requests of 100 + 8 tokens, steps of up to 512 tokens whole and in parts."""
    prompts, room = tokens(SMALL, SMALL_PROMPT, seed=4), SMALL * 2 * (SMALL_PROMPT + SMALL_TOKENS)

    def klero(llm: LLM) -> Numbers:
        return timed(lambda: llm.generate(prompts, greedy(SMALL_TOKENS)))[1]

    off: dict[str, Any] = {"enable_prefix_caching": False}
    whole, parts = models.llm(room, **off), models.llm(room, **off, max_microbatch_tokens=MICROBATCH)
    few = models.llm(room, **off, max_microbatch_requests=SMALL // 4)
    return {
        "whole": lambda: klero(whole),
        f"max_microbatch_tokens={MICROBATCH}": lambda: klero(parts),
        f"max_microbatch_requests={SMALL // 4}": lambda: klero(few),
    }


def swap(models: Models, peers: bool) -> dict[str, Candidate]:
    """From the preemption of a decoding sequence of 1,000 tokens to its next token; and a step without one."""
    (prompt,), room = tokens(1, SHARED, seed=5), 4 * SHARED

    def klero(llm: LLM, preempts: bool) -> Numbers:
        engine, took = llm.engine, []

        def go_on() -> None:
            before = engine.num_generated
            if preempts:
                engine.scheduler.preempt(engine.scheduler.running[0])
            while engine.num_generated == before:
                engine.step()

        engine.add_request("preempted", prompt, greedy(4 + PREEMPTIONS))
        while engine.num_generated == 0 or engine.times.num_rows < 2:
            engine.step()
        took += [timed(go_on)[1] for _ in range(PREEMPTIONS)]
        output = engine.abort("preempted")
        if output.metrics.num_preemptions != PREEMPTIONS * preempts:
            raise RuntimeError(f"{output.metrics.num_preemptions} preemptions")
        engine.times.reset()
        return {key: statistics.median(one[key] for one in took) for key in took[0]}

    off: dict[str, Any] = {"enable_prefix_caching": False}
    again, swapped, cached = models.llm(room, **off), models.llm(room, **off, swap_space=0.25), models.llm(room)
    return {
        "swapped out and in": lambda: klero(swapped, True),
        "computed again": lambda: klero(again, True),
        "found in the prefix cache": lambda: klero(cached, True),
        "not preempted": lambda: klero(again, False),
    }


CASES = {"prefix": prefix, "choices": choices, "step": step, "microbatches": microbatches, "swap": swap}
RATIOS = {  # case: (what, slower, faster)
    "prefix": ("to first token", "cache off", "cache on"),
    "choices": ("seconds", "8 requests, cache off", "n=8"),
    "microbatches": ("seconds", f"max_microbatch_tokens={MICROBATCH}", "whole"),
    "swap": ("seconds", "computed again", "swapped out and in"),
}
Found = dict[str, dict[str, list[float]]]


def measure(name: str, models: Models, rounds: int, peers: bool) -> Found:
    """Everything that the candidates of a case give, round by round."""
    candidates = CASES[name](models, peers)
    found: Found = {who: {} for who in candidates}
    for i in range(rounds):
        for who in list(candidates)[:: 1 if i % 2 == 0 else -1]:
            numbers = candidates[who]()
            shown = ", ".join(f"{key} {value:.4g}" for key, value in numbers.items())
            print(f"{name} {i + 1}: {who}: {shown} (load {machine.load_average()})", file=sys.stderr, flush=True)
            for key, value in numbers.items():
                found[who].setdefault(key, []).append(float(f"{value:.5g}"))
    return found


def judge(name: str, found: Found) -> Numbers:
    """Print the medians of a case, and return what is judged by: ratios by wall clock and processor, or a share."""
    medians = {who: {key: statistics.median(all) for key, all in of.items()} for who, of in found.items()}
    for who, numbers in medians.items():
        print(f"  {name:13} {who:42} " + ", ".join(f"{key} {value:.4g}" for key, value in numbers.items()))
    if name not in RATIOS:
        return {name: medians["64 decodes"]["scheduler and batch"]}
    key, slower, faster = RATIOS[name]
    keys = {name: key, f"{name}, cpu": "cpu" if key == "seconds" else f"cpu {key}"}
    ratios = {what: round(medians[slower][key] / medians[faster][key], 3) for what, key in keys.items()}
    print(f"  {name:13} {slower} / {faster}: " + ", ".join(f"{what} {value}" for what, value in ratios.items()))
    return ratios


def main(arguments: Sequence[str] | None = None) -> int:
    """Time, print, keep. Returns 1 if a target is missed."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batching_engine", description=about)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", action="store_true", help="transformers as well, which takes minutes")
    options = parser.parse_args(arguments)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    before, models = machine.load_average(), Models()
    models.llm(1024).generate(tokens(2, 40, seed=9), greedy(4))  # the first forwards of a process are slower
    found = {name: measure(name, models, options.rounds, options.peers) for name in options.only}
    load = [before, machine.load_average()]
    print(f"SmolLM2, float32, {THREADS} thread, medians of {options.rounds} rounds; load {load[0]} to {load[1]}")
    judged: Numbers = {}
    for name in found:
        judged |= judge(name, found[name])
    about_run = {"about": machine.describe(THREADS), "load": load}
    record = {"when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), **about_run}
    with RESULTS.open("a") as file:
        file.write(json.dumps(record | {"found": found, "judged": judged}) + "\n")
    return int(judged.get("prefix", SPEEDUP) < SPEEDUP or judged.get("step", 0.0) > SHARE)


if __name__ == "__main__":
    sys.exit(main())
