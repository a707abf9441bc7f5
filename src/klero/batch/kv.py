"""KVAccount: which K/V blocks each sequence holds, and what the model must move before a step.

Accounting only. One scheduling plans: sequences match, fork, grow, are swapped and released, in any order. `take_moves`
ends it. Then the model moves, computes and writes; `computed` says what came of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from klero.batch.blocks import Blocks
from klero.batch.prefix import TokenIds, block_keys, further_keys
from klero.batch.scheduler_output import NOTHING_MOVES, BlockMoves
from klero.errors import BlockError


@dataclass(eq=False, slots=True)
class Held:
    """What one sequence holds.

    block_ids: its blocks, in order; empty while it is swapped out, and then host_ids has them. identity: `identity_of`
    the sequence, fixed. keys: of its full blocks, as far as they were needed; they outlive `release`, so that who waits
    is not hashed again. num_registered: of its blocks, the first ones that were matched or offered to the cache. epoch:
    which `forget` its first block came after. num_asked: blocks that a `match` looked up, until `grow` follows. life:
    which `clear` its first block came after; what was held before one is nobody's.
    """

    block_ids: list[int] = field(default_factory=list)
    host_ids: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    num_registered: int = 0
    identity: bytes = b""
    epoch: int = 0
    num_asked: int = 0
    life: int = 0


class KVAccount:
    """The blocks of all sequences on one device, and in host memory if num_host_blocks > 0.

    caching: full blocks are kept findable by their tokens. zero_fresh: `BlockMoves.zero` lists every block that is
    handed out without content.

    The moves of a scheduling may run one by one or all at once within their kind: no block is the target of two, and no
    copy reads what another copy writes. A planned copy or swap-in keeps what it reads from being given away. A block
    that is released takes the move that was to fill it along.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_host_blocks: int = 0,
        caching: bool = True,
        zero_fresh: bool = False,
    ) -> None:
        self.blocks = Blocks(num_blocks, block_size)
        self.host = Blocks(num_host_blocks, block_size) if num_host_blocks else None
        self.caching, self.zero_fresh = caching, zero_fresh
        self._epoch = self._life = 0
        self._copies: dict[int, int] = {}  # target: source
        self._swap_ins: dict[int, int] = {}  # device: host
        self._swap_outs: dict[int, int] = {}  # host: device
        self._zeros: dict[int, None] = {}
        self._readers: dict[int, int] = {}  # of blocks that planned copies read; each counts as an owner too

    def match(self, held: Held, token_ids: TokenIds, most: int) -> int:
        """Take the cached blocks of the longest prefix of at most `most` tokens; return how many tokens they hold.

        The last token of a prompt must be computed for its logits, so `most` is one less. held must hold nothing. What
        it took is given back by `release`; the hit rate counts it once `grow` follows.
        """
        if held.block_ids or held.host_ids:
            raise BlockError("a sequence that holds blocks cannot match a prefix; release it first")
        if not self.caching:
            return 0
        size = self.blocks.block_size
        held.keys = block_keys(token_ids, size, held.identity, held.keys)
        asked = held.keys[: max(0, most) // size]
        found = self.blocks.find(asked)
        self.blocks.share(found)
        held.block_ids, held.num_registered, held.num_asked = found, len(found), len(asked)
        held.epoch, held.life = self._epoch, self._life
        return len(found) * size

    def fork(self, held: Held, num_tokens: int) -> Held:
        """Share the blocks of the first num_tokens, which must have been computed; `grow` copies what is written."""
        num_full, count = num_tokens // self.blocks.block_size, self._num_for(num_tokens)
        self._check_holds(held, count)
        child = Held(held.block_ids[:count], [], held.keys[:num_full], min(held.num_registered, num_full))
        child.identity, child.epoch, child.life = held.identity, held.epoch, held.life
        self.blocks.share(child.block_ids)
        return child

    def missing(self, held: Held, first: int, num_tokens: int) -> int:
        """Count the free blocks it takes to write the positions first .. num_tokens - 1."""
        written, num_new = self._span(held, first, num_tokens)
        return num_new + sum(self._is_shared(held.block_ids[place]) for place in written)

    def grow(self, held: Held, first: int, num_tokens: int) -> bool:
        """Let a sequence write the positions first .. num_tokens - 1; False, and nothing changed, if blocks lack.

        New blocks are appended. Of those it has, one that is shared is replaced: by a copy if positions before `first`
        lie in it, by a blank one if not, for what lies behind `first` is void. One that is its own but cached can be
        found no more. Which tokens come to stand there, `computed` is told.
        """
        ids, place = held.block_ids, first // self.blocks.block_size
        inside = num_tokens == first + 1 and held.num_registered <= place < len(ids) and held.life == self._life
        if inside and self.blocks.is_private(ids[place]):
            return True  # a decode in the middle of its block
        written, num_new = self._span(held, first, num_tokens)
        shared = [place for place in written if self._is_shared(ids[place])]
        if num_new + len(shared) > self.blocks.num_free:
            return False
        if not ids:
            held.epoch, held.life = self._epoch, self._life
        if held.num_asked:
            self.blocks.count_lookup(held.num_asked, held.num_registered)
            held.num_asked = 0
        self.rewind(held, first)  # a key that `match` made of tokens to come is made again: they may be others by then
        for place in shared:
            ids[place] = self._replaced(ids[place], keep=place * self.blocks.block_size < first)
        for place in written:
            self.blocks.unregister(ids[place])
        if num_new:
            ids += self._fresh(num_new)
        return True

    def rewind(self, held: Held, num_tokens: int) -> None:
        """Say that the tokens after the first num_tokens are void, and others may follow; its blocks stay.

        `grow` says it too. Who releases, swaps or matches a sequence whose tokens have changed must say it before.
        """
        num_full = num_tokens // self.blocks.block_size
        del held.keys[num_full:]
        held.num_registered = min(held.num_registered, num_full)

    def wants(self, held: Held, num_computed: int) -> bool:
        """Whether `computed` would register a block."""
        num_full = num_computed // self.blocks.block_size
        return self.caching and num_full > held.num_registered and held.epoch == self._epoch

    def computed(self, held: Held, token_ids: TokenIds, num_computed: int) -> None:
        """Register the blocks that the first num_computed tokens fill. For a step that has succeeded.

        What was begun before a `forget` is not registered. Raises BlockError when the sequence has fewer blocks or
        tokens than that.
        """
        num_full = num_computed // self.blocks.block_size
        if num_full <= held.num_registered:
            return
        self._check_holds(held, num_full)
        if len(token_ids) < num_computed:
            raise BlockError(f"num_computed={num_computed}: the sequence has {len(token_ids)} tokens")
        if self.caching and held.epoch == self._epoch:
            held.keys += further_keys(token_ids, num_full, self.blocks.block_size, held.identity, held.keys)
            for place in range(held.num_registered, num_full):
                self.blocks.register(held.block_ids[place], held.keys[place])
            held.num_registered = num_full

    def release(self, held: Held) -> None:
        """Give everything back, in host memory too."""
        if held.life == self._life:
            self._drop(held.block_ids)
            self._drop_host(held.host_ids)
        held.block_ids, held.host_ids, held.num_registered, held.num_asked = [], [], 0, 0

    def swap_out(self, held: Held, num_tokens: int) -> bool:
        """Move the blocks of the first num_tokens to host memory and release all; False, nothing changed, if full.

        num_tokens: those that were computed. Without host memory it is always full.
        """
        count = self._num_for(num_tokens)
        self._check_holds(held, count)
        kept = held.block_ids[:count]
        unread = [block for block in kept if block not in self._swap_ins]
        if self.host is None or len(unread) > self.host.num_free:
            return False
        host_of = dict(zip(unread, self.host.allocate(len(unread)), strict=True))
        for block, host_block in host_of.items():
            self._swap_outs[host_block] = self._copies.get(block, block)  # a copy comes after: read what it would
        for block in kept:
            if block not in host_of:  # its content never left the host
                host_of[block] = self._swap_ins[block]
                self.host.share([host_of[block]])
        self._drop(held.block_ids)
        held.block_ids, held.num_registered = [], 0
        held.host_ids = [host_of[block] for block in kept]
        return True

    def swap_in(self, held: Held) -> bool:
        """Move a sequence's blocks back to the device; False, and nothing changed, if too few are free."""
        self._check_life(held)
        if held.block_ids:
            raise BlockError("a sequence that holds blocks on the device is not swapped out")
        if len(held.host_ids) > self.blocks.num_free:
            return False
        held.block_ids = self.blocks.allocate(len(held.host_ids))
        self._swap_ins.update(zip(held.block_ids, held.host_ids, strict=True))  # the move owns the host's block now
        held.host_ids = []
        return True

    def take_moves(self) -> BlockMoves:
        """Return what the model must do before the forward of this step, and forget it: whoever asks must see to it."""
        if not (self._swap_outs or self._copies or self._swap_ins or self._zeros):
            return NOTHING_MOVES
        moves = BlockMoves(
            swap_out=tuple((block, host_block) for host_block, block in self._swap_outs.items()),
            copy=tuple((source, target) for target, source in self._copies.items()),
            swap_in=tuple((host_block, block) for block, host_block in self._swap_ins.items()),
            zero=tuple(self._zeros),
        )
        self.blocks.release(list(self._copies.values()))
        if self.host is not None:
            self.host.release(list(self._swap_ins.values()))
        for planned in (self._swap_outs, self._copies, self._swap_ins, self._zeros, self._readers):
            planned.clear()
        return moves

    def distrust(self, held: Held) -> None:
        """Let nobody find what a sequence holds any more: its logits were none."""
        for block in held.block_ids:
            self.blocks.unregister(block)

    def clear(self) -> None:
        """Begin again with every block free, as nobody knows what they hold. Who held some can only release it."""
        self.blocks = Blocks(self.blocks.num_blocks, self.blocks.block_size)
        self.host = None if self.host is None else Blocks(self.host.num_blocks, self.host.block_size)
        self._epoch, self._life = self._epoch + 1, self._life + 1
        for planned in (self._copies, self._swap_ins, self._swap_outs, self._zeros, self._readers):
            planned.clear()

    def forget(self) -> None:
        """Drop every cached content, as when the weights change; what sequences hold by now is never cached again."""
        self._epoch += 1
        self.blocks.forget()

    def _num_for(self, num_tokens: int) -> int:
        """How many blocks num_tokens fill or begin."""
        return -(-num_tokens // self.blocks.block_size)

    def _span(self, held: Held, first: int, num_tokens: int) -> tuple[range, int]:
        """Which of a sequence's blocks the positions first .. num_tokens - 1 lie in, and how many it lacks."""
        self._check_on_device(held)
        count = len(held.block_ids)
        if not 0 <= first <= count * self.blocks.block_size:
            where = f"its {count} blocks hold the positions before {count * self.blocks.block_size}"
            raise BlockError(f"first={first}: {where}; go on there, or within them")
        end = self._num_for(num_tokens) if num_tokens > first else 0
        return range(first // self.blocks.block_size, min(end, count)), max(0, end - count)

    def _check_on_device(self, held: Held) -> None:
        self._check_life(held)
        if held.host_ids:
            raise BlockError("the sequence is swapped out; swap it in first")

    def _check_life(self, held: Held) -> None:
        if held.life != self._life and (held.block_ids or held.host_ids):
            raise BlockError("the sequence holds blocks from before `clear`, which are others' by now; release it")

    def _check_holds(self, held: Held, count: int) -> None:
        self._check_on_device(held)
        if not 0 <= count <= len(held.block_ids):
            raise BlockError(f"the sequence holds {len(held.block_ids)} blocks, not {count}; grow it first")

    def _is_shared(self, block: int) -> bool:
        """Whether another sequence holds a block too; planned copies have read it before anyone writes."""
        return self.blocks.num_owners(block) - self._readers.get(block, 0) > 1

    def _fresh(self, count: int) -> list[int]:
        """Take blocks without content."""
        taken = self.blocks.allocate(count)
        if self.zero_fresh:
            self._zeros.update(dict.fromkeys(taken))
        return taken

    def _replaced(self, block: int, keep: bool) -> int:
        """Take another block for a shared one, with its content if that is to be kept."""
        if keep:
            (target,) = self.blocks.allocate(1)
            self._plan_copy(block, target)
        else:
            (target,) = self._fresh(1)
        self._drop([block])
        return target

    def _plan_copy(self, source: int, target: int) -> None:
        """Fill `target` with what `source` will hold once all moves are done."""
        host_block = self._swap_ins.get(source)
        if host_block is not None and self.host is not None:
            self.host.share([host_block])
            self._swap_ins[target] = host_block
            return
        source = self._copies.get(source, source)
        self.blocks.share([source])
        self._readers[source] = self._readers.get(source, 0) + 1
        self._copies[target] = source

    def _drop(self, block_ids: Sequence[int]) -> None:
        """Release blocks; where the last owner leaves, what was planned for the block is off."""
        if self._copies or self._swap_ins or self._zeros:
            for block in block_ids:
                if self.blocks.num_owners(block) == 1:
                    self._cancel(block)
        self.blocks.release(block_ids)

    def _cancel(self, target: int) -> None:
        """Plan no move into a block any more; what it would have held is not there to be found."""
        self._zeros.pop(target, None)
        source, host_block = self._copies.pop(target, None), self._swap_ins.pop(target, None)
        if source is not None or host_block is not None:
            self.blocks.unregister(target)
        if source is not None:
            self._readers[source] -= 1
            self.blocks.release([source])
        if host_block is not None:
            self._drop_host([host_block])

    def _drop_host(self, host_ids: Iterable[int]) -> None:
        """Release blocks in host memory; where the last owner leaves, nothing is written there any more."""
        if self.host is not None:
            for host_block in host_ids:
                self.host.release([host_block])
                if self.host.num_owners(host_block) == 0:
                    self._swap_outs.pop(host_block, None)
