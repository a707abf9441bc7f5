"""What must hold when nothing runs."""

from __future__ import annotations

from klero.engine import Engine


def assert_all_free(engine: Engine) -> None:
    """No request, no seat, no block is held."""
    assert engine.num_unfinished == 0
    assert engine.sampler.slots.num_free == engine.sampler.slots.num_slots
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    assert engine.batch.num_seqs == 0
    assert not engine.batch.block_tables.any()
    if engine.kv is not None:
        assert engine.kv.blocks.num_free == engine.kv.blocks.num_blocks
        assert engine.kv.host is None or engine.kv.host.num_free == engine.kv.host.num_blocks
