"""The fingerprint of a server: what decides its answers beside the requests."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import klero

if TYPE_CHECKING:
    from klero.engine import LLM

SAMPLE = 8  # numbers of each weight that are looked at


def fingerprint_of(llm: LLM) -> str:
    """A name for the weights, how they are computed and what does it: klero, torch, the processor and its threads.

    Two servers of one name give the same text for the same request, where `reproducible` is true. Not what they are
    called, nor what limits their requests. Of the weights a few numbers each are looked at.
    """
    engine, torch = llm.engine, sys.modules.get("torch")
    facts: list[Any] = [klero.__version__, engine.limits.vocab_size, engine.reproducible, engine.dtype]
    facts += [type(engine.model).__name__, platform.machine(), platform.processor()]
    facts += [] if torch is None else [torch.__version__, torch.get_num_threads()]
    digest = hashlib.sha256(json.dumps(facts).encode())
    for name, data in _weights(getattr(engine.model, "module", None)):
        digest.update(name.encode() + data)
    return "fp_" + digest.hexdigest()[:16]


def _weights(module: Any) -> Iterator[tuple[str, bytes]]:
    for name, weight in module.named_parameters() if hasattr(module, "named_parameters") else ():
        numbers = weight.detach().flatten()[:SAMPLE].float().tolist()
        yield f"{name}{tuple(weight.shape)}", json.dumps(numbers).encode()
