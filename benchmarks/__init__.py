"""Benchmarks: klero beside its peers and its floors, in one process. `python -m benchmarks.run`; see `benchmarks.run`.

Importing the package fixes what must stand before NumPy, Numba or torch are loaded: the number of threads of both sides
(KLERO_NUM_THREADS, 1 unless set) and a cache of compiled kernels that belongs to this state of the source. Numba's own
check of its disk cache sees the file of a function and not the files of the functions it inlines, so without that a
benchmark could time the kernel of yesterday.
"""

import os

from benchmarks.machine import ROOT, source_hash

THREADS = int(os.environ.setdefault("KLERO_NUM_THREADS", "1"))
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = str(THREADS)
os.environ["NUMBA_CACHE_DIR"] = str(ROOT / ".cache" / f"numba-{source_hash()}")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # OpenMP's waiting threads would eat the other core
os.environ.setdefault("HF_HUB_OFFLINE", "1")
