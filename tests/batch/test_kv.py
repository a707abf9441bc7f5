"""What each sequence holds and what is found in the cache: facts on blocks of 4 tokens, each trap by its name."""

from __future__ import annotations

import pytest
from tests.batch.accounts import TOKENS, account, filled

from klero.batch.kv import Held, KVAccount
from klero.batch.prefix import block_keys, identity_of
from klero.errors import BlockError


def test_blocks_are_appended():
    kv, held = account(), Held()
    assert kv.missing(held, 0, 9) == 3
    assert kv.grow(held, 0, 9)
    assert held.block_ids == [0, 1, 2]
    spans = [(9, 10), (9, 12), (9, 13), (9, 9), (5, 3)]
    assert [kv.missing(held, first, num_tokens) for first, num_tokens in spans] == [0, 0, 1, 0, 0]
    assert kv.grow(held, 9, 13)
    assert held.block_ids == [0, 1, 2, 3]
    assert not kv.take_moves().any
    kv.release(held)
    assert (held.block_ids, kv.blocks.num_free) == ([], 8)
    kv.release(held)  # nothing more comes back
    assert kv.blocks.num_free == 8


def test_too_few_blocks_change_nothing():
    kv, held, other = account(3), Held(), Held()
    assert kv.grow(held, 0, 8)
    assert not kv.grow(held, 8, 17)
    assert not kv.grow(other, 0, 5)
    assert (held.block_ids, other.block_ids, kv.blocks.num_free) == ([0, 1], [], 1)


def test_a_cached_prefix_is_shared():
    """12 tokens are cached as three blocks; the next sequence begins with the first 9 of them."""
    kv = account()
    first = filled(kv, TOKENS)
    held = Held()
    assert kv.match(held, [*TOKENS[:9], 77], 9) == 8
    assert held.block_ids == first.block_ids[:2] == [0, 1]
    assert [kv.blocks.num_owners(block) for block in (0, 1, 2)] == [2, 2, 1]
    assert kv.missing(held, 8, 10) == 1
    assert kv.grow(held, 8, 10)
    assert held.block_ids == [0, 1, 3]
    assert not kv.take_moves().any  # whole blocks are shared, nothing is copied
    kv.release(first)
    kv.release(held)
    assert (kv.blocks.num_free, kv.blocks.num_cached) == (8, 3)


@pytest.mark.parametrize("most, taken", [(12, 12), (11, 8), (8, 8), (7, 4), (3, 0), (0, 0), (-1, 0), (99, 12)])
def test_the_last_token_of_a_prompt_is_computed(most, taken):
    """The caller passes one token less than the prompt has. -1 of an empty prompt takes nothing."""
    kv, held = account(), Held()
    filled(kv, TOKENS)
    assert kv.match(held, TOKENS, most) == taken
    assert len(held.block_ids) == taken // 4


def test_no_hit_before_the_content_is_computed():
    """Two sequences with the same prompt in the same step: the second computes it as well."""
    kv, one, other = account(), Held(), Held()
    for held in (one, other):
        assert kv.match(held, TOKENS, 11) == 0
        assert kv.grow(held, 0, 12)
    kv.take_moves()
    assert kv.match(Held(), TOKENS, 11) == 0
    kv.computed(one, TOKENS, 6)  # a chunk: one block is full
    assert kv.match(late := Held(), TOKENS, 11) == 4
    assert late.block_ids == one.block_ids[:1]


def test_the_same_content_computed_by_two_at_once():
    """The second one's blocks are not cached, and what it computes after them is."""
    kv, one, other = account(), Held(), Held()
    longer = [*TOKENS, 12, 13, 14, 15]
    assert kv.grow(one, 0, 12)
    assert kv.grow(other, 0, 16)
    kv.take_moves()
    kv.computed(one, TOKENS, 12)
    kv.computed(other, longer, 16)
    assert kv.blocks.num_cached == 4
    held = Held()
    assert kv.match(held, longer, 16) == 16
    assert held.block_ids == [*one.block_ids, other.block_ids[3]]
    for each in (one, other, held):
        kv.release(each)
    assert (kv.blocks.num_free, kv.blocks.num_cached) == (8, 4)


def test_who_waits_and_looks_again_is_counted_once():
    kv = account()
    kv.release(filled(kv, TOKENS))
    before = kv.blocks.num_queries
    for _ in range(3):
        held = Held()
        kv.match(held, TOKENS, len(TOKENS) - 1)
        kv.release(held)
    assert kv.blocks.num_queries == before
    found = kv.match(held, TOKENS, len(TOKENS) - 1)
    assert kv.grow(held, found, len(TOKENS))
    assert kv.grow(held, found, len(TOKENS))
    asked = (len(TOKENS) - 1) // kv.blocks.block_size
    assert (kv.blocks.num_queries - before, kv.blocks.num_hits) == (asked, found // kv.blocks.block_size)
    assert found > 0


def test_without_caching_nothing_is_found():
    kv = account(caching=False)
    kv.release(filled(kv, TOKENS))
    held = Held()
    assert kv.match(held, TOKENS, 11) == 0
    assert (held.keys, kv.blocks.num_cached, kv.blocks.num_queries) == ([], 0, 0)


def test_identities_do_not_meet():
    """Another salt, or another's key as the salt: no hit."""
    kv, mine = account(), identity_of(salt="mine")
    filled(kv, TOKENS, mine)
    stolen = block_keys(TOKENS, 4, mine)[0]
    for identity in (b"", identity_of(salt="yours"), identity_of(lora="mine"), stolen, identity_of(salt=stolen)):
        assert kv.match(Held(identity=identity), TOKENS, 11) == 0
        assert kv.match(Held(identity=identity), TOKENS[4:], 7) == 0
    assert kv.match(Held(identity=mine), TOKENS, 11) == 8


def test_keys_outlive_a_release():
    """A sequence that waits is not hashed again, and its output is hashed behind its prompt."""
    kv, held = account(), filled(account(), TOKENS[:8])
    keys = block_keys(TOKENS, 4)
    waiting = Held()
    kv.match(waiting, TOKENS[:9], 8)
    kv.release(waiting)
    assert waiting.keys == keys[:2]
    assert kv.match(waiting, [77] * 8 + TOKENS[8:], 11) == 0  # known keys are believed
    assert waiting.keys == keys
    assert held.keys == keys[:2]


def test_forget_while_blocks_are_held():
    """New weights: who goes on with old K/V, swapped or forked, registers nothing; who begins anew does."""
    kv = account(16, num_host_blocks=2)
    old, waiting = filled(kv, TOKENS[:8]), Held()
    assert kv.match(waiting, TOKENS[:8], 7) == 4
    kv.forget()
    assert kv.match(Held(), TOKENS, 11) == 0
    child = kv.fork(old, 8)
    assert kv.grow(child, 8, 12)
    assert kv.swap_out(old, 8)
    assert kv.swap_in(old)
    kv.take_moves()
    assert kv.grow(old, 8, 12)
    assert kv.grow(waiting, 4, 12)
    for held in (old, child, waiting):
        kv.computed(held, TOKENS, 12)
    assert kv.blocks.num_cached == 0
    kv.release(waiting)
    assert kv.match(waiting, TOKENS, 11) == 0
    assert kv.grow(waiting, 0, 12)
    kv.computed(waiting, TOKENS, 12)
    assert kv.match(Held(), TOKENS, 12) == 12


def test_forget_before_a_step_has_ended():
    """Its K/V are those of the old weights."""
    kv, held = account(), Held()
    assert kv.grow(held, 0, 4)
    kv.take_moves()
    kv.forget()
    kv.computed(held, TOKENS[:4], 4)
    assert kv.blocks.num_cached == 0


def test_who_has_not_begun_before_a_forget_is_cached():
    """One never looked for a prefix, and one found none; both get their first block under the new weights."""
    kv, one, other = account(), Held(), Held()
    assert kv.match(other, [50, 51, 52, 53], 3) == 0
    kv.forget()
    for held, token_ids in ((one, TOKENS[:4]), (other, [50, 51, 52, 53])):
        assert kv.grow(held, 0, 4)
        kv.take_moves()
        kv.computed(held, token_ids, 4)
    assert kv.blocks.num_cached == 2


def test_what_makes_no_sense_is_refused():
    kv = account(num_host_blocks=4)
    held, out = filled(kv, TOKENS[:8]), filled(kv, [50])
    assert kv.swap_out(out, 1)
    for wrong, message in [
        (lambda: kv.match(held, TOKENS, 11), "release it first"),
        (lambda: kv.match(out, TOKENS, 11), "release it first"),
        (lambda: kv.fork(held, 9), "holds 2 blocks, not 3"),
        (lambda: kv.fork(out, 1), "swap it in first"),
        (lambda: kv.swap_out(held, 9), "holds 2 blocks, not 3"),
        (lambda: kv.swap_out(out, 1), "swap it in first"),
        (lambda: kv.swap_in(held), "not swapped out"),
        (lambda: kv.grow(out, 1, 2), "swap it in first"),
        (lambda: kv.missing(held, -1, 2), "first=-1: its 2 blocks hold the positions before 8"),
        (lambda: kv.grow(held, 9, 12), "first=9: its 2 blocks hold the positions before 8; go on there"),
        (lambda: kv.grow(Held(), 4, 8), "first=4: its 0 blocks hold the positions before 0"),
        (lambda: kv.computed(held, TOKENS, 12), "holds 2 blocks, not 3"),
        (lambda: kv.computed(kv.fork(held, 0), TOKENS, 4), "holds 0 blocks, not 1"),
        (lambda: KVAccount(4, 4, num_host_blocks=-1), "num_blocks=-1"),
    ]:
        before = kv.blocks.num_free, kv.host.num_free, list(held.block_ids), list(out.host_ids)
        with pytest.raises(BlockError, match=message):
            wrong()
        assert (kv.blocks.num_free, kv.host.num_free, held.block_ids, out.host_ids) == before
    short = Held()
    assert kv.grow(short, 0, 4)
    with pytest.raises(BlockError, match="num_computed=4: the sequence has 3 tokens"):
        kv.computed(short, TOKENS[:3], 4)


def test_tokens_of_a_prompt_that_change_before_they_are_computed():
    """The keys that `match` made of the whole prompt are not those under which the blocks are registered."""
    kv, held, others = account(), Held(), [*TOKENS[:4], 96, 97, 98, 99]
    kv.match(held, TOKENS[:8], 7)
    assert kv.grow(held, 0, 4)
    kv.computed(held, others, 4)
    assert kv.grow(held, 4, 8)
    kv.take_moves()
    kv.computed(held, others, 8)
    assert held.keys == block_keys(others, 4)
    assert kv.match(Held(), TOKENS[:8], 8) == 4
    assert kv.match(Held(), others, 8) == 8


def test_what_was_held_before_a_clear_is_nobodys():
    """One that still has it can only let go, and frees nothing of others."""
    kv, old, out, new = account(num_host_blocks=4), Held(), Held(), Held()
    kv.grow(old, 0, 6)
    kv.grow(out, 0, 4)
    kv.swap_out(out, 4)
    kv.take_moves()
    kv.clear()
    assert kv.grow(new, 0, 8)
    free = kv.blocks.num_free, kv.host.num_free
    for wrong in (
        lambda: kv.grow(old, 6, 7), lambda: kv.grow(old, 6, 30), lambda: kv.fork(old, 4), lambda: kv.missing(old, 0, 4),
        lambda: kv.swap_out(old, 4), lambda: kv.swap_in(out), lambda: kv.computed(old, TOKENS, 4),
    ):  # fmt: skip
        with pytest.raises(BlockError, match="before `clear`"):
            wrong()
    kv.release(old)
    kv.release(out)
    assert (kv.blocks.num_free, kv.host.num_free) == free
    assert (old.block_ids, out.host_ids) == ([], [])
    assert kv.grow(old, 0, 4)
    kv.release(old)
    kv.release(new)
    assert kv.blocks.num_free == kv.blocks.num_blocks
