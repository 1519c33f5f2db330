"""Picking one row of each batch slot, and padding rows to a fixed number."""

from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_mtp.custom_ops.operator import Operator, const

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


def take_row(x: Floats, index: Ints) -> Floats:
    """Row ``index[b]`` of each batch slot.

    Args:
        x: ``[B, R, D]`` float32.
        index: ``[B]`` int32; -1 (an idle slot) reads row 0.

    Returns:
        ``[B, D]`` float32.
    """
    return x[np.arange(len(x)), np.maximum(index, 0)]


def pad_rows(x: npt.NDArray[Any], rows: int, value: int) -> npt.NDArray[Any]:
    """Lengthen ``[B, R, ...]`` to ``[B, rows, ...]`` with ``value``."""
    width = [(0, 0), (0, rows - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
    return np.pad(x, width, constant_values=value)


def _take_fake(x: Any, index: Any) -> Any:
    return x.new_empty((x.shape[0], x.shape[2]))


def _take_onnx(op: Any, x: Any, index: Any) -> Any:
    index = op.Max(index, const(op, np.zeros((), np.int32)))
    return op.GatherND(x, op.Cast(op.Unsqueeze(index, [1]), to=7), batch_dims=1)


def _pad_fake(x: Any, rows: int, value: int) -> Any:
    return x.new_empty((x.shape[0], rows, *x.shape[2:]))


def _pad_onnx(op: Any, x: Any, rows: int, value: int) -> Any:
    shape = [int(d) for d in x.shape]
    missing = (shape[0], rows - shape[1], *shape[2:])
    if missing[1] == 0:
        return x
    return op.Concat(x, const(op, np.full(missing, value, x.dtype.numpy())), axis=1)


def gather_rows(x: Any, first: Any, rows: int) -> Any:
    """Rows ``first[b] .. first[b] + rows - 1`` of each slot in aten calls.

    One gather of whole rows; a gather along an axis would take an index for every element.

    Args:
        x: ``[B, L, ...]`` tensor.
        first: ``[B]`` int32 tensor.
        rows: Rows taken of each slot.

    Returns:
        ``[B * rows, ...]``.
    """
    import torch

    batch, length = x.shape[:2]
    index = first
    if batch > 1:
        index = index + torch.arange(0, batch * length, length, dtype=torch.int32)
    if rows > 1:
        index = (index.unsqueeze(1) + torch.arange(rows, dtype=torch.int32)).reshape(-1)
    return x.reshape(batch * length, *x.shape[2:]).index_select(0, index)


def _take_decomposed(x: Any, index: Any) -> Any:
    return gather_rows(x, index.clamp(min=0), 1)


def _pad_decomposed(x: Any, rows: int, value: int) -> Any:
    import torch

    missing = rows - x.shape[1]
    if missing == 0:
        return x
    filled = torch.full((x.shape[0], missing, *x.shape[2:]), value, dtype=x.dtype)
    return torch.cat([x, filled], 1)


TAKE_ROW = Operator(
    name="take_row",
    schema="(Tensor x, Tensor index) -> Tensor",
    meaning=take_row,
    fake=_take_fake,
    onnx=_take_onnx,
    decomposed=_take_decomposed,
)
PAD_ROWS = Operator(
    name="pad_rows",
    schema="(Tensor x, int rows, int value) -> Tensor",
    meaning=pad_rows,
    fake=_pad_fake,
    onnx=_pad_onnx,
    decomposed=_pad_decomposed,
)
