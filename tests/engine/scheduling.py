"""What tests of the scheduler share: small engines, and who runs in them with which blocks."""

from __future__ import annotations

from tests.engine.free import assert_all_free

from klero import SamplingParams
from klero.engine import Engine
from klero.testing.models import PagedToyModel, ToyModel


def hot(max_tokens, seed=1, **fields):
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=max_tokens, **fields)


def engine_of(model=None, **options):
    return Engine(model or PagedToyModel(), **({"block_size": 4, "num_blocks": 64} | options))


def choices(engine):
    """All that have not finished, by name."""
    alive = [c for request in engine._requests.values() for c in request.choices if c.finished is None]
    return {f"{c.request.request_id}{c.index if c.request.params.n > 1 else ''}": c for c in alive}


def held(engine):
    return {name: choice.held.block_ids for name, choice in choices(engine).items()}


def running(engine):
    """Who runs, in the order of rank."""
    return [name for c in engine.scheduler.running for name, other in choices(engine).items() if other is c]


def end(engine):
    """Step to the end; the answers by name."""
    found = {}
    while engine.num_unfinished:
        found |= {output.request_id: output for output in engine.step()}
    assert_all_free(engine)
    return found


def tokens_of(prompt, params):
    """The tokens of a request that runs alone, on a model without blocks."""
    engine = engine_of(ToyModel())
    engine.add_request("r", prompt, params)
    return [choice.token_ids for choice in end(engine)["r"].outputs]
