"""The commands and how they fail: a KleroError is one line on stderr and exit code 2."""

from __future__ import annotations

import sys

import typer

import klero
from klero.cli.bench import bench
from klero.cli.explain import explain
from klero.cli.fetch import fetch
from klero.cli.generate import generate
from klero.cli.models import models
from klero.cli.score import score
from klero.cli.serve import serve
from klero.cli.warmup import warmup
from klero.errors import KleroError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # joins the lines of a paragraph
    help="From logits to tokens: the same seed, the same text, whatever else is running.",
)
app.command()(generate)
app.command(context_settings={"ignore_unknown_options": True})(explain)  # a row may begin with -1
for command in (serve, score, fetch, models, warmup, bench):
    app.command()(command)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"klero {klero.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print it."),
) -> None:
    """Only --version stands before a command."""


def run() -> None:
    """Run the command line."""
    try:
        app()
    except KleroError as error:
        print(f"klero: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        print(f"klero: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
