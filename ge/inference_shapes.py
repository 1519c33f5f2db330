"""Inference rules of movement: shapes, slices, joins, gathers and scatters."""

from collections.abc import Sequence
from math import ceil, prod

from qwen_mtp.ge.dtypes import BITS, INDICES
from qwen_mtp.ge.values import Call, Rule, Value, axis_of, broadcast, require, same_dtype
from qwen_mtp.ge.view import Shape


def _reshape(call: Call) -> Sequence[Value]:
    x, shape = call["x"], call.ints("shape")
    require(shape.count(-1) < 2, f"shape {shape} leaves two dimensions open")
    require(all(dim >= -1 for dim in shape), f"shape {shape} has a negative dimension")
    known = prod(dim for dim in shape if dim != -1)
    count = prod(x.shape)
    filled = tuple(count // max(known, 1) if dim == -1 else dim for dim in shape)
    require(prod(filled) == count, f"{x} does not fit shape {shape}")
    return (Value(x.dtype, filled),)


def _transpose(call: Call) -> Sequence[Value]:
    x, perm = call["x"], call.ints("perm")
    require(sorted(perm) == list(range(len(x.shape))), f"perm {perm} does not fit {x}")
    return (Value(x.dtype, tuple(x.shape[axis] for axis in perm)),)


def _unsqueeze(call: Call) -> Sequence[Value]:
    x, axes = call["x"], call.list_attr("axes", [])
    rank = len(x.shape) + len(axes)
    new = {axis_of(axis, rank) for axis in axes}
    require(len(new) == len(axes), f"axes {axes} name one twice")
    left = iter(x.shape)
    return (Value(x.dtype, tuple(1 if i in new else next(left) for i in range(rank))),)


def _squeeze(call: Call) -> Sequence[Value]:
    x, axes = call["x"], call.list_attr("axis", [])
    chosen = {axis_of(axis, len(x.shape)) for axis in axes}
    require(all(x.shape[axis] == 1 for axis in chosen), f"axes {axes} of {x} are not all 1")
    if not axes:
        chosen = {i for i, dim in enumerate(x.shape) if dim == 1}
    return (Value(x.dtype, tuple(dim for i, dim in enumerate(x.shape) if i not in chosen)),)


def _expand_dims(call: Call) -> Sequence[Value]:
    x = call["x"]
    axis = axis_of(call.scalar("axis"), len(x.shape) + 1)
    return (Value(x.dtype, (*x.shape[:axis], 1, *x.shape[axis:])),)


def _broadcast_to(call: Call) -> Sequence[Value]:
    x, shape = call["x"], call.ints("shape")
    pad = len(shape) - len(x.shape)
    require(pad >= 0, f"shape {shape} has fewer dimensions than {x}")
    require(all(dim >= -1 for dim in shape), f"shape {shape} has a negative dimension")
    kept = (1,) * pad + x.shape
    wanted = tuple(have if dim == -1 else dim for have, dim in zip(kept, shape, strict=True))
    require(broadcast(x.shape, wanted) == wanted, f"{x} does not expand to {shape}")
    return (Value(x.dtype, wanted),)


def _tile(call: Call) -> Sequence[Value]:
    x, times = call["x"], call.ints("multiples")
    require(len(times) == len(x.shape), f"multiples {times} do not fit {x}")
    return (Value(x.dtype, tuple(d * t for d, t in zip(x.shape, times, strict=True))),)


def _strided_slice(call: Call) -> Sequence[Value]:
    x, begins, ends = call["x"], call.ints("begin"), call.ints("end")
    for mask in ("ellipsis_mask", "new_axis_mask", "shrink_axis_mask", "begin_mask", "end_mask"):
        require(call.int_attr(mask, 0) == 0, f"{mask} is set, no rule reads it")
    axes = call.ints("axes") if call.get("axes") else list(range(len(begins)))
    strides = call.ints("strides") if call.get("strides") else [1] * len(begins)
    require(
        len(begins) == len(ends) == len(axes) == len(strides),
        f"begin {begins}, end {ends}, axes {axes} and strides {strides} differ in length",
    )
    shape = list(x.shape)
    for axis, *bounds in zip(axes, begins, ends, strides, strict=True):
        at = axis_of(axis, len(shape))
        shape[at] = _extent(shape[at], *bounds)
    return (Value(x.dtype, tuple(shape)),)


def _extent(dim: int, begin: int, end: int, stride: int) -> int:
    require(stride > 0, f"stride {stride} is not positive")
    length = len(range(*slice(begin, end, stride).indices(dim)))
    require(length > 0, f"{begin}:{end}:{stride} takes nothing of {dim}")
    return length


def _slice(call: Call) -> Sequence[Value]:
    x, offsets, sizes = call["x"], call.ints("offsets"), call.ints("size")
    require(len(offsets) == len(sizes) == len(x.shape), f"offsets and size do not fit {x}")
    shape = []
    for dim, offset, size in zip(x.shape, offsets, sizes, strict=True):
        shape.append(dim - offset if size == -1 else size)
        require(offset >= 0 and 0 < shape[-1] <= dim - offset, f"{offset}+{size} leaves {dim}")
    return (Value(x.dtype, tuple(shape)),)


def _concat(call: Call) -> Sequence[Value]:
    parts = call.many("x")
    axis = axis_of(call.scalar("concat_dim"), len(parts[0].shape), "concat_dim")
    require(call.int_attr("N", 1) == len(parts), f"N is not the {len(parts)} inputs there are")
    rests = {(*p.shape[:axis], *p.shape[axis + 1 :]) for p in parts}
    listed = ", ".join(map(str, parts[:4]))
    require(len(rests) == 1, f"parts differ beside axis {axis}: {listed}")
    joined = sum(p.shape[axis] for p in parts)
    head, tail = parts[0].shape[:axis], parts[0].shape[axis + 1 :]
    return (Value(same_dtype(*parts), (*head, joined, *tail)),)


def _pack(call: Call) -> Sequence[Value]:
    parts = call.many("x")
    require(call.int_attr("N") == len(parts), f"N is not the {len(parts)} inputs there are")
    require(len({p.shape for p in parts}) == 1, "parts differ in shape")
    axis = axis_of(call.int_attr("axis", 0), len(parts[0].shape) + 1)
    head, tail = parts[0].shape[:axis], parts[0].shape[axis:]
    return (Value(same_dtype(*parts), (*head, len(parts), *tail)),)


def _unpack(call: Call) -> Sequence[Value]:
    x, count = call["x"], call.int_attr("num")
    axis = axis_of(call.int_attr("axis", 0), len(x.shape))
    require(x.shape[axis] == count, f"num is {count}, the axis has {x.shape[axis]}")
    return [Value(x.dtype, (*x.shape[:axis], *x.shape[axis + 1 :]))] * count


def _split_v(call: Call) -> Sequence[Value]:
    x, sizes = call["x"], call.ints("size_splits")
    axis = axis_of(call.scalar("split_dim"), len(x.shape), "split_dim")
    require(call.int_attr("num_split") == len(sizes), f"num_split is not the {len(sizes)} sizes")
    rest = x.shape[axis] - sum(size for size in sizes if size != -1)
    sizes = [rest if size == -1 else size for size in sizes]
    require(sum(sizes) == x.shape[axis] and min(sizes) > 0, f"{sizes} do not split {x}")
    return [Value(x.dtype, (*x.shape[:axis], size, *x.shape[axis + 1 :])) for size in sizes]


def _split(call: Call) -> Sequence[Value]:
    x, count = call["x"], call.int_attr("num_split")
    axis = axis_of(call.scalar("split_dim"), len(x.shape), "split_dim")
    require(count > 0 and x.shape[axis] % count == 0, f"{count} parts do not split {x}")
    part = (*x.shape[:axis], x.shape[axis] // count, *x.shape[axis + 1 :])
    return [Value(x.dtype, part)] * count


def _fill(call: Call) -> Sequence[Value]:
    require(len(call["value"].shape) == 0 or call["value"].shape == (1,), "value is no scalar")
    dims = call.ints("dims")
    require(all(dim > 0 for dim in dims), f"dims {dims} are not all positive")
    return (Value(call["value"].dtype, tuple(dims)),)


def _range(call: Call) -> Sequence[Value]:
    dtypes = {call[name].dtype for name in ("start", "limit", "delta")}
    start, limit, delta = (call.const(name).reshape(-1) for name in ("start", "limit", "delta"))
    require(start.size == limit.size == delta.size == 1, "start, limit and delta are scalars")
    require(delta[0] != 0, "delta is 0")
    length = ceil((float(limit[0]) - float(start[0])) / float(delta[0]))
    # CANN's inference of mixed dtypes answers float; torchair's arange(end) mixes int32 and int64.
    dtype = dtypes.pop() if len(dtypes) == 1 else "DT_FLOAT"
    exact = len(dtypes) == 0 or abs(float(limit[0])) < 2**24
    require(exact, f"limit {limit[0]} of mixed dtypes is counted in float, which loses it")
    return (Value(dtype, (max(length, 0),)),)


def _shape(call: Call) -> Sequence[Value]:
    return (Value(call.dtype_attr("dtype", "DT_INT32"), (len(call["x"].shape),)),)


def _bitcast(call: Call) -> Sequence[Value]:
    x, dtype = call["x"], call.dtype_attr("type")
    require({x.dtype, dtype} <= BITS.keys(), f"{x.dtype} to {dtype}: no rule knows their bits")
    old, new = BITS[x.dtype], BITS[dtype]
    if old == new:
        return (Value(dtype, x.shape),)
    if old > new:
        return (Value(dtype, (*x.shape, old // new)),)
    require(x.shape[-1:] == (new // old,), f"{x} does not hold {dtype} in its last dimension")
    return (Value(dtype, x.shape[:-1]),)


def _indices(call: Call, name: str = "indices") -> Shape:
    require(call[name].dtype in INDICES, f"{name} is {call[name].dtype}, no index type")
    return call[name].shape


def _gather(call: Call) -> Sequence[Value]:
    x, indices = call["x"], _indices(call)
    axis = axis_of(call.scalar("axis") if call.get("axis") else 0, len(x.shape))
    require(call.int_attr("batch_dims", 0) == 0, "batch_dims is set, no rule reads it")
    _within(call, "indices", x.shape[axis])
    return (Value(x.dtype, (*x.shape[:axis], *indices, *x.shape[axis + 1 :])),)


def _within(call: Call, name: str, limit: int) -> None:
    found = call[name].const
    if found is not None and found.size:
        low = int(found.min()) >= (-limit if call.flag("negative_index_support") else 0)
        require(low and int(found.max()) < limit, f"{name} reach outside 0..{limit - 1}")


def _gather_elements(call: Call) -> Sequence[Value]:
    x, index = call["x"], _indices(call, "index")
    axis = axis_of(call.int_attr("dim", 0), len(x.shape), "dim")
    _inside(index, x.shape, axis)
    return (Value(x.dtype, index),)


def _gather_nd(call: Call) -> Sequence[Value]:
    x, indices = call["x"], _indices(call)
    require(len(indices) > 0 and indices[-1] <= len(x.shape), f"indices do not point into {x}")
    return (Value(x.dtype, (*indices[:-1], *x.shape[indices[-1] :])),)


def _inside(index: Shape, shape: Shape, axis: int) -> None:
    fits = len(index) == len(shape) and all(
        i == axis or have <= dim for i, (have, dim) in enumerate(zip(index, shape, strict=False))
    )
    require(fits, f"index {list(index)} does not lie inside {list(shape)}")


def _scatter_elements(call: Call) -> Sequence[Value]:
    data, updates, indices = call["data"], call["updates"], _indices(call)
    axis = axis_of(call.int_attr("axis", 0), len(data.shape))
    _inside(indices, data.shape, axis)
    require(updates.shape == indices, f"updates {updates} for indices {list(indices)}")
    return (Value(same_dtype(data, updates), data.shape),)


def _scatter_nd(call: Call) -> Sequence[Value]:
    var, updates, indices = call["var"], call["updates"], _indices(call)
    require(len(indices) > 0 and indices[-1] <= len(var.shape), f"indices do not point into {var}")
    wanted = (*indices[:-1], *var.shape[indices[-1] :])
    require(updates.shape == wanted, f"updates {updates} where {list(wanted)} is written")
    return (Value(same_dtype(var, updates), var.shape),)


def _scatter_update(call: Call) -> Sequence[Value]:
    var, updates, indices = call["var"], call["updates"], _indices(call)
    wanted = (*indices, *var.shape[1:])
    require(updates.shape == wanted, f"updates {updates} where {list(wanted)} is written")
    return (Value(same_dtype(var, updates), var.shape),)


def _scatter(call: Call) -> Sequence[Value]:
    var, updates, indices = call["var"], call["updates"], _indices(call)
    axis_of(call.int_attr("axis", 0), len(var.shape))
    fits = len(updates.shape) == len(var.shape) and updates.shape[:1] == indices[:1]
    require(fits, f"updates {updates} of indices {list(indices)} do not fit {var}")
    return (Value(same_dtype(var, updates), var.shape),)


def _assign(call: Call) -> Sequence[Value]:
    ref, value = call["ref"], call["value"]
    require(ref.shape == value.shape, f"{value} is assigned to {ref}")
    return (Value(same_dtype(ref, value), ref.shape),)


def _pad(call: Call) -> Sequence[Value]:
    x, pads = call["x"], call.ints("paddings")
    require(len(pads) == 2 * len(x.shape), f"paddings {pads} do not fit {x}")
    require(call.flag("paddings_contiguous", True), "no rule reads paddings_contiguous=false")
    pairs = zip(x.shape, pads[::2], pads[1::2], strict=True)
    return (Value(x.dtype, tuple(dim + before + after for dim, before, after in pairs)),)


def _reverse(call: Call) -> Sequence[Value]:
    for axis in call.ints("axis"):
        axis_of(axis, len(call["x"].shape))
    return (Value(call["x"].dtype, call["x"].shape),)


RULES: dict[str, Rule] = {
    "Reshape": _reshape,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "ExpandDims": _expand_dims,
    "BroadcastTo": _broadcast_to,
    "Expand": _broadcast_to,
    "Tile": _tile,
    "StridedSliceV2": _strided_slice,
    "Slice": _slice,
    "ConcatV2": _concat,
    "Pack": _pack,
    "Unpack": _unpack,
    "SplitV": _split_v,
    "Split": _split,
    "Fill": _fill,
    "Range": _range,
    "Shape": _shape,
    "Bitcast": _bitcast,
    "GatherV2": _gather,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherNd": _gather_nd,
    "ScatterElements": _scatter_elements,
    "ScatterNdUpdate": _scatter_nd,
    "ScatterNdAdd": _scatter_nd,
    "ScatterUpdate": _scatter_update,
    "Scatter": _scatter,
    "Assign": _assign,
    "PadV3": _pad,
    "ReverseV2": _reverse,
}
