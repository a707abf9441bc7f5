"""A row as kernels read it: plain memory, or seen through its rewriting, without a copy of it.

A rewritten row is the model's row, a list of patches per block of BLOCK tokens (the ids whose logits changed) and a
mask. Kernels ask for a block at a time; one without patches is the model's own memory, so a row pays for the blocks
that its rules touch. `block_of(row, b)`: the logits of block b; `bits_at(row, i)`: one logit; `width_of(row)`: V.
Both kinds of row go through the same kernels, and a plain row compiles to plain reads. Agreement: *bits*.
"""
