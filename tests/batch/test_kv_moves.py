"""Forks, swaps and the moves of a step: facts on blocks of 4 tokens, each trap by its name."""

from __future__ import annotations

from tests.batch.accounts import TOKENS, account, filled

from klero.batch.kv import Held
from klero.batch.prefix import block_keys
from klero.batch.scheduler_output import BlockMoves


def test_a_fork_copies_what_it_writes():
    """Six tokens: a full block is shared for good; the half one is copied by who writes first, and kept by the last."""
    kv = account()
    parent = filled(kv, TOKENS[:6])
    children = [kv.fork(parent, 6) for _ in range(2)]
    assert [kv.blocks.num_owners(block) for block in (0, 1)] == [3, 3]
    assert [kv.missing(held, 6, 7) for held in (parent, *children)] == [1, 1, 1]
    for held in (parent, *children):
        assert kv.grow(held, 6, 7)
    assert [held.block_ids for held in (parent, *children)] == [[0, 2], [0, 3], [0, 1]]
    assert kv.take_moves() == BlockMoves(copy=((1, 2), (1, 3)))
    assert [kv.blocks.num_owners(block) for block in range(4)] == [3, 1, 1, 1]
    assert not kv.take_moves().any  # they are forgotten


def test_only_what_lies_before_the_first_position_is_copied():
    """A fork of 8 tokens that writes from position 6 on needs a copy of block 1, and no content in block 2."""
    kv = account(zero_fresh=True)
    parent = filled(kv, TOKENS)
    child = kv.fork(parent, 12)
    assert kv.missing(child, 6, 13) == 3
    assert kv.grow(child, 6, 13)
    assert child.block_ids == [0, 3, 4, 5]
    moves = kv.take_moves()
    assert (moves.copy, sorted(moves.zero)) == (((1, 3),), [4, 5])
    assert parent.block_ids == [0, 1, 2]


def test_a_cached_block_of_a_fork_is_not_written():
    """The child computes the last prompt token itself; the block is full, cached, and the parent's too."""
    kv = account()
    parent = filled(kv, TOKENS[:8])
    child = kv.fork(parent, 7)
    assert kv.grow(child, 7, 9)
    assert (parent.block_ids, child.block_ids) == ([0, 1], [0, 2, 3])
    assert kv.take_moves().copy == ((1, 2),)
    assert kv.blocks.is_registered(1)
    kv.computed(child, TOKENS[:9], 8)  # the same content again
    assert not kv.blocks.is_registered(2)


def test_a_cached_block_with_one_owner_is_no_longer_cached_when_it_is_written():
    """The parent has left, so that the child overwrites its own block; nobody may find it from then on."""
    kv = account(2)
    parent = filled(kv, TOKENS[:8])
    child = kv.fork(parent, 7)
    kv.release(parent)
    assert kv.missing(child, 7, 8) == 0
    assert kv.grow(child, 7, 8)  # though no block is free
    assert child.block_ids == [0, 1]
    assert kv.match(Held(), TOKENS[:8], 8) == 4
    kv.take_moves()
    kv.computed(child, [*TOKENS[:7], 99], 8)
    assert kv.match(Held(), [*TOKENS[:7], 99], 8) == 8


def test_tokens_that_were_taken_back_are_not_found_later():
    """Five of eight tokens stay and three others follow: by growing, by swapping, and by waiting."""
    others = [*TOKENS[:5], 97, 98, 99]
    for way in ("grow", "swap", "wait"):
        kv = account(num_host_blocks=4)
        held = filled(kv, TOKENS[:8])
        first = 5
        if way != "grow":
            kv.rewind(held, 5)
            assert held.keys == block_keys(TOKENS[:4], 4)
        if way == "swap":
            assert kv.swap_out(held, 5)
            assert kv.swap_in(held)
        if way == "wait":
            kv.release(held)
            first = kv.match(held, others, 7)
            assert first == 4
        assert kv.grow(held, first, 8)
        kv.take_moves()
        kv.computed(held, others, 8)
        assert held.keys == block_keys(others, 4)
        assert kv.match(Held(), others, 8) == 8
        expected = 4 if way == "grow" else 8  # written over, or left behind in a block of its own
        assert kv.match(Held(), TOKENS[:8], 8) == expected


def test_a_sequence_is_released_after_its_copy_was_planned():
    """The block goes to another, fresh or as the target of another copy: the first copy must not come about."""
    kv = account(5)
    parent = filled(kv, TOKENS[:6])
    child, second = kv.fork(parent, 6), kv.fork(parent, 6)
    assert kv.grow(child, 6, 7)
    assert child.block_ids == [0, 2]
    kv.release(child)
    assert kv.blocks.num_owners(1) == 2  # the plan no longer holds what it would have read
    fresh = Held()
    assert kv.grow(fresh, 0, 1)
    assert fresh.block_ids == [2]
    assert not kv.take_moves().any
    assert kv.grow(second, 6, 7)
    kv.release(second)
    other = kv.fork(parent, 6)
    assert kv.grow(other, 6, 7)
    assert kv.take_moves().copy == ((1, other.block_ids[1]),)


def test_a_fresh_block_that_comes_back_is_not_zeroed_over_a_copy():
    """Zeros come last: block 2 was fresh for one, and then took a copy for another."""
    kv = account(3, zero_fresh=True)
    parent = filled(kv, TOKENS[:6])
    child, fresh = kv.fork(parent, 6), Held()
    assert kv.grow(fresh, 0, 1)
    kv.release(fresh)
    assert kv.grow(child, 6, 7)
    assert child.block_ids == [0, 2]
    assert kv.take_moves() == BlockMoves(copy=((1, 2),))


def test_what_a_planned_copy_reads_is_not_given_away():
    """Both owners of block 1 leave, one by a copy: until the copy has run, nobody gets block 1, cached or not."""
    for num_tokens, place in ((6, 1), (8, 1)):
        kv = account(3)
        parent = filled(kv, TOKENS[:num_tokens])
        child = kv.fork(parent, 6)
        assert kv.grow(child, 6, 7)
        kv.release(parent)
        assert kv.blocks.num_free == 0
        assert not kv.grow(Held(), 0, 1)
        assert kv.take_moves().copy == ((place, 2),)
        assert kv.blocks.num_free == 1
        assert kv.grow(late := Held(), 0, 1)
        assert late.block_ids == [1]


def test_a_copy_of_a_copy_reads_the_first():
    """Within one scheduling: a fork's block is a copy still to come, and is forked and copied again."""
    kv = account()
    parent = filled(kv, TOKENS[:6])
    child = kv.fork(parent, 6)
    assert kv.grow(child, 6, 7)
    grandchild = kv.fork(child, 6)
    assert kv.grow(grandchild, 6, 7)
    assert (child.block_ids, grandchild.block_ids) == ([0, 2], [0, 3])
    assert kv.take_moves().copy == ((1, 2), (1, 3))


def test_swap_out_and_in():
    """Nine computed tokens of a sequence that was given four blocks."""
    kv = account(4, num_host_blocks=3)
    held = filled(kv, TOKENS[:9])
    assert kv.grow(held, 9, 13)
    assert kv.swap_out(held, 9)
    assert (held.block_ids, held.host_ids) == ([], [0, 1, 2])
    assert (kv.blocks.num_free, kv.host.num_free) == (4, 0)
    assert kv.take_moves() == BlockMoves(swap_out=((0, 0), (1, 1), (2, 2)))
    assert kv.swap_in(held)
    assert held.host_ids == []
    assert kv.host.num_free == 0  # until the moves are taken
    moves = kv.take_moves()
    assert moves.swap_in == tuple(zip([0, 1, 2], held.block_ids, strict=True))
    assert kv.host.num_free == 3
    kv.computed(held, TOKENS[:9], 9)  # where the old blocks were reused, these are cached instead
    assert kv.match(Held(), TOKENS[:9], 8) == 8


def test_no_room_to_swap():
    kv = account(3, num_host_blocks=1)
    held, small, none = filled(kv, TOKENS[:8]), filled(kv, [50]), account()
    assert not kv.swap_out(held, 8)
    assert (held.block_ids, kv.host.num_free) == ([0, 1], 1)
    assert kv.swap_out(small, 1)
    assert kv.grow(held, 8, 9)
    assert not kv.swap_in(small)
    assert (small.host_ids, small.block_ids) == ([0], [])
    assert not none.swap_out(filled(none, [1]), 1)  # no host memory at all


def test_a_swapped_out_block_is_taken_by_a_swap_in_of_the_same_step():
    """swap_out reads block 0 before swap_in writes it."""
    kv = account(1, num_host_blocks=2)
    one = filled(kv, [1])
    assert kv.swap_out(one, 1)
    kv.take_moves()
    other = filled(kv, [2])
    assert kv.swap_out(other, 1)
    assert kv.swap_in(one)
    assert one.block_ids == [0]
    assert kv.take_moves() == BlockMoves(swap_out=((0, 1),), swap_in=((0, 0),))


def test_out_and_in_within_one_step():
    """The host's block carries the content from one device block to another, and is not given away before."""
    kv = account(2, num_host_blocks=1)
    held, other = filled(kv, [1]), filled(kv, [2])
    assert kv.swap_out(held, 1)
    assert kv.swap_in(held)
    assert not kv.swap_out(other, 1)
    assert kv.take_moves() == BlockMoves(swap_out=((0, 0),), swap_in=((0, held.block_ids[0]),))


def test_in_and_out_within_one_step():
    """The content never left the host, so nothing moves."""
    kv = account(2, num_host_blocks=1)
    held = filled(kv, [1])
    assert kv.swap_out(held, 1)
    kv.take_moves()
    assert kv.swap_in(held)
    assert kv.swap_out(held, 1)
    assert (held.host_ids, kv.host.num_owners(0)) == ([0], 1)
    assert not kv.take_moves().any
    kv.release(held)
    assert (kv.host.num_free, kv.blocks.num_free) == (1, 2)


def test_a_swap_that_was_planned_is_off_when_the_sequence_is_released():
    kv = account(2, num_host_blocks=1)
    held, other = filled(kv, [1]), filled(kv, [2])
    assert kv.swap_out(held, 1)
    kv.release(held)
    assert not kv.take_moves().any
    held = filled(kv, [1])
    assert kv.swap_out(held, 1)
    kv.release(held)
    assert kv.swap_out(other, 1)  # the same host block
    assert kv.take_moves().swap_out == ((1, 0),)
    assert kv.swap_in(other)
    kv.release(other)
    assert (kv.host.num_free, kv.blocks.num_free) == (1, 2)
    assert not kv.take_moves().any


def test_a_copy_still_to_come_is_swapped_out_from_its_source():
    """swap_out runs before the copy: it reads what the copy would have read."""
    kv = account(3, num_host_blocks=2)
    parent = filled(kv, TOKENS[:6])
    child = kv.fork(parent, 6)
    assert kv.grow(child, 6, 7)
    assert kv.swap_out(child, 6)
    assert kv.take_moves() == BlockMoves(swap_out=((0, 0), (1, 1)))
    assert [kv.blocks.num_owners(block) for block in range(3)] == [1, 1, 0]


def test_a_swap_in_still_to_come_is_copied_from_the_host():
    """A copy runs before the swap-in: what would read the block reads the host's instead."""
    kv = account(4, num_host_blocks=1)
    held = filled(kv, [1])
    assert kv.swap_out(held, 1)
    kv.take_moves()
    assert kv.swap_in(held)
    child = kv.fork(held, 1)
    assert kv.grow(child, 1, 2)
    assert held.block_ids != child.block_ids
    kv.release(held)
    assert kv.take_moves() == BlockMoves(swap_in=((0, child.block_ids[0]),))
    assert kv.host.num_free == 1


def test_a_block_whose_move_is_off_is_not_found():
    """Registered, when the step before was reported late, before the content was moved in; and then released."""
    kv = account(1, num_host_blocks=1)
    held = filled(kv, TOKENS[:4])
    assert kv.swap_out(held, 4)
    kv.take_moves()
    kv.release(filled(kv, [50, 51, 52, 53]))  # evicts what held left behind
    assert kv.swap_in(held)
    kv.computed(held, TOKENS[:4], 4)
    assert kv.blocks.find(held.keys) == [0]
    kv.release(held)
    assert kv.blocks.find(held.keys) == []
    assert (kv.blocks.num_free, kv.blocks.num_cached, kv.host.num_free) == (1, 0, 1)


def test_a_cached_block_is_evicted_while_it_is_swapped_out():
    """It is read before anyone writes; what was cached in it is found no more."""
    kv = account(1, num_host_blocks=1)
    held, other = filled(kv, TOKENS[:4]), Held()
    assert kv.swap_out(held, 4)
    assert kv.grow(other, 0, 1)
    assert other.block_ids == [0]
    assert kv.blocks.num_evictions == 1
    assert kv.match(Held(), TOKENS[:4], 4) == 0
    assert kv.take_moves().swap_out == ((0, 0),)
