"""What the accounting of K/V blocks costs: `python -m benchmarks.blocks` (a minute), `--rounds 15`.

Blocks taken and given back in bulk, one by one, and out of a full cache; keys and look-up of a cached prompt of 4,096
tokens at block size 16, from an array and from a list; one decoding sequence in a step. Beside them what one writes
first: a queue of block objects, and SHA-256 of pickled tokens. One thread. Appends to results/blocks.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import pickle
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import THREADS, machine
from benchmarks.timing import Candidate, interleave
from klero.batch.blocks import Blocks
from klero.batch.kv import Held, KVAccount
from klero.batch.prefix import block_keys

RESULTS = Path(__file__).parent / "results" / "blocks.jsonl"
NUM_BLOCKS, BLOCK_SIZE, NUM_TOKENS = 65_536, 16, 4096
PER_CALL = 16 * 256  # blocks: sixteen sequences of 4,096 tokens
ALLOCATIONS, LOOKUP = 1e6, 400.0  # targets: allocations a second; microseconds for keys and look-up of the prompt


@dataclass
class Block:
    """The peer's block."""

    block_id: int
    owners: int = 0


class Queue:
    """The peer's pool: objects in a queue, taken and given back one by one."""

    def __init__(self) -> None:
        self.free = deque(Block(i) for i in range(NUM_BLOCKS))

    def allocate(self, count: int) -> list[Block]:
        if count > len(self.free):
            raise ValueError("no blocks")
        taken = []
        for _ in range(count):
            block = self.free.popleft()
            block.owners += 1
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[Block]) -> None:
        for block in reversed(blocks):
            block.owners -= 1
            if block.owners == 0:
                self.free.append(block)


def pickled_keys(token_ids: Sequence[int]) -> list[bytes]:
    """The peer's keys."""
    before, keys = b"", []
    for start in range(0, len(token_ids), BLOCK_SIZE):
        content = (before, tuple(token_ids[start : start + BLOCK_SIZE]))
        before = hashlib.sha256(pickle.dumps(content)).digest()
        keys.append(before)
    return keys


def taking(pool: Any, count: int) -> Callable[[], None]:
    """Take PER_CALL blocks, `count` at a time, and give them back."""

    def call() -> None:
        taken = [pool.allocate(count) for _ in range(PER_CALL // count)]
        for blocks in taken:
            pool.release(blocks)

    return call


def evicting() -> Callable[[], None]:
    """Take PER_CALL blocks out of a pool whose blocks are all cached, register them anew, and give them back."""
    pool = Blocks(PER_CALL, BLOCK_SIZE)
    numbers = iter(range(1 << 62))

    def call() -> None:
        taken = pool.allocate(PER_CALL)
        for block in taken:
            pool.register(block, next(numbers).to_bytes(32, "little"))
        pool.release(taken)

    call()
    return call


def decoding() -> Callable[[], None]:
    """A sequence grows by a token, PER_CALL times, and every full block is registered; then it starts again."""
    token_ids = np.arange(PER_CALL + 1, dtype=np.int32)
    numbers = iter(range(1 << 62))
    kv = KVAccount(NUM_BLOCKS, BLOCK_SIZE)

    def call() -> None:
        held = Held(identity=next(numbers).to_bytes(8, "little"))
        for num_computed in range(PER_CALL):
            kv.grow(held, num_computed, num_computed + 1)
            kv.take_moves()
            kv.computed(held, token_ids, num_computed + 1)
        kv.release(held)

    return call


def looking_up(token_ids: Any, keys_of: Callable[[Any], list[bytes]]) -> Callable[[], None]:
    """Compute the keys of a prompt and find all its blocks among 65,536 cached ones."""
    pool, keys = Blocks(NUM_BLOCKS, BLOCK_SIZE), keys_of(token_ids)
    others = [i.to_bytes(32, "little") for i in range(NUM_BLOCKS - len(keys))]
    for block, key in zip(pool.allocate(NUM_BLOCKS), others + keys, strict=True):
        pool.register(block, key)

    def call() -> None:
        if len(pool.find(keys_of(token_ids))) != len(keys):
            raise RuntimeError("the prompt is cached and was not found")

    return call


def candidates() -> list[Candidate]:
    """Who does what, by how many of it in a call; the name says what one is."""
    array = np.random.default_rng(0).integers(0, 50_000, NUM_TOKENS, np.int32)
    ids: list[int] = array.tolist()
    ours: Callable[[Any], list[bytes]] = lambda token_ids: block_keys(token_ids, BLOCK_SIZE)  # noqa: E731
    known = block_keys(array, BLOCK_SIZE)
    again: Callable[[Any], list[bytes]] = lambda token_ids: block_keys(token_ids, BLOCK_SIZE, known=known)  # noqa: E731
    what = [
        ("a block", "klero", "256 at a time", taking(Blocks(NUM_BLOCKS, BLOCK_SIZE), 256), PER_CALL),
        ("a block", "klero", "one by one", taking(Blocks(NUM_BLOCKS, BLOCK_SIZE), 1), PER_CALL),
        ("a block", "klero", "all cached: evict, register", evicting(), PER_CALL),
        ("a block", "queue of objects", "256 at a time", taking(Queue(), 256), PER_CALL),
        ("a block", "queue of objects", "one by one", taking(Queue(), 1), PER_CALL),
        ("a decoded token", "klero", "grow, moves, computed", decoding(), PER_CALL),
        ("a prompt", "klero", "keys and find, array", looking_up(array, ours), 1),
        ("a prompt", "klero", "keys and find, list", looking_up(ids, ours), 1),
        ("a prompt", "klero", "find, keys known", looking_up(array, again), 1),
        ("a prompt", "sha256 of pickles", "keys and find, list", looking_up(ids, pickled_keys), 1),
    ]
    return [Candidate((unit, who, how), call, num) for unit, who, how, call, num in what]


def main(arguments: Sequence[str] | None = None) -> int:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.blocks", description=about)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args(arguments)
    made = candidates()
    share = interleave(made, options.rounds, lambda message: print(message, file=sys.stderr, flush=True))
    print(f"{THREADS} thread, microseconds by the clock and of the processor, {share:.2f} of a core was ours")
    for candidate in made:
        unit, who, how = candidate.key
        stats = candidate.stats
        print(f"  {unit:16} {who:18} {how:28} {stats.median:9.3f} {stats.cpu:9.3f}")
    stats_of = {" | ".join(candidate.key): candidate.stats for candidate in made}
    rate = 1e6 / stats_of["a block | klero | 256 at a time"].median
    lookup = stats_of["a prompt | klero | keys and find, array"].median
    print(f"  {rate / 1e6:.1f} million blocks a second taken and given back ({ALLOCATIONS / 1e6:g} wanted)")
    print(f"  {lookup:.0f} us for keys and look-up of {NUM_TOKENS} tokens ({LOOKUP:g} wanted at most)")
    record: dict[str, Any] = {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "about": machine.describe(THREADS),
        "us": {name: [round(stats.median, 4), round(stats.cpu, 4)] for name, stats in stats_of.items()},
        "judged": {"allocations per s": round(rate), "lookup us": round(lookup, 1)},
    }
    with RESULTS.open("a") as file:
        file.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
