"""From a name, a path or a live module to a model that is ready to run."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klero.engine.models import gguf, llamacpp, smollm2
from klero.engine.models.extra import loading, require
from klero.errors import ModelError

if TYPE_CHECKING:
    from klero.engine.models.protocol import Model

DTYPES = ("auto", "float32", "bfloat16", "float16")
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def load_model(
    model: Any, *, dtype: str = "auto", max_model_len: int | None = None, deterministic: bool | None = None
) -> tuple[Model, Any]:
    """Return the model, probed and ready for `allocate`, and its tokenizer or None.

    `model` is "smollm2" (the default model), a directory as `save_pretrained` writes it, a GGUF file,
    whatever else AutoModelForCausalLM takes (a hub id), or a live transformers module, whose weights are
    shared, not copied, and which comes without a tokenizer. "llama.cpp:FILE.gguf" and "llama.cpp:smollm2"
    leave the forward to llama.cpp and need neither torch nor transformers.

    `dtype` is "float32", "bfloat16", "float16" or "auto": the dtype of the checkpoint; float32 for "smollm2"
    and for GGUF files, whose dequantised weights no half precision holds exactly; a live module keeps its
    own. `max_model_len` shortens the context length, in tokens. `deterministic`: logits do not depend on the
    batch; None: on the CPU, where that is built and probed.

    ModelError if nothing of that kind is there or the model cannot be run; MissingExtra without the `engine`
    extra.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")
    if isinstance(model, str) and model.startswith(llamacpp.PREFIX):
        return llamacpp.load(model, dtype=dtype, max_model_len=max_model_len, deterministic=deterministic)
    torch = require("torch")
    require("transformers")
    if not isinstance(model, str | os.PathLike | torch.nn.Module) or model == "":
        raise ModelError(f"model={model!r}: must be a name, a path, a transformers module or a Model. {_ways_out()}")
    if isinstance(model, torch.nn.Module):
        if dtype != "auto" and model.dtype != getattr(torch, dtype):
            raise ModelError(
                f"dtype={dtype!r}: a live module keeps its own, here {model.dtype}; "
                f"pass dtype='auto', or convert it yourself with module.to(torch.{dtype})"
            )
        module, tokenizer = model, None
    else:
        module, tokenizer = _read(str(model), dtype)

    from klero.engine.models.transformers import TransformersModel

    return TransformersModel(
        module, tokenizer=tokenizer, max_model_len=max_model_len, deterministic=deterministic
    ), tokenizer


def _read(name: str, dtype: str) -> tuple[Any, Any]:
    """Return module and tokenizer of a named model."""
    path = Path(name).expanduser()
    if name == smollm2.NAME:
        # Not bfloat16: its logits are off by up to 1, and at batch 1, where one first meets this model, it
        # gains little.
        return smollm2.load("float32" if dtype == "auto" else dtype)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{name}: a file must be a GGUF file (*.gguf); for other formats name the directory")
        return gguf.load(path, "float32" if dtype == "auto" else dtype)
    if path.is_dir():
        return _from_pretrained(str(path), dtype, local_files_only=True)
    if _HUB_ID.fullmatch(name) is None or path.suffix.lower() == ".gguf":
        raise ModelError(f"{name}: no such file or directory. {_ways_out()}")
    return _from_pretrained(name, dtype)


def _from_pretrained(name: str, dtype: str, **options: Any) -> tuple[Any, Any]:
    """Load a directory or hub id; a checkpoint without a tokenizer is fine, one without a model is not."""
    from transformers import AutoModelForCausalLM

    try:
        with loading():
            module = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **options)
    except (OSError, ValueError, KeyError) as error:
        kind = "directory" if options else "hub id"
        tried = "" if options else f"it is neither {smollm2.NAME!r} nor a file or directory here; "
        reason = str(error).strip().split("\n")[0]
        raise ModelError(f"{name}: {tried}as a {kind} it does not load ({reason}). {_ways_out()}") from error
    return module, _tokenizer(name, **options)


def _tokenizer(name: str, **options: Any) -> Any:
    from transformers import AutoTokenizer

    if options and not any(Path(name).glob("*token*")):
        return None  # a bare checkpoint: it is served by token ids
    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelError(
            f"{name}: the model loads but its tokenizer does not ({reason}); load the module yourself and "
            "pass it instead of the name to serve it by token ids"
        ) from error


def _ways_out() -> str:
    return (
        f"Pass {smollm2.NAME!r} for the default model, the directory of a checkpoint with config.json and "
        "weights, a GGUF file, a hub id that is downloaded or can be, or a live transformers module"
    )
