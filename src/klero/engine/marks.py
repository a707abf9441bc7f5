"""Between which tokens a model thinks: as the caller says, or as its chat template shows."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from klero.errors import OptionError
from klero.grammar.thinking import Mark, Marks

KNOWN = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<|channel>", "<channel|>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ("◁think▷", "◁/think▷"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
)
"""Pairs that models use. Of several in one template the first counts."""

_NEIGHBOURS = (("a", "a"), ("a", "\n\n"), (" ", "\n"), (".", "\n\n"), (".\n", " a"), ("}", "{"))
"""Texts before and after a mark, which a tokenizer may join with its letters."""

Encode = Callable[[str], Sequence[int]]


def marks_of(asked: Any, tokenizer: Any, encode: Encode | None) -> Marks | None:
    """The marks that were asked for, else those of the tokenizer's chat template; None if it shows none.

    asked: (start, end), each a token id, a list of token ids or a string; None: look into the template. encode: text to
    ids without added tokens; unused without a tokenizer. OptionError for what cannot be a pair of marks, and for a
    string whose tokens change with the text around it: the model would write the mark in tokens that nobody waits for.

    A known pair counts if the template mentions its end mark (one that lets the model write the start mark itself need
    not mention that), and if the tokens of both are the same in every text.
    """
    if tokenizer is None:
        encode = None
    if asked is not None:
        return _asked(asked, encode)
    template = _template(tokenizer)
    if encode is None:
        return None
    for start, end in KNOWN:
        if end in template:
            ids, end_ids = _ids(start, encode), _ids(end, encode)
            if _is_stable(start, ids, encode) and _is_stable(end, end_ids, encode):
                with suppress(OptionError):  # both the unknown token
                    return Marks(ids, end_ids)
    return None


def _asked(asked: Any, encode: Encode | None) -> Marks:
    if isinstance(asked, str | bytes | Mapping) or not isinstance(asked, Sequence) or len(asked) != 2:
        raise OptionError(
            f"thinking_token_ids={asked!r}: must be a pair (start, end), each a token id, a list of token ids or a "
            "string, such as ('<think>', '</think>')"
        )
    return Marks(*(_mark(mark, encode) for mark in asked))


def _mark(mark: Any, encode: Encode | None) -> Any:
    """The ids of one mark; what is no mark is left to Marks to refuse."""
    if not isinstance(mark, str):
        return (mark,) if _is_id(mark) else mark
    if encode is None:
        raise OptionError(f"thinking_token_ids: {mark!r} is text, and there is no tokenizer; give token ids")
    ids = _ids(mark, encode)
    if mark and not _is_stable(mark, ids, encode):
        raise OptionError(
            f"thinking_token_ids: {mark!r} is no token of this tokenizer, and its letters join with the text around "
            f"it; give the string that the model was trained with, or token ids, such as {list(ids)}"
        )
    return ids


def _ids(mark: str, encode: Encode) -> Mark:
    return tuple(int(i) for i in encode(mark))


def _is_stable(mark: str, ids: Mark, encode: Encode) -> bool:
    """Whether the mark is written in the same tokens wherever it stands."""
    for before, after in _NEIGHBOURS:
        text = _ids(before + mark + after, encode)
        if not any(text[i : i + len(ids)] == ids for i in range(len(text))):
            return False
    return True


def _template(tokenizer: Any) -> str:
    """The text of the chat template, of all of them if they have names."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(map(str, template.values())) if isinstance(template, Mapping) else str(template)


def _is_id(mark: Any) -> bool:
    try:
        operator.index(mark)
    except TypeError:
        return False
    return True
