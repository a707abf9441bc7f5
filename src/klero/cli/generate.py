"""klero generate: prompts in, texts out, in one batch."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from klero.cli import generation_config, show
from klero.cli import options as o
from klero.cli.fields import BAD_WORDS, FILTERS, LOGPROBS, REWRITING, SEED, SHAPING, STRUCTURED, takes
from klero.cli.requests import Asked, read
from klero.errors import KleroError, OptionError, RequestError

if TYPE_CHECKING:
    from klero.engine import LLM, Progress, RequestOutput
    from klero.params import SamplingParams


@takes(SHAPING, SEED, FILTERS, REWRITING, BAD_WORDS, STRUCTURED, LOGPROBS)
@o.takes_engine
def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(help='Texts to continue; "-": standard input.', show_default=False)
    ] = None,
    model: Annotated[str, typer.Option(help=o.MODEL)] = "smollm2",
    file: Annotated[
        str | None,
        typer.Option(help='JSON lines ("-": standard input), such as {"prompt": ..., "top_p": ...}.'),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Each prompt is a user's message to a chat model.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
    generation_config: Annotated[
        bool, typer.Option("--generation-config", help="Take the model's own parameters and print them; options win.")
    ] = False,
    n: o.NumChoices = None,
    max_tokens: o.MaxTokens = None,
    min_tokens: o.MinTokens = None,
    stop: o.Stop = None,
    stop_token_id: o.StopTokenId = None,
    ignore_eos: o.IgnoreEos = False,
    include_stop: o.IncludeStop = False,
    echo: o.Echo = False,
    thinking_token_ids: o.ThinkingTokenIds = None,
    *,
    engine: o.EngineOptions,
    **fields: Any,
) -> None:
    """Continue every prompt, all in one batch, and print text, finish reason, seed and tokens/s.

    Prompts come as arguments, as JSON lines with --file, or as one text on standard input, whose last newline is
    dropped. The line of a file says "prompt", "prompt_token_ids" or "messages" and any parameters of its own.
    Logprobs come with --json: one entry for each token, null where nothing is said, "-inf" for what is impossible.
    """
    request = {
        "n": n, "max_tokens": max_tokens, "min_tokens": min_tokens, "stop": stop, "stop_token_ids": stop_token_id,
        "ignore_eos": ignore_eos, "include_stop_str_in_output": include_stop, "echo": echo,
    }  # fmt: skip
    fields |= {name: value for name, value in request.items() if value is not None}
    asked = read(prompts or [], file, fields, chat=chat)
    if not as_json:
        _refuse_what_text_cannot_show(asked)
    if thinking_token_ids is not None:
        engine["thinking_token_ids"] = o.marks_of(thinking_token_ids)
    llm, loading = o.load(model, **engine)
    params = _params(llm, asked, generation_config)
    texts = _prompts(llm, asked)
    start = time.perf_counter()
    if len(asked) == 1 and params[0].n == 1 and not as_json and sys.stdout.isatty():
        outputs = _stream(llm, asked[0], texts, params)
    else:
        outputs = _run(llm, texts, params)
        for one, output in zip(asked, outputs, strict=True):
            (show.print_json if as_json else show.print_text)(one, output)
    seconds = time.perf_counter() - start
    num_tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    speed = f"{num_tokens} tokens in {seconds:.2f} s: {num_tokens / seconds:.1f} tokens/s"
    print(f"{speed} (and {loading:.1f} s to load the model)", file=sys.stderr)


def _refuse_what_text_cannot_show(asked: list[Asked]) -> None:
    """Logprobs and kept ids are printed as JSON alone."""
    for i, one in enumerate(asked):
        params = one.params({})
        if params.asks or params.scores_prompt:
            raise OptionError(f"prompts[{i}]: logprobs and kept ids are printed as JSON; add --json")


def _params(llm: LLM, asked: list[Asked], from_model: bool) -> list[SamplingParams]:
    """The parameters of each request; what comes from the model's generation config is printed."""
    if not from_model:
        return [one.params({}) for one in asked]
    defaults = generation_config.of_model(llm.engine.model)
    for line in defaults.lines():
        print(f"klero: {line}", file=sys.stderr)
    return [one.params(defaults.fields) for one in asked]


def _prompts(llm: LLM, asked: list[Asked]) -> list[Any]:
    """What the model gets; an error says which."""
    prompts = []
    for i, one in enumerate(asked):
        try:
            prompts.append(one.prompt(llm))
        except KleroError as error:
            raise RequestError(f"prompts[{i}]: {error}") from None
    return prompts


def _run(llm: LLM, prompts: list[Any], params: list[SamplingParams]) -> list[RequestOutput]:
    """All in one batch, behind a progress bar on a terminal."""
    from tqdm import tqdm

    with tqdm(total=len(prompts), unit="request", disable=not sys.stderr.isatty(), leave=False) as bar:

        def show_progress(progress: Progress) -> None:
            bar.set_postfix_str(f"{progress.num_tokens} tokens")
            bar.update(progress.done - bar.n)

        return llm.generate(prompts, params, progress=show_progress)


def _stream(llm: LLM, asked: Asked, prompts: list[Any], params: list[SamplingParams]) -> list[RequestOutput]:
    """One choice on a terminal: its text as it comes."""
    print(f"=== {asked.shown}")
    deltas = llm.stream(prompts, params)
    while True:
        try:
            print(next(deltas).text, end="", flush=True)
        except StopIteration as end:
            outputs: list[RequestOutput] = end.value
            break
    print()
    show.print_end(outputs[0].outputs[0])
    return outputs
