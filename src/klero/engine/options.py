"""Options of an engine, and the sizes that follow from them."""

from __future__ import annotations

import difflib
import operator
from dataclasses import dataclass, fields
from typing import Any

from klero.batch import Buckets, KVAccount
from klero.engine.models.protocol import Model
from klero.errors import OptionError

POLICIES = ("fcfs", "priority")
GRAMMARS = ("llguidance", "xgrammar")
SIZES = ("max_num_seqs", "max_num_batched_tokens", "block_size", "max_answer_bytes")
BOUNDS = ("num_blocks", "max_model_len", "max_microbatch_tokens", "max_microbatch_requests", "max_num_waiting")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What can be chosen about an engine. OptionError names the first field that breaks its rule.

    max_num_seqs: sequences at a time. max_num_batched_tokens: tokens a step computes; longer prompts come in chunks.
    block_size, num_blocks: the paged K/V cache, in tokens and in blocks; num_blocks=None: up to 4 GiB. max_model_len: a
    context shorter than the model's own. max_answer_bytes: what the rows of logits and the lists of logprobs of one
    request may take, counted before it runs; a request that asks for more is refused.

    enable_prefix_caching: what was computed is kept while nobody needs its blocks, and shared with whoever begins with
    the same tokens; it is forgotten when the weights change while nothing runs. swap_space: GiB of host memory that
    preempted sequences are moved to instead of being computed again. max_microbatch_tokens, max_microbatch_requests: a
    larger step runs in parts, which bounds its memory. buckets: every part is padded to static shapes.
    scheduling_policy: "fcfs", or "priority": the lower priority goes first, and takes the place of a higher one.
    max_num_waiting: choices that may wait; one more is refused with QueueFullError; None: any number.
    grammar_backend: "llguidance", "xgrammar", or a `klero.grammar.Backend` of one's own.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    block_size: int = 16
    num_blocks: int | None = None
    max_model_len: int | None = None
    max_answer_bytes: int = 4 * 2**30
    enable_prefix_caching: bool = True
    swap_space: float = 0
    max_microbatch_tokens: int | None = None
    max_microbatch_requests: int | None = None
    buckets: Buckets | None = None
    scheduling_policy: str = "fcfs"
    max_num_waiting: int | None = None
    grammar_backend: Any = "llguidance"

    def __post_init__(self) -> None:
        check_sizes(**{name: getattr(self, name) for name in SIZES})
        check_sizes(**{name: size for name in BOUNDS if (size := getattr(self, name)) is not None})
        if not isinstance(self.enable_prefix_caching, bool):
            raise OptionError(f"enable_prefix_caching={self.enable_prefix_caching!r}: must be True or False")
        if self.scheduling_policy not in POLICIES:
            raise OptionError(f"scheduling_policy={self.scheduling_policy!r}: must be one of {', '.join(POLICIES)}")
        if self.grammar_backend not in GRAMMARS and not hasattr(self.grammar_backend, "compile"):
            rule = f"must be one of {', '.join(GRAMMARS)}, or a klero.grammar.Backend"
            raise OptionError(f"grammar_backend={self.grammar_backend!r}: {rule}")
        if not (self.buckets is None or isinstance(self.buckets, Buckets)):
            raise OptionError(f"buckets={self.buckets!r}: must be klero.batch.Buckets, or None for no padding")


def options_of(**options: Any) -> EngineOptions:
    """The options of an engine. OptionError for one that it does not have, with the nearest that it has."""
    known = [field.name for field in fields(EngineOptions)]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise OptionError(f"{name}: is no option of an engine; {hint}")
    return EngineOptions(**options)


def account_of(model: Model, options: EngineOptions, max_model_len: int) -> KVAccount | None:
    """Make the blocks, here and in the model; None for a model that owns its sequences."""
    size, num_blocks = options.block_size, options.num_blocks
    num_host_blocks = host_blocks(model, size, options.swap_space)
    if not model.uses_blocks:
        return None
    if num_blocks is None:
        num_blocks = default_num_blocks(model, size, options.max_num_seqs, max_model_len)
    model.allocate(num_blocks, size, *[num_host_blocks] * (num_host_blocks > 0))
    return KVAccount(num_blocks, size, num_host_blocks=num_host_blocks, caching=options.enable_prefix_caching)


def default_num_blocks(model: Model, block_size: int, max_num_seqs: int, max_model_len: int) -> int:
    """Blocks for max_num_seqs full contexts, or what 4 GiB hold if that is less; always enough for one context."""
    of_context = -(-max_model_len // block_size)
    bytes_per_block = max(1, model.bytes_per_block(block_size))
    return max(of_context, min(of_context * max_num_seqs, 4 * 2**30 // bytes_per_block))


def context_of(model: Model, asked: int | None) -> int:
    """The context length: the model's own, or a shorter one that was asked for."""
    if asked is None:
        return model.max_model_len
    if asked > model.max_model_len:
        raise OptionError(f"max_model_len={asked}: the model's context is {model.max_model_len}; ask for no more")
    return asked


def check_sizes(**sizes: Any) -> None:
    """Raise OptionError for the first that is no integer >= 1."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < 1:
            raise OptionError(f"{name}={value!r}: must be an integer >= 1")


def host_blocks(model: Model, block_size: int, swap_space: float) -> int:
    """Blocks that swap_space GiB of host memory hold. OptionError where the model cannot swap, or for no size."""
    if isinstance(swap_space, bool) or not isinstance(swap_space, int | float) or not 0 <= swap_space < float("inf"):
        raise OptionError(f"swap_space={swap_space!r}: must be GiB of host memory, a number >= 0")
    if not swap_space:
        return 0
    if not model.uses_blocks or not hasattr(model, "move_blocks"):
        raise OptionError(f"swap_space={swap_space}: {type(model).__name__} moves no blocks; leave it at 0")
    num_blocks = int(swap_space * 2**30) // max(1, model.bytes_per_block(block_size))
    if num_blocks < 1:
        raise OptionError(f"swap_space={swap_space}: not one block of {block_size} tokens fits; raise it, or leave 0")
    return num_blocks
