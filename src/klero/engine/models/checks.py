"""What a transformers model must be for klero to run it, read from its configuration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from klero.errors import ModelError

KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Scalings that look at the longest sequence of the call: beyond the original length, one request would change
# another.
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


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
    devices = sorted({str(parameter.device) for parameter in module.parameters()})
    if len(devices) != 1 or devices == ["meta"]:
        raise ModelError(f"{name} lies on {', '.join(devices) or 'no device'}; klero needs all weights on one device")


def context_length(config: Any, asked: int | None) -> int:
    """Return the context length in tokens: what was asked for, or all that the configuration allows.

    ModelError if the configuration names none, or if more is asked than positions exist.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    limit: Any = getattr(config, "max_position_embeddings", None)
    original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    reason = "its configuration says max_position_embeddings"
    if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE:
        limit = original or limit
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
