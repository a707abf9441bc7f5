"""klero warmup: kernels compiled ahead of the first request."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import klero
from klero.cli import options as o
from klero.device import HAVE_NUMBA
from klero.sampling.fused import cpu_kernel
from klero.sampling.stateless import warm_up

KINDS: dict[str, Any] = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}


def warmup(
    model: Annotated[str | None, typer.Option(help="Load this model once as well.", show_default=False)] = None,
    dtype: o.Dtype = "auto",
) -> None:
    """Compile the kernels for this machine now, so that the first request need not wait for it.

    Compiled kernels are kept on disk, in the directory that is printed or in $NUMBA_CACHE_DIR; a second warmup loads
    them.
    """
    if HAVE_NUMBA:
        for kind, rows in KINDS.items():
            begin = time.perf_counter()
            warm_up(rows, rewriting=True, scoring=True)
            print(f"kernels for {kind} rows: {time.perf_counter() - begin:.1f} s")
        print(f"cache: {_kernel_cache()}")
    else:
        print("Numba cannot be imported here: the NumPy reference runs, and there is nothing to compile")
    if model is not None:
        _, seconds = o.load(model, dtype=dtype)
        print(f"model {model}: loaded in {seconds:.1f} s")


def _kernel_cache() -> str:
    """Where Numba keeps the kernels, and whether it can."""
    compiled = getattr(cpu_kernel(), "__wrapped__", None)
    path = getattr(getattr(compiled, "stats", None), "cache_path", None)
    if path is None:
        return "none, since no directory can be written: every process compiles; set NUMBA_CACHE_DIR to one"
    if os.environ.get("NUMBA_CACHE_DIR"):
        return os.environ["NUMBA_CACHE_DIR"]
    package = Path(klero.__file__).parent
    return f"__pycache__ in {package}" if Path(path).is_relative_to(package) else str(Path(path).parent)
