"""Vector: an array as a value, so that parameters that hold one can be hashed, compared and kept."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt


class Vector:
    """One float32 number per token, immutable; equal when all bits are equal. Values are checked before (checks.py).

    array: float32 [V], read-only, a copy of what was given. Safe to hash, to pickle and to share between threads.
    """

    array: npt.NDArray[np.float32]

    def __init__(self, values: npt.ArrayLike) -> None:
        array = np.array(values, dtype=np.float32, order="C")
        array.flags.writeable = False
        object.__setattr__(self, "array", array)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Vector does not change; make another one instead of setting {name}")

    def __len__(self) -> int:
        return len(self.array)

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.array.tobytes())

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Vector):
            return NotImplemented
        return self is other or self.array.tobytes() == other.array.tobytes()

    def __reduce__(self) -> tuple[Any, ...]:
        return Vector, (np.array(self.array),)

    def __repr__(self) -> str:
        first = ", ".join(f"{value:g}" for value in self.array[:3])
        return f"Vector([{first}{', ...' if len(self) > 3 else ''}], width={len(self)})"
