"""One ONNX model that holds every graph of a package.

ONNX Runtime shares packed weights between the nodes of one session, never between sessions, so
the graphs live in one model: each is the ``then`` branch of an If that compares the scalar input
``graph`` with the graph's index; the other branch answers with empty tensors. A run binds the
inputs and outputs of its graph only (docs/adr/0003).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import GraphBuilder
from torch._subclasses.fake_tensor import FakeTensorMode

from qwen_mtp.config import ModelConfig
from qwen_mtp.custom_ops.linear import FLAT
from qwen_mtp.custom_ops.operator import MICROSOFT, NAMESPACE, const
from qwen_mtp.export.lowering import input_values, lower, trace
from qwen_mtp.graphs.layers import weight_groups
from qwen_mtp.graphs.manifest import SELECTOR
from qwen_mtp.graphs.model import Graph, Model
from qwen_mtp.graphs.signature import graph_specs
from qwen_mtp.graphs.spec import Geometry, GraphSpec
from qwen_mtp.graphs.weights import PAGE, StoredTensor, WeightGroup

OPSET = 24
IR_VERSION = 11
WEIGHTS_FILE = "weights.bin"
_ONNX = {"float32": ir.DataType.FLOAT, "int32": ir.DataType.INT32}
_STORED = {"float32": ir.DataType.FLOAT, "int8": ir.DataType.INT8, "uint8": ir.DataType.UINT8}


class Composer:
    """Builds the model of a package from its configuration alone; weights stay in their file."""

    def __init__(self, config: ModelConfig, geometry: Geometry) -> None:
        """Build the fake modules and lay the weight file out."""
        self._mode = FakeTensorMode()
        with self._mode:
            self._model = Model(config, geometry)
        self.specs: tuple[GraphSpec, ...] = graph_specs(config, geometry)
        self.groups: tuple[WeightGroup, ...] = tuple(weight_groups(self._model))
        self.stored: tuple[StoredTensor, ...] = _layout(self._model)

    def compose(self, progress: Callable[[str], None]) -> ir.Model:
        """Trace and lower every graph.

        Args:
            progress: Called with the name of each graph before it is traced.

        Raises:
            ExportError: A module uses a torch operator without an ONNX form.
        """
        imports = {"": OPSET, MICROSOFT: 1, NAMESPACE: 1}
        root = ir.Graph([], [], nodes=[], name=NAMESPACE, opset_imports=imports)
        builder = GraphBuilder(root)
        weights = {t.name: builder.initializer(_external(t), qualify=False) for t in self.stored}
        selector = builder.input(SELECTOR, dtype=ir.DataType.INT32, shape=[])
        for index, spec in enumerate(self.specs):
            progress(spec.name)
            self._add(builder, selector, index, spec, weights)
        functions = list(builder.functions.values())
        for node in (
            *ir.traversal.RecursiveGraphIterator(root),
            *(n for f in functions for n in f),
        ):
            node.metadata_props.clear()  # scope notes of the builder: megabytes in every session
        return ir.Model(
            root,
            ir_version=IR_VERSION,
            functions=functions,
            producer_name="qwen-mtp",
            producer_version=version("qwen-mtp"),
        )

    def _add(
        self,
        builder: GraphBuilder,
        selector: ir.Value,
        index: int,
        spec: GraphSpec,
        weights: Mapping[str, ir.Value],
    ) -> None:
        with self._mode:
            program = trace(Graph(self._model, spec))
        inputs = input_values(spec)
        builder.graph.inputs.extend(inputs)
        builder.push_module(spec.name)
        chosen = builder.op.Equal(selector, const(builder.op, np.array(index, np.int32)))
        outputs = builder.op.If(
            chosen,
            then_branch=_branch(builder, spec, lambda op: lower(program, op, inputs, weights)),
            else_branch=_branch(builder, spec, lambda op: _nothing(op, spec)),
            _outputs=len(spec.outputs),
        )
        builder.pop_module()
        for value, tensor in zip(outputs, spec.outputs, strict=True):
            value.type = ir.TensorType(_ONNX[tensor.dtype])
            builder.add_output(value, f"{spec.name}/{tensor.name}")


def _branch(
    builder: GraphBuilder, spec: GraphSpec, trace_branch: Callable[[Any], Sequence[ir.Value]]
) -> ir.Graph:
    outputs = [ir.Value(type=ir.TensorType(_ONNX[t.dtype])) for t in spec.outputs]
    return builder.subgraph(trace_branch, [], outputs, name=spec.name)


def _nothing(op: Any, spec: GraphSpec) -> list[ir.Value]:
    """An empty tensor for each output, made by one node for each dtype."""
    empty: dict[str, Iterator[ir.Value]] = {}
    for dtype, kind in (("float32", np.float32), ("int32", np.int32)):
        count = sum(tensor.dtype == dtype for tensor in spec.outputs)
        sizes = const(op, np.zeros(count, np.int64))
        parts = op.Split(const(op, np.zeros(0, kind)), sizes, axis=0, _outputs=count)
        empty[dtype] = iter([parts] if count == 1 else parts)
    return [next(empty[tensor.dtype]) for tensor in spec.outputs]


def _layout(model: Model) -> tuple[StoredTensor, ...]:
    stored, offset = [], 0
    for name, param in model.named_parameters():
        dtype = str(param.dtype).removeprefix("torch.")
        tensor = StoredTensor(name, dtype, tuple(param.shape), offset)  # type: ignore[arg-type]
        stored.append(tensor)
        offset += -(-tensor.nbytes // PAGE) * PAGE
    places = {tensor.name: tensor for tensor in stored}
    for group in weight_groups(model):
        if group.recipe == "table" and group.format == "int4":
            packed = places[group.params[0]]
            flat = (packed.shape[0], packed.nbytes // packed.shape[0])
            name = f"{packed.name}.{FLAT}"
            stored.append(StoredTensor(name, packed.dtype, flat, packed.offset))
    return tuple(stored)


def _external(tensor: StoredTensor) -> ir.ExternalTensor:
    return ir.ExternalTensor(
        WEIGHTS_FILE,
        tensor.offset,
        tensor.nbytes,
        _STORED[tensor.dtype],
        shape=ir.Shape(tensor.shape),
        name=tensor.name,
    )
