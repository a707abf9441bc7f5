"""llama.cpp's sampler chain, through the C API of llama-cpp-python, without a model. Only where that is installed."""

from __future__ import annotations

import ctypes
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from benchmarks.cases import Rows, Setting

try:
    from llama_cpp import llama_cpp as api
except (ImportError, OSError, RuntimeError):  # a library that does not load is as good as none
    api = None

SEED = 1


@numba.njit(nogil=True, cache=True, error_model="numpy")
def write_candidates(row: Any, candidates: Any) -> None:
    """Write a row as llama.cpp takes it, an entry for each token, as its own `llama_sampler_sample` does.

    row: bits of float32 [V]; candidates: int32 [V, 3], the fields of llama_token_data: id, logit, p.
    """
    for i in range(row.size):
        candidates[i, 0], candidates[i, 1], candidates[i, 2] = i, row[i], 0


class Chain:
    """The samplers of a setting, in llama.cpp's own order, over one row after the other."""

    def __init__(self, setting: Setting, width: int) -> None:
        self._chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        self._filters = _filters(setting)
        self._last = api.llama_sampler_init_greedy() if setting.greedy else api.llama_sampler_init_dist(SEED)
        for sampler in (*self._filters, self._last):
            api.llama_sampler_chain_add(self._chain, sampler)
        self._candidates = np.zeros((width, 3), np.int32)
        self._data = self._candidates.ctypes.data_as(ctypes.POINTER(api.llama_token_data))

    def draw(self, rows: Rows) -> npt.NDArray[np.int32]:
        """Token ids [R]."""
        drawn = np.empty(len(rows.values), np.int32)
        for r, row in enumerate(rows.as_float32()):
            array = self._array(row)
            api.llama_sampler_apply(self._chain, ctypes.byref(array))
            drawn[r] = array.data[array.selected].id
        return drawn

    def kept(self, row: npt.NDArray[np.float32]) -> set[int]:
        """The ids that the filters leave of a row."""
        array = self._array(row)
        for sampler in self._filters:
            api.llama_sampler_apply(sampler, ctypes.byref(array))
        return {array.data[i].id for i in range(array.size)}

    def _array(self, row: npt.NDArray[np.float32]) -> Any:
        """A row as the samplers take it, in memory that they change."""
        write_candidates(row.view(np.int32), self._candidates)
        return api.llama_token_data_array(data=self._data, size=len(row), selected=-1, sorted=False)

    def __del__(self) -> None:
        if api is not None:
            api.llama_sampler_free(self._chain)  # and what was added to it


def _filters(setting: Setting) -> list[Any]:
    made = []
    if setting.greedy:
        return made
    if setting.top_k is not None:
        made.append(api.llama_sampler_init_top_k(setting.top_k))
    if setting.top_p is not None:
        made.append(api.llama_sampler_init_top_p(setting.top_p, 1))
    if setting.min_p is not None:
        made.append(api.llama_sampler_init_min_p(setting.min_p, 1))
    if setting.temperature != 1:
        made.append(api.llama_sampler_init_temp(setting.temperature))
    return made
