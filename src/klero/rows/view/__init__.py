"""A row as kernels read it: plain memory, or seen through its rewriting.

A rewritten row is the model's row and a copy of those blocks of BLOCK tokens that its rules change; every other block
is read where the model left it, so a row pays for the blocks that its rules touch. `block_of(row, b)`: the logits of
block b; `bits_at(row, i)`: one logit; `width_of(row)`: V. Both kinds of row go through the same kernels, and a plain
row compiles to plain reads. Agreement: *bits*.
"""
