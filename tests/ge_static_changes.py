"""Changes that make a GE graph wrong by its structure, its prototypes or its shapes."""

from collections.abc import Callable
from typing import Any

from tests.ge_changes import (
    Change,
    Place,
    constant,
    dtype,
    exchanged,
    flipped,
    integer,
    integers,
    other_type,
    text,
    without,
)


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
    return exchanged(place.op, 0, 1)


def _turned(name: str, port: str) -> Change:
    """A transposition more or less, of an input that is not square."""
    flip = flipped(name)

    def change(place: Place) -> bool:
        source = place.producer(port)
        assert source is not None
        shape = list(source.output_desc[0].shape.dim)
        return len(shape) >= 2 and shape[-1] != shape[-2] and flip(place)

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


STATIC: dict[str, tuple[str, Change]] = {
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
    "a state is not written in place": (r"RefData", other_type("Data")),
    "an input is numbered twice": (r"Data", integer("index", 1)),
    "an output is declared otherwise": (r"NetOutput", _descriptor(dtype=9)),
    "two outputs change places": (r"NetOutput", _outputs_swapped),
    "a cast has another target": (r"Cast", integer("dst_type", 12)),
    "a cast has an unknown target": (r"Cast", integer("dst_type", 77)),
    "a cast has no target": (r"Cast", without("dst_type")),
    "keep_dims is flipped": (r"Reduce\w+", flipped("keep_dims")),
    "a reduced axis is outside": (r"Reduce\w+", constant("axes", lambda old: old + 9)),
    "the number of parts is wrong": (r"SplitV", integer("num_split", 5)),
    "parts do not add up": (r"SplitV", constant("size_splits", lambda old: old * 0 + 1)),
    "the number of joined tensors is wrong": (r"ConcatV2", integer("N", 9)),
    "tensors are joined along another axis": (r"ConcatV2", constant("concat_dim", _last(7))),
    "a product turns its left side": (r"MatMul", flipped("transpose_x1")),
    "a product turns its right side": (r"MatMul", _turned("transpose_x2", "x2")),
    "a shape has other dimensions": (r"Reshape", constant("shape", lambda old: old * 0 + 3)),
    "an order of axes repeats one": (r"Transpose", constant("perm", lambda old: old * 0)),
    "an expanded shape differs": (r"BroadcastTo", constant("shape", lambda old: old + 1)),
    "a slice starts behind its end": (
        r"StridedSliceV2",
        constant("begin", lambda old: old + 10**6),
    ),
    "a slice is of an axis outside": (r"StridedSliceV2", constant("axes", lambda old: old + 8)),
    "gathered along an axis outside": (r"GatherV2", constant("axis", lambda old: old + 8)),
    "softmax over an axis outside": (r"SoftmaxV2", integers("axes", 8)),
    "more is taken than there is": (r"TopKV2", constant("k", lambda old: old + 10**6)),
    "an argmax counts in float": (r"ArgMaxV2", dtype("dtype", 0)),
    "new axes are outside": (r"Unsqueeze", integers("axes", 9)),
    "an axis is removed that is not 1": (r"Squeeze", integers("axis", 0)),
    "a range has no step": (r"Range", constant("delta", lambda old: old * 0)),
    "a range is longer": (r"Range", constant("limit", _last(3))),
    "a filled shape is empty": (r"Fill", constant("dims", lambda old: old * 0)),
    "an attribute nobody declares": (r"Mul|Add", integer("colour", 3)),
    "an attribute of another type": (r"GatherV2|TopKV2", text("batch_dims", b"0")),
    "a required attribute is gone": (r"SplitV|Pack|FileConstant", without("shape")),
    "an unknown operator": (r"Add|Rsqrt", other_type("Frobnicate")),
    "a comparison in place of a sum": (r"Add", other_type("Less")),
    "a logical operator in place of a product": (r"Mul", other_type("LogicalAnd")),
    "a constant lacks a byte": (r"Const", _bytes),
    "a constant says another dtype": (r"Const", _const_dtype),
    "a weight in an absolute place": (r"FileConstant", text("file_path", b"/data/w")),
    "a weight outside the package": (r"FileConstant", text("file_path", b"../w")),
    "a weight that is not there": (r"FileConstant", text("file_path", b"weights/none")),
    "a weight of another shape": (r"FileConstant", integers("shape", 3, 1)),
    "a weight of another dtype": (r"FileConstant", dtype("dtype", 2)),
    "an edge from another weight": (r"MatMul", _rewired),
    "a debugging note": (r"Add", text("_meta", b"Tensor(dtype=torch.float32)")),
    "an address": (r"Add", text("_origin", b"RefData_8_140156806954064")),
    "a path": (r"Add", text("_origin", b"file /home/somebody/model.py")),
}
