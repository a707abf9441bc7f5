"""top-p of a whole row as an op: the shortest prefix of the total order that holds P of the mass (docs/draw.md, 3).

keep_top_p(row, maxima, top, P, r, scratch): a cut, (number listed or UNLISTED, key, last id, number kept). Definition:
`top_p` in filters/reference.py. Agreement: *set*; what decides are sums of integers, and bounds of them only where both
ends of a bound cut at the same token.
"""
