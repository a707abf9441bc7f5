"""Batch invariance: a row's logits are the same bits whatever else a step computes, and however its prompt was cut.

A matrix library picks its kernel by the shape of the call, and kernels add in different orders. The row counts (or key
lengths) whose results agree in bits form a *class*. Which classes there are depends on the processor, the library, the
dtype and the threads: with one thread, float32 rows fall into 1 | 2-3 | 4 and more on an AVX2 processor and into 1 |
2-15 | 16 and more on an AVX-512 one. So nothing is assumed here: when a model is loaded, each of its products is
measured, and calls are padded or cut so that they stay in one class. `rows` does it for products, `attention` for
attention, `forward` watches a model's forward and puts them in place.
"""
