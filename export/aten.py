"""ONNX forms of the few aten operators that the graph modules use.

The modules keep to this list on purpose: an operator that is missing here fails the export by
name instead of reaching a back end in a shape nobody looked at.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from qwen_mtp.custom_ops.operator import NAMESPACE, const

Form = Callable[..., Any]
aten = torch.ops.aten

ONNX_TYPES = {
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
}
PRODUCTS = ("LinearInt8", "LinearInt4")  # native kernels that can shape what they give
_NUMPY = {torch.float32: np.float32, torch.int32: np.int32, torch.int64: np.int64}
_END = np.iinfo(np.int64).max


def _scalar(op: Any, like: Any, value: float) -> Any:
    return const(op, np.array(value, like.dtype.numpy()))


def _binary(name: str) -> Form:
    def form(op: Any, x: Any, y: Any) -> Any:
        return getattr(op, name)(x, _scalar(op, x, y) if isinstance(y, int | float) else y)

    return form


def _reshape(op: Any, x: Any, shape: Sequence[int]) -> Any:
    return op.Reshape(x, const(op, np.array(shape, np.int64)))


def _slice(op: Any, x: Any, dim: int = 0, start: int | None = None, end: int | None = None) -> Any:
    bounds = (np.array([v], np.int64) for v in (start or 0, _END if end is None else end, dim))
    return op.Slice(x, *(const(op, b) for b in bounds))


def _split(op: Any, x: Any, sizes: Sequence[int], dim: int = 0) -> Any:
    return op.Split(x, const(op, np.array(sizes, np.int64)), axis=dim, _outputs=len(sizes))


def _axes(op: Any, dim: int) -> Any:
    return const(op, np.array([dim], np.int64))


def _clamp(op: Any, x: Any, min: float | None = None, max: float | None = None) -> Any:
    if min is not None:
        x = op.Max(x, _scalar(op, x, min))
    return x if max is None else op.Min(x, _scalar(op, x, max))


def _full(op: Any, shape: Sequence[int], value: float, dtype: torch.dtype | None = None) -> Any:
    kind = _NUMPY[dtype] if dtype is not None else np.float32
    return const(op, np.full(shape, value, kind))


def _cast(op: Any, x: Any, dtype: torch.dtype, *_: Any) -> Any:
    return op.Cast(x, to=ONNX_TYPES[dtype])


def _stack(op: Any, parts: Sequence[Any], dim: int = 0) -> Any:
    return op.Concat(*(op.Unsqueeze(x, _axes(op, dim)) for x in parts), axis=dim)


def _argmax(op: Any, x: Any, dim: int) -> Any:
    return op.ArgMax(x, axis=dim, keepdims=0)


def _argmax_native(op: Any, x: Any, dim: int) -> Any:
    if len(x.shape) != 2 or dim not in (1, -1) or x.dtype.numpy() != np.float32:
        return _argmax(op, x, dim)
    return op.ArgMaxRows(x, _domain=NAMESPACE)


def _reshape_native(op: Any, x: Any, shape: Sequence[int]) -> Any:
    # Logits leave a graph by batch slot: a Reshape of an output would copy all of them.
    node, sizes = x.producer(), [int(d) for d in x.shape]
    flat = node is not None and node.op_type in PRODUCTS and len(sizes) == 2
    if flat and len(shape) == 3 and sizes[0] > 1 and not x.uses():
        node.attributes["B"] = ir.AttrInt64("B", shape[0])
        return x
    return _reshape(op, x, shape)


FORMS: dict[Any, Form] = {
    aten.add.Tensor: _binary("Add"),
    aten.sub.Tensor: _binary("Sub"),
    aten.mul.Tensor: _binary("Mul"),
    aten.view.default: _reshape,
    aten.reshape.default: _reshape,
    aten.slice.Tensor: _slice,
    aten.split_with_sizes.default: _split,
    aten.cat.default: lambda op, parts, dim=0: op.Concat(*parts, axis=dim),
    aten.stack.default: _stack,
    aten.unsqueeze.default: lambda op, x, dim: op.Unsqueeze(x, _axes(op, dim)),
    aten.sigmoid.default: lambda op, x: op.Sigmoid(x),
    aten.silu.default: lambda op, x: op.Mul(x, op.Sigmoid(x)),
    aten.clamp.default: _clamp,
    aten.full.default: _full,
    aten.to.dtype: _cast,
    aten.argmax.default: _argmax,
    aten.index_select.default: lambda op, x, dim, index: op.Gather(x, index, axis=dim),
}

# Where native/ has kernels; ONNX Runtime's ArgMax runs on a single thread.
NATIVE: dict[Any, Form] = {
    aten.argmax.default: _argmax_native,
    aten.view.default: _reshape_native,
    aten.reshape.default: _reshape_native,
}
