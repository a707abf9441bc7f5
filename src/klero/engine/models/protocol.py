"""What the engine asks of a model, and nothing more.

Two kinds of model fit. One keeps keys and values in the engine's paged blocks (`uses_blocks` is True): the
step says where each token's go and where each sequence's lie. The other owns its sequences (`uses_blocks` is
False): it keeps whatever state it likes under the slot number, reads `slots`, `query_starts`, `positions` and
`input_ids`, and ignores the block arrays. `TransformersModel` is of the first kind; toy models and bindings
to other runtimes may be either.

What only some models can is not part of the protocol; the engine asks with `getattr`, and does without:

- `move_blocks(moves: BlockMoves) -> None`: carry out a step's moves of blocks, before its forward, in the order
  swap_out, copy, swap_in, zero, and each list in its order. Without it the children of a request share no block by
  copy, and nothing is swapped.
- `allocate(..., num_host_blocks: int)`: that many blocks in the host's memory as well, to swap with; passed only where
  there are to be some. Device and host blocks each have numbers from 0 on.
- `hidden_size: int | None`: width of the rows that `StepArrays.inputs_embeds` may bring in place of ids; None, or no
  such attribute: ids only, and the engine refuses a request with embeddings.
- `weights_version() -> int`: changes when the weights do; cached prefixes that were computed under another are stale.
- `close() -> None`: called once nothing runs on the model any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from klero.batch import StepArrays


@runtime_checkable
class Model(Protocol):
    """A causal language model that computes one packed step at a time."""

    vocab_size: int
    """Width of the logits, padding columns included."""

    max_model_len: int
    """Context length in tokens: prompt and output together."""

    end_token_ids: tuple[int, ...]
    """Every id that ends a text of this model, ascending; empty if it has none."""

    uses_blocks: bool
    """True: keys and values lie in the engine's blocks. False: the model keeps its sequences, by slot."""

    deterministic: bool
    """True: a row's logits are the same bits whatever else a step computes, and however its prompt was cut."""

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Make room for `num_blocks` blocks of `block_size` tokens, in every layer.

        Called once before the first `forward`; a second call drops what was cached. Models that own their
        sequences do nothing here.
        """
        ...

    def bytes_per_block(self, block_size: int) -> int:
        """Return the bytes of a block of `block_size` tokens in all layers; 0 if the model needs none."""
        ...

    def forward(self, step: StepArrays) -> Any:
        """Return the logits [R, V] of `step.logits_rows`, in their order, whatever that is; R may be 0.

        A torch tensor or a NumPy array of float32, float16 or bfloat16. Row r belongs to token
        `logits_rows[r]` of the packed step and speaks of the token that follows it. All T tokens enter the
        model's state, whether or not a row of theirs is asked for. What one sequence holds never changes the
        logits of another. The arrays of `step` are valid during the call only.

        A padded step has tokens behind those of its sequences: their slot_mapping is -1, which goes to a block that
        nobody else has (one behind the last) or nowhere, and their rows may be anything.
        """
        ...

    def release(self, slot: int) -> None:
        """Forget the sequence in `slot`: it is finished, or will be computed again from its first token."""
        ...
