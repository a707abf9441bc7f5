"""klero generate: prompts in, texts out, in one batch."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from klero.cli import options as o
from klero.errors import KleroError, ParameterError, RequestError
from klero.params import SamplingParams
from klero.params.aliases import resolve_aliases

PROMPT_FIELDS = ("prompt", "prompt_token_ids")


def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Texts to continue.", show_default=False)] = None,
    model: Annotated[str, typer.Option(help="smollm2, a folder, a GGUF file or a hub id.")] = "smollm2",
    file: Annotated[
        str | None,
        typer.Option(help='JSON lines ("-": standard input), {"prompt": ..., "top_p": ...}, each its own fields.'),
    ] = None,
    temperature: o.Temperature = None,
    top_k: o.TopK = None,
    top_p: o.TopP = None,
    min_p: o.MinP = None,
    seed: o.Seed = None,
    n: o.NumChoices = 1,
    max_tokens: o.MaxTokens = 256,
    min_tokens: o.MinTokens = 0,
    stop: o.Stop = None,
    stop_token_id: o.StopTokenId = None,
    ignore_eos: o.IgnoreEos = False,
    include_stop: o.IncludeStop = False,
    echo: o.Echo = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    max_num_seqs: Annotated[int, typer.Option(help="Sequences at a time.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """Continue every prompt, all in one batch, and print text, finish reason, seed and tokens/s."""
    common = o.params_of(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, n=n, max_tokens=max_tokens,
        min_tokens=min_tokens, stop=stop, stop_token_ids=stop_token_id, ignore_eos=ignore_eos,
        include_stop_str_in_output=include_stop, echo=echo,
    )  # fmt: skip
    asked, params = _requests(prompts or [], file, common)
    if not asked:
        raise RequestError("no prompt: give one as an argument, or --file FILE with JSON lines")
    from tqdm import tqdm

    from klero.engine import LLM, Progress

    print(f"loading {model} ...", file=sys.stderr)
    begin = time.perf_counter()
    llm = LLM(model, dtype=dtype, max_num_seqs=max_num_seqs)
    start = time.perf_counter()
    with tqdm(total=len(asked), unit="request", disable=not sys.stderr.isatty(), leave=False) as bar:

        def show(progress: Progress) -> None:
            bar.set_postfix_str(f"{progress.num_tokens} tokens")
            bar.update(progress.done - bar.n)

        outputs = llm.generate(asked, params, progress=show)
    seconds = time.perf_counter() - start
    for output in outputs:
        (_print_json if as_json else _print_text)(output)
    num_tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    speed = f"{num_tokens} tokens in {seconds:.2f} s: {num_tokens / seconds:.1f} tokens/s"
    print(f"{speed} (and {start - begin:.1f} s to load the model)", file=sys.stderr)


def _requests(
    prompts: list[str], file: str | None, common: SamplingParams
) -> tuple[list[Any], SamplingParams | list[SamplingParams]]:
    """Prompts and parameters from the arguments or from JSON lines, whose fields replace the options'."""
    if file is None:
        return list(prompts), common
    if prompts:
        raise RequestError("prompts stand beside --file; give one of them")
    try:
        text = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        lines = text.decode().split("\n")  # JSON lines end at a newline and nowhere else
    except (OSError, UnicodeDecodeError, AttributeError) as error:
        raise RequestError(f"--file {file}: cannot be read ({error})") from None
    pairs: list[tuple[Any, SamplingParams]] = []
    faults: list[str] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                pairs.append(_of_line(line, common.for_prompt(len(pairs) + len(faults))))
            except KleroError as error:
                faults.append(f"line {number}: {error}")
    if faults:
        raise RequestError("\n       ".join(faults))
    return [prompt for prompt, _ in pairs], [params for _, params in pairs]


def _of_line(line: str, common: SamplingParams) -> tuple[Any, SamplingParams]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not JSON ({error})") from None
    given = [name for name in PROMPT_FIELDS if isinstance(fields, dict) and name in fields]
    if len(given) != 1:
        raise RequestError(f"must be an object with one of {' or '.join(PROMPT_FIELDS)}")
    prompt = fields.pop(given[0])
    if given == ["prompt"] and not isinstance(prompt, str):
        raise RequestError(f"prompt={prompt!r}: must be a text; ids go into prompt_token_ids")
    fields, faults = resolve_aliases(fields)
    if faults:
        raise ParameterError(faults)
    return prompt, SamplingParams.from_dict(common.asked() | fields)


def _print_text(output: Any) -> None:
    for choice in output.outputs:
        prompt = output.prompt if output.prompt is not None else list(output.prompt_token_ids)
        reason = choice.finish_reason + (f" {choice.stop_reason!r}" if choice.stop_reason is not None else "")
        reason += f": {choice.error}" if choice.error else ""
        print(f"=== {prompt}\n{choice.text}")
        print(f"--- {reason} · seed {choice.seed} · child {choice.index} · {len(choice.token_ids)} tokens")


def _print_json(output: Any) -> None:
    for choice in output.outputs:
        print(
            json.dumps(
                {
                    "request_id": output.request_id,
                    "index": choice.index,
                    "prompt": output.prompt,
                    "text": choice.text,
                    "prompt_token_ids": output.prompt_token_ids,
                    "token_ids": choice.token_ids,
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                    "seed": choice.seed,
                    "error": choice.error,
                },
                ensure_ascii=False,
            )
        )
