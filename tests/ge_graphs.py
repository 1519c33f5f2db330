"""Small GE graphs built by hand, with the descriptors and port names that torchair writes."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from qwen_mtp.errors import MissingExtraError
from qwen_mtp.ge.overlay import corrected
from qwen_mtp.ge.proto import ATTRIBUTE_CODES, TENSOR_TYPES
from qwen_mtp.ge.prototypes import Prototypes, wheel_prototypes
from qwen_mtp.ge.wheel import find_wheel, messages
from qwen_mtp.graphs.spec import GraphSpec, TensorSpec


def _has_wheel() -> bool:
    try:
        messages()
    except MissingExtraError:
        return False
    return True


needs_wheel = pytest.mark.skipif(not _has_wheel(), reason="torch_npu is not there to be read")


@cache
def declared() -> Prototypes:
    """The wheel's prototypes as they are."""
    return wheel_prototypes(find_wheel().torchair)


@cache
def prototypes() -> Prototypes:
    """The wheel's prototypes, corrected."""
    return corrected(declared())


class Type:
    """A dtype in an attribute, by its name in the graph tables."""

    def __init__(self, name: str) -> None:
        self.code = ATTRIBUTE_CODES[TENSOR_TYPES[name]]


class GraphBuilder:
    """Adds operators one after the other; every method answers with an edge."""

    def __init__(self) -> None:
        self.model = messages().ModelDef(name="graph")
        self.graph = self.model.graph.add(name="graph")

    def op(
        self,
        op_type: str,
        inputs: Mapping[str, str] | None = None,
        outputs: Sequence[str] = ("y",),
        name: str = "",
        **attributes: Any,
    ) -> str:
        """An operator; an input of "" is left out. Dtypes stay those nobody knows."""
        inputs = inputs or {}
        op = self.graph.op.add(name=name or f"{op_type}/{len(self.graph.op)}", type=op_type)
        op.input.extend(inputs.values())
        for port in inputs:
            op.input_desc.add(name=port, layout="ND", dtype=1)
        for port in outputs:
            op.output_desc.add(name=port, layout="ND", dtype=1)
        for key, value in attributes.items():
            _set(op.attr[key], value)
        self._ports(op)
        return f"{op.name}:0"

    def data(self, name: str, dtype: str, shape: Sequence[int], kind: str = "Data") -> str:
        """A graph input."""
        index = sum(op.type in ("Data", "RefData") for op in self.graph.op)
        edge = self.op(kind, name=name, index=index)
        op = self.graph.op[-1]
        op.input_desc.add(name="x")
        for desc in (*op.input_desc, *op.output_desc):
            _describe(desc, dtype, shape)
        self._ports(op)
        return edge

    def const(self, value: npt.ArrayLike, dtype: str = "int64") -> str:
        """A constant."""
        array = np.asarray(value, dtype)
        edge = self.op("Const", outputs=("",))
        op = self.graph.op[-1]
        tensor = op.attr["value"].t
        tensor.data = array.tobytes()
        for desc in (tensor.desc, op.output_desc[0]):
            _describe(desc, dtype, array.shape)
        return edge

    def weight(self, name: str, dtype: str, shape: Sequence[int]) -> str:
        """A weight in the file ``weights/<name>``."""
        edge = self.op(
            "FileConstant",
            name=name,
            file_path=f"weights/{name}",
            file_id=name,
            shape=list(shape),
            dtype=Type(dtype),
        )
        _describe(self.graph.op[-1].output_desc[0], dtype, shape)
        return edge

    def end(self, outputs: Sequence[tuple[str, str, Sequence[int]]]) -> Any:
        """``NetOutput`` of (edge, dtype, shape); answers with the model."""
        self.op(
            "NetOutput",
            {f"input{i}": edge for i, (edge, _, _) in enumerate(outputs)},
            (),
            name="NetOutput",
        )
        descs = self.graph.op[-1].input_desc
        for desc, (_, dtype, shape) in zip(descs, outputs, strict=True):
            _describe(desc, dtype, shape)
        return self.model

    def _ports(self, op: Any) -> None:
        for side, descs in (("input", op.input_desc), ("output", op.output_desc)):
            for part, values in (
                ("key", [d.name.encode() for d in descs]),
                ("value", list(range(len(descs)))),
            ):
                op.attr.pop(f"_{side}_name_{part}", None)
                _set(op.attr[f"_{side}_name_{part}"], values)


def _describe(desc: Any, dtype: str, shape: Sequence[int]) -> None:
    desc.dtype = messages().DataType.Value(TENSOR_TYPES[dtype])
    desc.layout = "ND"
    desc.shape.dim[:] = shape


def _set(attribute: Any, value: Any) -> None:
    if isinstance(value, Type):
        attribute.dt = value.code
    elif isinstance(value, bool):
        attribute.b = value
    elif isinstance(value, int):
        attribute.i = value
    elif isinstance(value, float):
        attribute.f = value
    elif isinstance(value, str):
        attribute.s = value.encode()
    elif value and isinstance(value[0], bytes):
        attribute.list.s.extend(value)
    else:
        attribute.list.i.extend(value)
        attribute.list.val_type = 2


def layer() -> Any:
    """A graph of every shape of rule: a norm, products, a pool that changes, a draw."""
    b = GraphBuilder()
    ids = b.data("ids", "int32", (4,))
    start = b.data("start", "int32", (1,))
    table = b.weight("embed", "float32", (16, 8))
    weight = b.weight("up", "float32", (12, 8))
    pool = b.data("pool", "float32", (6, 2, 3), "RefData")
    zero, minus, one = b.const(0), b.const([-1]), b.const(1)
    x = b.op("GatherV2", {"x": table, "indices": ids, "axis": zero}, batch_dims=0)
    square = b.op("Mul", {"x1": x, "x2": x})
    mean = b.op("ReduceMean", {"x": square, "axes": minus}, keep_dims=True)
    shifted = b.op("Add", {"x1": mean, "x2": b.const(0.05, "float32")})
    normed = b.op("Mul", {"x1": x, "x2": b.op("Rsqrt", {"x": shifted})})
    up = b.op(
        "MatMul",
        {"x1": normed, "x2": weight, "bias": ""},
        transpose_x1=False,
        transpose_x2=True,
    )
    b.op(
        "SplitV",
        {"x": up, "size_splits": b.const([6, -1]), "split_dim": b.const(1, "int32")},
        ("y0", "y1"),
        name="split",
        num_split=2,
    )
    rows = b.op("Reshape", {"x": "split:0", "shape": b.const([4, 2, 3])})
    where = b.op(
        "Range",
        {"start": b.const(0, "int32"), "limit": b.const(4, "int32"), "delta": b.const(1, "int32")},
    )
    slots = b.op("Add", {"x1": where, "x2": start})
    slots = b.op("Unsqueeze", {"x": slots}, axes=[-1])
    b.op(
        "ScatterNdUpdate",
        {"var": pool, "indices": slots, "updates": rows},
        ("var",),
        name="write",
        use_locking=False,
    )
    read = b.op("Transpose", {"x": "write:0", "perm": b.const([1, 0, 2])})
    chosen = b.op(
        "StridedSliceV2",
        {
            "x": read,
            "begin": b.const([0]),
            "end": b.const([4]),
            "axes": b.const([1]),
            "strides": b.const([1]),
        },
    )
    scores = b.op("BatchMatMul", {"x1": chosen, "x2": chosen}, adj_x1=False, adj_x2=True)
    causal = b.op("LessEqual", {"x1": where, "x2": b.op("Unsqueeze", {"x": where}, axes=[1])})
    wide = b.op("BroadcastTo", {"x": causal, "shape": b.const([2, 4, 4])})
    low = b.op("Fill", {"dims": b.const([2, 4, 4]), "value": b.const(-1e9, "float32")})
    masked = b.op("SelectV2", {"condition": wide, "then": scores, "else": low}, ("result",))
    law = b.op("SoftmaxV2", {"x": masked}, axes=[-1], half_to_float=False)
    mixed = b.op("BatchMatMul", {"x1": law, "x2": chosen}, adj_x1=False, adj_x2=False)
    back = b.op("Transpose", {"x": mixed, "perm": b.const([1, 0, 2])})
    flat = b.op("Reshape", {"x": back, "shape": b.const([4, -1])})
    both = b.op("ConcatV2", {"x0": flat, "x1": "split:1", "concat_dim": one}, name="hidden", N=2)
    b.op(
        "TopKV2",
        {"x": both, "k": b.const(3, "int32")},
        ("values", "indices"),
        name="top",
        sorted=True,
        dim=-1,
        largest=True,
    )
    best = b.op("ArgMaxV2", {"x": "top:0", "dimension": one}, dtype=Type("int64"))
    picked = b.op(
        "GatherElements",
        {"x": "top:1", "index": b.op("Unsqueeze", {"x": best}, axes=[1])},
        dim=1,
    )
    tokens = b.op("Squeeze", {"x": picked}, axis=[1])
    tokens = b.op("Cast", {"x": tokens}, name="tokens", dst_type=3)
    return b.end([("hidden:0", "float32", (4, 12)), (tokens, "int32", (4,))])


SPEC = GraphSpec(
    name="graph",
    kind="prefill",
    rows=4,
    lookahead=0,
    inputs=(
        TensorSpec("ids", "int32", (4,)),
        TensorSpec("start", "int32", (1,)),
        TensorSpec("pool", "float32", (6, 2, 3), "pool"),
    ),
    outputs=(
        TensorSpec("hidden", "float32", (4, 12)),
        TensorSpec("tokens", "int32", (4,)),
    ),
)


def weights(folder: Path) -> None:
    """Write the weights of :func:`layer`."""
    (folder / "weights").mkdir()
    rng = np.random.default_rng(0)
    for name, shape in (("embed", (16, 8)), ("up", (12, 8))):
        values = rng.standard_normal(shape).astype(np.float32)
        (folder / "weights" / name).write_bytes(values.tobytes())
