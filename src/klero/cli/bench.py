"""klero bench: how fast a model answers here, and where the time of a step goes."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from klero.cli import options as o
from klero.cli.fields import SHAPING, takes
from klero.cli.models import print_table
from klero.device import num_threads
from klero.errors import OptionError
from klero.params import SamplingParams

if TYPE_CHECKING:
    from klero.engine import LLM

SHAPE = "What is measured"
Requests = Annotated[int, typer.Option(rich_help_panel=SHAPE, help="Requests at once.")]
PromptTokens = Annotated[int, typer.Option(rich_help_panel=SHAPE, help="Tokens of each prompt, chosen at random.")]
NewTokens = Annotated[int, typer.Option(rich_help_panel=SHAPE, help="Tokens that each request generates.")]
Repeat = Annotated[int, typer.Option(rich_help_panel=SHAPE, help="Runs that are timed, after one that is not.")]
Times = dict[str, float]


@dataclass(frozen=True)
class Measured:
    """One benchmark. tokens/s: generated tokens over the time of a whole run, prefill included; times in seconds.

    parts: seconds and share of each part of a step, over all runs. load: running processes over the last minute, before
    and after.
    """

    model: str
    dtype: str
    deterministic: bool
    requests: int
    prompt_tokens: int
    new_tokens: int
    repeat: int
    cores: int
    kernel_threads: int
    model_threads: int | None
    load: tuple[float | None, float | None]
    tokens_per_second: Times
    seconds_to_first_token: Times
    num_steps: int
    seconds: Times
    shares: Times


@takes(SHAPING)
@o.takes_engine
def bench(
    model: Annotated[str, typer.Argument(help=o.MODEL)] = "smollm2",
    requests: Requests = 16,
    prompt_tokens: PromptTokens = 100,
    new_tokens: NewTokens = 64,
    repeat: Repeat = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    *,
    engine: o.EngineOptions,
    **fields: Any,
) -> None:
    """Measure tokens/s, the time to the first token and the share of each part of a step.

    Without a shaping option tokens are drawn at temperature 1 with top-p 0.9.
    """
    sizes = {"requests": requests, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "repeat": repeat}
    for name, value in sizes.items():
        if value < 1:
            raise OptionError(f"--{name.replace('_', '-')}={value}: must be at least 1")
    params = SamplingParams.from_dict(fields or {"temperature": 1.0, "top_p": 0.9})
    llm, _ = o.load(model, **engine)
    measured = measure(llm, model, params, **sizes)
    if as_json:
        print(json.dumps(asdict(measured)))
    else:
        report(measured)


def measure(
    llm: LLM, name: str, params: SamplingParams, *, requests: int, prompt_tokens: int, new_tokens: int, repeat: int
) -> Measured:
    """Run the same requests `repeat` times after a run that warms up, each from an empty prefix cache.

    Every request generates `new_tokens`.
    """
    engine, params = llm.engine, params.but(max_tokens=new_tokens, ignore_eos=True)
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, engine.model.vocab_size, (requests, prompt_tokens)).tolist()
    before = _load()
    llm.generate(prompts, params)
    engine.times.reset()
    rates, firsts = [], []
    for i in range(repeat):
        print(f"run {i + 1} of {repeat} ...", file=sys.stderr)
        llm.reset_prefix_cache()
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - begin
        rates.append(sum(len(choice.token_ids) for output in outputs for choice in output.outputs) / seconds)
        firsts += [output.metrics.seconds_to_first_token or 0.0 for output in outputs]
    return Measured(
        model=name, dtype=engine.dtype or "own dtype", deterministic=engine.reproducible, requests=requests,
        prompt_tokens=prompt_tokens, new_tokens=new_tokens, repeat=repeat, cores=os.cpu_count() or 1,
        kernel_threads=num_threads(), model_threads=_model_threads(engine.model), load=(before, _load()),
        tokens_per_second=_spread(rates), seconds_to_first_token=_spread(firsts), num_steps=engine.times.num_steps,
        seconds=dict(engine.times.seconds), shares=engine.times.shares(),
    )  # fmt: skip


def report(m: Measured) -> None:
    """Print it for people."""
    how = "deterministic" if m.deterministic else "not deterministic"
    runs = f"{m.repeat} {'run' if m.repeat == 1 else 'runs'} after one to warm up"
    print(f"{m.model}, {m.dtype}, {how}: {m.requests} requests of {m.prompt_tokens} + {m.new_tokens} tokens, {runs}")
    threads = f"threads: model {m.model_threads or '-'}, kernels {m.kernel_threads}"
    print(f"{m.cores} cores, {threads}, load {_shown(m.load[0])} before and {_shown(m.load[1])} after\n")
    print_table(
        [
            ("", "median", "least", "most"),
            ("tokens/s", *(f"{m.tokens_per_second[key]:.1f}" for key in ("median", "min", "max"))),
            ("s to first token", *(f"{m.seconds_to_first_token[key]:.3f}" for key in ("median", "min", "max"))),
        ]
    )
    print(f"\n{m.num_steps} steps, {1000 * sum(m.seconds.values()) / max(m.num_steps, 1):.1f} ms each")
    rows = [(part, f"{m.seconds[part]:.3f} s", f"{100 * share:5.1f} %") for part, share in m.shares.items()]
    print_table([("part of a step", "time", "share"), *rows])


def _spread(values: Sequence[float]) -> Times:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _load() -> float | None:
    """The machine's load average over one minute; None where there is no such thing."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _shown(load: float | None) -> str:
    return "unknown" if load is None else f"{load:.2f}"


def _model_threads(model: Any) -> int | None:
    """Threads of the forward: the model's own word, or torch's; None where it runs on neither."""
    own = getattr(model, "threads", None)
    if own is not None or not hasattr(model, "module"):
        return own
    import torch

    return int(torch.get_num_threads())
