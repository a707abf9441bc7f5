"""Greedy: the largest logit, the lowest id on a tie; no noise. Agreement: *token*."""

from klero.sampling.greedy.reference import greedy

__all__ = ["greedy"]
