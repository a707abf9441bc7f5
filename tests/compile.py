"""Compile the kernels that tests use, one kind of logits on each core, before two workers would each compile all."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np

import conftest  # noqa: F401  the cache that the tests use
from klero.sampling.stateless import warm_up

KINDS = {"float32": np.float32, "half": np.uint16}


def main() -> None:
    """Without an argument all kinds, each in a process of its own."""
    if len(sys.argv) > 1:
        warm_up(KINDS[sys.argv[1]], rewriting=True, scoring=True)
        return
    begin = time.perf_counter()
    processes = [subprocess.Popen([sys.executable, __file__, kind]) for kind in KINDS]
    failed = [process.wait() for process in processes]
    assert not any(failed), f"compiling failed: {failed}"
    print(f"kernels: compiled or found in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
