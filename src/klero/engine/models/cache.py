"""The user's cache of models, and how a directory in it is known to be complete.

Whatever lies there under its own name is complete: it is written under a temporary name (`.` and the model's name)
beside it and then renamed. A checkpoint also records the size of each of its files, so that what was cut short later,
by a disk that filled or a copy that broke off, is found without reading it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from klero.engine.models.extra import require
from klero.errors import ModelError

SIZES = "klero-sizes.json"
_log = logging.getLogger("klero")


def cache_directory() -> Path:
    """Return klero's cache: $KLERO_CACHE, $XDG_CACHE_HOME/klero or ~/.cache/klero."""
    try:
        if own := os.environ.get("KLERO_CACHE"):
            return Path(own).expanduser()
        if shared := os.environ.get("XDG_CACHE_HOME"):
            return Path(shared).expanduser() / "klero"
        return Path.home() / ".cache" / "klero"
    except RuntimeError as error:  # no HOME, and a user whom the system does not know
        raise ModelError(f"there is no place for klero's cache ({error}); set KLERO_CACHE to a directory") from error


@contextmanager
def only_one(name: str) -> Iterator[Path]:
    """Hold the lock of a model: in this block no other process and no other thread writes it.

    Yields the directory of models, made and free of what killed processes left under temporary names. OSError if it
    cannot be written. The operating system frees the lock of a process that dies.
    """
    directory = cache_directory() / "models"
    directory.mkdir(parents=True, exist_ok=True)
    filelock = require("filelock")
    lock = filelock.FileLock(directory / f".{name}.lock")
    try:
        lock.acquire(timeout=1)
    except filelock.Timeout:
        _log.warning("another process prepares the model %r; waiting for it (%s)", name, lock.lock_file)
        lock.acquire()
    try:
        for left in directory.glob(f".{name}-*"):
            shutil.rmtree(left)
        yield directory
    finally:
        lock.release()


def publish(temporary: Path, target: Path) -> None:
    """Give a finished checkpoint its name, in place of a damaged one; if somebody was faster, his stays."""
    sizes = {}
    for file in sorted(temporary.iterdir()):
        file.chmod(0o644)  # safetensors makes its file private; a shared cache should be readable
        sizes[file.name] = file.stat().st_size
        _flush(file)
    (temporary / SIZES).write_text(json.dumps(sizes, indent=1))
    _flush(temporary / SIZES)
    temporary.chmod(0o755)
    if target.exists() and not is_complete(target):
        shutil.rmtree(target)
    try:
        temporary.rename(target)
    except OSError:
        if not is_complete(target):
            raise


def is_complete(directory: Path) -> bool:
    """Whether every file of a checkpoint that `publish` named has the size that was recorded then."""
    try:
        sizes = json.loads((directory / SIZES).read_bytes())
        return bool(sizes) and all((directory / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _flush(file: Path) -> None:
    """Put a file on the disk: after a power cut a renamed directory must not hold empty files."""
    with file.open("rb+") as opened:
        os.fsync(opened.fileno())
