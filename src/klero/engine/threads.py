"""Threads and spinning: explicit settings of the process, and a warning when the two ruin it.

torch's Linux builds run matrix products on GNU OpenMP (libgomp), whose threads spin between pieces of work. Where
another process wants a core, the spinners burn the time that the one thread with work left needs, and every step waits
for it. `GOMP_SPINCOUNT` bounds the spinning; libgomp reads it once, when it is loaded.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from klero.errors import OptionError

SPIN = "GOMP_SPINCOUNT"
FEW_SPINS = 10_000  # rounds; libgomp spins 300000 by default, some milliseconds, and 1000 costs nothing
WAITED = 0.25  # seconds of waiting per second, all threads of the process together
PERIOD_S = 2.0

_log = logging.getLogger("klero")
_warned = False


def set_threads(threads: int | None) -> None:
    """Set the threads of klero's kernels, of llama.cpp and, once it is loaded, of torch; None changes nothing.

    It holds for the whole process, as KLERO_NUM_THREADS in its environment does.
    """
    if threads is None:
        return
    _check("threads", threads, 1)
    os.environ["KLERO_NUM_THREADS"] = str(threads)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
    else:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # which torch reads when it is loaded


def set_spin(spin: int | None) -> None:
    """Bound the rounds that OpenMP's threads spin while they wait; 0: they sleep at once; None changes nothing.

    It acts on what loads OpenMP later. OptionError where that is loaded already with another bound, or where torch does
    not use GNU OpenMP.
    """
    if spin is None:
        return
    _check("spin", spin, 0)
    if sys.platform != "linux":
        raise OptionError(f"spin={spin}: bounds GNU OpenMP, which torch uses on Linux only; leave it at None here")
    if openmp_is_loaded() and os.environ.get(SPIN) != str(spin):
        raise OptionError(
            f"spin={spin}: OpenMP is loaded in this process and reads its bound only then; set {SPIN}={spin} in the "
            "environment before Python starts, or make the LLM before anything imports torch"
        )
    os.environ[SPIN] = str(spin)


def _check(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise OptionError(f"{name}={value!r}: must be an integer >= {least}, or None")


def openmp_is_loaded() -> bool:
    """Whether GNU OpenMP is in this process, by torch or by anything else."""
    try:
        return "libgomp" in Path("/proc/self/maps").read_text(errors="replace")
    except OSError:
        return "torch" in sys.modules


def spins_long(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment leaves OpenMP's threads spinning for milliseconds. GOMP_SPINCOUNT goes before
    OMP_WAIT_POLICY; one that libgomp could not read counts as absent."""
    text = environ.get(SPIN, "").strip().lower()
    if text in ("infinite", "infinity"):
        return True
    factor = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}.get(text[-1:], 1)
    digits = text[:-1].rstrip() if factor > 1 else text
    if digits.isascii() and digits.isdigit():
        return int(digits) * factor > FEW_SPINS
    return environ.get("OMP_WAIT_POLICY", "").strip().lower() != "passive"


def seconds_waited() -> float | None:
    """Seconds that the threads of this process were ready to run and had no core, since each began; None where the
    system does not say (only Linux does)."""
    total = 0
    try:
        for thread in Path("/proc/self/task").iterdir():
            try:
                total += int((thread / "schedstat").read_text().split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended meanwhile; one that has no such file has none anywhere
    except (OSError, ValueError, IndexError):
        return None
    return total * 1e-9


def torch_threads() -> int:
    """Threads of torch's matrix products; 1 while it is not loaded."""
    torch = sys.modules.get("torch")
    return 1 if torch is None else int(torch.get_num_threads())


class Watch:
    """Says once per process that spinning is ruinous here. `look` is cheap and may be called at every step.

    Ruinous: torch runs several threads, nothing bounds their spinning, and over the last two seconds the threads of
    this process waited for a core more than `WAITED` of the time. Threads that have the cores to themselves wait for
    none, so klero's own load never counts. The load average would count it, and lags by a minute.
    """

    def __init__(
        self,
        *,
        waited: Callable[[], float | None] = seconds_waited,
        clock: Callable[[], float] = time.monotonic,
        threads: Callable[[], int] = torch_threads,
    ) -> None:
        self._waited, self._clock, self._threads = waited, clock, threads
        self._time, self._total = clock(), waited()

    def look(self) -> None:
        """Read what was waited since the last reading, at most every two seconds, and warn if it is too much."""
        now = self._clock()
        if _warned or now - self._time < PERIOD_S:
            return
        before, total, seconds = self._total, self._waited(), now - self._time
        self._time, self._total = now, total
        if before is None or total is None or self._threads() < 2 or not spins_long():
            return
        share = (total - before) / seconds  # a thread that ended takes its share with it, so this may be too little
        if share > WAITED:
            _warn(share, self._threads())


_lock = threading.Lock()


def _warn(share: float, threads: int) -> None:
    global _warned
    with _lock:
        if _warned:
            return
        _warned = True
    _log.warning(
        "other processes want the cores of this one: its threads waited %.1f s per second for a core, and torch's %d "
        "threads spin while they wait for each other, which makes steps many times slower. Set %s=1000 in the "
        "environment before Python starts (LLM(spin=1000) before torch is imported does it), or LLM(threads=1)",
        share,
        threads,
        SPIN,
    )
