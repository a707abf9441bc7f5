"""Seeds for requests that bring none."""

from __future__ import annotations

import secrets

from klero.lots.philox import philox4x32
from klero.params import check_seed, seed_bits

PURPOSE_SEED = 0xFFFFFFFF  # far from the purposes of the draw


class SeedSource:
    """From the operating system; or, given a seed, a fixed sequence: request k gets words 0 and 1 of Philox at k.

    num_bits: seeds are below 2^num_bits. What tells seeds in JSON sets it to 53: JavaScript keeps no more.
    """

    num_bits = 64

    def __init__(self, seed: int | None) -> None:
        checked = check_seed("seed", seed)
        self._seed = None if checked is None else seed_bits(checked)
        self._count = 0

    def next(self) -> int:
        """Return the next seed, 0 .. 2^num_bits-1."""
        if self._seed is None:
            return secrets.randbits(self.num_bits)
        key = (self._seed & 0xFFFFFFFF, self._seed >> 32)
        low, high = philox4x32([self._count & 0xFFFFFFFF, self._count >> 32, 0, PURPOSE_SEED], key)[:2].tolist()
        self._count += 1
        return (int(low) | int(high) << 32) & (1 << self.num_bits) - 1
