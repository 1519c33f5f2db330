"""Standard ONNX: a model for each graph, in operators of ``ai.onnx`` and nothing else.

For what reads ONNX but not the operators of ONNX Runtime, such as ATC's parser. It starts from
the trace of every other back end: the operators of the product are replaced by their decomposed
forms, and aten becomes ONNX one node at a time. Every dimension is a number, there are no
functions and no subgraphs, and the models share the weight file beside them (docs/adr/0009).
"""

import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, RemoveUnusedNodesPass
from onnxscript import GraphBuilder
from torch.export import ExportedProgram

from qwen_mtp.custom_ops.linear import EMBEDDING, LINEAR
from qwen_mtp.custom_ops.torch_library import OPERATORS
from qwen_mtp.export.blueprint import Blueprint
from qwen_mtp.export.compose import WEIGHTS_FILE, external, finished
from qwen_mtp.export.form import Form
from qwen_mtp.export.lowering import OWN, lower
from qwen_mtp.export.plan import Plan
from qwen_mtp.export.standard_forms import DECOMPOSED, scatter_rows
from qwen_mtp.graphs.spec import GraphSpec, TensorSpec
from qwen_mtp.progress import Progress

# Every release of ATC's parser that was looked at registers all operators used here for opset 13,
# and none does for 18: Round, MatMulInteger and ScatterElements end earlier.
OPSET = 13
IR_VERSION = 7
MODEL_FILE = "{graph}.onnx"
SCRIPT = "atc-onnx.sh"
# What is not decomposed. A linear layer is a Gemm already, which takes the weight as it is stored.
_KEPT = {"scatter_rows": scatter_rows, "linear": LINEAR.onnx, "embedding": EMBEDDING.onnx}
_FORMS = DECOMPOSED | {OWN[name]: form for name, form in _KEPT.items()}
_DECOMPOSITIONS = {
    OWN[o.name]: o.decomposed for o in OPERATORS if o.decomposed and o.name not in _KEPT
}
_TYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "int32": ir.DataType.INT32,
}

_ATC = """\
#!/bin/sh
# Compiles the ONNX models of this folder with ATC. Needs CANN: source its set_env.sh first.
#
#   sh atc-onnx.sh                             all graphs
#   SOC_VERSION=Ascend910B3 sh atc-onnx.sh     for another chip
#
# 310P needs an export with --format fp16: it has no products of float32.
# The weights lie in one file that the models name relative to this folder, so ATC runs in it.
# Types are kept as they are in the models.
set -eu
cd "$(dirname "$0")"
SOC_VERSION="${{SOC_VERSION:-Ascend910B4}}"
command -v atc >/dev/null || {{
  echo "error: atc not found; source CANN's set_env.sh" >&2
  exit 1
}}
mkdir -p om
for graph in {graphs}; do
  echo "atc: $graph for $SOC_VERSION" >&2
  atc --framework=5 --model="$graph.onnx" --output="om/$graph" --soc_version="$SOC_VERSION" \\
    --input_format=ND --precision_mode_v2=origin --deterministic=1 --log=error "$@"
done
"""
_README = """\
# Graphs in standard ONNX

One Qwen checkpoint{head}: a model for each graph of `manifest.json`, opset {opset}, operators of
`ai.onnx` alone, every dimension a number. `qwen-mtp verify` checks them with ONNX Runtime;
`verification` in `manifest.json` has what it found, or `null` where it did not run. When they were
written, none had been compiled or run on an NPU.

| file | what |
|---|---|
| `manifest.json` | graphs, states, weights and how they were made |
| `*.onnx` | one model for each graph |
| `weights.bin` | the weights of all models, as ONNX external data: keep it beside them |
| `golden.npz` | where there is one: values of the torch definition, for `qwen-mtp verify` |
| `atc-onnx.sh` | the ATC commands |

Other files are copies of the checkpoint's.

Where ATC is at hand: `source` CANN's `set_env.sh`, then `sh atc-onnx.sh`. In this folder, it runs

    {command}

`SOC_VERSION=NAME sh atc-onnx.sh` is for another chip; 310P needs an export with `--format fp16`.

A state is an input and an output, `<state>` and `<state>.out`. What a graph gave as `<state>.out`
is the `<state>` of the next one; the two may share memory where a state is a key/value pool
(`*.key`, `*.value`), and only there. `qwen-mtp run` on the package does all this on a CPU; it does
not drive the compiled models.
"""
_HEAD = " with its MTP head"
_COMMAND = (
    "atc --framework=5 --model={graph}.onnx --output=om/{graph} --soc_version=Ascend910B4 "
    "--input_format=ND --precision_mode_v2=origin --deterministic=1 --log=error"
)


def write_standard(plan: Plan, directory: Path, progress: Progress) -> Form:
    """Write ``<graph>.onnx`` for each graph and the ATC commands; the weights are the caller's.

    Raises:
        ExportError: An operator has no standard form.
        OSError: A file cannot be written.
    """
    for spec in plan.blueprint.specs:
        progress.phase(f"graph {spec.name}")
        ir.save(standard_model(plan.blueprint, spec), directory / f"{spec.name}.onnx")
    names = [spec.name for spec in plan.blueprint.specs]
    (directory / SCRIPT).write_text(_ATC.format(graphs=" ".join(names)), encoding="utf-8")
    (directory / "README.md").write_text(_note(plan, names), encoding="utf-8")
    tools = {name: version(name) for name in ("onnx-ir", "onnxscript")}
    return Form("onnxruntime", MODEL_FILE, WEIGHTS_FILE, tools)


def standard_model(blueprint: Blueprint, spec: GraphSpec) -> ir.Model:
    """One graph as a model of its own.

    Its inputs and outputs have the names of the signature; states that other back ends change in
    place follow as outputs ``<state>.out``.

    Raises:
        ExportError: An operator has no standard form.
    """
    root = ir.Graph([], [], nodes=[], name=spec.name, opset_imports={"": OPSET})
    builder = GraphBuilder(root)
    stored = {t.name: builder.initializer(external(t), qualify=False) for t in blueprint.stored}
    inputs = [ir.val(t.name, dtype=_TYPES[t.dtype], shape=t.shape) for t in spec.inputs]
    root.inputs.extend(inputs)
    program = _decomposed(blueprint.trace(spec))
    outputs = lower(program, builder.op, inputs, stored, _FORMS)
    _name_outputs(builder, outputs, spec.all_outputs)
    model = finished(root, builder)
    model.ir_version = IR_VERSION
    RemoveUnusedNodesPass()(model)
    CommonSubexpressionEliminationPass()(model)  # layers compute the same masks and slots
    return model


def _note(plan: Plan, graphs: Sequence[str]) -> str:
    head = _HEAD if plan.geometry.lookaheads else ""
    commands = ("mkdir -p om", *(_COMMAND.format(graph=graph) for graph in graphs))
    return _README.format(head=head, opset=OPSET, command="\n    ".join(commands))


def _decomposed(program: ExportedProgram) -> ExportedProgram:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, about its own code
        result: ExportedProgram = program.run_decompositions(_DECOMPOSITIONS)
    return result


def _name_outputs(
    builder: GraphBuilder, values: Sequence[ir.Value], specs: Sequence[TensorSpec]
) -> None:
    taken: set[Any] = {*builder.graph.inputs, *builder.graph.initializers.values()}
    for value, tensor in zip(values, specs, strict=True):
        if value in taken:  # a value has one name
            value = builder.op.Identity(value)
        taken.add(value)
        value.type, value.shape = ir.TensorType(_TYPES[tensor.dtype]), ir.Shape(tensor.shape)
        builder.add_output(value, tensor.name)
