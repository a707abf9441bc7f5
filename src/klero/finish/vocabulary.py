"""Which bytes a token id stands for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from klero.errors import ModelError
from klero.finish.pieces import bytes_of_piece_function


class TokenBytes:
    """Map token ids to bytes, so that text is the concatenation of its tokens' bytes.

    `tokenizer` is a fast tokenizer of transformers, or a `tokenizers.Tokenizer`. Entries are read when first
    asked for, and kept. An entry is read as a continuation: the space before a word belongs to the word, at
    the start of the output too. Added tokens, special or not, stand for their content in UTF-8. ModelError
    for a tokenizer whose entries cannot be read as bytes.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if not all(hasattr(backend, name) for name in ("id_to_token", "decoder", "get_added_tokens_decoder")):
            raise ModelError(
                f"{type(tokenizer).__name__} is not a fast tokenizer, so its tokens' bytes are unknown; load "
                "one with transformers.AutoTokenizer, or list the bytes with TokenBytes.from_list"
            )
        bytes_of_piece = bytes_of_piece_function(backend.decoder)
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._known = {token_id: token.content.encode() for token_id, token in added.items()}

        def look_up(token_id: int) -> bytes | None:
            piece = backend.id_to_token(token_id)
            return None if piece is None else bytes_of_piece(piece)

        self._look_up: Callable[[int], bytes | None] = look_up

    @classmethod
    def from_list(cls, bytes_of_ids: Sequence[bytes], special: Collection[int] = ()) -> TokenBytes:
        """Make a vocabulary from the bytes of ids 0, 1, 2, ...; `special` holds the ids of special tokens."""
        outside = sorted(token_id for token_id in special if not 0 <= token_id < len(bytes_of_ids))
        if outside:
            raise ModelError(
                f"special={outside}: not in the list of {len(bytes_of_ids)} tokens; list their bytes"
            )
        made = cls.__new__(cls)
        made._special = frozenset(special)
        made._known = {token_id: bytes(data) for token_id, data in enumerate(bytes_of_ids)}
        made._look_up = lambda token_id: None
        return made

    def bytes_of_token(self, token_id: int) -> bytes:
        """Return the bytes of `token_id`; ModelError for an id that the vocabulary does not have."""
        data = self._known.get(token_id)
        if data is None:
            data = self._look_up(token_id) if token_id >= 0 else None
            if data is None:
                raise ModelError(
                    f"token id {token_id} is not in the tokenizer's vocabulary, so it has no text; "
                    "the logits are wider than the tokenizer: ban the padding, or load the model's tokenizer"
                )
            self._known[token_id] = data
        return data

    def is_special(self, token_id: int) -> bool:
        """Say whether `token_id` is a special token (one that skip_special_tokens hides)."""
        return token_id in self._special
