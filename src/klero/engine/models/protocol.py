"""What the engine asks of a model, and nothing more.

Twokindsofmodelfit.Onekeepskeysandvaluesintheengine'spagedblocks(`uses_blocks`isTrue):thestepsays
whereeachtoken'sgoandwhereeachsequence'slie.Theotherownsitssequences(`uses_blocks`isFalse):itkeeps
whateverstateitlikesundertheslotnumber,reads`slots`,`query_starts`,`positions`and`input_ids`,andignores
theblockarrays.`TransformersModel`isofthefirstkind;toymodelsandbindingstootherruntimesmaybeeither.
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

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Make room for `num_blocks` blocks of `block_size` tokens, in every layer.

        Calledoncebeforethefirst`forward`;asecondcalldropswhatwascached.Modelsthatowntheirsequences
        donothinghere.
        """
        ...

    def bytes_per_block(self, block_size: int) -> int:
        """Return the bytes of a block of `block_size` tokens in all layers; 0 if the model needs none."""
        ...

    def forward(self, step: StepArrays) -> Any:
        """Return the logits [R, V] of `step.logits_rows`, in their order.

        AtorchtensororaNumPyarrayoffloat32,float16orbfloat16.Rowrbelongstotoken`logits_rows[r]`ofthe
        packedstepandspeaksofthetokenthatfollowsit.AllTtokensenterthemodel'sstate,whetherornota
        rowoftheirsisaskedfor.Whatonesequenceholdsneverchangesthelogitsofanother.
        """
        ...

    def release(self, slot: int) -> None:
        """Forget the sequence in `slot`: it is finished, or will be computed again from its first token."""
        ...
