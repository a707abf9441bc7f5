"""The engine beside transformers: `python -m benchmarks.engine` (float32), `--bfloat16`, `--rounds 5`.

16 requests of 100 prompt tokens and 64 new ones, and one such request, on SmolLM2. Candidates take turns in one
process, so that the machine's moods meet all of them; ratios of medians are the result. Two threads,
or `--threads`, OpenMP's spinning bounded. Appends to benchmarks/results/engine.jsonl.
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

import torch

from benchmarks import machine
from klero import LLM, SamplingParams

PROMPT_TOKENS, NEW_TOKENS = 100, 64
RESULTS = Path(__file__).parent / "results" / "engine.jsonl"
TARGETS = (  # (slower, faster, requests): seconds of the first over seconds of the second
    ("transformers generate", "klero, deterministic off", 16),
    ("transformers continuous batching", "klero, deterministic off", 16),
    ("klero", "klero, deterministic off", 16),
    ("klero", "klero, deterministic off", 1),
)


def prompts_of(num_requests: int) -> list[list[int]]:
    """Prompts of equal length, different in every token."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(100, 40000, (num_requests, PROMPT_TOKENS), generator=generator).tolist()


class Candidates:
    """klero and its peers over one module: whoever runs switches the attention to its own first."""

    def __init__(self, dtype: str, threads: int) -> None:
        sizes: dict[str, Any] = {"threads": threads, "max_num_seqs": 64, "num_blocks": 64 * 12, "seed": 1}
        sizes |= {"enable_prefix_caching": False}  # rounds repeat their prompts
        self.llm = LLM("smollm2", dtype=dtype, **sizes)
        self.module: Any = self.llm.engine.model.module  # type: ignore[attr-defined]
        self.off = LLM(self.module, deterministic=False, tokenizer=self.llm.tokenizer, **sizes)

    def klero(self, num_requests: int, deterministic: bool) -> None:
        params = SamplingParams(temperature=1.0, top_p=0.9, seed=1, max_tokens=NEW_TOKENS, ignore_eos=True)
        (self.llm if deterministic else self.off).generate(prompts_of(num_requests), params)

    def generate(self, num_requests: int) -> None:
        """transformers' own loop: one padded batch of equal lengths, dense cache, its sampling."""
        self.module.set_attn_implementation("sdpa")
        ids = torch.tensor(prompts_of(num_requests))
        with torch.inference_mode():
            self.module.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_p=0.9, top_k=0,
                max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, pad_token_id=0,
            )  # fmt: skip

    def continuous(self, num_requests: int) -> None:
        """transformers' continuous batching, over paged attention of its own."""
        from transformers import GenerationConfig

        self.module.set_attn_implementation("paged|sdpa")
        config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=True, top_p=0.9, top_k=0, eos_token_id=-1)
        outputs = self.module.generate_batch(prompts_of(num_requests), generation_config=config, progress_bar=False)
        made = [len(output.generated_tokens) for output in outputs.values()]
        if made != [NEW_TOKENS] * num_requests:
            raise RuntimeError(f"continuous batching made {made} tokens")

    def all(self) -> dict[tuple[str, int], Callable[[], None]]:
        made: dict[tuple[str, int], Callable[[], None]] = {}
        for n in (16, 1):
            made["klero", n] = lambda n=n: self.klero(n, True)
            made["klero, deterministic off", n] = lambda n=n: self.klero(n, False)
            made["transformers generate", n] = lambda n=n: self.generate(n)
        made["transformers continuous batching", 16] = lambda: self.continuous(16)
        return made


def timed(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def shares(candidates: Candidates, num_requests: int) -> dict[str, float]:
    """Where the steps of a batch of `num_requests` go, as fractions."""
    candidates.llm.engine.times.reset()
    candidates.klero(num_requests, True)
    return {part: round(share, 4) for part, share in candidates.llm.engine.times.shares().items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--bfloat16", action="store_true", help="bfloat16 instead of float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    threads = options.threads
    dtype = "bfloat16" if options.bfloat16 else "float32"
    print(f"{machine.describe(threads)}\nload {machine.load_average()}", file=sys.stderr)
    candidates = Candidates(dtype, threads)
    calls = candidates.all()
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    for done in range(1 + options.rounds):
        for key, call in calls.items():
            took = timed(call)
            print(f"{'warm-up' if done == 0 else done} {key} {took:.2f} s", file=sys.stderr, flush=True)
            if done:
                seconds[key].append(took)
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    print(f"{dtype}, {threads} threads, {PROMPT_TOKENS} + {NEW_TOKENS} tokens, load {machine.load_average()}")
    for (who, n), median in medians.items():
        low, high = min(seconds[who, n]), max(seconds[who, n])
        print(f"  {n:3} x {who:34} {n * NEW_TOKENS / median:7.1f} tokens/s   {median:6.2f} s ({low:.2f} to {high:.2f})")
    ratios = {f"{slow} / {fast}, {n}": round(medians[slow, n] / medians[fast, n], 3) for slow, fast, n in TARGETS}
    parts = shares(candidates, 16 if options.bfloat16 else 64)
    print("ratios:", json.dumps(ratios, indent=2), "\nshares of a step:", parts)
    record: dict[str, Any] = {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "about": machine.describe(threads),
        "dtype": dtype,
        "seconds": {f"{who}, {n}": [round(s, 3) for s in values] for (who, n), values in seconds.items()},
        "ratios": ratios,
        "shares": parts,
    }
    with RESULTS.open("a") as file:
        file.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
