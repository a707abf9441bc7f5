"""Read the bytes of one vocabulary entry as its tokenizer's decoder would, as a continuation of earlier text.

The decoder is read from the settings that the `tokenizers` library keeps for it, so that neither the library
nor a copy of the vocabulary is needed here. Steps that only touch the ends of a whole text (stripping the
first space) do not apply: a piece continues what came before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, TypeAlias

from klero.errors import ModelError

Piece: TypeAlias = str | bytes
Step: TypeAlias = Callable[[Piece], Piece]

_WAY_OUT = (
    "klero reads ByteLevel, Metaspace, WordPiece and Replace/ByteFallback/Fuse/Strip decoders; give the "
    "bytes of all tokens with TokenBytes.from_list, or ask for no text (detokenize=False, no stop strings)"
)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def bytes_of_piece_function(decoder: Any) -> Callable[[str], bytes]:
    """Return the function from a vocabulary entry to its bytes.

    `decoder` is the `decoder` of a `tokenizers.Tokenizer`, or None for a tokenizer that joins its entries by
    spaces. ModelError for a decoder whose entries have no text of their own.
    """
    if decoder is None:
        return lambda piece: b" " + piece.encode()
    steps = _steps_of_settings(_settings_of_decoder(decoder), decoder)

    def bytes_of_piece(piece: str) -> bytes:
        value: Piece = piece
        for step in steps:
            value = step(value)
        return value if isinstance(value, bytes) else value.encode()

    return bytes_of_piece


def _settings_of_decoder(decoder: Any) -> dict[str, Any]:
    try:
        settings = json.loads(decoder.__getstate__())
    except Exception as error:  # the library raises a bare Exception for decoders written in Python
        raise ModelError(f"the tokenizer's decoder hides its settings ({error}); {_WAY_OUT}") from error
    if not isinstance(settings, dict):
        raise ModelError(f"the tokenizer's decoder has settings of an unknown kind: {settings!r}; {_WAY_OUT}")
    return settings


def _steps_of_settings(settings: dict[str, Any], decoder: Any) -> list[Step]:
    if settings.get("type") == "WordPiece":
        return [_word_piece_step(decoder)]
    parts = settings["decoders"] if settings.get("type") == "Sequence" else [settings]
    steps: list[Step] = []
    fused = False
    for part in parts:
        kind = part.get("type")
        if kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and not part["stop"]:
            continue  # strips the start of the whole text, never of a continuation
        elif not fused and (step := _step_of_part(kind, part)) is not None:
            steps.append(step)
        else:
            raise ModelError(f"the tokenizer's decoder step {part!r} gives no bytes per token; {_WAY_OUT}")
    return steps


def _step_of_part(kind: str | None, part: dict[str, Any]) -> Step | None:
    if kind == "ByteLevel":
        return _byte_level
    if kind == "ByteFallback":
        return _byte_fallback
    if kind == "Metaspace":
        return _replace(part["replacement"], " ")
    if kind == "Replace" and "String" in part["pattern"]:
        return _replace(part["pattern"]["String"], part["content"])
    return None


def _replace(old: str, new: str) -> Step:
    return lambda piece: piece.replace(old, new) if isinstance(piece, str) else piece


def _byte_fallback(piece: Piece) -> Piece:
    found = _BYTE_TOKEN.fullmatch(piece) if isinstance(piece, str) else None
    return bytes([int(found[1], 16)]) if found else piece


def _word_piece_step(decoder: Any) -> Step:
    # A first piece is read differently from a later one, so the decoder is asked with a letter in front.
    def step(piece: Piece) -> Piece:
        return str(decoder.decode(["x", piece]))[1:]

    return step


def _make_byte_of_letter() -> dict[str, int]:
    """Invert the byte-level alphabet: printable Latin-1 bytes are themselves, the others U+0100 and up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _make_byte_of_letter()


def _byte_level(piece: Piece) -> Piece:
    if isinstance(piece, bytes) or not all(letter in _BYTE_OF_LETTER for letter in piece):
        return piece  # an entry outside the alphabet was put into the vocabulary as plain text
    return bytes(_BYTE_OF_LETTER[letter] for letter in piece)
