"""The options that are fields of SamplingParams: one table, and a decorator that gives a command those it takes."""

from __future__ import annotations

import csv
import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from klero.errors import OptionError

TOKEN = "Which token"
MORE = "More filters"
CHANGES = "Bias, penalties and bans"
GUIDED = "Which text may come"
SAID = "What is said about a token"


def _option(kind: Any, panel: str, text: str, *names: str, metavar: str | None = None) -> Any:
    return Annotated[kind | None, typer.Option(*names, rich_help_panel=panel, help=text, metavar=metavar)]


def _flag(name: str, panel: str, text: str, *, hidden: bool = False) -> Any:
    return Annotated[bool | None, typer.Option(name, rich_help_panel=panel, help=text, hidden=hidden)]


SHAPING = {
    "temperature": _option(float, TOKEN, "0 .. 1e6; unset, with top-k and top-p: greedy."),
    "top_k": _option(int, TOKEN, "Keep the k most likely; 0 or -1: off."),
    "top_p": _option(float, TOKEN, "Keep the shortest prefix with this mass."),
    "min_p": _option(float, TOKEN, "Keep tokens this likely beside the first."),
}
SEED = {"seed": _option(int, TOKEN, "0 .. 2^64-1; unset: a fresh one for each prompt, printed.")}
FILTERS = {
    "top_n_sigma": _option(float, MORE, "Keep logits this many deviations from the largest."),
    "epsilon_cutoff": _option(float, MORE, "Keep tokens at least this likely."),
    "eta_cutoff": _option(float, MORE, "The same, less strict at high entropy."),
    "top_a": _option(float, MORE, "Keep those above this times the largest squared."),
    "typical_p": _option(float, MORE, "Keep the nearest to the entropy, to this mass."),
    "xtc_probability": _option(float, MORE, "How often XTC drops the most likely tokens."),
    "xtc_threshold": _option(float, MORE, "What XTC takes for likely; unset: 0.1."),
    "top_p_decay": _option(float, MORE, "Multiply top-p by this after each token."),
    "top_p_min": _option(float, MORE, "Where the decay ends; unset: 1e-6."),
    "top_p_reset_id": _option(int, MORE, "After this token top-p begins anew."),
}
REWRITING = {
    "logit_bias": _option(list[str], CHANGES, "ID=NUMBER, added; -inf bans; may be repeated."),
    "repetition_penalty": _option(float, CHANGES, "On what occurred, the prompt included; 1: off."),
    "presence_penalty": _option(float, CHANGES, "-2 .. 2, taken off what was generated."),
    "frequency_penalty": _option(float, CHANGES, "-2 .. 2, the same, each time it occurred."),
    "prompt_ignore_length": _option(int, CHANGES, "Both count the prompt after so many tokens."),
    "bad_token_ids": _option(list[str], CHANGES, "ID, or ID,ID,... in a row; may be repeated."),
    "no_repeat_ngram_size": _option(int, CHANGES, "No run of so many tokens twice."),
    "allowed_token_ids": _option(list[str], CHANGES, "ID,ID,...: no other; may be repeated."),
}
SPELLED = "Ban this text as the tokenizer spells it, alone and after a space; may be repeated."
BAD_WORDS = {"bad_words": _option(list[str], CHANGES, SPELLED)}
STRUCTURED = {
    "json": _option(str, GUIDED, "JSON that this schema allows.", "--json-schema", metavar="FILE"),
    "json_object": _flag("--json-object", GUIDED, "Any JSON object."),
    "regex": _option(str, GUIDED, "What this regular expression matches as a whole."),
    "choice": _option(list[str], GUIDED, "One of A,B,...; with a comma: '\"a, b\",c'; may be repeated."),
    "grammar": _option(str, GUIDED, "What this grammar derives: Lark, or EBNF.", metavar="FILE"),
    "structural_tag": _option(str, GUIDED, "Free text with structures in it.", metavar="FILE"),
    "json_whitespace": _option(int, GUIDED, "0 .. 16 spaces and line breaks in a row in JSON; unset: 0."),
    "thinking_token_budget": _option(int, GUIDED, "End the thinking after so many tokens."),
}
LOGPROBS = {
    "logprobs": _option(int, SAID, "Its logprob and the k most likely; 0: its own; -1: all."),
    "logprob_token_ids": _option(list[str], SAID, "ID,ID,...: of these as well; may be repeated."),
    "logprobs_mode": _option(str, SAID, "raw: the model's; processed: what was drawn from."),
    "prompt_logprobs": _option(int, SAID, "The same of the prompt's tokens, always raw."),
    "return_kept": _flag("--return-kept", SAID, "The ids that the filters left."),
    "return_probs": _flag("--return-probs", SAID, "The same ids and their probabilities."),
    "return_context_logits": _flag("--return-context-logits", SAID, "Refused, see READ.", hidden=True),
    "return_generation_logits": _flag("--return-generation-logits", SAID, "Refused, see READ.", hidden=True),
}


def takes(*tables: dict[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of these tables in place of its `**fields`, which then holds those that were given.

    `fields` arrive as SamplingParams takes them. OptionError for text that is not what the option holds.
    """
    options = {name: option for table in tables for name, option in table.items()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            fields = {name: given.pop(name) for name in options}
            command(**given, **read_fields(fields))

        added = [parameter(name, kind, None) for name, kind in options.items()]
        kept = [p for p in parameters_of(command) if p.kind is not inspect.Parameter.VAR_KEYWORD]
        return signed(run, [*added, *kept])  # help shows panels in this order

    return decorate


def parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    """One more parameter of a command."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def parameters_of(command: Callable[..., None]) -> list[inspect.Parameter]:
    """The parameters of a command, with annotations that are no strings."""
    hints = get_type_hints(command, include_extras=True)
    return [p.replace(annotation=hints[p.name]) for p in inspect.signature(command).parameters.values()]


def signed(run: Callable[..., None], parameters: Sequence[inspect.Parameter]) -> Callable[..., None]:
    """Let a function that takes anything by name look as if it took these."""
    rest = inspect.Parameter.VAR_KEYWORD
    named = [p if p.kind is rest else p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    run.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in named}
    return run


def read_fields(given: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, as fields: lists of ids and pairs are read from their text."""
    return {name: READ.get(name, _as_it_is)(value) for name, value in given.items() if value not in (None, [])}


def ids_of(option: str, text: str) -> list[int]:
    """Token ids from "1,2,3"; nothing from an empty text."""
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise OptionError(f"{option} {text!r}: must be token ids with commas between them") from None


def _file(option: str) -> Callable[[str], str]:
    def read(name: str) -> str:
        try:
            return Path(name).read_bytes().decode("utf-8-sig")
        except (OSError, ValueError) as error:  # ValueError: bytes that are no text, a NUL in the name
            raise OptionError(f"{option} {name}: cannot be read ({error})") from None

    return read


def _choices(texts: list[str]) -> list[str]:
    """Texts with commas between them, quoted as in CSV where a text holds a comma."""
    try:
        return [choice for row in csv.reader(texts, strict=True) for choice in row]
    except csv.Error as error:
        shown = " ".join(map(repr, texts))
        raise OptionError(f"--choice {shown:.60}: must be texts with commas between them ({error})") from None


def _bias(texts: list[str]) -> list[tuple[int, float]]:
    return [_pair(text) for text in texts]


def _pair(text: str) -> tuple[int, float]:
    token_id, _, number = text.partition("=")
    try:
        return int(token_id), float(number)
    except ValueError:
        raise OptionError(f"--logit-bias {text!r}: must be ID=NUMBER, such as 42=-1.5, or 42=-inf for a ban") from None


def _bad(texts: list[str]) -> list[list[int]]:
    return [ids_of("--bad-token-ids", text) for text in texts]


def _ids(option: str) -> Callable[[list[str]], list[int]]:
    return lambda texts: [token_id for text in texts for token_id in ids_of(option, text)]


def _rows(option: str) -> Callable[[Any], Any]:
    def refuse(_: Any) -> Any:
        raise OptionError(f"{option}: is rows of numbers, too many to print; ask klero.LLM in Python")

    return refuse


def _as_it_is(value: Any) -> Any:
    return value


READ: dict[str, Callable[[Any], Any]] = {
    "logit_bias": _bias,
    "bad_token_ids": _bad,
    "allowed_token_ids": _ids("--allowed-token-ids"),
    "json": _file("--json-schema"),
    "choice": _choices,
    "grammar": _file("--grammar"),
    "structural_tag": _file("--structural-tag"),
    "logprob_token_ids": _ids("--logprob-token-ids"),
    "return_context_logits": _rows("--return-context-logits"),
    "return_generation_logits": _rows("--return-generation-logits"),
}
