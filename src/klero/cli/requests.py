"""From arguments, standard input and JSON lines to requests."""

from __future__ import annotations

import json
import os
import stat
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klero.errors import Fault, KleroError, ParameterError, RequestError
from klero.params import SamplingParams, seed_bits
from klero.params.aliases import resolve_aliases

if TYPE_CHECKING:
    from klero.engine import LLM

KINDS = ("prompt", "prompt_token_ids", "messages")
CALLABLE = ("filters", "logits_processors")
ROWS = ("return_context_logits", "return_generation_logits")
DEFAULTS = {"max_tokens": 256}


@dataclass(frozen=True)
class Asked:
    """One request as it was written. kind: one of KINDS, and what `content` is; fields: of SamplingParams."""

    kind: str
    content: Any
    fields: dict[str, Any]

    @property
    def shown(self) -> Any:
        """What to print as the prompt: the text, the ids, or the last message of a conversation."""
        if self.kind != "messages":
            return self.content
        last = self.content[-1] if isinstance(self.content, list) and self.content else self.content
        return last.get("content") if isinstance(last, dict) else last

    def params(self, model_fields: dict[str, Any]) -> SamplingParams:
        """The parameters: what was asked for, else what the model's generation config says, else silence."""
        return SamplingParams.from_dict(DEFAULTS | model_fields | self.fields)

    def prompt(self, llm: LLM) -> Any:
        """What `LLM.generate` takes: a conversation goes through the tokenizer's chat template."""
        return llm.render(self.content) if self.kind == "messages" else self.content


def read(prompts: list[str], file: str | None, options: dict[str, Any], *, chat: bool) -> list[Asked]:
    """The requests of one command, every one checked. chat: each text is a user's message.

    options: fields that hold for all; a seed in them becomes seed + i for prompt i. RequestError or ParameterError.
    """
    SamplingParams.from_dict(DEFAULTS | options)  # a fault in an option shows before anything is read or loaded
    if file is not None:
        if prompts:
            raise RequestError("prompts stand beside --file; give one of them")
        return _of_file(file, options, chat)
    if not prompts and is_piped():
        prompts = ["-"]
    if prompts.count("-") > 1:
        raise RequestError('the prompt "-" is standard input, which can be read once; it is given more than once')
    if not prompts:
        raise RequestError("no prompt: give one as an argument or on standard input, or --file FILE with JSON lines")
    texts = [_standard_input() if prompt == "-" else prompt for prompt in prompts]
    return [_asked("prompt", text, _for_prompt(options, i), chat) for i, text in enumerate(texts)]


def _of_file(file: str, options: dict[str, Any], chat: bool) -> list[Asked]:
    """JSON lines, whose fields replace the options'; all faults at once."""
    asked: list[Asked] = []
    faults: list[str] = []
    for number, line in enumerate(lines_of(file), 1):
        if line.strip():
            try:
                asked.append(_of_line(line, _for_prompt(options, len(asked) + len(faults)), chat))
            except KleroError as error:
                faults.append(f"line {number}: {error}")
    if faults:
        raise RequestError("\n       ".join(faults))
    if not asked:
        raise RequestError(f'--file {file}: holds no prompt; give JSON lines such as {{"prompt": ...}}')
    return asked


def lines_of(file: str) -> list[str]:
    """The lines of a file of JSON lines, "-" for standard input. RequestError if it cannot be read."""
    try:
        text = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return text.decode().split("\n")  # JSON lines end at a newline and nowhere else
    except (OSError, UnicodeDecodeError, AttributeError) as error:
        raise RequestError(f"--file {file}: cannot be read ({error})") from None


def _of_line(line: str, options: dict[str, Any], chat: bool) -> Asked:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not JSON ({error})") from None
    given = [name for name in KINDS if isinstance(fields, dict) and name in fields]
    if len(given) != 1:
        raise RequestError(f"must be an object with one of {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    content = fields.pop(given[0])
    if given == ["prompt"] and not isinstance(content, str):
        raise RequestError(f"prompt={content!r}: must be a text; ids go into prompt_token_ids")
    if chat and given == ["prompt_token_ids"]:
        raise RequestError("prompt_token_ids stands beside --chat, which needs texts or messages")
    fields, faults = resolve_aliases(fields)
    rule = "is a callable, which JSON cannot bring; give it to klero.LLM in Python"
    faults += [Fault(name, fields[name], rule) for name in CALLABLE if fields.get(name) not in (None, [])]
    rule = "is rows of numbers, too many for JSON; ask klero.LLM in Python"
    faults += [Fault(name, fields[name], rule) for name in ROWS if fields.get(name)]
    if faults:
        raise ParameterError(faults)
    asked = _asked(given[0], content, options | fields, chat)
    asked.params({})
    return asked


def _asked(kind: str, content: Any, fields: dict[str, Any], chat: bool) -> Asked:
    asked = Asked(kind, content, fields)
    if chat and kind == "prompt":
        return replace(asked, kind="messages", content=[{"role": "user", "content": content}])
    return asked


def _for_prompt(options: dict[str, Any], i: int) -> dict[str, Any]:
    """The options for prompt i: a seed is spread, as `SamplingParams.for_prompt` spreads it."""
    return options | {"seed": seed_bits(options["seed"] + i)} if "seed" in options and i else options


def is_piped() -> bool:
    """Whether somebody sends standard input: a pipe, a socket or a file, no terminal and no /dev/null."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISREG(mode)


def _standard_input() -> str:
    """The whole of it as one prompt, without the newline at its end."""
    try:
        text = sys.stdin.buffer.read().decode()
    except (OSError, UnicodeDecodeError, AttributeError) as error:
        raise RequestError(f"standard input cannot be read ({error})") from None
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise RequestError("no prompt: standard input is empty; give a prompt there or as an argument")
    return text
