"""Options that several commands share, and how they become SamplingParams."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from klero.params import SamplingParams

SHAPING = "Which token"
TEXT = "Length, end and text"

Temperature = Annotated[
    float | None, typer.Option(rich_help_panel=SHAPING, help="0 .. 1e6; unset, with top-k and top-p: greedy.")
]
TopK = Annotated[int | None, typer.Option(rich_help_panel=SHAPING, help="Keep the k most likely; 0 or -1: off.")]
TopP = Annotated[float | None, typer.Option(rich_help_panel=SHAPING, help="Keep the shortest prefix with this mass.")]
MinP = Annotated[float | None, typer.Option(rich_help_panel=SHAPING, help="Keep tokens this likely beside the first.")]
Seed = Annotated[
    int | None, typer.Option(rich_help_panel=SHAPING, help="0 .. 2^64-1; unset: a fresh one for each prompt, printed.")
]
NumChoices = Annotated[int, typer.Option("--n", rich_help_panel=SHAPING, help="Choices per prompt.")]
MaxTokens = Annotated[int, typer.Option(rich_help_panel=TEXT, help="Generate at most so many tokens.")]
MinTokens = Annotated[int, typer.Option(rich_help_panel=TEXT, help="Do not end before so many.")]
Stop = Annotated[list[str] | None, typer.Option(rich_help_panel=TEXT, help="Stop at this text; may be given again.")]
StopTokenId = Annotated[list[int] | None, typer.Option(rich_help_panel=TEXT, help="Stop at this id; may be repeated.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", rich_help_panel=TEXT, help="Go on past the model's end.")]
IncludeStop = Annotated[bool, typer.Option("--include-stop", rich_help_panel=TEXT, help="Keep the stop's text.")]
Echo = Annotated[bool, typer.Option("--echo", rich_help_panel=TEXT, help="Put the prompt before the text.")]


def params_of(**fields: Any) -> SamplingParams:
    """SamplingParams from the options that were given."""
    return SamplingParams.from_dict({name: value for name, value in fields.items() if value is not None})
