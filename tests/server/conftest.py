"""One live server on a toy model for all tests of a module that only ask it."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("transformers")


@pytest.fixture(scope="session")
def live():
    """A server whose engine must be free again after every test (`free`)."""
    from tests.server.live import Live

    with Live() as server:
        yield server
