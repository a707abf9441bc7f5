"""Blocks: which blocks of one pool of K/V memory are free, held, shared or cached. Accounting only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from klero.errors import BlockError


class Blocks:
    """One pool of blocks, numbered 0 .. num_blocks - 1, with an owner count each and a cache of finished contents.

    A block is *out* while it has owners. A block that was registered under a key stays findable when its last owner
    leaves: it is free then, and still cached, until `allocate` needs it. Everything is O(1) a block. num_queries,
    num_hits: blocks that were looked up, and found, as `count_lookup` was told. num_evictions: cached contents given
    up for room.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise BlockError(f"num_blocks={num_blocks}, block_size={block_size}: both must be >= 1")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.num_queries = self.num_hits = self.num_evictions = 0
        self._owners = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._block_of_key: dict[bytes, int] = {}
        self._blank = list(range(num_blocks))[::-1]  # free without content; a stack
        self._resting: OrderedDict[int, None] = OrderedDict()  # free and cached; the first is evicted first

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, the cached ones among them included."""
        return len(self._blank) + len(self._resting)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found, held or not."""
        return len(self._block_of_key)

    @property
    def hit_rate(self) -> float:
        """Blocks found of all blocks asked for; 0 before the first question."""
        return self.num_hits / self.num_queries if self.num_queries else 0.0

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one owner: blank ones first, then the least recently used cached ones.

        Raises BlockError, and takes none, when fewer are free.
        """
        if not 0 <= count <= self.num_free:
            raise BlockError(f"{count} blocks wanted: {self.num_free} of {self.num_blocks} are free; release some")
        start = max(0, len(self._blank) - count)
        taken = self._blank[start:][::-1]
        del self._blank[start:]
        while len(taken) < count:
            taken.append(self._evict())
        owners = self._owners
        for block in taken:
            owners[block] = 1
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """Give each block one more owner; a cached block that nobody holds is out again.

        Raises BlockError, and changes nothing, for a block that is neither out nor cached.
        """
        wanted = list(block_ids)
        for block in wanted:
            if not 0 <= block < self.num_blocks or (self._owners[block] == 0 and self._keys[block] is None):
                raise BlockError(f"block {block} is neither held nor cached, so it cannot be shared; allocate one")
        for block in wanted:
            if self._owners[block] == 0:
                del self._resting[block]
            self._owners[block] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Take one owner from each block; `block_ids` in the order of their sequence.

        The last of them is the first to be evicted: a prefix is worth more than what follows it. Raises BlockError,
        and changes nothing, when a block has fewer owners than that.
        """
        owners, freed = self._owners, []
        for done, block in enumerate(reversed(block_ids)):
            if not 0 <= block < self.num_blocks or owners[block] == 0:
                for other in islice(reversed(block_ids), done):
                    owners[other] += 1
                raise BlockError(f"block {block} comes back, but it is not out, or not that often; release it once")
            owners[block] -= 1
            if owners[block] == 0:
                freed.append(block)
        for block in freed:
            if self._keys[block] is None:
                self._blank.append(block)
            else:
                self._resting[block] = None

    def num_owners(self, block: int) -> int:
        """How many hold a block; 0 for a block that is free, or that is not of this pool."""
        return self._owners[block] if 0 <= block < self.num_blocks else 0

    def is_registered(self, block: int) -> bool:
        """Whether a block can be found, and so must not be written."""
        return self._keys[block] is not None

    def register(self, block: int, key: bytes) -> None:
        """Make a block findable: its content is complete, and `key` names it.

        A second block with the same content stays unregistered. Raises BlockError for a block that is not out, or that
        is registered under another key.
        """
        if self.num_owners(block) == 0:
            raise BlockError(f"block {block} is not out, so it has no content to register; register before release")
        if self._keys[block] not in (None, key):
            raise BlockError(f"block {block} is registered under another key; unregister it before it is written")
        if self._block_of_key.setdefault(key, block) == block:
            self._keys[block] = key

    def is_private(self, block: int) -> bool:
        """Whether one holds it alone, and nobody can find it."""
        return self._owners[block] == 1 and self._keys[block] is None

    def unregister(self, block: int) -> None:
        """Let a block be found no more, because it will be written; a block that is not registered stays as it is."""
        key = self._keys[block]
        if key is not None:
            self._keys[block] = None
            del self._block_of_key[key]
            if self._owners[block] == 0:
                del self._resting[block]
                self._blank.append(block)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest prefix of `keys` that is cached; nobody owns them more than before."""
        found: list[int] = []
        for key in keys:
            block = self._block_of_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def count_lookup(self, num_asked: int, num_found: int) -> None:
        """Count a look-up that somebody made use of; one that is only repeated until there is room is none."""
        self.num_queries += num_asked
        self.num_hits += num_found

    def forget(self) -> None:
        """Drop every cached content, as when the weights change; owners keep their blocks."""
        for block in self._block_of_key.values():
            self._keys[block] = None
        self._block_of_key.clear()
        self._blank.extend(self._resting)
        self._resting.clear()

    def _evict(self) -> int:
        """Take the least recently used block that is cached and free, without its content."""
        block, _ = self._resting.popitem(last=False)
        key = self._keys[block]
        assert key is not None
        self._keys[block] = None
        del self._block_of_key[key]
        self.num_evictions += 1
        return block
