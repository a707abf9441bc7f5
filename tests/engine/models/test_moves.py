"""Moves of blocks: what a paged cache does in all layers at once is what a plain loop does one after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from klero.batch.scheduler_output import BlockMoves
from klero.engine.models.paging import PagedCache
from klero.engine.models.transformers import TransformersModel
from klero.errors import BlockError, ModelError

NUM_BLOCKS, NUM_HOST, SIZE = 5, 3, 2
DEVICE, HOST = st.integers(0, NUM_BLOCKS - 1), st.integers(0, NUM_HOST - 1)
MOVES = st.builds(
    BlockMoves,
    swap_out=st.lists(st.tuples(DEVICE, HOST), max_size=4).map(tuple),
    copy=st.lists(st.tuples(DEVICE, DEVICE), max_size=5).map(tuple),
    swap_in=st.lists(st.tuples(HOST, DEVICE), max_size=4).map(tuple),
    zero=st.lists(DEVICE, max_size=2).map(tuple),
)


def filled(num_host=NUM_HOST, device="cpu"):
    """Two layers, in which every number of every block is another one."""
    cache = PagedCache(NUM_BLOCKS, SIZE, num_host)
    cache.reserve({0: (2, 3, 1), 4: (1, 2, 2)}, torch.float32, torch.device(device))
    first = 1
    for _, tensor in tensors_of(cache):
        numbers = torch.arange(first, first + tensor.numel(), dtype=torch.float32)
        tensor.copy_(numbers.view(tensor.shape))
        first += tensor.numel()
    return cache


def tensors_of(cache):
    for layers in (cache.layers, cache.host_layers):
        for number, layer in layers.items():
            yield (layers is cache.layers, number, "keys"), layer.keys
            yield (layers is cache.layers, number, "values"), layer.values


def contents(cache):
    return {name: tensor.clone() for name, tensor in tensors_of(cache)}


def one_by_one(memory, moves):
    """What the moves are, by definition; memory: what `contents` gives, and changed."""
    rows = lambda block: slice(block * SIZE, (block + 1) * SIZE)  # noqa: E731
    for device, host in [((True, *rest), (False, *rest)) for here, *rest in memory if here]:
        for block, place in moves.swap_out:
            memory[host][rows(place)] = memory[device][rows(block)].clone()
        for source, target in moves.copy:
            memory[device][rows(target)] = memory[device][rows(source)].clone()
        for place, block in moves.swap_in:
            memory[device][rows(block)] = memory[host][rows(place)].clone()
        for block in moves.zero:
            memory[device][rows(block)] = 0


def assert_moved(moves):
    cache = filled()
    expected = contents(cache)
    one_by_one(expected, moves)
    cache.move_blocks(moves)
    for name, tensor in tensors_of(cache):
        assert torch.equal(tensor, expected[name]), (moves, name)


@pytest.mark.parametrize(
    "moves",
    [
        BlockMoves(copy=((0, 1), (1, 2))),  # a chain: 2 gets what 0 had
        BlockMoves(copy=((1, 2), (0, 1))),  # and the other way round what 1 had
        BlockMoves(copy=((0, 1), (1, 0))),  # no exchange: both have what 0 had
        BlockMoves(copy=((0, 3), (1, 3))),  # the last one stays
        BlockMoves(swap_out=((2, 0),), swap_in=((1, 2),)),  # 2 goes out, and another comes in to its place
        BlockMoves(swap_out=((2, 0),), copy=((3, 2),)),  # 2 goes out before it is overwritten
        BlockMoves(swap_out=((2, 0),), swap_in=((0, 4),)),  # out and in again elsewhere
        BlockMoves(copy=((1, 0),), swap_in=((2, 1),)),  # copied before it is overwritten
        BlockMoves(copy=((1, 0),), zero=(1, 4)),
        BlockMoves(swap_out=((0, 1), (3, 1)), swap_in=((0, 2), (2, 2))),  # the last one stays
        BlockMoves(),
    ],
)
def test_moves_that_depend_on_their_order(moves):
    assert_moved(moves)


@given(moves=MOVES)
def test_any_moves(moves):
    assert_moved(moves)


def test_a_chain_by_hand():
    """Blocks of one number each: 7 goes from block 0 to 1 to 2, and 8, that was there, out to the host."""
    cache = PagedCache(3, 1, 1)
    cache.reserve({0: (1, 1, 1)}, torch.float32, torch.device("cpu"))
    cache.layers[0].keys[:3, 0, 0] = torch.tensor([7.0, 8.0, 9.0])
    cache.move_blocks(BlockMoves(swap_out=((1, 0),), copy=((0, 1), (1, 2)), zero=(0,)))
    assert cache.layers[0].keys[:3, 0, 0].tolist() == [0, 7, 7]
    assert cache.host_layers[0].keys[:, 0, 0].tolist() == [8]


@pytest.mark.parametrize(
    "moves, says",
    [
        (BlockMoves(copy=((0, 5),)), "device block 5"),  # the scratch block is nobody's to move
        (BlockMoves(copy=((-1, 0),)), "device block -1"),
        (BlockMoves(swap_out=((5, 0),)), "device block 5"),
        (BlockMoves(swap_in=((0, 7),)), "device block 7"),
        (BlockMoves(zero=(9,)), "device block 9"),
        (BlockMoves(copy=((0, 1),), swap_out=((0, 3),)), "host block 3, and there are 3"),
        (BlockMoves(copy=((0, 1),), swap_in=((-2, 0),)), "host block -2"),
    ],
)
def test_a_block_that_does_not_exist_moves_nothing(moves, says):
    cache = filled()
    before = contents(cache)
    with pytest.raises(BlockError, match=says):
        cache.move_blocks(moves)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors_of(cache))


def test_without_host_blocks_nothing_can_be_swapped():
    cache = filled(num_host=0)
    cache.move_blocks(BlockMoves(copy=((0, 1),)))
    with pytest.raises(BlockError, match="host block 0, and there are 0"):
        cache.move_blocks(BlockMoves(swap_out=((0, 0),)))


def test_a_model_needs_blocks_to_move(tiny):
    with pytest.raises(ModelError, match="allocate"):
        TransformersModel(tiny("Llama"), deterministic=False).move_blocks(BlockMoves(zero=(0,)))


def test_a_sequence_goes_on_in_other_blocks_after_a_swap(tiny, packer):
    """Out to the host, the device's blocks overwritten, in again elsewhere: the next logits are the same bits."""
    model, ids = TransformersModel(tiny("Llama")), np.arange(3, 13)
    rows = []
    for swapped in (False, True):
        model.allocate(8, 4, num_host_blocks=3)
        p = packer(8, 4)
        p.join(0)
        model.forward(p.step([(0, ids)]))
        if swapped:
            held = p.tables[0]
            elsewhere = p.free[: len(held)]
            model.move_blocks(BlockMoves(swap_out=tuple(zip(held, (2, 0, 1), strict=True))))
            for layer in model._cache.layers.values():
                layer.keys.fill_(float("nan"))
                layer.values.fill_(float("nan"))
            model.move_blocks(BlockMoves(swap_in=tuple(zip((2, 0, 1), elsewhere, strict=True))))
            p.tables[0] = list(elsewhere)
        rows.append(model.forward(p.step([(0, np.array([5]))])))
    assert torch.equal(rows[0], rows[1])


def test_a_copy_is_the_child_s_own(tiny, packer):
    """Two sequences share two blocks of a prompt; the third, which is not full, is copied before both go on."""
    model, ids = TransformersModel(tiny("Llama")), np.arange(3, 13)
    model.allocate(8, 4)
    p = packer(8, 4)
    p.join(0)
    model.forward(p.step([(0, ids)]))
    p.join(1)
    p.tables[1], p.done[1] = [*p.tables[0][:2], p.free.pop()], 10
    model.move_blocks(BlockMoves(copy=((p.tables[0][2], p.tables[1][2]),)))
    model.forward(p.step([(0, np.array([20])), (1, np.array([30]))]))
    both = model.forward(p.step([(0, np.array([21])), (1, np.array([31]))]))
    for row, tokens in zip(both, ([20, 21], [30, 31]), strict=True):
        model.allocate(8, 4)
        alone = packer(8, 4)
        alone.join(0)
        expected = model.forward(alone.step([(0, np.array([*ids, *tokens]))]))[-1]
        assert torch.equal(row, expected)
