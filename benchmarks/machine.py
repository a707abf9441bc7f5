"""What ran, and on what. Standard library only: this is imported before anything that reads the environment."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DISTRIBUTIONS = ("klero", "numpy", "numba", "torch", "transformers", "llama-cpp-python")


def source_hash() -> str:
    """A hash of the package's source: which state of the kernels was timed."""
    digest = hashlib.sha256()
    package = ROOT / "src" / "klero"
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def version(distribution: str) -> str | None:
    """The installed version of a distribution, None if it is missing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor as the operating system calls it, with the vector extensions that decide here."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    flags = set(fields.get("flags", "").split())
    vectors = [flag for flag in ("avx2", "avx512f") if flag in flags]
    return " ".join([fields.get("model name", platform.machine()), *vectors])


def load_average() -> float:
    """Running processes over the last minute, this one included."""
    return round(os.getloadavg()[0], 2)


def describe(threads: int) -> dict[str, Any]:
    """Everything about the machine that a number of this benchmark depends on."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": threads,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in DISTRIBUTIONS},
        "source": source_hash(),
    }


def resident_bytes() -> int:
    """Memory that this process has in use (Linux)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
