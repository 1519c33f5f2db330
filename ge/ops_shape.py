"""Meanings of GE's operators that move, cut, join and make tensors."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as nn

from qwen_mtp.ge.node import Function, Node, operator

Tensor = torch.Tensor


@operator("Reshape")
def _reshape(node: Node) -> Function:
    node.fixed(axis=0, num_axes=-1)
    shape = node.ints("shape")
    return lambda *args: args[0].reshape(shape(args))


@operator("FlattenV2")
def _flatten(node: Node) -> Function:
    start, end = node.attr("axis", 1), node.attr("end_axis", -1)
    return lambda x: x.flatten(start, end)


@operator("Transpose")
def _transpose(node: Node) -> Function:
    order = node.ints("perm")
    return lambda *args: args[0].permute(order(args))


@operator("TransposeD", "Permute")
def _transpose_d(node: Node) -> Function:
    order = node.attr("perm" if node.type == "TransposeD" else "order")
    return lambda x: x.permute(order)


@operator("Squeeze")
def _squeeze(node: Node) -> Function:
    axes = tuple(node.attr("axis", []))

    def squeeze(x: Tensor) -> Tensor:
        if any(x.shape[a] != 1 for a in axes):
            raise ValueError(f"axes {axes} of {tuple(x.shape)} are not 1")
        return x.squeeze(axes) if axes else x.squeeze()

    return squeeze


@operator("Unsqueeze")
def _unsqueeze(node: Node) -> Function:
    axes = node.attr("axes", [])
    if len(axes) == 1:
        return lambda x: x.unsqueeze(axes[0])

    def unsqueeze(x: Tensor) -> Tensor:
        for axis in sorted(a % (x.dim() + len(axes)) for a in axes):
            x = x.unsqueeze(axis)
        return x

    return unsqueeze


@operator("ExpandDims")
def _expand_dims(node: Node) -> Function:
    axis = node.ints("axis")
    return lambda *args: args[0].unsqueeze(axis(args)[0])


@operator("Shape")
def _shape(node: Node) -> Function:
    dtype = node.dtype("dtype", 3)
    return lambda x: torch.tensor(x.shape, dtype=dtype)


@operator("ConcatV2")
def _concat(node: Node) -> Function:
    axis = node.ints("concat_dim")
    node.fixed(N=len(node.inputs) - 1)
    return lambda *args: _cat(args[:-1], axis(args)[0])


@operator("Concat")
def _concat_first(node: Node) -> Function:
    axis = node.ints("concat_dim")
    node.fixed(N=len(node.inputs) - 1)
    return lambda *args: _cat(args[1:], axis(args)[0])


@operator("ConcatD", "ConcatV2D")
def _concat_d(node: Node) -> Function:
    axis = node.attr("concat_dim")
    node.fixed(N=len(node.inputs))
    return lambda *args: _cat(args, axis)


@operator("Pack")
def _pack(node: Node) -> Function:
    axis = node.attr("axis", 0)
    node.fixed(N=len(node.inputs))

    def pack(*args: Tensor) -> Tensor:
        _same_dtype(args)
        return torch.stack(args, axis)

    return pack


def _cat(parts: Sequence[Tensor], axis: int) -> Tensor:
    _same_dtype(parts)
    return torch.cat(tuple(parts), axis)


def _same_dtype(parts: Sequence[Tensor]) -> None:
    if any(part.dtype is not parts[0].dtype for part in parts):
        raise TypeError(f"parts are {[str(part.dtype) for part in parts]}, GE does not promote")


@operator("Unpack")
def _unpack(node: Node) -> Function:
    axis = node.attr("axis", 0)
    node.fixed(num=node.outputs)
    return lambda x: x.unbind(axis)


@operator("SplitV")
def _split_v(node: Node) -> Function:
    sizes, axis = node.ints("size_splits"), node.ints("split_dim")
    node.fixed(num_split=node.outputs)
    return lambda *args: _split(args[0], sizes(args), axis(args)[0])


@operator("SplitVD")
def _split_vd(node: Node) -> Function:
    sizes, axis = node.attr("size_splits"), node.attr("split_dim")
    node.fixed(num_split=node.outputs)
    return lambda x: _split(x, sizes, axis)


@operator("Split")
def _split_equal(node: Node) -> Function:
    axis, count = node.ints("split_dim"), node.attr("num_split")
    return lambda *args: args[1].tensor_split(count, axis(args)[0])


@operator("SplitD")
def _split_d(node: Node) -> Function:
    axis, count = node.attr("split_dim"), node.attr("num_split")
    return lambda x: x.tensor_split(count, axis)


def _split(x: Tensor, sizes: list[int], axis: int) -> Any:
    if -1 in sizes:
        rest = x.shape[axis] - sum(size for size in sizes if size >= 0)
        sizes = [rest if size == -1 else size for size in sizes]
    return torch.split(x, sizes, axis)


@operator("Slice")
def _slice(node: Node) -> Function:
    offsets, sizes = node.ints("offsets"), node.ints("size")

    def run(*args: Any) -> Tensor:
        x: Tensor = args[0]
        for axis, (start, size) in enumerate(zip(offsets(args), sizes(args), strict=True)):
            x = x.narrow(axis, start, x.shape[axis] - start if size == -1 else size)
        return x

    return run


@operator("StridedSlice", "StridedSliceV2")
def _strided_slice(node: Node) -> Function:
    node.fixed(ellipsis_mask=0, new_axis_mask=0)
    begin, end = node.ints("begin"), node.ints("end")
    strides = node.ints("strides") if node.at("strides") is not None else None
    axes = node.ints("axes") if node.at("axes") is not None else None
    no_begin, no_end = node.attr("begin_mask", 0), node.attr("end_mask", 0)
    shrink = node.attr("shrink_axis_mask", 0)

    def run(*args: Any) -> Tensor:
        x: Tensor = args[0]
        first, last = begin(args), end(args)
        steps = strides(args) if strides else [1] * len(first)
        places = axes(args) if axes else list(range(len(first)))
        index: list[Any] = [slice(None)] * x.dim()
        for i, (place, a, z, step) in enumerate(zip(places, first, last, steps, strict=True)):
            cut = slice(None if no_begin >> i & 1 else a, None if no_end >> i & 1 else z, step)
            index[place] = a if shrink >> i & 1 else cut
        return x[tuple(index)]

    return run


@operator("Tile")
def _tile(node: Node) -> Function:
    multiples = node.ints("multiples")
    return lambda *args: args[0].tile(multiples(args))


@operator("BroadcastTo", "Expand")
def _broadcast(node: Node) -> Function:
    shape = node.ints("shape")
    return lambda *args: args[0].expand(shape(args))


@operator("Fill")
def _fill(node: Node) -> Function:
    dims = node.ints("dims")
    return lambda *args: args[1].expand(dims(args))


@operator("Range")
def _range(node: Node) -> Function:
    node.fixed(is_closed=False)

    def run(start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
        return torch.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype)

    return run


@operator("ReverseV2")
def _reverse(node: Node) -> Function:
    axes = node.ints("axis")
    return lambda *args: args[0].flip(axes(args))


@operator("Triu", "Tril")
def _triangle(node: Node) -> Function:
    diagonal, keep = node.attr("diagonal", 0), torch.triu if node.type == "Triu" else torch.tril
    return lambda x: keep(x, diagonal)


@operator("Pad")
def _pad(node: Node) -> Function:
    pads = node.ints("paddings")
    return lambda *args: nn.pad(args[0], _torch_pads(pads(args)))


@operator("PadV3")
def _pad_v3(node: Node) -> Function:
    node.fixed(mode="constant", paddings_contiguous=True)
    pads, value = node.ints("paddings"), node.at("constant_values")

    def run(*args: Any) -> Tensor:
        fill = 0 if value is None else args[value].item()
        return nn.pad(args[0], _torch_pads(pads(args)), value=fill)

    return run


def _torch_pads(pads: list[int]) -> list[int]:
    """In torch's order: from the last axis on."""
    return [p for i in range(len(pads) - 2, -1, -2) for p in pads[i : i + 2]]


@operator("AsStrided")
def _as_strided(node: Node) -> Function:
    size, stride, offset = (node.ints(n) for n in ("size", "stride", "storage_offset"))
    return lambda *args: args[0].contiguous().as_strided(size(args), stride(args), offset(args)[0])
