"""Finish: when a sequence ends, why, and which text of it may be sent.

`Finish` decides for one sequence, token by token; `TextStream` turns its tokens into text and matches stop
strings; `TokenBytes` says which bytes a token id stands for. Nothing here knows the engine, torch or a
tokenizer library.
"""

from klero.finish.reasons import Finished, FinishReason, StopReason
from klero.finish.rules import Finish
from klero.finish.text import TextStream, text_of_prompt
from klero.finish.vocabulary import TokenBytes

__all__ = [
    "Finish",
    "FinishReason",
    "Finished",
    "StopReason",
    "TextStream",
    "TokenBytes",
    "text_of_prompt",
]
