"""ONNX forms, in operators of opset 13, of the aten operators that decomposed forms use.

Types follow torch: where operands differ, both are cast to what torch would promote to.

ATC's parser of ONNX narrows the choice further. ReduceMax and ReduceMean are not used: their axes
became inputs late, and whether a release of it reads them as inputs or as attributes varies. An
integer Div becomes a division of reals there, so one is only written where it leaves no rest.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from qwen_mtp.custom_ops.operator import const, shared
from qwen_mtp.export.aten import FORMS, ONNX_TYPES, Form

aten = torch.ops.aten
_TORCH = {code: kind for kind, code in ONNX_TYPES.items()}


def _number(op: Any, x: Any, value: float) -> Any:
    return const(op, np.array(value, x.dtype.numpy()))


def _pair(op: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """Two operands in one type; a number takes that of the tensor."""
    if isinstance(y, bool | int | float):
        if isinstance(y, float) and not _TORCH[int(x.dtype)].is_floating_point:
            x = op.Cast(x, to=ONNX_TYPES[torch.float32])
        return x, _number(op, x, y)
    kinds = [_TORCH[int(v.dtype)] for v in (x, y)]
    wanted = torch.promote_types(*kinds)
    cast = [v if v_kind == wanted else op.Cast(v, to=ONNX_TYPES[wanted])
            for v, v_kind in zip((x, y), kinds, strict=True)]  # fmt: skip
    return cast[0], cast[1]


def _binary(name: str) -> Form:
    return lambda op, x, y: getattr(op, name)(*_pair(op, x, y))


def _unary(*names: str) -> Form:
    def form(op: Any, x: Any, **_: Any) -> Any:
        for name in names:
            x = getattr(op, name)(x)
        return x

    return form


def _unequal(op: Any, x: Any, y: Any) -> Any:
    return op.Not(op.Equal(*_pair(op, x, y)))


def _floor_divide(op: Any, x: Any, y: Any) -> Any:
    """Integers, rounded down."""
    x, y = _pair(op, x, y)
    return op.Div(op.Sub(x, op.Mod(x, y)), y)


def _where(op: Any, condition: Any, x: Any, y: Any) -> Any:
    return op.Where(condition, *_pair(op, x, y))


def _ints(op: Any, *values: int) -> Any:
    return const(op, np.array(values, np.int64))


def _cast(op: Any, x: Any, dtype: torch.dtype | None = None, **_: Any) -> Any:
    return x if dtype is None else op.Cast(x, to=ONNX_TYPES[dtype])


def _same(op: Any, x: Any, **_: Any) -> Any:
    return x


def _transpose(op: Any, x: Any) -> Any:
    """Of a weight once a graph, in the graph itself: a runtime makes a copy of it."""
    return shared(op, ("transposed", x), lambda: op.Transpose(x, perm=[1, 0]))


def _permute(op: Any, x: Any, dims: Sequence[int]) -> Any:
    return op.Transpose(x, perm=[d % len(dims) for d in dims])


def _swap(op: Any, x: Any, first: int, second: int) -> Any:
    order = list(range(len(x.shape)))
    order[first], order[second] = order[second], order[first]
    return op.Transpose(x, perm=order)


def _expand(op: Any, x: Any, sizes: Sequence[int]) -> Any:
    return op.Expand(x, _ints(op, *(max(size, 1) for size in sizes)))  # -1: as it is


def _unbind(op: Any, x: Any, dim: int = 0) -> Any:
    count = int(x.shape[dim])
    parts = [x]
    if count > 1:
        parts = op.Split(x, _ints(op, *[1] * count), axis=dim, _outputs=count)
    return [op.Squeeze(part, _ints(op, dim)) for part in parts]


def _sum(op: Any, x: Any, dims: Sequence[int], keep: bool = False, dtype: Any = None) -> Any:
    return op.ReduceSum(_cast(op, x, dtype), _ints(op, *dims), keepdims=int(keep))


def _mean(op: Any, x: Any, dims: Sequence[int], keep: bool = False) -> Any:
    count = prod(int(x.shape[dim]) for dim in dims)
    return op.Mul(_sum(op, x, dims, keep), _number(op, x, 1 / count))


def _max(op: Any, x: Any, dim: int, keep: bool = False) -> Any:
    """The largest by TopK; where by ArgMax, which takes the first of equal ones everywhere."""
    peak, _ = op.TopK(x, _ints(op, 1), axis=dim, _outputs=2)
    if not keep:
        peak = op.Squeeze(peak, _ints(op, dim))
    return [peak, op.ArgMax(x, axis=dim, keepdims=int(keep))]


def _any(op: Any, x: Any, dim: int, keep: bool = False) -> Any:
    marks = op.Cast(x, to=ONNX_TYPES[torch.float32])
    return op.Greater(_sum(op, marks, [dim], keep), const(op, np.array(0, np.float32)))


def _cumsum(op: Any, x: Any, dim: int) -> Any:
    return op.CumSum(x, const(op, np.array(dim, np.int64)))


def _sort(op: Any, x: Any, *, stable: bool, dim: int = -1, descending: bool = False) -> Any:
    """TopK of all: of equal values it puts the one with the lower index first."""
    whole = _ints(op, int(x.shape[dim]))
    return op.TopK(x, whole, axis=dim, largest=int(descending), sorted=1, _outputs=2)


def _log1p(op: Any, x: Any) -> Any:
    return op.Log(op.Add(x, _number(op, x, 1)))


def _gather(op: Any, x: Any, dim: int, index: Any) -> Any:
    return op.GatherElements(x, index, axis=dim)


def _scatter(op: Any, x: Any, dim: int, index: Any, source: Any) -> Any:
    return op.ScatterElements(x, index, source, axis=dim)


def scatter_rows(op: Any, pool: Any, slots: Any, rows: Any) -> Any:
    """The form of ``qwen_mtp.scatter_rows``: a slot is a block and a place in it."""
    size = const(op, np.array(int(pool.shape[1]), np.int32))
    pair = [op.Unsqueeze(x, _ints(op, 1))
            for x in (_floor_divide(op, slots, size), op.Mod(slots, size))]  # fmt: skip
    index = op.Cast(op.Concat(*pair, axis=1), to=ONNX_TYPES[torch.int64])
    return op.ScatterND(pool, index, rows)


DECOMPOSED: dict[Any, Form] = FORMS | {
    aten.add.Tensor: _binary("Add"),
    aten.sub.Tensor: _binary("Sub"),
    aten.mul.Tensor: _binary("Mul"),
    aten.div.Tensor: _binary("Div"),
    aten.minimum.default: _binary("Min"),
    aten.maximum.default: _binary("Max"),
    aten.floor_divide.default: _floor_divide,
    aten.remainder.Scalar: _binary("Mod"),
    aten.eq.Tensor: _binary("Equal"),
    aten.eq.Scalar: _binary("Equal"),
    aten.ne.Tensor: _unequal,
    aten.ne.Scalar: _unequal,
    aten.lt.Tensor: _binary("Less"),
    aten.lt.Scalar: _binary("Less"),
    aten.le.Tensor: _binary("LessOrEqual"),
    aten.le.Scalar: _binary("LessOrEqual"),
    aten.gt.Tensor: _binary("Greater"),
    aten.gt.Scalar: _binary("Greater"),
    aten.ge.Tensor: _binary("GreaterOrEqual"),
    aten.ge.Scalar: _binary("GreaterOrEqual"),
    aten.logical_and.default: _binary("And"),
    aten.logical_or.default: _binary("Or"),
    aten.logical_not.default: _unary("Not"),
    aten.neg.default: _unary("Neg"),
    aten.abs.default: _unary("Abs"),
    aten.exp.default: _unary("Exp"),
    aten.cos.default: _unary("Cos"),
    aten.sin.default: _unary("Sin"),
    aten.round.default: _unary("Round"),
    aten.floor.default: _unary("Floor"),
    aten.reciprocal.default: _unary("Reciprocal"),
    aten.rsqrt.default: _unary("Sqrt", "Reciprocal"),
    aten.log1p.default: _log1p,
    aten.where.self: _where,
    aten._to_copy.default: _cast,
    aten.clone.default: _same,
    aten.alias.default: _same,
    aten._unsafe_view.default: FORMS[aten.view.default],
    aten.t.default: _transpose,
    aten.permute.default: _permute,
    aten.transpose.int: _swap,
    aten.expand.default: _expand,
    aten.unbind.int: _unbind,
    aten.squeeze.dim: lambda op, x, dim: op.Squeeze(x, _ints(op, dim)),
    aten.sum.dim_IntList: _sum,
    aten.mean.dim: _mean,
    aten.max.dim: _max,
    aten.any.dim: _any,
    aten.cumsum.default: _cumsum,
    aten.sort.stable: _sort,
    aten.softmax.int: lambda op, x, dim: op.Softmax(x, axis=dim),
    aten.mm.default: lambda op, x, y: op.MatMul(x, y),
    aten.bmm.default: lambda op, x, y: op.MatMul(x, y),
    aten._int_mm.default: lambda op, x, y: op.MatMulInteger(x, y),
    aten.gather.default: _gather,
    aten.scatter.src: _scatter,
}
