"""Which numbers: the pinned functions of docs/draw.md, sections 2, 4, 6 and 8, without any state.

Each op is a folder: the contract in `__init__`, the definition in `reference` (NumPy), the kernel in `cpu` (Numba).
All agree in *bits*.
"""
