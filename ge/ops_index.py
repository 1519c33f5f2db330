"""Meanings of GE's operators that look up, order, scan and write by index.

Index tensors must be inside their axis: what the device does with others is not defined, so
they are errors here. Ties of an order go to the lower index.
"""

from typing import Any

import torch

from qwen_mtp.ge.node import ATTRIBUTE_TYPES, Function, Node, operator

Tensor = torch.Tensor


@operator("GatherV2")
def _gather_v2(node: Node) -> Function:
    node.fixed(batch_dims=0, is_preprocessed=False)
    axis, wrap = node.ints("axis"), node.attr("negative_index_support", False)
    return lambda *args: _gather(args[0], args[1], axis(args)[0], wrap)


@operator("Gather")
def _gather_first(node: Node) -> Function:
    node.fixed(batch_dims=0, is_preprocessed=False)
    node.irrelevant("validate_indices")
    wrap = node.attr("negative_index_support", False)
    return lambda x, index: _gather(x, index, 0, wrap)


def _gather(x: Tensor, index: Tensor, axis: int, wrap: bool) -> Tensor:
    if wrap:
        index = torch.where(index < 0, index + x.shape[axis], index)
    if index.dim() == 1:
        return x.index_select(axis, index)
    axis %= x.dim()
    found = x.index_select(axis, index.reshape(-1))
    return found.reshape((*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]))


@operator("GatherElements")
def _gather_elements(node: Node) -> Function:
    dim = node.attr("dim", 0)
    return lambda x, index: torch.gather(x, dim, index.long())


@operator("GatherNd")
def _gather_nd(node: Node) -> Function:
    node.fixed(negative_index_support=False)

    def gather(x: Tensor, index: Tensor) -> Tensor:
        rows = _rows(x, index)
        flat = x.reshape((-1, *x.shape[index.shape[-1] :]))
        return flat.index_select(0, rows).reshape((*index.shape[:-1], *flat.shape[1:]))

    return gather


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Places ``[n]`` in the leading axes of ``x`` taken as one axis."""
    limits = torch.tensor(x.shape[: index.shape[-1]])
    if bool((index < 0).any()) or bool((index >= limits).any()):
        raise IndexError(f"an index lies outside {tuple(limits.tolist())}")
    rows = torch.zeros(index.shape[:-1], dtype=torch.int64)
    for axis, limit in enumerate(limits.tolist()):
        rows = rows * limit + index[..., axis]
    return rows.reshape(-1)


@operator("ScatterElements")
def _scatter_elements(node: Node) -> Function:
    axis, reduction = node.attr("axis", 0), node.attr("reduction", "none")
    if reduction == "none":
        return lambda data, index, updates: data.scatter(axis, index.long(), updates)
    if reduction == "add":
        return lambda data, index, updates: data.scatter_add(axis, index.long(), updates)
    raise node.error(f"reduction={reduction} is not implemented")


@operator("ScatterNdUpdate")
def _scatter_nd_update(node: Node) -> Function:
    node.irrelevant("use_locking")

    def scatter(var: Tensor, index: Tensor, updates: Tensor) -> Tensor:
        flat = var.view(-1, *var.shape[index.shape[-1] :])
        flat.index_copy_(0, _rows(var, index), updates.reshape(-1, *flat.shape[1:]))
        return var

    return scatter


@operator("ScatterUpdate")
def _scatter_update(node: Node) -> Function:
    node.irrelevant("use_locking")

    def scatter(var: Tensor, index: Tensor, updates: Tensor) -> Tensor:
        var.index_copy_(0, index.reshape(-1).long(), updates.reshape(-1, *var.shape[1:]))
        return var

    return scatter


@operator("Scatter")
def _scatter(node: Node) -> Function:
    node.fixed(reduce="update")
    axis = node.attr("axis", 0)

    def scatter(var: Tensor, index: Tensor, updates: Tensor) -> Tensor:
        along = axis % var.dim() - 1
        for row, place in enumerate(index.reshape(len(index), -1).tolist()):
            held = var[place[0] if len(place) > 1 else row]
            held.narrow(along, place[-1], updates.shape[along + 1]).copy_(updates[row])
        return var

    return scatter


@operator("Assign")
def _assign(node: Node) -> Function:
    node.irrelevant("use_locking")
    node.fixed(validate_shape=True)

    def assign(ref: Tensor, value: Tensor) -> Tensor:
        if ref.shape != value.shape or ref.dtype is not value.dtype:
            raise ValueError("the value has another shape or type")
        return ref.copy_(value)

    return assign


@operator("TopKV2", "TopK")
def _top_k(node: Node) -> Function:
    node.irrelevant("sorted", "sort_policy")
    dim, largest, count = node.attr("dim", -1), node.attr("largest", True), node.ints("k")
    kind = ATTRIBUTE_TYPES[node.attr("indices_dtype", 3)]

    def run(*args: Any) -> tuple[Tensor, Tensor]:
        values, order = torch.sort(args[0], dim=dim, descending=largest, stable=True)
        k = count(args)[0]
        return values.narrow(dim, 0, k), order.narrow(dim, 0, k).to(kind)

    return run


@operator("Sort")
def _sort(node: Node) -> Function:
    node.irrelevant("stable")
    axis, descending = node.attr("axis", -1), node.attr("descending", False)
    kind = ATTRIBUTE_TYPES[node.attr("y2_dtype", 3)]

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        values, order = torch.sort(x, dim=axis, descending=descending, stable=True)
        return values, order.to(kind)

    return run


@operator("ArgMaxV2", "ArgMin")
def _arg_extreme(node: Node) -> Function:
    axis, dtype = node.ints("dimension"), node.dtype("dtype", 9)
    find = torch.argmax if node.type == "ArgMaxV2" else torch.argmin
    return lambda *args: find(args[0], axis(args)[0]).to(dtype)


@operator("ArgMaxWithValue", "ArgMinWithValue")
def _arg_with_value(node: Node) -> Function:
    axis, keep = node.attr("dimension"), node.attr("keep_dims", False)
    find = torch.max if "Max" in node.type else torch.min

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        values, index = find(x, axis, keepdim=keep)
        return index.to(torch.int32), values

    return run


@operator("Cumsum", "Cumprod")
def _scan(node: Node) -> Function:
    node.fixed(exclusive=False, reverse=False)
    axis, scan = node.ints("axis"), torch.cumsum if node.type == "Cumsum" else torch.cumprod
    return lambda *args: scan(args[0], axis(args)[0], dtype=args[0].dtype)


@operator("SearchSorted")
def _search_sorted(node: Node) -> Function:
    dtype, right = node.dtype("dtype", 9), node.attr("right", False)
    node.absent("sorter")

    def run(sequence: Tensor, values: Tensor, *_: None) -> Tensor:
        return torch.searchsorted(sequence, values, right=right).to(dtype)

    return run
