"""Accounts of blocks of 4 tokens, and sequences in them."""

from __future__ import annotations

from klero.batch.kv import Held, KVAccount

TOKENS = list(range(12))


def account(num_blocks=8, **options):
    return KVAccount(num_blocks, 4, **options)


def filled(kv, token_ids, identity=b""):
    """A sequence whose tokens were all computed in a step of its own."""
    held = Held(identity=identity)
    first = kv.match(held, token_ids, len(token_ids) - 1)
    assert kv.grow(held, first, len(token_ids))
    kv.take_moves()
    kv.computed(held, token_ids, len(token_ids))
    return held
