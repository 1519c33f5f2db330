"""Wrong GE graphs made from a right one: one change each, the same ones every time.

``static_mutants`` are wrong by their structure, their prototypes or their shapes, which the checks
must see. ``value_mutants`` are well-formed graphs that compute something else: nothing but running
them can tell.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

SITES = 3  # operators of a kind that each change is tried on: first, middle and last


@dataclass(slots=True)
class Place:
    """An operator of a copy of the graph that a change may touch."""

    graph: Any
    index: int

    @property
    def op(self) -> Any:
        return self.graph.op[self.index]

    def producer(self, port: str) -> Any | None:
        """What feeds an input."""
        for ref, desc in zip(self.op.input, self.op.input_desc, strict=False):
            if desc.name == port and ref:
                name = ref.rpartition(":")[0]
                return next(op for op in self.graph.op if op.name == name)
        return None

    def own_const(self, port: str) -> Any | None:
        """The constant behind an input, copied if other operators read it too."""
        shared = self.producer(port)
        if shared is None or shared.type != "Const":
            return None
        if sum(ref == f"{shared.name}:0" for op in self.graph.op for ref in op.input) == 1:
            return shared
        position = next(i for i, op in enumerate(self.graph.op) if op.name == shared.name)
        ops = list(self.graph.op)
        copy = type(shared)()
        copy.CopyFrom(shared)
        copy.name = f"{shared.name}/own"
        i = next(i for i, desc in enumerate(self.op.input_desc) if desc.name == port)
        self.op.input[i] = f"{copy.name}:0"
        del self.graph.op[:]
        self.graph.op.extend([*ops[: position + 1], copy, *ops[position + 1 :]])
        self.index += 1
        return self.graph.op[position + 1]


Change = Callable[[Place], bool]
_TYPES = {1: np.float32, 2: np.float16, 7: np.int32, 8: np.int64, 11: np.bool_}


def static_mutants(model: Any) -> Iterator[tuple[str, Any]]:
    """Mutants that a check without execution must refuse."""
    return _made(model, _STATIC)


def value_mutants(model: Any) -> Iterator[tuple[str, Any]]:
    """Mutants that are well-formed and compute something else."""
    return _made(model, _VALUES)


def mutants(model: Any) -> Iterator[tuple[str, Any]]:
    """All of them."""
    yield from static_mutants(model)
    yield from value_mutants(model)


def _made(model: Any, table: "dict[str, tuple[str, Change]]") -> Iterator[tuple[str, Any]]:
    for what, (types, change) in table.items():
        pattern = re.compile(types)
        sites = [i for i, op in enumerate(model.graph[0].op) if pattern.fullmatch(op.type)]
        done = 0
        for site in _spread(sites):
            if done == SITES:
                break
            copy = type(model)()
            copy.CopyFrom(model)
            if change(Place(copy.graph[0], site)):
                done += 1
                yield f"{what} at {model.graph[0].op[site].name}", copy


def _spread(sites: list[int]) -> Iterable[int]:
    """First, middle, last, then the rest: a change that does not apply moves on."""
    chosen = [sites[i] for i in sorted({0, len(sites) // 2, len(sites) - 1})] if sites else []
    return [*chosen, *(site for site in sites if site not in chosen)]


# Changes of structure


def _same_name(place: Place) -> bool:
    place.op.name = place.graph.op[0].name
    return place.index > 0


def _missing_producer(place: Place) -> bool:
    place.op.input[0] = "nobody:0"
    return True


def _missing_output(place: Place) -> bool:
    place.op.input[0] = place.op.input[0].rpartition(":")[0] + ":7"
    return True


def _later(place: Place) -> bool:
    """The operator moves behind its first reader."""
    ops = list(place.graph.op)
    moved = ops.pop(place.index)
    del place.graph.op[:]
    place.graph.op.extend([*ops, moved])
    return True


def _dropped(place: Place) -> bool:
    del place.graph.op[place.index]
    return True


def _twice(place: Place) -> bool:
    copy = place.graph.op.add()
    copy.CopyFrom(place.op)
    copy.name = "again"
    return True


def _fewer_edges(place: Place) -> bool:
    del place.op.input[-1]
    return True


def _unread(place: Place) -> bool:
    """A copy of an operator whose result nobody reads."""
    ops = list(place.graph.op)
    copy = type(place.op)()
    copy.CopyFrom(place.op)
    copy.name = "unread"
    del place.graph.op[:]
    place.graph.op.extend([*ops[: place.index + 1], copy, *ops[place.index + 1 :]])
    return True


def _port(side: str) -> Change:
    def change(place: Place) -> bool:
        getattr(place.op, f"{side}_desc")[0].name = "sideways"
        place.op.attr[f"_{side}_name_key"].list.s[0] = b"sideways"
        return True

    return change


def _listed_port(place: Place) -> bool:
    place.op.attr["_input_name_key"].list.s[0] = b"sideways"
    return True


def _swapped_ports(place: Place) -> bool:
    """Names of two inputs change places, the edges do not."""
    descs = place.op.input_desc
    descs[0].name, descs[1].name = descs[1].name, descs[0].name
    names = place.op.attr["_input_name_key"].list.s
    names[0], names[1] = names[1], names[0]
    return True


def _fewer_outputs(place: Place) -> bool:
    del place.op.output_desc[-1]
    return True


def _descriptor(dtype: int | None = None, dim: int | None = None) -> Change:
    def change(place: Place) -> bool:
        for desc in (*place.op.input_desc, *place.op.output_desc):
            if dtype is not None:
                desc.dtype = dtype
            if dim is not None:
                desc.shape.dim.append(dim)
        return True

    return change


def _outputs_swapped(place: Place) -> bool:
    """Two results change places; their descriptors say so too."""
    if len(place.op.input_desc) < 2:
        return False
    return _exchanged(place.op, 0, 1)


def _exchanged(op: Any, i: int, j: int) -> bool:
    """Two edges change places with what is declared of them; port names stay."""
    op.input[i], op.input[j] = op.input[j], op.input[i]
    first, second = op.input_desc[i], op.input_desc[j]
    first.dtype, second.dtype = second.dtype, first.dtype
    shape = list(first.shape.dim)
    first.shape.dim[:] = second.shape.dim
    second.shape.dim[:] = shape
    return True


def _int(name: str, value: int) -> Change:
    def change(place: Place) -> bool:
        if name not in place.op.attr or place.op.attr[name].i == value:
            return False
        place.op.attr[name].i = value
        return True

    return change


def _dtype(name: str, value: int) -> Change:
    def change(place: Place) -> bool:
        same = place.op.attr[name].dt == value
        place.op.attr[name].dt = value
        return not same

    return change


def _ints(name: str, *values: int) -> Change:
    def change(place: Place) -> bool:
        del place.op.attr[name].list.i[:]
        place.op.attr[name].list.i.extend(values)
        return True

    return change


def _text(name: str, value: bytes) -> Change:
    def change(place: Place) -> bool:
        place.op.attr[name].s = value
        return True

    return change


def _without(name: str) -> Change:
    def change(place: Place) -> bool:
        if name not in place.op.attr:
            return False
        del place.op.attr[name]
        return True

    return change


def _flipped(name: str) -> Change:
    def change(place: Place) -> bool:
        if name not in place.op.attr:
            return False
        place.op.attr[name].b = not place.op.attr[name].b
        return True

    return change


def _turned(name: str, port: str) -> Change:
    """A transposition more or less, of an input that is not square."""
    flip = _flipped(name)

    def change(place: Place) -> bool:
        source = place.producer(port)
        assert source is not None
        shape = list(source.output_desc[0].shape.dim)
        return len(shape) >= 2 and shape[-1] != shape[-2] and flip(place)

    return change


def _type(name: str) -> Change:
    def change(place: Place) -> bool:
        place.op.type = name
        return True

    return change


def _const(port: str, change_value: Callable[[Any], Any]) -> Change:
    """Another value, of the same shape, for the constant behind an input."""

    def change(place: Place) -> bool:
        const = place.own_const(port)
        if const is None:
            return False
        tensor = const.attr["value"].t
        kind = _TYPES[tensor.desc.dtype]
        old = np.frombuffer(tensor.data, kind).reshape(tuple(tensor.desc.shape.dim))
        new: Any = np.asarray(change_value(old.copy())).astype(kind)
        if new.shape != old.shape or np.array_equal(new, old):
            return False
        tensor.data = new.tobytes()
        return True

    return change


def _bytes(place: Place) -> bool:
    place.op.attr["value"].t.data = place.op.attr["value"].t.data[:-1]
    return True


def _const_dtype(place: Place) -> bool:
    """An integer constant says it is a float of the same size."""
    tensor = place.op.attr["value"].t
    if tensor.desc.dtype != 7:
        return False
    tensor.desc.dtype = place.op.output_desc[0].dtype = 1
    return True


def _rewired(place: Place) -> bool:
    """The first input comes from a weight of another shape."""
    for op in place.graph.op[: place.index]:
        if op.type == "FileConstant" and not place.op.input[0].startswith(f"{op.name}:"):
            place.op.input[0] = f"{op.name}:0"
            return True
    return False


def _last(value: int) -> Callable[[Any], Any]:
    def change(old: Any) -> Any:
        old.reshape(-1)[-1:] += value
        return old

    return change


_STATIC: dict[str, tuple[str, Change]] = {
    "a name is used twice": (r"Add|Reshape", _same_name),
    "an edge comes from nowhere": (r"Mul|Reshape", _missing_producer),
    "an edge comes from an output that is not there": (r"Mul|MatMul", _missing_output),
    "an operator stands behind its readers": (r"Rsqrt|Sigmoid|MatMul", _later),
    "an operator is gone": (r"Rsqrt|MatMul|Transpose", _dropped),
    "there is no NetOutput": (r"NetOutput", _dropped),
    "there are two NetOutput": (r"NetOutput", _twice),
    "an edge is gone": (r"Add|ConcatV2|SelectV2", _fewer_edges),
    "a result is not read": (r"Add|Transpose", _unread),
    "an input has another name": (r"Mul|MatMul|GatherV2", _port("input")),
    "an output has another name": (r"SoftmaxV2|TopKV2|SelectV2", _port("output")),
    "port names are listed otherwise": (r"Mul|GatherV2", _listed_port),
    "input names change places": (r"GatherV2|SelectV2|StridedSliceV2", _swapped_ports),
    "an output is not described": (r"TopKV2|SplitV|Sort", _fewer_outputs),
    "an input has another dtype": (r"Data", _descriptor(dtype=2)),
    "an input has one dimension more": (r"Data", _descriptor(dim=5)),
    "a state has another dtype": (r"RefData", _descriptor(dtype=7)),
    "a state is not written in place": (r"RefData", _type("Data")),
    "an input is numbered twice": (r"Data", _int("index", 1)),
    "an output is declared otherwise": (r"NetOutput", _descriptor(dtype=9)),
    "two outputs change places": (r"NetOutput", _outputs_swapped),
    "a cast has another target": (r"Cast", _int("dst_type", 12)),
    "a cast has an unknown target": (r"Cast", _int("dst_type", 77)),
    "a cast has no target": (r"Cast", _without("dst_type")),
    "keep_dims is flipped": (r"Reduce\w+", _flipped("keep_dims")),
    "a reduced axis is outside": (r"Reduce\w+", _const("axes", lambda old: old + 9)),
    "the number of parts is wrong": (r"SplitV", _int("num_split", 5)),
    "parts do not add up": (r"SplitV", _const("size_splits", lambda old: old * 0 + 1)),
    "the number of joined tensors is wrong": (r"ConcatV2", _int("N", 9)),
    "tensors are joined along another axis": (r"ConcatV2", _const("concat_dim", _last(7))),
    "a product turns its left side": (r"MatMul", _flipped("transpose_x1")),
    "a product turns its right side": (r"MatMul", _turned("transpose_x2", "x2")),
    "a shape has other dimensions": (r"Reshape", _const("shape", lambda old: old * 0 + 3)),
    "an order of axes repeats one": (r"Transpose", _const("perm", lambda old: old * 0)),
    "an expanded shape differs": (r"BroadcastTo", _const("shape", lambda old: old + 1)),
    "a slice starts behind its end": (r"StridedSliceV2", _const("begin", lambda old: old + 10**6)),
    "a slice is of an axis outside": (r"StridedSliceV2", _const("axes", lambda old: old + 8)),
    "gathered along an axis outside": (r"GatherV2", _const("axis", lambda old: old + 8)),
    "softmax over an axis outside": (r"SoftmaxV2", _ints("axes", 8)),
    "more is taken than there is": (r"TopKV2", _const("k", lambda old: old + 10**6)),
    "an argmax counts in float": (r"ArgMaxV2", _dtype("dtype", 0)),
    "new axes are outside": (r"Unsqueeze", _ints("axes", 9)),
    "an axis is removed that is not 1": (r"Squeeze", _ints("axis", 0)),
    "a range has no step": (r"Range", _const("delta", lambda old: old * 0)),
    "a range is longer": (r"Range", _const("limit", _last(3))),
    "a filled shape is empty": (r"Fill", _const("dims", lambda old: old * 0)),
    "an attribute nobody declares": (r"Mul|Add", _int("colour", 3)),
    "an attribute of another type": (r"GatherV2|TopKV2", _text("batch_dims", b"0")),
    "a required attribute is gone": (r"SplitV|Pack|FileConstant", _without("shape")),
    "an unknown operator": (r"Add|Rsqrt", _type("Frobnicate")),
    "a comparison in place of a sum": (r"Add", _type("Less")),
    "a logical operator in place of a product": (r"Mul", _type("LogicalAnd")),
    "a constant lacks a byte": (r"Const", _bytes),
    "a constant says another dtype": (r"Const", _const_dtype),
    "a weight in an absolute place": (r"FileConstant", _text("file_path", b"/data/w")),
    "a weight outside the package": (r"FileConstant", _text("file_path", b"../w")),
    "a weight that is not there": (r"FileConstant", _text("file_path", b"weights/none")),
    "a weight of another shape": (r"FileConstant", _ints("shape", 3, 1)),
    "a weight of another dtype": (r"FileConstant", _dtype("dtype", 2)),
    "an edge from another weight": (r"MatMul", _rewired),
    "a debugging note": (r"Add", _text("_meta", b"Tensor(dtype=torch.float32)")),
    "an address": (r"Add", _text("_origin", b"RefData_8_140156806954064")),
    "a path": (r"Add", _text("_origin", b"file /home/somebody/model.py")),
}


# Changes of meaning


def _swapped(place: Place) -> bool:
    """Two operands change places."""
    op = place.op
    return op.input[0] != op.input[1] and _exchanged(op, 0, 1)


def _branches(place: Place) -> bool:
    op = place.op
    return op.input[1] != op.input[2] and _exchanged(op, 1, 2)


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


def _float(name: str, factor: float) -> Change:
    def change(place: Place) -> bool:
        if name not in place.op.attr:
            return False
        place.op.attr[name].f = place.op.attr[name].f * factor
        return True

    return change


def _scaled(port: str, factor: float) -> Change:
    """A float constant behind an operand, where it is a scalar: an epsilon, a scale."""

    def value(old: Any) -> Any:
        return old * factor if old.dtype.kind == "f" and prod(old.shape) == 1 else old

    return _const(port, value)


def _earlier(old: Any) -> Any:
    bounded = (old > 0).all() and (old < 10**9).all()
    return old - 1 if bounded else old


_VALUES: dict[str, tuple[str, Change]] = {
    "operands change places": (r"Sub|RealDiv|Less|LessEqual|Greater|GreaterEqual", _swapped),
    "branches change places": (r"SelectV2", _branches),
    "a sum becomes a difference": (r"Add", _type("Sub")),
    "a product becomes a sum": (r"Mul", _type("Add")),
    "less becomes less or equal": (r"Less", _type("LessEqual")),
    "less or equal becomes less": (r"LessEqual", _type("Less")),
    "equal becomes unequal": (r"Equal", _type("NotEqual")),
    "and becomes or": (r"LogicalAnd", _type("LogicalOr")),
    "greatest becomes least": (r"Maximum", _type("Minimum")),
    "a mean becomes a sum": (r"ReduceMean", _summed),
    "a sum becomes a maximum": (r"ReduceSum", _type("ReduceMax")),
    "a cosine becomes a sine": (r"Cos", _type("Sin")),
    "a sigmoid becomes a tanh": (r"Sigmoid", _type("Tanh")),
    "a reciprocal root becomes a root": (r"Rsqrt", _type("Sqrt")),
    "the smallest are taken": (r"TopKV2", _flipped("largest")),
    "a sum runs backwards": (r"Cumsum", _flipped("reverse")),
    "a sum leaves its row out": (r"Cumsum", _flipped("exclusive")),
    "an epsilon or a factor is another": (r"Add|Mul", _scaled("x2", 3.0)),
    "a norm has another epsilon": (r"RmsNorm", _float("epsilon", 1e3)),
    "attention has another scale": (r"FusedInferAttentionScore", _float("scale", 2.0)),
    "the delta rule has another scale": (r"RecurrentGatedDeltaRule", _float("scale_value", 2.0)),
    "weights change places": (r"FileConstant", _other_weight),
    "a slice starts and ends one earlier": (
        r"StridedSliceV2",
        lambda place: _const("begin", _earlier)(place) and _const("end", _earlier)(place),
    ),
}
