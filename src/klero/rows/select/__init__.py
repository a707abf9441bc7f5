"""Selection: which tokens of a row are its largest, and what they weigh. Plain rows and views alike.

select(keys, weights, n, need): the largest key t such that the weights of all keys >= t reach `need`, by radix.
gather(row, maxima, t): the tokens with key >= t, ascending by id; blocks below it are skipped. top_k_bound: a key that
at least k tokens reach; keep_top_k cuts to exactly k, ties to the lowest ids. block_masses, fill_masses: masses
(docs/draw.md, 2) of blocks and of listed tokens. Agreement with sorting: *set*, and *bits* of the masses.
"""
