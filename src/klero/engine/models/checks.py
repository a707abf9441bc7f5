"""What a transformers model must be for klero to run it, read from its configuration."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from klero.errors import ModelError

KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Scalings that look at the longest sequence of the call: beyond the original length, one request would change
# another.
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
WINDOW_MASK = "create_sliding_window_causal_mask"  # what the file of an architecture with sliding windows imports


def check_module(module: Any) -> None:
    """Raise ModelError unless `module` is a causal transformers model of plain attention, on one device."""
    name = type(module).__name__
    if not hasattr(module, "set_attn_implementation") or not hasattr(module, "config"):
        raise ModelError(
            f"{name} is not a transformers model; wrap it in a class with the attributes and methods of "
            "klero.engine.models.Model, which asks for no more than logits of a step"
        )
    config = module.config.get_text_config()
    if getattr(module.config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder; klero runs decoder-only models")
    if module.get_output_embeddings() is None:
        raise ModelError(f"{name} has no language-model head; load it as AutoModelForCausalLM does")
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYER_TYPES)
    if unknown:
        raise ModelError(
            f"{name} has layers of type {', '.join(unknown)}; paged keys and values serve "
            f"{' and '.join(sorted(KNOWN_LAYER_TYPES))} only; such a model can run behind a Model that owns "
            "its sequences"
        )
    _check_window(module, config)
    devices = sorted({str(parameter.device) for parameter in module.parameters()})
    if len(devices) != 1 or devices == ["meta"]:
        raise ModelError(f"{name} lies on {', '.join(devices) or 'no device'}; klero needs all weights on one device")


def _check_window(module: Any, config: Any) -> None:
    """Raise ModelError for a sliding window that the architecture ignores and paged attention would apply.

    A checkpoint that changed its architecture may still name the window of the former one. No short text shows it.
    """
    window, length = getattr(config, "sliding_window", None), getattr(config, "max_position_embeddings", None)
    layer_types = getattr(config, "layer_types", None)
    if window is None or (layer_types is not None and "sliding_attention" not in layer_types):
        return
    if length is not None and window >= length:
        return  # nobody is so far away
    files = {kind.__module__ for part in module.modules() for kind in type(part).__mro__}
    if not any(hasattr(sys.modules.get(file), WINDOW_MASK) for file in files):
        raise ModelError(
            f"{type(module).__name__}: the configuration says sliding_window={window}, but the architecture has no "
            "sliding windows and ignores it; set config.sliding_window to None, in config.json or on the live module"
        )


def _ropes(config: Any) -> Iterator[dict[str, Any]]:
    """All rope parameters of a configuration: one set, or one for each type of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    yield found
    yield from (of_type for of_type in found.values() if isinstance(of_type, dict))


def context_length(config: Any, asked: int | None) -> int:
    """Return the context length in tokens: what was asked for, or all that the configuration allows.

    ModelError if the configuration names none, or if more is asked than positions exist.
    """
    limit: Any = getattr(config, "max_position_embeddings", None)
    reason = "its configuration says max_position_embeddings"
    for rope in _ropes(config):
        if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            original = rope.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None) or limit
            if original is not None:
                limit = original if limit is None else min(limit, original)
            reason = f"its rope_type {rope['rope_type']!r} lets the longest request of a step change the others beyond"
    if limit is None and asked is None:
        raise ModelError("the model's configuration names no context length; pass max_model_len")
    if asked is not None and asked < 1:
        raise ModelError(f"max_model_len={asked}: must be at least 1 token")
    if asked is not None and limit is not None and asked > limit:
        raise ModelError(f"max_model_len={asked}: the model goes to {limit} ({reason}); ask for {limit} or less")
    return int(limit if asked is None else asked)


def end_ids(*sources: Any) -> tuple[int, ...]:
    """Return all end ids that the given configurations and tokenizers name, ascending, each once."""
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        if isinstance(ids, Iterable):
            found.update(int(token) for token in ids)
        elif ids is not None:
            found.add(int(ids))
    return tuple(sorted(found))
