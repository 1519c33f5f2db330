"""Meanings of GE's elementwise operators, reductions and matrix products.

float16 and bfloat16 come out as on the device: each operator rounds once; sums and products of
matrices accumulate in float32 and round at the end.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as nn

from qwen_mtp.ge.node import Function, Node, operator

Tensor = torch.Tensor

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Neg": torch.neg,
    "Abs": torch.abs,
    "Sqrt": torch.sqrt,
    "Rsqrt": torch.rsqrt,
    "Reciprocal": torch.reciprocal,
    "Square": torch.square,
    "Sigmoid": torch.sigmoid,
    "Tanh": torch.tanh,
    "Cos": torch.cos,
    "Sin": torch.sin,
    "Floor": torch.floor,
    "Ceil": torch.ceil,
    "Sign": torch.sign,
    "Erf": torch.erf,
    "Expm1": torch.expm1,
    "Log1p": torch.log1p,
    "Relu": torch.relu,
    "IsNan": torch.isnan,
    "IsInf": torch.isinf,
    "IsFinite": torch.isfinite,
    "LogicalNot": torch.logical_not,
    "Invert": torch.bitwise_not,
    "BitwiseNot": torch.bitwise_not,
    "Softplus": nn.softplus,
    "ZerosLike": torch.zeros_like,
    "OnesLike": torch.ones_like,
    "Identity": lambda x: x,
    "TensorMove": lambda x: x,
    "StopGradient": lambda x: x,
}


def _truncated(x: Tensor, y: Tensor) -> Tensor:
    return torch.div(x, y, rounding_mode=None if x.is_floating_point() else "trunc")


BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": torch.add,
    "AddV2": torch.add,
    "Sub": torch.sub,
    "RealDiv": torch.true_divide,
    "Div": _truncated,
    "TruncateDiv": _truncated,
    "FloorDiv": torch.floor_divide,
    "FloorMod": torch.remainder,
    "Mod": torch.fmod,
    "TruncateMod": torch.fmod,
    "Minimum": torch.minimum,
    "Maximum": torch.maximum,
    "Pow": torch.pow,
    "LogicalAnd": torch.logical_and,
    "LogicalOr": torch.logical_or,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
    "LeftShift": torch.bitwise_left_shift,
    "RightShift": torch.bitwise_right_shift,
    "Equal": torch.eq,
    "NotEqual": torch.ne,
    "Less": torch.lt,
    "LessEqual": torch.le,
    "Greater": torch.gt,
    "GreaterEqual": torch.ge,
}
# RealDiv of integers and logic of numbers mean other things to torch than to the device.
FLOAT_ONLY, BOOL_ONLY = frozenset({"RealDiv"}), frozenset({"LogicalAnd", "LogicalOr"})


@operator(*UNARY)
def _unary(node: Node) -> Function:
    return UNARY[node.type]


@operator(*BINARY)
def _binary(node: Node) -> Function:
    function = BINARY[node.type]

    def checked(x: Tensor, y: Tensor) -> Tensor:
        if x.dtype is not y.dtype:
            raise TypeError(f"inputs are {x.dtype} and {y.dtype}, GE does not promote")
        return function(x, y)

    if node.type in FLOAT_ONLY:
        return lambda x, y: checked(_require(x, x.is_floating_point(), "floats"), y)
    if node.type in BOOL_ONLY:
        return lambda x, y: checked(_require(x, x.dtype is torch.bool, "bools"), y)
    return checked


@operator("Mul")
def _mul(node: Node) -> Function:
    def mul(x: Tensor, y: Tensor) -> Tensor:
        if x.dtype is y.dtype:
            return torch.mul(x, y)
        wide = (x.dtype, y.dtype)
        if torch.float32 not in wide or not {*wide} & {torch.float16, torch.bfloat16}:
            raise TypeError(f"inputs are {x.dtype} and {y.dtype}, GE does not promote")
        return x.float() * y.float()

    return mul


def _require(x: Tensor, held: bool, what: str) -> Tensor:
    if not held:
        raise TypeError(f"inputs are {x.dtype}, it takes {what}")
    return x


@operator("Exp", "Log")
def _exponential(node: Node) -> Function:
    node.fixed(base=-1.0, scale=1.0, shift=0.0)
    return torch.exp if node.type == "Exp" else torch.log


@operator("Round")
def _round(node: Node) -> Function:
    node.fixed(decimals=0)
    return torch.round


@operator("Swish")
def _swish(node: Node) -> Function:
    node.fixed(scale=1.0)
    return nn.silu


@operator("SoftplusV2")
def _softplus(node: Node) -> Function:
    beta, threshold = node.attr("beta", 1.0), node.attr("threshold", 20.0)
    return lambda x: nn.softplus(x, beta, threshold)


@operator("Muls")
def _muls(node: Node) -> Function:
    value = node.attr("value")
    return lambda x: x * value


@operator("Adds")
def _adds(node: Node) -> Function:
    value = node.attr("value")
    return lambda x: x + value


@operator("AxpyV2")
def _axpy(node: Node) -> Function:
    return lambda x, y, alpha: x + alpha.to(x.dtype) * y


@operator("ClipByValue", "ClipByValueV2")
def _clip(node: Node) -> Function:
    return lambda x, low, high: torch.minimum(torch.maximum(x, low), high)


@operator("MaskedFill")
def _masked_fill(node: Node) -> Function:
    return lambda x, mask, value: torch.where(mask, value.to(x.dtype), x)


@operator("Select")
def _select(node: Node) -> Function:
    def select(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
        if not condition.shape == x.shape == y.shape:
            raise ValueError("shapes differ, which only SelectV2 may")
        return torch.where(condition, x, y)

    return select


@operator("SelectV2")
def _select_v2(node: Node) -> Function:
    def select(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
        if x.dtype is not y.dtype:
            raise TypeError(f"branches are {x.dtype} and {y.dtype}, GE does not promote")
        return torch.where(condition, x, y)

    return select


@operator("Cast")
def _cast(node: Node) -> Function:
    dtype = node.dtype("dst_type")
    node.fixed(truncate=False)
    return lambda x: x.to(dtype)


@operator("Bitcast")
def _bitcast(node: Node) -> Function:
    dtype = node.dtype("type")
    node.irrelevant("keep_dim")

    def bitcast(x: Tensor) -> Tensor:
        if x.element_size() != dtype.itemsize:
            raise TypeError(f"{x.dtype} to {dtype} changes the width")
        return x.view(dtype)

    return bitcast


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((a % x.dim() for a in axes), reverse=True):
        x = torch.prod(x, axis, keepdim=keep, dtype=x.dtype)
    return x


REDUCTIONS: dict[str, Callable[[Tensor, list[int], bool], Tensor]] = {
    "ReduceSum": lambda x, axes, keep: torch.sum(x, axes, keepdim=keep, dtype=x.dtype),
    "ReduceMean": lambda x, axes, keep: torch.mean(x, axes, keepdim=keep),
    "ReduceMax": lambda x, axes, keep: torch.amax(x, axes, keepdim=keep),
    "ReduceMin": lambda x, axes, keep: torch.amin(x, axes, keepdim=keep),
    "ReduceAny": lambda x, axes, keep: torch.any(x, tuple(axes), keepdim=keep),
    "ReduceAll": lambda x, axes, keep: torch.all(x, tuple(axes), keepdim=keep),
    "ReduceProd": _product,
    "ReduceLogSumExp": lambda x, axes, keep: torch.logsumexp(x, axes, keepdim=keep),
}


@operator(*REDUCTIONS)
def _reduce(node: Node) -> Function:
    reduce, axes, keep = REDUCTIONS[node.type], node.ints("axes"), node.attr("keep_dims", False)
    node.irrelevant("noop_with_empty_axes")

    def run(*args: Any) -> Tensor:
        over = axes(args)
        if not over and args[0].dim():
            raise ValueError("no axes")
        return reduce(args[0], over, keep)

    return run


@operator("ReduceSumD")
def _reduce_sum_d(node: Node) -> Function:
    axes, keep = node.attr("axes"), node.attr("keep_dims", False)
    return lambda x: torch.sum(x, axes, keepdim=keep, dtype=x.dtype)


@operator("LpNormV2")
def _lp_norm(node: Node) -> Function:
    node.fixed(p=2.0)
    node.irrelevant("epsilon")  # of the gradient: GE adds it nowhere else
    axes, keep = node.attr("axes", []), node.attr("keepdim", False)
    return lambda x: torch.linalg.vector_norm(x, 2, axes or None, keepdim=keep)


@operator("SoftmaxV2")
def _softmax(node: Node) -> Function:
    axes, widen = node.attr("axes", [-1]), node.attr("half_to_float", False)
    if len(axes) != 1:
        raise node.error(f"axes={axes} is not implemented")
    axis = axes[0]
    return lambda x: torch.softmax(x, axis, dtype=torch.float32 if widen else None)


@operator("LogSoftmaxV2")
def _log_softmax(node: Node) -> Function:
    axes = node.attr("axes", [-1])
    if len(axes) != 1:
        raise node.error(f"axes={axes} is not implemented")
    axis = axes[0]
    return lambda x: torch.log_softmax(x, axis)


def matmul(x: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
    """Matrix product with the device's accumulators: int32 for int8, float32 for halves."""
    if x.dtype is torch.int8:
        # float64 is exact here, and far faster than torch's integer product.
        total = (x.double() @ y.double()).to(torch.int32)
        return total if bias is None else total + bias
    if x.dtype is not y.dtype or not x.is_floating_point():
        raise TypeError(f"factors are {x.dtype} and {y.dtype}")
    if x.dtype is torch.float32:
        return x @ y if bias is None else x @ y + bias
    wide = x.float() @ y.float()
    return (wide if bias is None else wide + bias.float()).to(x.dtype)


@operator("MatMul", "MatMulV2", "MatMulV3", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def _matmul(node: Node) -> Function:
    first, second = (
        ("adj_x1", "adj_x2") if "Batch" in node.type else ("transpose_x1", "transpose_x2")
    )
    turn_x, turn_y = node.attr(first, False), node.attr(second, False)
    node.fixed(offset_x=0)
    node.irrelevant("opImplMode", "enable_hf32", "opImplMode_hf32")
    node.absent("offset_w")

    def run(x: Tensor, y: Tensor, bias: Tensor | None = None, *_: None) -> Tensor:
        return matmul(x.mT if turn_x else x, y.mT if turn_y else y, bias)

    return run
