"""Changes that leave a GE graph well-formed and make it compute something else."""

from math import prod
from typing import Any

from tests.ge_changes import Change, Place, constant, exchanged, flipped, other_type, scaled


def _swapped(place: Place) -> bool:
    """Two operands change places."""
    op = place.op
    return op.input[0] != op.input[1] and exchanged(op, 0, 1)


def _branches(place: Place) -> bool:
    op = place.op
    return op.input[1] != op.input[2] and exchanged(op, 1, 2)


def _other_weight(place: Place) -> bool:
    """The file of another weight of the same shape and type."""
    mine = place.op.attr
    for op in place.graph.op:
        if op.type != "FileConstant" or op.name == place.op.name:
            continue
        other = op.attr
        if other["shape"] == mine["shape"] and other["dtype"] == mine["dtype"]:
            for name in ("file_path", "file_id"):
                mine[name].s, other[name].s = other[name].s, mine[name].s
            return True
    return False


def _summed(place: Place) -> bool:
    place.op.attr.pop("noop_with_empty_axes", None)
    place.op.type = "ReduceSum"
    return True


def _scaled_scalar(port: str, factor: float) -> Change:
    """A float constant behind an operand, where it is a scalar: an epsilon, a scale."""

    def value(old: Any) -> Any:
        return old * factor if old.dtype.kind == "f" and prod(old.shape) == 1 else old

    return constant(port, value)


def _earlier(old: Any) -> Any:
    bounded = (old > 0).all() and (old < 10**9).all()
    return old - 1 if bounded else old


VALUES: dict[str, tuple[str, Change]] = {
    "operands change places": (r"Sub|RealDiv|Less|LessEqual|Greater|GreaterEqual", _swapped),
    "branches change places": (r"SelectV2", _branches),
    "a sum becomes a difference": (r"Add", other_type("Sub")),
    "a product becomes a sum": (r"Mul", other_type("Add")),
    "less becomes less or equal": (r"Less", other_type("LessEqual")),
    "less or equal becomes less": (r"LessEqual", other_type("Less")),
    "equal becomes unequal": (r"Equal", other_type("NotEqual")),
    "and becomes or": (r"LogicalAnd", other_type("LogicalOr")),
    "greatest becomes least": (r"Maximum", other_type("Minimum")),
    "a mean becomes a sum": (r"ReduceMean", _summed),
    "a sum becomes a maximum": (r"ReduceSum", other_type("ReduceMax")),
    "a cosine becomes a sine": (r"Cos", other_type("Sin")),
    "a sigmoid becomes a tanh": (r"Sigmoid", other_type("Tanh")),
    "a reciprocal root becomes a root": (r"Rsqrt", other_type("Sqrt")),
    "the smallest are taken": (r"TopKV2", flipped("largest")),
    "a sum runs backwards": (r"Cumsum", flipped("reverse")),
    "a sum leaves its row out": (r"Cumsum", flipped("exclusive")),
    "an epsilon or a factor is another": (r"Add|Mul", _scaled_scalar("x2", 3.0)),
    "a norm has another epsilon": (r"RmsNorm", scaled("epsilon", 1e3)),
    "attention has another scale": (r"FusedInferAttentionScore", scaled("scale", 2.0)),
    "the delta rule has another scale": (r"RecurrentGatedDeltaRule", scaled("scale_value", 2.0)),
    "weights change places": (r"FileConstant", _other_weight),
    "a slice starts and ends one earlier": (
        r"StridedSliceV2",
        lambda place: constant("begin", _earlier)(place) and constant("end", _earlier)(place),
    ),
}
