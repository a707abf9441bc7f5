"""Watch a model's forward, and call every product and every curve so that a row's bits do not depend on its company."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from klero.engine.models.invariant import one
from klero.engine.models.invariant.rows import Product, RowClass, class_of, in_class
from klero.errors import ModelError

# Vector code does whole registers, scalar code the rest, and the two round exp, tanh and their like differently. Two
# registers of 32 bfloat16 are the largest piece that vector code takes; threads cut the elements of a call at this
# grain.
WHOLE, GRAIN = 64, 32768
NARROW = 16  # products with fewer outputs are padded to it: below 12, a row's bits can depend on its place in the call
_classes: dict[tuple[Any, ...], RowClass] = {}  # of the process: what was measured, by shape, dtype and threads


class BatchInvariant(TorchFunctionMode):
    """Inside this block, torch functions called by this thread give each row bits that depend on the row alone.

    Products of rows with a weight are called within one class of row counts (rows.py); curves such as silu on whole
    registers. Sums along a row, norms and softmax are computed row by row already. A product that is neither is refused
    with ModelError: nobody knows on what its bits depend.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = RULES.get(func)
        if rule is None:
            return func(*args, **(kwargs or {}))
        return rule(func, *args, **(kwargs or {}))


def _in_class(
    name: str, product: Product, rows: torch.Tensor, weight: torch.Tensor, axis: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return product(rows, weight) over the last axis of `rows` [.., K], in the class of such products.

    bias: what `product` adds; of NARROW outputs at least, as it has to be for a weight padded to those.
    """
    num_outputs = weight.shape[1 - axis]
    if num_outputs < NARROW:
        weight = F.pad(weight, (0, 0, 0, NARROW - num_outputs) if axis == 1 else (0, NARROW - num_outputs))
    key = (name, axis, weight.shape, weight.stride(), weight.dtype, torch.get_num_threads())
    found = _classes.get(key)
    if found is None:
        found = _classes[key] = class_of(product, weight, axis, bias)
    flat = rows.reshape(-1, rows.shape[-1])
    if found.order is not None and flat.shape[0] == 1:
        result = one.product(flat, weight, found.order, bias)
    else:
        result = in_class(lambda some: product(some, weight), flat, found)
    return result[:, :num_outputs].view(*rows.shape[:-1], num_outputs)


def _linear(func: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """F.linear: rows of `input` [.., K] with `weight` [N, K]. A bias is added where the product is, in one call."""
    if bias is None:
        return _in_class("linear", F.linear, input, weight, 1)
    wide = F.pad(bias, (0, max(0, NARROW - len(bias))))
    return _in_class("linear+bias", lambda rows, some: F.linear(rows, some, wide), input, weight, 1, wide)


def _addmm(func: Any, input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, **scales: Any) -> torch.Tensor:
    """torch.addmm with a bias [N]: rows of `mat1` [R, K] with `mat2` [K, N]."""
    if input.dim() != 1 or scales:
        raise ModelError(_unknown("addmm with a matrix or with scales"))
    wide = F.pad(input, (0, max(0, NARROW - len(input))))
    return _in_class("addmm", lambda rows, some: torch.addmm(wide, rows, some), mat1, mat2, 0)


def _matmul(func: Any, input: torch.Tensor, other: torch.Tensor, *, out: Any = None) -> torch.Tensor:
    """Rows of `input` [.., K] with a weight [K, N]; or outer products, which add nothing up."""
    if out is not None:
        raise ModelError(_unknown("matmul with out="))
    if other.dim() == 2 and input.dim() >= 2:
        return _in_class("matmul", torch.matmul, input, other, 0)
    if input.shape[-1] == 1:
        return torch.matmul(input, other)
    raise ModelError(_unknown(f"a product of shapes {tuple(input.shape)} and {tuple(other.shape)}"))


def _grouped_mm(func: Any, mat_a: torch.Tensor, mat_b: torch.Tensor, offs: Any = None, **others: Any) -> torch.Tensor:
    """Experts: rows of `mat_a` [R, K] up to offs[e] with weight e of `mat_b` [E, K, N]."""
    if mat_a.dim() != 2 or mat_b.dim() != 3 or offs is None or any(value is not None for value in others.values()):
        raise ModelError(_unknown("a grouped product that is not rows by experts"))
    ends = offs.tolist()
    pieces = mat_a[: ends[-1]].tensor_split(ends[:-1])
    done = [_in_class("matmul", torch.matmul, piece, mat_b[e], 0) for e, piece in enumerate(pieces)]
    return F.pad(torch.cat(done), (0, 0, 0, mat_a.shape[0] - ends[-1]))


def _curve(func: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A function of each element alone, on whole registers, and never cut by threads inside of one."""
    width = input.shape[-1] if input.dim() else 1
    if width % (2 * WHOLE) == 0 and torch.get_num_threads() <= 2 and not kwargs.get("inplace"):
        return func(input, *args, **kwargs)  # a row is whole registers, and so is half of all rows
    kwargs.pop("inplace", None)
    flat = input.reshape(-1)
    padded = F.pad(flat, (0, -len(flat) % WHOLE))
    pieces = [func(piece, *args, **kwargs) for piece in padded.split(GRAIN)]
    return torch.cat(pieces)[: len(flat)].view(input.shape)


def _refuse(func: Any, *args: Any, **kwargs: Any) -> Any:
    raise ModelError(_unknown(getattr(func, "__name__", str(func))))


def _unknown(what: str) -> str:
    return (
        f"the model's forward uses {what}, and klero does not know on what the bits of that depend; "
        "pass deterministic=False to run it all the same"
    )


def _named(*names: str) -> list[Any]:
    """The functions of these names that torch has, as a function, as a method and in torch.nn.functional."""
    places = (torch, torch.Tensor, F)
    return [getattr(place, name) for name in names for place in places if hasattr(place, name)]


CURVES = _named(
    "silu", "gelu", "sigmoid", "tanh", "softplus", "mish", "elu", "selu", "logsigmoid", "hardswish",
    "exp", "exp2", "expm1", "log", "log2", "log1p", "erf", "sin", "cos", "logit",
)  # fmt: skip
PRODUCTS = _named(
    "bmm", "baddbmm", "einsum", "tensordot", "mv", "addmv", "addbmm", "addr", "inner", "dot", "bilinear",
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "scaled_dot_product_attention", "chain_matmul", "_scaled_mm",
)  # fmt: skip
RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(PRODUCTS, _refuse),
    **dict.fromkeys(CURVES, _curve),
    **dict.fromkeys(_named("matmul", "mm", "__matmul__"), _matmul),
    torch._grouped_mm: _grouped_mm,
    torch.addmm: _addmm,
    torch.Tensor.addmm: _addmm,
    F.linear: _linear,
}
