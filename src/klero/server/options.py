"""Options of a server: where it listens, who may ask, and what one request may ask for at most."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from klero.errors import OptionError
from klero.params.json_text import MAX_BYTES

COUNTS = (
    "max_body_bytes", "max_prompts", "max_n", "max_choices", "max_stop", "max_logit_bias", "max_schema_bytes",
    "max_concurrency",
)  # fmt: skip
SECONDS = ("drain_timeout", "step_timeout", "read_timeout", "keep_alive")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What a server is told. OptionError names the field, the value and the rule.

    host, port: where it listens; port 0: one that is free. api_key: what clients must bring; None: nothing.
    served_model_name: what clients call the model; None: what it was loaded by.
    max_body_bytes: of a request. max_prompts: of a request; max_n: choices of a prompt; max_choices: of a request in
    all. max_stop: stop strings. max_logit_bias: entries. max_logprobs: most likely tokens beside each; -1: no limit,
    and a request may ask for every token (-1). max_schema_bytes: of a JSON schema, a regular expression, a grammar or
    choices; 262,144 is the most, as `SamplingParams` takes no more. max_concurrency: requests at a time; more are told
    to come again.
    drain_timeout: seconds that running requests get to end once the server is told to stop. step_timeout: seconds after
    which a step counts as hung. read_timeout: seconds that a client may take to send its request, or to read what it is
    sent. keep_alive: seconds of silence in a stream before a comment is sent.
    log_prompts: log every body that clients send, and what unexpected exceptions say; else neither is logged.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    served_model_name: str | None = None
    max_body_bytes: int = 4 * 2**20
    max_prompts: int = 128
    max_n: int = 128
    max_choices: int = 1024
    max_stop: int = 64
    max_logit_bias: int = 4096
    max_logprobs: int = 100
    max_schema_bytes: int = MAX_BYTES
    max_concurrency: int = 1024
    drain_timeout: float = 30.0
    step_timeout: float = 120.0
    read_timeout: float = 60.0
    keep_alive: float = 15.0
    log_prompts: bool = False

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if not _is_integer(value) or value < 1:
                raise OptionError(f"{name}={value!r}: must be an integer >= 1")
        if self.max_schema_bytes > MAX_BYTES:
            raise OptionError(f"max_schema_bytes={self.max_schema_bytes!r}: must be at most {MAX_BYTES}")
        if not _is_integer(self.port) or not 0 <= self.port <= 65535:
            raise OptionError(f"port={self.port!r}: must be an integer in [0, 65535]; 0: one that is free")
        if not _is_integer(self.max_logprobs) or self.max_logprobs < -1:
            raise OptionError(f"max_logprobs={self.max_logprobs!r}: must be an integer >= 0, or -1: no limit")
        for name in SECONDS:
            value = getattr(self, name)
            least = 0 if name == "drain_timeout" else math.ulp(0)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
                raise OptionError(f"{name}={value!r}: must be seconds, finite and {'>= 0' if least == 0 else '> 0'}")
        _check_texts(self)


def _check_texts(options: ServerOptions) -> None:
    if not isinstance(options.host, str) or not options.host:
        raise OptionError(f"host={options.host!r}: must be an address, such as '127.0.0.1' or '0.0.0.0'")
    key = options.api_key
    if key is not None and (not isinstance(key, str) or not key or not key.isascii() or key.split() != [key]):
        raise OptionError("api_key: must be ASCII without spaces; leave it out for a server that anyone may ask")
    name = options.served_model_name
    if name is not None and (not isinstance(name, str) or not name):
        raise OptionError(f"served_model_name={name!r}: must be a non-empty string")
    if not isinstance(options.log_prompts, bool):
        raise OptionError(f"log_prompts={options.log_prompts!r}: must be True or False")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
