"""klero: from logits to tokens. The token is a pure function of logits, parameters, seed, position and child."""

from klero.errors import KleroError, LogitsError, ParameterError
from klero.params import SamplingParams
from klero.sampling.explain import Explanation, explain
from klero.sampling.stateless import Sampled, sample

__version__ = "0.1.0"
__all__ = [
    "Explanation",
    "KleroError",
    "LogitsError",
    "ParameterError",
    "Sampled",
    "SamplingParams",
    "explain",
    "sample",
]
