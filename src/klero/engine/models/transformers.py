"""Any causal language model of transformers, run on packed steps without a line of model code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from klero.engine.models import checks
from klero.engine.models.attention import ATTENTION_NAME, register
from klero.engine.models.forward import attention_in_use, run_step, use_attention
from klero.engine.models.paging import PagedCache
from klero.engine.models.probe import check_bits, probe
from klero.errors import ModelError

if TYPE_CHECKING:
    from klero.batch import StepArrays


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

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Make the paged cache of all layers, zeroed; a former one is dropped."""
        self._cache = None  # before the new one: both at once may not fit
        cache = PagedCache(num_blocks, block_size)
        cache.reserve(self._layer_shapes, self.module.dtype, self.module.device)
        self._cache = cache

    def forward(self, step: StepArrays) -> torch.Tensor:
        """Return the logits [R, V] of the step, in the module's dtype and on its device."""
        if self._cache is None:
            raise ModelError("forward before allocate: call allocate(num_blocks, block_size) once first")
        self._take_over()
        return run_step(self.module, step, self._cache, deterministic=self.deterministic)

    def close(self) -> None:
        """Drop the cache and give the module its own attention back; the next `forward` would need `allocate`."""
        self._cache = None
        if self._former != ATTENTION_NAME:
            self.module.set_attn_implementation(self._former)

    def release(self, slot: int) -> None:
        """Nothing to forget: the engine owns the blocks and hands them on."""
