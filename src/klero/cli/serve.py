"""klero serve: a model behind HTTP, for clients of OpenAI's API."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import fields
from typing import Annotated, Any

import typer

from klero.cli import options as o
from klero.errors import KleroError
from klero.server.options import ServerOptions

SERVER, LIMITS, PATIENCE = "Server", "What one request may ask for", "Patience"
OWN = ServerOptions()
OF_ENGINE = ("max_num_waiting", "scheduling_policy", "grammar_backend", "max_answer_bytes")
"""The options of `serve` beside ENGINE_OPTIONS that the engine takes; the others are the server's own."""


def _option(panel: str, text: str, *names: str, **options: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, help=text, **options)


Host = Annotated[str, _option(SERVER, "Listen here; 0.0.0.0: for other machines too.")]
Port = Annotated[int, _option(SERVER, "0: one that is free.")]
ApiKey = Annotated[
    str | None,
    _option(SERVER, "Clients must bring it; better in the environment.", envvar="KLERO_API_KEY", show_default=False),
]
ServedModelName = Annotated[str | None, _option(SERVER, "What clients call the model; unset: what it is loaded by.")]
MaxNumWaiting = Annotated[int, _option(SERVER, "Choices that may wait; clients of more are told to come again.")]
MaxConcurrency = Annotated[int, _option(SERVER, "Requests at a time, streams included.")]
SchedulingPolicy = Annotated[str, _option(SERVER, "fcfs or priority (requests then bring one).")]
GrammarBackend = Annotated[str, _option(SERVER, "llguidance or xgrammar.")]
AccessLog = Annotated[bool, _option(SERVER, "A line for each request: id, route, outcome, seconds.")]
LogPrompts = Annotated[bool, _option(SERVER, "Log what clients send; else no prompt is logged.", "--log-prompts")]
MaxBodyBytes = Annotated[int, _option(LIMITS, "Of a request.")]
MaxAnswerBytes = Annotated[int, _option(LIMITS, "Of lists of logprobs and rows of logits.")]
MaxPrompts = Annotated[int, _option(LIMITS, "Prompts.")]
MaxN = Annotated[int, _option(LIMITS, "Choices of a prompt.", "--max-n")]
MaxChoices = Annotated[int, _option(LIMITS, "Choices of all prompts.")]
MaxStop = Annotated[int, _option(LIMITS, "Stop strings.")]
MaxLogitBias = Annotated[int, _option(LIMITS, "Entries of logit_bias.")]
MaxLogprobs = Annotated[int, _option(LIMITS, "Most likely tokens beside each; -1: all of them.")]
MaxSchemaBytes = Annotated[int, _option(LIMITS, "Of a JSON schema, an expression or a grammar.")]
DrainTimeout = Annotated[float, _option(PATIENCE, "Seconds for running requests after SIGTERM.")]
StepTimeout = Annotated[float, _option(PATIENCE, "Seconds after which a step of the engine has hung.")]
ReadTimeout = Annotated[float, _option(PATIENCE, "Seconds for a client to send, or to read what it is sent.")]
KeepAlive = Annotated[float, _option(PATIENCE, "Seconds of silence in a stream before a comment.")]


@o.takes_engine
def serve(
    model: Annotated[str, typer.Argument(help=o.MODEL)] = "smollm2",
    host: Host = OWN.host,
    port: Port = OWN.port,
    api_key: ApiKey = None,
    served_model_name: ServedModelName = None,
    max_num_waiting: MaxNumWaiting = 1024,
    max_concurrency: MaxConcurrency = OWN.max_concurrency,
    scheduling_policy: SchedulingPolicy = "fcfs",
    grammar_backend: GrammarBackend = "llguidance",
    access_log: AccessLog = True,
    log_prompts: LogPrompts = False,
    max_body_bytes: MaxBodyBytes = OWN.max_body_bytes,
    max_answer_bytes: MaxAnswerBytes = 2**25,
    max_prompts: MaxPrompts = OWN.max_prompts,
    max_n: MaxN = OWN.max_n,
    max_choices: MaxChoices = OWN.max_choices,
    max_stop: MaxStop = OWN.max_stop,
    max_logit_bias: MaxLogitBias = OWN.max_logit_bias,
    max_logprobs: MaxLogprobs = OWN.max_logprobs,
    max_schema_bytes: MaxSchemaBytes = OWN.max_schema_bytes,
    drain_timeout: DrainTimeout = OWN.drain_timeout,
    step_timeout: StepTimeout = OWN.step_timeout,
    read_timeout: ReadTimeout = OWN.read_timeout,
    keep_alive: KeepAlive = OWN.keep_alive,
    thinking_token_ids: o.ThinkingTokenIds = None,
    *,
    engine: o.EngineOptions,
) -> None:
    """Serve a model to clients of OpenAI's API: /v1/completions, /v1/chat/completions, /v1/models.

    SIGTERM and Ctrl-C let running requests end first; a second one ends them. The exit code is 0 then, and 1 if the
    engine died or hung.
    """
    given = locals()
    options = ServerOptions(**{one.name: given[one.name] for one in fields(ServerOptions)})
    _leave(_serve(model, options, _for_engine(**given), access_log=access_log))


def _for_engine(engine: dict[str, Any], thinking_token_ids: str | None, **given: Any) -> dict[str, Any]:
    """What the engine takes of the options of `serve`; None is silence."""
    told = engine | {name: given[name] for name in OF_ENGINE}
    told["thinking_token_ids"] = None if thinking_token_ids is None else o.marks_of(thinking_token_ids)
    return {name: value for name, value in told.items() if value is not None}


def _serve(model: str, options: ServerOptions, engine: dict[str, Any], *, access_log: bool = True) -> int:
    """Serve until the end; the exit code."""
    from klero import server

    logging.basicConfig(format="klero: %(message)s", level=logging.WARNING)
    logging.getLogger("klero.server").setLevel(logging.INFO if access_log or options.log_prompts else logging.WARNING)
    print(f"loading {model} ...", file=sys.stderr, flush=True)
    try:
        return server.serve(model, options, **engine)
    except KleroError as error:
        print(f"klero: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"klero: {error}", file=sys.stderr)
        return 1


def _leave(code: int) -> None:
    """End the process at once: a step that hangs, or a model that is still being loaded, is not waited for."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
