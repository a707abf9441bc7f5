"""top-n-sigma, epsilon, eta and top-a as the least key that stays: what `klero.sampling.filters.reference` defines.

least_kept(row, maxima, top, widest, p): the least key that these filters leave together, in their order; above `top`
where only the first token stays. Agreement with the reference: *set*, the same ids bit for bit.
"""
