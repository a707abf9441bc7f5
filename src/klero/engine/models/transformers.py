"""Any causal language model of transformers, run on packed steps without a line of model code."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from klero.engine.models import checks
from klero.engine.models.attention import ATTENTION_NAME, register
from klero.engine.models.forward import attention_in_use, run_step, use_attention
from klero.engine.models.paging import PagedCache
from klero.engine.models.probe import check_bits, embedding_width, probe
from klero.errors import ModelError

if TYPE_CHECKING:
    from klero.batch import StepArrays
    from klero.batch.scheduler_output import BlockMoves

SAMPLED = 16  # elements of each parameter that `weights_version` reads


class TransformersModel:
    """A `Model` around an unmodified transformers module, with paged keys and values.

    The module's weights are shared, not copied: training steps on a live module show in the next forward. It
    is put into evaluation mode and switched to klero's attention, again at each forward if somebody changed
    that. Loading probes two short requests against the module's own eager attention; a model that does not
    agree is refused with ModelError.

    `tokenizer` contributes its end id. `max_model_len` may shorten the model's context length, never exceed it.
    `deterministic` (the default on the CPU): a row's logits are the same bits whatever else a step computes, and
    however its prompt was cut; see klero.engine.models.invariant. Another number of torch's threads may have other
    bits: it is measured when it is first met.
    """

    uses_blocks = True

    def __init__(
        self,
        module: Any,
        *,
        tokenizer: Any = None,
        max_model_len: int | None = None,
        deterministic: bool | None = None,
    ) -> None:
        register()
        checks.check_module(module)
        config = module.config.get_text_config()
        self.module, self.tokenizer = module, tokenizer
        on_cpu = module.device.type == "cpu"
        if deterministic and not on_cpu:
            raise ModelError(f"deterministic=True: holds on the CPU, and the model lies on {module.device}; pass False")
        self.deterministic = on_cpu if deterministic is None else deterministic
        self._former = former = module.config._attn_implementation
        try:
            self._take_over()
            self.max_model_len = checks.context_length(config, max_model_len)
            found = probe(module)
            if self.deterministic:
                check_bits(module)
        except BaseException:
            if former != ATTENTION_NAME:
                module.set_attn_implementation(former)  # a module that is refused goes back as it came
            raise
        self.vocab_size = found.vocab_size
        self.end_token_ids = checks.end_ids(
            getattr(module, "generation_config", None), module.config, config, tokenizer
        )
        self._layer_shapes = found.layer_shapes
        self._cache: PagedCache | None = None

    def __repr__(self) -> str:
        return f"TransformersModel({type(self.module).__name__}, {self.module.dtype}, {self.module.device})"

    def _take_over(self) -> None:
        """Make sure that the module attends through klero and drops nothing out."""
        if attention_in_use(self.module) != {ATTENTION_NAME}:
            use_attention(self.module, ATTENTION_NAME)
        if self.module.training:
            self.module.eval()

    def bytes_per_block(self, block_size: int) -> int:
        """Return the bytes of keys and values that `block_size` tokens take in all layers."""
        values = sum(heads * (key + value) for heads, key, value in self._layer_shapes.values())
        return values * block_size * int(self.module.dtype.itemsize)

    def allocate(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        """Make the paged cache of all layers, zeroed; a former one is dropped.

        num_host_blocks: more blocks in the host's memory, to swap with. Each kind has numbers from 0 on.
        """
        self._cache = None  # before the new one: both at once may not fit
        cache = PagedCache(num_blocks, block_size, num_host_blocks)
        cache.reserve(self._layer_shapes, self.module.dtype, self.module.device)
        self._cache = cache

    def move_blocks(self, moves: BlockMoves) -> None:
        """Carry out the moves of a step, before its forward: swap_out, copy, swap_in, zero, each list in its order."""
        self._allocated().move_blocks(moves)

    @property
    def hidden_size(self) -> int | None:
        """Width of the embeddings that a step may bring in place of ids; None: this module takes ids only.

        Tried out when it is first asked for. Embeddings are what `module.get_input_embeddings()` makes of ids.
        """
        return self._embeddings[0]

    @cached_property
    def _embeddings(self) -> tuple[int | None, str]:
        """The width of embeddings, or why there is none."""
        self._take_over()
        try:
            return embedding_width(self.module, deterministic=self.deterministic), ""
        except ModelError as error:
            return None, str(error)

    def forward(self, step: StepArrays) -> torch.Tensor:
        """Return the logits [R, V] of the step, in the module's dtype and on its device."""
        cache = self._allocated()
        self._take_over()
        if step.inputs_embeds is not None and self.hidden_size is None:
            raise ModelError(self._embeddings[1])
        return run_step(self.module, step, cache, deterministic=self.deterministic)

    def weights_version(self) -> int:
        """Return a number that changes when the weights do; what was computed under another one is stale.

        Parameters and buffers that were exchanged or moved, and changes in place that torch counts, are always seen.
        Torch counts neither its fused optimizers nor what goes through `.data` or NumPy: those are seen by the first
        SAMPLED elements of each tensor, so a training step is, and a change of a few rows of a table may not be. Not
        seen: what is neither parameter nor buffer. 1 ms for the 275 tensors of SmolLM2 on a CPU; on a GPU it waits.
        """
        tensors = _tensors_of(self.module)
        counts = [(id(one), one.data_ptr(), 0 if one.is_inference() else one._version) for one in tensors]
        firsts: dict[Any, list[torch.Tensor]] = {}
        with torch.inference_mode():
            for one in tensors:
                if one.is_contiguous():
                    first = one.as_strided((min(SAMPLED, one.numel()),), (1,))
                    firsts.setdefault((one.dtype, one.device), []).append(first)
            sampled = [torch.cat(of_kind).cpu().view(torch.uint8).numpy().tobytes() for of_kind in firsts.values()]
        return hash((tuple(counts), tuple(sampled)))

    def _allocated(self) -> PagedCache:
        """The cache; ModelError if there is none."""
        if self._cache is None:
            raise ModelError("there are no blocks yet: call allocate(num_blocks, block_size) once first")
        return self._cache

    def close(self) -> None:
        """Drop the cache and give the module its own attention back; the next `forward` would need `allocate`."""
        self._cache = None
        if self._former != ATTENTION_NAME:
            self.module.set_attn_implementation(self._former)

    def release(self, slot: int) -> None:
        """Nothing to forget: the engine owns the blocks and hands them on."""


def _tensors_of(module: Any) -> list[torch.Tensor]:
    """All parameters and buffers; torch's own iteration over them looks for duplicates and takes four times as long."""
    found, stack = [], [module]
    while stack:
        part = stack.pop()
        found += [*part._parameters.values(), *part._buffers.values()]
        stack += [child for child in part._modules.values() if child is not None]
    return [tensor for tensor in found if tensor is not None]
