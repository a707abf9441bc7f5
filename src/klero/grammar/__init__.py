"""Grammar: which tokens may follow.

A `Source` says which grammar a request asks for, a `Backend` compiles it, and each sequence follows it with a `Matcher`
of its own, which fills masks, takes tokens and takes them back. Nothing here knows the engine, torch or a tokenizer
library; the backends' libraries are imported when one is made.
"""

from klero.grammar.llguidance import LLGuidance
from klero.grammar.protocol import Backend, Compiled, Matcher, TokenText
from klero.grammar.source import Source, source_of

__all__ = ["Backend", "Compiled", "LLGuidance", "Matcher", "Source", "TokenText", "source_of"]
