"""One live server for the cases that need HTTP."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def one_stage():
    """The server; `stage` is what tests ask for."""
    pytest.importorskip("fastapi")
    pytest.importorskip("transformers")
    from tests.faults.served import Stage

    with Stage() as stage:
        yield stage


@pytest.fixture
def stage(one_stage):
    """A server whose model says noise, or what a test lets it say; whose engine must be free again after the test."""
    one_stage.noise()
    yield one_stage
    gate, one_stage.model.gate = one_stage.model.gate, None
    if gate is not None:
        gate.release(1000)
    one_stage.all_free()
