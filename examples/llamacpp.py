"""llama.cpp computes the forward, klero batches and samples: every parameter of klero at llama.cpp's speed.

    pip install -c constraints.txt '.[llamacpp]'
    python examples/llamacpp.py [FILE.gguf]

Without a file it takes SmolLM2, the default model.
"""

from __future__ import annotations

import sys
import time

from klero import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Once upon a time", "Three colours:"]
PARAMS = [
    SamplingParams(max_tokens=24),
    SamplingParams(temperature=0.8, min_p=0.05, seed=7, n=2, max_tokens=24),
    SamplingParams(temperature=1.0, top_k=20, seed=1, stop=["\n\n"], max_tokens=24),
]


def main(file: str = "smollm2") -> None:
    """Generate for three prompts in one batch, each with its own parameters."""
    llm = LLM(f"llama.cpp:{file}")
    start = time.perf_counter()
    outputs = llm.generate(PROMPTS, PARAMS)
    seconds = time.perf_counter() - start
    for output in outputs:
        for choice in output.outputs:
            print(f"{output.prompt!r} -> {choice.text!r}  ({choice.finish_reason}, seed {choice.seed})")
    num_tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    print(f"{num_tokens / seconds:.0f} tokens/s")


if __name__ == "__main__":
    main(*sys.argv[1:])
