"""The product of a single row, added in the order in which the library adds larger ones.

A library computes a single row by a kernel of its own, so it falls into another class, and padding it to the smallest
count of the wanted one nearly doubles the time of a step at one request. But the order of the wanted class is simple: a
chain of fused multiply-adds along each block of the inner axis, block sums added one after the other. `order_of` looks
for blocks that give the bits of the library; where none do, the row is padded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from klero.device import HAVE_NUMBA, inline, kernel, over_rows

BLOCKS = (192, 256, 384, 128, 512, 320, 336, 448, 640, 768, 96, 64)  # inner lengths that matrix libraries work with
F32 = npt.NDArray[np.float32]
Ends = npt.NDArray[np.int64]
_NOTHING = np.empty(0, np.float32)

if HAVE_NUMBA:
    from numba import types
    from numba.extending import intrinsic

    @intrinsic
    def fma(context: Any, a: Any, b: Any, c: Any) -> Any:
        """a * b + c with one rounding, in float32."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.fma(*arguments)

        return types.float32(types.float32, types.float32, types.float32), generate

    @inline
    def eight_chains(x: F32, a: F32, b: F32, c: F32, d: F32, e: F32, f: F32, g: F32, h: F32) -> Any:
        """Eight products of vectors with x, each a chain of fma that is never split; they hide each other's latency."""
        p = q = r = s = t = u = v = w = np.float32(0.0)
        for k in range(len(x)):
            y = x[k]
            p, q, r, s = fma(y, a[k], p), fma(y, b[k], q), fma(y, c[k], r), fma(y, d[k], s)
            t, u, v, w = fma(y, e[k], t), fma(y, f[k], u), fma(y, g[k], v), fma(y, h[k], w)
        return p, q, r, s, t, u, v, w

    @kernel
    def one_row(row: F32, weight: F32, ends: Ends, start: F32, out: F32, first: int, last: int) -> None:
        """out[n] = start[n] + sum over blocks of (chain of fma over k of row[k] * weight[n, k]), for first <= n < last.

        ends: where each block of the inner axis ends. start: bias [N], or empty for none. last - first >= 8. Agrees
        with the library in bits where `order_of` says so.
        """
        for at in range(first, last, 8):
            n = min(at, last - 8)  # the last eight may be computed twice
            begin = 0
            for b in range(len(ends)):
                end = ends[b]
                w, m = weight, n + 4
                chains = eight_chains(
                    row[begin:end],
                    w[n, begin:end], w[n + 1, begin:end], w[n + 2, begin:end], w[n + 3, begin:end],
                    w[m, begin:end], w[m + 1, begin:end], w[m + 2, begin:end], w[m + 3, begin:end],
                )  # fmt: skip
                for j in range(8):
                    if b > 0:
                        out[n + j] += chains[j]
                    elif len(start) > 0:
                        out[n + j] = start[n + j] + chains[j]
                    else:
                        out[n + j] = chains[j]
                begin = end


def blocks_of(width: int, block: int) -> Ends:
    """Return the ends of the blocks of an inner axis: `block` each; two halves where it is between one and two."""
    if block < width < 2 * block:
        return np.array([-(-width // 2), width])
    return np.array([*range(block, width, block), width])


def product(row: torch.Tensor, weight: torch.Tensor, ends: Ends, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return row [1, K] times weight [N, K], plus bias [N], in float32, in the order that `ends` gives; new, [1, N]."""
    out = torch.empty(1, weight.shape[0])
    start = _NOTHING if bias is None else bias.detach().contiguous().numpy()
    arrays = row[0].detach().contiguous().numpy(), weight.detach().numpy(), ends, start, out[0].numpy()
    # A smaller product is over before a second thread is awake; and 16 leave every thread the eight that one_row needs.
    grain = max(16, 2**20 // weight.shape[1])
    over_rows(lambda first, last: one_row(*arrays, first, last), weight.shape[0], torch.get_num_threads(), grain=grain)
    return out


def order_of(
    rows: torch.Tensor, weight: torch.Tensor, expected: torch.Tensor, bias: torch.Tensor | None = None
) -> Ends | None:
    """Return the blocks that give `expected`, what the library made of `rows` and `weight`; None if none do."""
    if not HAVE_NUMBA or weight.dtype != torch.float32 or weight.device.type != "cpu" or not weight.is_contiguous():
        return None
    for block in BLOCKS:
        ends = blocks_of(weight.shape[1], block)
        results = (product(rows[n : n + 1], weight, ends, bias) for n in range(rows.shape[0]))
        if all(torch.equal(result, expected[n : n + 1]) for n, result in enumerate(results)):
            return ends
    return None
