"""Which token: filters, the draw, and the road through them on one screen (sampler.py)."""
