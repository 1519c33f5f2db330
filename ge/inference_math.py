"""Inference rules of arithmetic: elementwise, reductions, products of matrices, ordering."""

from collections.abc import Sequence

from qwen_mtp.ge.dtypes import FLOATS, INDICES
from qwen_mtp.ge.values import (
    Call,
    Rule,
    Value,
    axis_of,
    broadcast,
    require,
    same_dtype,
)
from qwen_mtp.ge.view import Shape


def _same(call: Call) -> Sequence[Value]:
    return (Value(call["x"].dtype, call["x"].shape),)


def _floating(call: Call) -> Sequence[Value]:
    require(call["x"].dtype in FLOATS, f"x is {call['x'].dtype}, a float is needed")
    return _same(call)


def _binary(call: Call) -> Sequence[Value]:
    x1, x2 = call["x1"], call["x2"]
    return (Value(same_dtype(x1, x2), broadcast(x1.shape, x2.shape)),)


def _compare(call: Call) -> Sequence[Value]:
    (value,) = _binary(call)
    return (Value("DT_BOOL", value.shape),)


def _scalar(call: Call) -> Sequence[Value]:
    call.float_attr("value")
    return _same(call)


def _axpy(call: Call) -> Sequence[Value]:
    x1, x2, alpha = call["x1"], call["x2"], call["alpha"]
    require(len(alpha.shape) < 2, f"alpha is {alpha}, a scalar is needed")
    return (Value(same_dtype(x1, x2, alpha), broadcast(x1.shape, x2.shape)),)


def _clip(call: Call) -> Sequence[Value]:
    x, low, high = call["x"], call["clip_value_min"], call["clip_value_max"]
    shape = broadcast(x.shape, low.shape, high.shape)
    require(shape == x.shape, f"bounds {low} and {high} widen x {x}")
    return (Value(same_dtype(x, low, high), shape),)


def _select(call: Call) -> Sequence[Value]:
    condition, yes, no = call["condition"], call["then"], call["else"]
    require(condition.dtype == "DT_BOOL", f"condition is {condition.dtype}, not bool")
    return (Value(same_dtype(yes, no), broadcast(condition.shape, yes.shape, no.shape)),)


def _masked_fill(call: Call) -> Sequence[Value]:
    x, mask, value = call["x"], call["mask"], call["value"]
    require(mask.dtype == "DT_BOOL", f"mask is {mask.dtype}, not bool")
    shape = broadcast(x.shape, mask.shape, value.shape)
    return (Value(same_dtype(x, value), shape),)


def _cast(call: Call) -> Sequence[Value]:
    return (Value(call.dtype_attr("dst_type"), call["x"].shape),)


def reduced(shape: Shape, axes: Sequence[int], keep: bool) -> Shape:
    """A shape with axes reduced to one or removed."""
    gone = {axis_of(axis, len(shape)) for axis in axes}
    require(len(gone) == len(axes), f"axes {list(axes)} name one twice")
    kept = ((1 if i in gone else dim) for i, dim in enumerate(shape) if keep or i not in gone)
    return tuple(kept)


def _reduce(call: Call) -> Sequence[Value]:
    x, axes = call["x"], call.ints("axes")
    if not axes:
        axes = [] if call.flag("noop_with_empty_axes", True) else list(range(len(x.shape)))
    dtype = call.dtype_attr("dtype", x.dtype)
    return (Value(dtype, reduced(x.shape, axes, call.flag("keep_dims"))),)


def _softmax(call: Call) -> Sequence[Value]:
    x = call["x"]
    for axis in call.list_attr("axes", [-1]):
        axis_of(axis, len(x.shape))
    wide = call.flag("half_to_float") and x.dtype == "DT_FLOAT16"
    return (Value("DT_FLOAT" if wide else x.dtype, x.shape),)


def _scan(call: Call) -> Sequence[Value]:
    axis_of(call.scalar("axis"), len(call["x"].shape))
    return _same(call)


def _matmul(call: Call) -> Sequence[Value]:
    x1, x2 = call["x1"], call["x2"]
    require(len(x1.shape) == 2 == len(x2.shape), f"{x1} by {x2} is no product of two matrices")
    shape = _product(x1, x2, call.flag("transpose_x1"), call.flag("transpose_x2"))
    return (_biased(call, Value(_product_dtype(x1, x2), shape)),)


def _batch_matmul(call: Call) -> Sequence[Value]:
    x1, x2 = call["x1"], call["x2"]
    require(min(len(x1.shape), len(x2.shape)) >= 2, f"{x1} by {x2} lacks a matrix")
    shape = _product(x1, x2, call.flag("adj_x1"), call.flag("adj_x2"))
    batch = broadcast(x1.shape[:-2], x2.shape[:-2])
    return (_biased(call, Value(_product_dtype(x1, x2), batch + shape)),)


def _product_dtype(x1: Value, x2: Value) -> str:
    dtype = same_dtype(x1, x2)
    return "DT_INT32" if dtype in ("DT_INT8", "DT_INT4") else dtype


def _product(x1: Value, x2: Value, turn1: bool, turn2: bool) -> Shape:
    rows, inner = x1.shape[-2:][::-1] if turn1 else x1.shape[-2:]
    other, columns = x2.shape[-2:][::-1] if turn2 else x2.shape[-2:]
    require(inner == other, f"{x1} by {x2}: inner dimensions {inner} and {other} differ")
    return rows, columns


def _biased(call: Call, product: Value) -> Value:
    bias = call.get("bias")
    if bias is not None:
        require(bias.shape[-1:] == product.shape[-1:], f"bias {bias} does not fit {product}")
    return product


def _argmax(call: Call) -> Sequence[Value]:
    x = call["x"]
    dtype = call.dtype_attr("dtype", "DT_INT64")
    require(dtype in INDICES, f"attribute dtype is {dtype}, an index type is needed")
    return (Value(dtype, reduced(x.shape, [call.scalar("dimension")], False)),)


def _argmax_with_value(call: Call) -> Sequence[Value]:
    x = call["x"]
    shape = reduced(x.shape, [call.int_attr("dimension")], call.flag("keep_dims"))
    return Value("DT_INT32", shape), Value(x.dtype, shape)


def _topk(call: Call) -> Sequence[Value]:
    x, k = call["x"], call.scalar("k")
    axis = axis_of(call.int_attr("dim", -1), len(x.shape), "dim")
    require(0 < k <= x.shape[axis], f"k is {k}, the axis has {x.shape[axis]}")
    shape = (*x.shape[:axis], k, *x.shape[axis + 1 :])
    return Value(x.dtype, shape), Value("DT_INT32", shape)


def _sort(call: Call) -> Sequence[Value]:
    x = call["x"]
    axis = axis_of(call.int_attr("axis", -1), len(x.shape))
    require(axis == len(x.shape) - 1, f"axis {axis} of {x}: only the last can be sorted")
    return Value(x.dtype, x.shape), Value("DT_INT32", x.shape)


_RULES: dict[str, tuple[str, Rule]] = {
    "same": ("Abs Neg Sign Identity TensorMove ZerosLike OnesLike Triu Tril Relu Invert", _same),
    "float": (
        "Exp Log Log1p Sqrt Rsqrt Reciprocal Sigmoid Swish Tanh Cos Sin Floor Ceil Round Softplus "
        "SoftplusV2 Square",
        _floating,
    ),
    "bool": ("LogicalNot", _same),
    "binary": (
        "Add Sub Mul RealDiv FloorDiv FloorMod Mod TruncateDiv Maximum Minimum Pow BitwiseAnd "
        "BitwiseOr LogicalAnd LogicalOr",
        _binary,
    ),
    "compare": ("Equal NotEqual Less LessEqual Greater GreaterEqual", _compare),
    "reduce": ("ReduceSum ReduceMean ReduceMeanWithCast ReduceMax ReduceMin ReduceProd", _reduce),
    "reduce bool": ("ReduceAny ReduceAll", _reduce),
    "scan": ("Cumsum Cumprod", _scan),
    "scalar": ("Muls Adds", _scalar),
    "axpy": ("AxpyV2", _axpy),
    "clip": ("ClipByValueV2", _clip),
    "select": ("SelectV2", _select),
    "fill": ("MaskedFill", _masked_fill),
    "cast": ("Cast", _cast),
    "softmax": ("SoftmaxV2", _softmax),
    "matmul": ("MatMul MatMulV2", _matmul),
    "batch matmul": ("BatchMatMul BatchMatMulV2", _batch_matmul),
    "argmax": ("ArgMaxV2", _argmax),
    "max": ("ArgMaxWithValue", _argmax_with_value),
    "topk": ("TopKV2", _topk),
    "sort": ("Sort", _sort),
}
RULES: dict[str, Rule] = {name: rule for names, rule in _RULES.values() for name in names.split()}
