"""What must hold when nothing runs."""

from __future__ import annotations

from klero.engine import Engine


def assert_all_free(engine: Engine) -> None:
    """No request, no seat, no block is held."""
    assert engine.num_unfinished == 0
    assert engine.sampler.slots.num_free == engine.sampler.slots.num_slots
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    if engine.blocks is not None:
        assert engine.blocks.num_free == engine.blocks.num_blocks
        assert not engine.blocks.tables.any()
