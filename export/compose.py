"""One ONNX model that holds every graph of a package.

ONNX Runtime shares packed weights between the nodes of one session, never between sessions, so
the graphs live in one model: each is the ``then`` branch of an If that compares the scalar input
``graph`` with the graph's index; the other branch answers with empty tensors. A run binds the
inputs and outputs of its graph only (docs/adr/0003).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import GraphBuilder

from qwen_mtp.custom_ops.operator import MICROSOFT, NAMESPACE, const
from qwen_mtp.export.aten import Form as Lowered
from qwen_mtp.export.blueprint import Blueprint
from qwen_mtp.export.form import Form
from qwen_mtp.export.lowering import NATIVE_FORMS, ONNX_FORMS, input_values, lower
from qwen_mtp.export.plan import Plan
from qwen_mtp.graphs.manifest import SELECTOR
from qwen_mtp.graphs.spec import GraphSpec
from qwen_mtp.graphs.weights import StoredTensor
from qwen_mtp.progress import Progress

OPSET = 24
IR_VERSION = 11
MODEL_FILE = "model.onnx"
NATIVE_FILE = "model.native.onnx"
WEIGHTS_FILE = "weights.bin"
_ONNX = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "int32": ir.DataType.INT32,
}
_STORED = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "int8": ir.DataType.INT8,
    "uint8": ir.DataType.UINT8,
    "int32": ir.DataType.INT32,
}


def write_onnx(plan: Plan, directory: Path, progress: Progress) -> Form:
    """Write ``model.onnx`` and its twin for native kernels; the weights are the caller's.

    Raises:
        ExportError: A module uses a torch operator without an ONNX form.
        OSError: The file cannot be written.
    """
    blueprint, programs = plan.blueprint, []
    for spec in blueprint.specs:
        progress.phase(f"graph {spec.name}")
        programs.append(blueprint.trace(spec, whole=True))
    for file, forms in ((MODEL_FILE, ONNX_FORMS), (NATIVE_FILE, NATIVE_FORMS)):
        progress.phase(file)
        ir.save(compose(blueprint, programs, forms), directory / file)
    tools = {name: version(name) for name in ("onnx-ir", "onnxscript")}
    return Form("onnxruntime", MODEL_FILE, WEIGHTS_FILE, tools, native_file=NATIVE_FILE)


def compose(
    blueprint: Blueprint,
    programs: Sequence[torch.export.ExportedProgram],
    forms: Mapping[Any, Lowered] = ONNX_FORMS,
) -> ir.Model:
    """Lower every graph into one model; weights stay in their file.

    Args:
        blueprint: What to build.
        programs: The traced graphs, composite operators whole.
        forms: What each operator becomes: ``NATIVE_FORMS`` has nodes of the domain ``qwen_mtp``.

    Raises:
        ExportError: A module uses a torch operator without an ONNX form.
    """
    imports = {"": OPSET, MICROSOFT: 1, NAMESPACE: 1}
    root = ir.Graph([], [], nodes=[], name=NAMESPACE, opset_imports=imports)
    builder = GraphBuilder(root)
    stored = {t.name: builder.initializer(external(t), qualify=False) for t in blueprint.stored}
    selector = builder.input(SELECTOR, dtype=ir.DataType.INT32, shape=[])
    for index, (spec, program) in enumerate(zip(blueprint.specs, programs, strict=True)):
        chosen = builder.op.Equal(selector, const(builder.op, np.array(index, np.int32)))
        inputs = input_values(spec)
        _add(builder, chosen, spec, inputs, partial(_lowered, program, inputs, stored, forms))
    return finished(root, builder)


def finished(root: ir.Graph, builder: GraphBuilder) -> ir.Model:
    """The model of a graph that is complete."""
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


def _lowered(
    program: torch.export.ExportedProgram,
    inputs: Sequence[ir.Value],
    weights: Mapping[str, ir.Value],
    forms: Mapping[Any, Lowered],
    op: Any,
) -> Sequence[ir.Value]:
    return lower(program, op, inputs, weights, forms)


def _add(
    builder: GraphBuilder,
    chosen: ir.Value,
    spec: GraphSpec,
    inputs: Sequence[ir.Value],
    emit: Callable[[Any], Sequence[ir.Value]],
) -> None:
    builder.graph.inputs.extend(inputs)
    builder.push_module(spec.name)
    outputs = builder.op.If(
        chosen,
        then_branch=_branch(builder, spec, emit),
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
    for dtype, count in Counter(tensor.dtype for tensor in spec.outputs).items():
        sizes = const(op, np.zeros(count, np.int64))
        parts = op.Split(const(op, np.zeros(0, dtype)), sizes, axis=0, _outputs=count)
        empty[dtype] = iter([parts] if count == 1 else parts)
    return [next(empty[tensor.dtype]) for tensor in spec.outputs]


def external(tensor: StoredTensor) -> ir.ExternalTensor:
    """The initializer of a stored tensor."""
    return ir.ExternalTensor(
        WEIGHTS_FILE,
        tensor.offset,
        tensor.nbytes,
        _STORED[tensor.dtype],
        shape=ir.Shape(tensor.shape),
        name=tensor.name,
    )
