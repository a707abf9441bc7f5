"""One packed step through a transformers module: switch its attention, call it, take the logits."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from klero.engine.models.attention import running
from klero.engine.models.invariant.forward import BatchInvariant
from klero.engine.models.paging import PagedCache, PagedStep
from klero.errors import ModelError

if TYPE_CHECKING:
    from klero.batch import StepArrays


def attention_in_use(module: Any) -> set[str]:
    """Return the names of the attentions that the configurations of `module` and of its text part ask for."""
    return {config._attn_implementation for config in (module.config, module.config.get_text_config())}


def use_attention(module: Any, name: str) -> None:
    """Switch all of `module`'s layers to the attention `name`; ModelError if they do not follow.

    transformers only warns when an architecture has its attention written out, and goes on with the old one.
    """
    module.set_attn_implementation(name)
    stayed = attention_in_use(module) - {name}
    if stayed:
        raise ModelError(
            f"{type(module).__name__} stays on its {stayed.pop()!r} attention: the architecture does not "
            "call transformers' AttentionInterface, so klero cannot page its keys and values"
        )


@lru_cache(maxsize=64)
def _takes_logits_to_keep(kind: Any) -> bool:
    """Whether a model class computes only the rows it is asked for; reading a signature is slow, so once."""
    return "logits_to_keep" in inspect.signature(kind.forward).parameters


def call(module: Any, weights: dict[str, torch.Tensor] | None, **arguments: Any) -> torch.Tensor:
    """Return the logits [tokens, V] of a batch of one, with `weights` in place of the module's if given."""
    if weights is None:
        output = module(**arguments, use_cache=False)
    else:
        output = torch.func.functional_call(module, weights, (), {**arguments, "use_cache": False})
    logits: torch.Tensor = output.logits[0]
    return logits


def run_step(
    module: Any,
    step: StepArrays,
    cache: PagedCache,
    weights: dict[str, torch.Tensor] | None = None,
    *,
    deterministic: bool = False,
) -> torch.Tensor:
    """Return the logits [R, V] of `module`, already switched to klero's attention, for one packed step.

    deterministic: a row's bits do not depend on what else is in the step (klero.engine.models.invariant). Where a token
    of the step comes as an embedding, the module is given embeddings only: those of the other ids are looked up.
    """
    device = module.device
    rows = torch.from_numpy(step.logits_rows).to(device)
    ids = torch.from_numpy(step.input_ids).long().to(device)[None]
    arguments = {"position_ids": torch.from_numpy(step.positions).long().to(device)[None]}
    # Caps and scales stand behind the head in some models, so the module's own forward picks the rows.
    kind: Any = type(module)
    keeps = _takes_logits_to_keep(kind)
    if keeps:
        arguments["logits_to_keep"] = rows
    paged = PagedStep(step, cache, device, deterministic=deterministic)
    plain = torch.autocast(device.type, enabled=False)  # a caller's autocast would mix dtypes
    with torch.inference_mode(), plain, running(paged, cache), BatchInvariant() if deterministic else nullcontext():
        if step.inputs_embeds is None:
            arguments["input_ids"] = ids
        else:
            arguments["inputs_embeds"] = _embed(module, ids, step)
        logits = call(module, weights, **arguments)
    return logits if keeps else logits[rows]


def _embed(module: Any, ids: torch.Tensor, step: StepArrays) -> torch.Tensor:
    """Return the embeddings [1, T, H] of a step: of its ids [1, T], and the given ones where it has some.

    What the module does to embeddings after its table (a scale, a projection, positions) it does to both.
    """
    embeds: torch.Tensor = module.get_input_embeddings()(ids)
    assert step.inputs_embeds is not None
    assert step.is_embedded is not None
    given = torch.from_numpy(step.inputs_embeds)
    if given.shape[1] != embeds.shape[2]:
        raise ModelError(
            f"embeddings of width {given.shape[1]}: those of {type(module).__name__} have {embeds.shape[2]}; give what "
            "module.get_input_embeddings() makes of ids"
        )
    places = torch.from_numpy(step.is_embedded.nonzero()[0])
    rows = given.index_select(0, places).to(embeds.device, embeds.dtype)
    return embeds.index_copy(1, places.to(embeds.device), rows[None])
