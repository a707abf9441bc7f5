"""Options that several commands share and that are no fields alone, and an LLM from those of the engine."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from klero.cli.fields import GUIDED, TOKEN, parameter, parameters_of, signed
from klero.errors import OptionError

if TYPE_CHECKING:
    from klero.engine import LLM

TEXT = "Length, end and text"
ENGINE = "Engine"
MODEL = "smollm2, a folder, a GGUF file, a hub id or llama.cpp:FILE."
REPEATABLE = "The same text in any company"
ALIKE = "Prompts that begin alike"

NumChoices = Annotated[int | None, typer.Option("--n", rich_help_panel=TOKEN, help="Choices per prompt; unset: 1.")]
MaxTokens = Annotated[
    int | None, typer.Option(rich_help_panel=TEXT, help="Generate at most so many tokens; unset: 256.")
]
MinTokens = Annotated[int | None, typer.Option(rich_help_panel=TEXT, help="Do not end before so many.")]
Stop = Annotated[list[str] | None, typer.Option(rich_help_panel=TEXT, help="Stop at this text; may be given again.")]
StopTokenId = Annotated[list[int] | None, typer.Option(rich_help_panel=TEXT, help="Stop at this id; may be repeated.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", rich_help_panel=TEXT, help="Go on past the model's end.")]
IncludeStop = Annotated[bool, typer.Option("--include-stop", rich_help_panel=TEXT, help="Keep the stop's text.")]
Echo = Annotated[bool, typer.Option("--echo", rich_help_panel=TEXT, help="Put the prompt before the text.")]
ThinkingTokenIds = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=GUIDED, metavar="START,END", help="Marks of thinking, ids or texts; unset: of the template."
    ),
]

Dtype = Annotated[str, typer.Option(rich_help_panel=ENGINE, help="auto, float32, bfloat16 or float16.")]
Deterministic = Annotated[
    bool | None,
    typer.Option(
        "--deterministic/--no-deterministic",
        rich_help_panel=REPEATABLE,  # on its own: two names beside each other leave no room for texts
        help="Unset: where the model can be.",
    ),
]
MaxNumSeqs = Annotated[int, typer.Option(rich_help_panel=ENGINE, help="Sequences at a time.")]
MaxNumBatchedTokens = Annotated[
    int, typer.Option(rich_help_panel=ENGINE, help="Tokens a step computes; longer prompts come in chunks.")
]
MaxModelLen = Annotated[int | None, typer.Option(rich_help_panel=ENGINE, help="A context shorter than the model's.")]
BlockSize = Annotated[int, typer.Option(rich_help_panel=ENGINE, help="Tokens in a block of the KV cache.")]
NumBlocks = Annotated[int | None, typer.Option(rich_help_panel=ENGINE, help="KV blocks; unset: up to 4 GiB of them.")]
PrefixCaching = Annotated[
    bool,
    typer.Option(
        "--prefix-caching/--no-prefix-caching",
        rich_help_panel=ALIKE,  # on its own, as above
        help="Compute their beginning once.",
    ),
]
SwapSpace = Annotated[
    float, typer.Option(rich_help_panel=ENGINE, help="GiB of host memory to move blocks to when they run out.")
]
MaxMicrobatchTokens = Annotated[
    int | None, typer.Option(rich_help_panel=ENGINE, help="A larger step runs in parts; unset: whole.")
]
MaxMicrobatchRequests = Annotated[
    int | None, typer.Option(rich_help_panel=ENGINE, help="The same, in requests; unset: whole.")
]
Threads = Annotated[
    int | None, typer.Option(rich_help_panel=ENGINE, help="Of forward and kernels; unset: as the environment says.")
]
Spin = Annotated[
    int | None,
    typer.Option(
        rich_help_panel=ENGINE, help="Rounds that a waiting OpenMP thread spins; unset: $GOMP_SPINCOUNT or 1000."
    ),
]

EngineOptions = dict[str, Any]
ENGINE_OPTIONS = {
    "dtype": (Dtype, "auto"),
    "deterministic": (Deterministic, None),
    "max_num_seqs": (MaxNumSeqs, 64),
    "max_num_batched_tokens": (MaxNumBatchedTokens, 512),
    "max_model_len": (MaxModelLen, None),
    "block_size": (BlockSize, 16),
    "num_blocks": (NumBlocks, None),
    "enable_prefix_caching": (PrefixCaching, True),
    "swap_space": (SwapSpace, 0),
    "max_microbatch_tokens": (MaxMicrobatchTokens, None),
    "max_microbatch_requests": (MaxMicrobatchRequests, None),
    "threads": (Threads, None),
    "spin": (Spin, None),
}


def marks_of(text: str) -> tuple[int | str, int | str]:
    """The marks of thinking from "5,6" or "<think>,</think>". OptionError for anything but two."""
    start, comma, end = text.partition(",")
    if not comma or "," in end or not start or not end:
        raise OptionError(f"--thinking-token-ids {text!r}: must be START,END, such as 5,6 or <think>,</think>")
    return _mark(start), _mark(end)


def _mark(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def takes_engine(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command ENGINE_OPTIONS in place of its parameter `engine`, which then holds them, as `load` takes them."""

    @functools.wraps(command)
    def run(**given: Any) -> None:
        engine = {name: given.pop(name) for name in ENGINE_OPTIONS}
        command(**given, engine=engine)

    added = [parameter(name, kind, default) for name, (kind, default) in ENGINE_OPTIONS.items()]
    own = parameters_of(command)
    at = [p.name for p in own].index("engine")
    return signed(run, [*own[:at], *added, *own[at + 1 :]])


def load(model: str, **options: Any) -> tuple[LLM, float]:
    """An LLM from the engine's options, None where one was not given, and the seconds that it took; stderr says so."""
    from klero.engine import LLM

    print(f"loading {model} ...", file=sys.stderr)
    begin = time.perf_counter()
    llm = LLM(model, **{name: value for name, value in options.items() if value is not None})
    return llm, time.perf_counter() - begin
