"""Watch a model's forward, and call every product and every curve so that a row's bits do not depend on its company."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from klero.engine.models.invariant import one
from klero.engine.models.invariant.rows import HOME, Product, RowClass, class_of, in_class
from klero.errors import ModelError

# Vector code does whole registers, scalar code the rest, and the two round exp, tanh and their like differently. Two
# registers of 32 bfloat16 are the largest piece that vector code takes; threads cut the elements of a call at this
# grain.
WHOLE, GRAIN = 64, 8192
NARROW = 16  # products with fewer outputs are padded to it: below 12, a row's bits can depend on its place in the call
_classes: dict[tuple[Any, ...], RowClass] = {}  # of the process: what was measured, by shape, dtype and threads
_within = threading.local()  # .rule: this thread is inside of a call that was measured


@contextmanager
def measured() -> Iterator[None]:
    """Say to the audit that what is called in this block is called within measured classes."""
    former, _within.rule = getattr(_within, "rule", False), True
    try:
        yield
    finally:
        _within.rule = former


class BatchInvariant(TorchFunctionMode):
    """Inside this block, torch functions called by this thread give each row bits that depend on the row alone.

    Products of rows with a weight are called within one class of row counts (rows.py); curves such as silu on whole
    registers. Sums along a row, norms and softmax are computed row by row already. A product that is neither is refused
    with ModelError. What goes past torch's functions (scripts, operators called directly) is seen by `Audit`.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = RULES.get(func)
        if rule is None:
            return func(*args, **(kwargs or {}))
        with measured():
            return rule(func, *args, **(kwargs or {}))


class Audit(TorchDispatchMode):
    """Inside this block, every operator that reaches the processor is looked at: what nobody measured is refused.

    Slow, and so for the one forward that a model is loaded with. ModelError names the operator.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        name = name.partition(".")[0].removesuffix("_")
        foreign = namespace not in ("aten", "prim", "prims") or name.startswith(("linalg_", "special_"))
        if (foreign or name in UNMEASURED) and not getattr(_within, "rule", False):
            raise ModelError(_unknown(f"the operator {func.name()}"))
        return func(*args, **(kwargs or {}))


def _in_class(
    name: str, product: Product, rows: torch.Tensor, weight: torch.Tensor, axis: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return product(rows, weight) over the last axis of `rows` [.., K], in the class of such products.

    bias: what `product` adds; of NARROW outputs at least, as it has to be for a weight padded to those.
    """
    num_outputs = weight.shape[1 - axis]
    if num_outputs < NARROW:
        weight = F.pad(weight, (0, 0, 0, NARROW - num_outputs) if axis == 1 else (0, NARROW - num_outputs))
    flat = rows.reshape(-1, rows.shape[-1]).contiguous()
    key = (name, axis, weight.shape, weight.stride(), weight.dtype, torch.get_num_threads())
    found = _classes.get(key)
    if found is None or found.lacks(flat.shape[0]):
        found = _classes[key] = class_of(product, weight, axis, max(HOME, flat.shape[0]), bias)
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


def _addmm(
    func: Any, input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """torch.addmm with a bias [N]: rows of `mat1` [R, K] with `mat2` [K, N]."""
    if input.dim() != 1 or beta != 1 or alpha != 1:
        raise ModelError(_unknown("addmm with a matrix or with scales"))
    wide = F.pad(input, (0, max(0, NARROW - len(input))))
    return _in_class("addmm", lambda rows, some: torch.addmm(wide, rows, some), mat1, mat2, 0)


def _matmul(func: Any, input: torch.Tensor, other: Any = None, *, mat2: Any = None, out: Any = None) -> torch.Tensor:
    """Rows of `input` [.., K] with a weight [K, N]; or outer products, which add nothing up."""
    other = mat2 if other is None else other
    if out is not None or not isinstance(other, torch.Tensor):
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
    inplace = kwargs.pop("inplace", False)
    if kwargs.get("out") is not None or any(isinstance(value, torch.Tensor) for value in args):
        raise ModelError(_unknown(f"{getattr(func, '__name__', func)} with out= or of two tensors"))
    width = input.shape[-1] if input.dim() else 1
    if width % (2 * WHOLE) == 0 and torch.get_num_threads() <= 2:
        result = func(input, *args, **kwargs)  # a row is whole registers, and so is half of all rows
    else:
        flat = input.reshape(-1)
        pieces = F.pad(flat, (0, -len(flat) % WHOLE)).split(GRAIN)
        result = torch.cat([func(piece, *args, **kwargs) for piece in pieces])[: len(flat)].view(input.shape)
    return input.copy_(result) if inplace else result


def _power(func: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A power: squares and cubes are products of elements and alike in all code; others are curves."""
    exponent = args[0] if args else kwargs.get("exponent")
    return func(input, *args, **kwargs) if exponent in (2, 3) else _curve(func, input, *args, **kwargs)


def _root(func: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """1 / sqrt, which float32 rounds alike in all code and half precision does not."""
    exact = input.dtype == torch.float32
    return func(input, *args, **kwargs) if exact else _curve(func, input, *args, **kwargs)


def _refuse(func: Any, *args: Any, **kwargs: Any) -> Any:
    raise ModelError(_unknown(getattr(func, "__name__", str(func))))


def _unknown(what: str) -> str:
    return (
        f"the model's forward uses {what}, and klero does not know on what the bits of that depend; "
        "pass deterministic=False to run it all the same"
    )


def _named(*names: str) -> list[Any]:
    """The functions of these names that torch has, as a function, as a method and in torch.nn.functional."""
    places = (torch, torch.Tensor, F, torch.special)
    return [getattr(place, name) for name in names for place in places if hasattr(place, name)]


CURVES = (
    "silu", "gelu", "sigmoid", "expit", "tanh", "softplus", "mish", "elu", "selu", "celu", "logsigmoid", "hardswish",
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "erf", "erfc", "sin", "cos", "tan", "sinh", "cosh", "atan",
)  # fmt: skip
PRODUCTS = (
    "mm", "addmm", "matmul", "linear", "bmm", "baddbmm", "einsum", "tensordot", "mv", "addmv", "addbmm", "addr",
    "inner", "dot", "vdot", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "chain_matmul", "cdist",
    "scaled_dot_product_attention", "_grouped_mm", "_scaled_mm", "__rmatmul__",
)  # fmt: skip
OTHERS = ("convolution", "mkldnn_linear", "glu", "_cdist_forward", "atan2", "logaddexp")  # operators, not functions
UNMEASURED = frozenset({*CURVES, *PRODUCTS, *OTHERS})
RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_named(*PRODUCTS), _refuse),
    **dict.fromkeys(_named(*CURVES), _curve),
    **dict.fromkeys(_named("pow", "__pow__"), _power),
    **dict.fromkeys(_named("rsqrt"), _root),
    **dict.fromkeys(_named("matmul", "mm", "__matmul__"), _matmul),
    **dict.fromkeys(_named("addmm"), _addmm),
    **dict.fromkeys(_named("_grouped_mm"), _grouped_mm),
    F.linear: _linear,
}
