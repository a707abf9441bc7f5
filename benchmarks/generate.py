"""The whole road: tokens/s of LLM.generate on SmolLM2."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.machine import version
from benchmarks.recorded import PROMPTS, WHEEL
from klero import SamplingParams

REQUESTS, PROMPT_TOKENS, NEW_TOKENS, REPEATS = 16, 100, 64, 3


def tokens_per_second(say: Callable[[str], None]) -> dict[str, Any] | None:
    """Median and range over whole runs, prefill included; float32, top-p .9. None without the model's wheel."""
    if version(WHEEL) is None or version("transformers") is None:
        return None
    from klero.engine import LLM

    say(f"LLM.generate: {REQUESTS} requests of {PROMPT_TOKENS} + {NEW_TOKENS} tokens")
    llm = LLM(
        "smollm2", dtype="float32", max_num_seqs=REQUESTS, num_blocks=REQUESTS * 16, seed=1,
        enable_prefix_caching=False,  # runs repeat their prompts
    )  # fmt: skip
    tokenizer: Any = llm.tokenizer
    ids = [list(tokenizer.encode(prompt)) for prompt in PROMPTS]
    prompts = [(ids[i % len(ids)] * PROMPT_TOKENS)[i : i + PROMPT_TOKENS] for i in range(REQUESTS)]
    params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=NEW_TOKENS, ignore_eos=True)
    llm.generate(prompts[:2], params)
    rates = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params)
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        rates.append(made / (time.perf_counter() - begin))
    return {"requests": REQUESTS, "median": statistics.median(rates), "min": min(rates), "max": max(rates)}
