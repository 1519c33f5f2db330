"""Values of small tensors: the few operators whose results decide shapes further on."""

from collections.abc import Callable

import numpy as np

from qwen_mtp.ge.values import SMALL, Array, Call, Value

Fold = Callable[[Call], Array]


def fold(call: Call, value: Value) -> Value:
    """Add the elements to an inferred value where every input's are known and few.

    Only integers and bools are followed; GE computes floats in another order than NumPy.
    """
    rule = FOLDS.get(call.node.type)
    if rule is None or value.dtype not in _HOST or int(np.prod(value.shape)) > SMALL:
        return value
    if call.node.type != "Shape" and any(v.const is None for v in call.inputs.values()):
        return value
    const: Array = np.asarray(rule(call)).astype(_HOST[value.dtype]).reshape(value.shape)
    return Value(value.dtype, value.shape, const)


_HOST = {
    "DT_INT8": np.int8,
    "DT_UINT8": np.uint8,
    "DT_INT32": np.int32,
    "DT_INT64": np.int64,
    "DT_BOOL": np.bool_,
}


def _range(call: Call) -> Array:
    start, limit, delta = (call.const(name).reshape(-1)[0] for name in ("start", "limit", "delta"))
    return np.arange(start, limit, delta)


def _slice(call: Call) -> Array:
    x, begins, ends = call.const("x"), call.ints("begin"), call.ints("end")
    axes = call.ints("axes") if call.get("axes") else list(range(len(begins)))
    strides = call.ints("strides") if call.get("strides") else [1] * len(begins)
    at = [slice(None)] * x.ndim
    for axis, begin, end, stride in zip(axes, begins, ends, strides, strict=True):
        at[axis] = slice(begin, end, stride)
    return np.asarray(x[tuple(at)])


def _gather(call: Call) -> Array:
    return np.take(call.const("x"), call.const("indices"), axis=call.scalar("axis"))


def _x(call: Call) -> Array:
    return call.const("x")


FOLDS: dict[str, Fold] = {
    "Identity": _x,
    "TensorMove": _x,
    "Cast": _x,
    "Reshape": _x,
    "Unsqueeze": _x,
    "Squeeze": _x,
    "ExpandDims": _x,
    "BroadcastTo": lambda call: np.broadcast_to(call.const("x"), call.ints("shape")),
    "Transpose": lambda call: np.transpose(call.const("x"), call.ints("perm")),
    "Neg": lambda call: np.negative(call.const("x")),
    "Add": lambda call: np.add(call.const("x1"), call.const("x2")),
    "Sub": lambda call: np.subtract(call.const("x1"), call.const("x2")),
    "Mul": lambda call: np.multiply(call.const("x1"), call.const("x2")),
    "FloorDiv": lambda call: np.floor_divide(call.const("x1"), call.const("x2")),
    "Maximum": lambda call: np.maximum(call.const("x1"), call.const("x2")),
    "Minimum": lambda call: np.minimum(call.const("x1"), call.const("x2")),
    "ConcatV2": lambda call: np.concatenate(
        [_known(v) for v in call.many("x")], axis=call.scalar("concat_dim")
    ),
    "Pack": lambda call: np.stack([_known(v) for v in call.many("x")], call.int_attr("axis", 0)),
    "Fill": lambda call: np.full(call.ints("dims"), call.const("value").reshape(-1)[0]),
    "Range": _range,
    "Shape": lambda call: np.array(call["x"].shape),
    "StridedSliceV2": _slice,
    "GatherV2": _gather,
}


def _known(value: Value) -> Array:
    assert value.const is not None
    return value.const
