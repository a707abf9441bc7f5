"""Logits as they come, as the arrays that kernels read: no copy where none is needed, never a write.

float32, float16 and bfloat16; NumPy (bfloat16 also as uint16 bits or as ml_dtypes), torch, or anything with DLPack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from klero.errors import Fault, LogitsError, ParameterError
from klero.params.checks import Broken, as_integer

MAX_VOCAB = 2**22
BITS_OF = {"f": np.int32, "H": np.uint16, "e": np.int16}


class Logits(NamedTuple):
    """rows [R, V]: float32, float16, or bfloat16's bits as uint16; home: turns a result into the caller's kind."""

    rows: npt.NDArray[Any]
    home: Callable[[npt.NDArray[Any]], Any]


def read_logits(logits: Any) -> Logits:
    """Read [R, V] logits. Raises LogitsError for any other rank, dtype, width or device."""
    home: Callable[[npt.NDArray[Any]], Any] = np.asarray
    if isinstance(logits, np.ma.MaskedArray):
        raise LogitsError("logits with a mask: klero reads every column; write -inf where nothing may be drawn")
    if isinstance(logits, np.ndarray):
        rows = np.asarray(logits)
    elif type(logits).__module__.partition(".")[0] == "torch":
        rows, home = _from_torch(logits)
    elif hasattr(logits, "__dlpack__"):
        rows = _from_dlpack(logits)
    else:
        raise LogitsError(
            f"logits={type(logits).__name__}: must be a NumPy array, a torch tensor or an array with DLPack, [R, V]"
        )
    if rows.ndim != 2:
        raise LogitsError(f"logits with shape {rows.shape}: must be [R, V]; use logits[None] for one row")
    if not 1 <= rows.shape[1] <= MAX_VOCAB:
        raise LogitsError(f"logits with shape {rows.shape}: the vocabulary width V must be in [1, {MAX_VOCAB}]")
    return Logits(_readable(rows), home)


def _readable(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """float32, float16 or uint16 (bfloat16 bits), native, C-contiguous; a copy only where it is not already."""
    if rows.dtype == np.float32 and rows.flags.c_contiguous:
        return rows
    name = rows.dtype.name
    if name == "bfloat16":  # ml_dtypes
        rows = rows.view(np.uint16)
    elif name not in ("float32", "float16", "uint16"):
        rule = "must be float32, float16 or bfloat16; cast it (uint16 is read as bfloat16's bits)"
        raise LogitsError(f"logits of dtype {name}: {rule}")
    return np.ascontiguousarray(rows, dtype=rows.dtype.newbyteorder("="))


def _from_torch(tensor: Any) -> tuple[npt.NDArray[Any], Callable[[npt.NDArray[Any]], Any]]:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise LogitsError(f"logits={type(tensor).__name__}: must be a tensor")
    if tensor.device.type != "cpu":
        raise LogitsError(f"logits on {tensor.device}: this backend reads host memory; pass logits.cpu()")
    try:
        tensor = tensor.detach()
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.view(torch.uint16)
        return tensor.numpy(), torch.from_numpy
    except (TypeError, RuntimeError) as error:
        raise LogitsError(f"logits of {tensor.layout} {tensor.dtype}: not a dense array ({error})") from None


def _from_dlpack(array: Any) -> npt.NDArray[Any]:
    try:
        return np.from_dlpack(array)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise LogitsError(f"logits={type(array).__name__}: not readable through DLPack here ({error})") from error


def as_float32(rows: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """The rows as float32, for the reference: bfloat16 bits shifted into place, float16 as NumPy converts it."""
    if rows.dtype == np.uint16:
        return (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return rows.astype(np.float32, copy=False)


def as_bits(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The rows as the integers that kernels read (int32, of bfloat16 uint16, of float16 int16): a view marked
    read-only, so that one compiled kernel serves all."""
    bits = rows.view(BITS_OF[rows.dtype.char])
    bits.flags.writeable = False
    return bits


def width_without_padding(padded_from: int | None, width: int) -> int:
    """The columns that are tokens; the others are padding."""
    if padded_from is None:
        return width
    try:
        columns = as_integer(padded_from, "")
    except Broken:
        columns = 0
    if not 1 <= columns <= width:
        raise ParameterError([Fault("padded_from", padded_from, f"must be an integer in [1, {width}], or None")])
    return columns


def ids_of(name: str, given: Any, width: int) -> npt.NDArray[np.int32]:
    """A list of token ids as int32, checked against the logits width."""
    fault = Fault(name, given, f"must be a list of token ids in [0, {width - 1}]: the logits are {width} wide")
    try:
        ids = np.asarray(given)
    except (ValueError, TypeError, RuntimeError):
        raise ParameterError([fault]) from None
    if ids.size == 0 and ids.ndim == 1:
        return np.empty(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= width:
        raise ParameterError([fault])
    return ids.astype(np.int32)
