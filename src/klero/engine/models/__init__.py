"""The models an engine can run: one protocol, and the transformers models that fulfil it.

Importing this package imports neither torch nor transformers; `load_model` does, when it is called.
"""

from klero.engine.models.load import load_model
from klero.engine.models.protocol import Model

__all__ = ["Model", "load_model"]
