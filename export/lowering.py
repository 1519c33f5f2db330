"""From a torch module to ONNX nodes: trace under fake tensors, then one form per FX node."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch.fx import Node

from qwen_mtp.custom_ops.operator import NAMESPACE, const
from qwen_mtp.custom_ops.torch_library import OPERATORS
from qwen_mtp.errors import ExportError
from qwen_mtp.export.aten import FORMS, NATIVE, ONNX_TYPES, Form
from qwen_mtp.graphs.layers import DTYPES
from qwen_mtp.graphs.model import Graph
from qwen_mtp.graphs.spec import DType, GraphSpec

TORCH_TYPES: dict[DType, torch.dtype] = {**DTYPES, "int32": torch.int32}
_INPUT_TYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "int32": ir.DataType.INT32,
}
_PLACEMENT = {"device", "layout", "pin_memory", "requires_grad"}
CHECKS = {torch.ops.aten._assert_tensor_metadata.default}  # hold by construction
OWN: dict[str, Any] = {
    o.name: getattr(getattr(torch.ops, NAMESPACE), o.name).default for o in OPERATORS
}
COMPOSITES: dict[Any, Callable[..., Any]] = {
    OWN[o.name]: o.composed for o in OPERATORS if o.composed is not None
}
ONNX_FORMS: dict[Any, Form] = FORMS | {
    OWN[o.name]: o.onnx for o in OPERATORS if o.composed is None
}
NATIVE_FORMS: dict[Any, Form] = (
    ONNX_FORMS | NATIVE | {OWN[o.name]: o.native for o in OPERATORS if o.native}
)


def trace(graph: Graph) -> torch.export.ExportedProgram:
    """Trace a graph whose parameters are fake: no weight is ever in memory.

    Must run inside the fake tensor mode that built the model.
    """
    inputs = tuple(torch.empty(t.shape, dtype=TORCH_TYPES[t.dtype]) for t in graph.spec.inputs)
    return torch.export.export(graph, inputs, strict=False)


def lower(
    program: torch.export.ExportedProgram,
    op: Any,
    inputs: Sequence[ir.Value],
    weights: Mapping[str, ir.Value],
    forms: Mapping[Any, Form] = ONNX_FORMS,
) -> list[ir.Value]:
    """Emit the nodes of a traced graph.

    Args:
        program: From :func:`trace`.
        op: The onnxscript ``OpBuilder`` of the graph that receives the nodes.
        inputs: Values for the user inputs, in order.
        weights: Initializers by parameter name of :class:`~qwen_mtp.graphs.model.Model`.
        forms: The ONNX form of each torch operator.

    Returns:
        The output values in order.

    Raises:
        ExportError: A torch operator has no ONNX form.
    """
    given = iter(inputs)
    params = program.graph_signature.inputs_to_parameters
    env: dict[Node, Any] = {}
    for node in program.graph.find_nodes(op="placeholder"):
        name = params.get(node.name)
        env[node] = weights[name.removeprefix("model.")] if name else next(given)
    return _Emitter(op, forms).run(program.graph, env)


class _Emitter:
    """Emits traced graphs: the one that is lowered, and inside it what composites are made of."""

    def __init__(self, op: Any, forms: Mapping[Any, Form]) -> None:
        self._op, self._forms = op, forms
        self._parts: dict[Any, torch.export.ExportedProgram] = {}

    def run(self, graph: torch.fx.Graph, env: dict[Node, Any]) -> list[Any]:
        """Emit the nodes of a graph whose placeholders are in ``env``; its outputs."""
        for node in graph.nodes:
            if node.op == "call_function" and node.target not in CHECKS:
                known = all(_is_known(env[source]) for source in node.all_input_nodes)
                env[node] = _evaluate(node, env) if known else self._emit(node, env)
            elif node.op == "output":
                return [_value(self._op, env[value]) for value in node.args[0]]
        raise AssertionError("a traced graph ends with its outputs")

    def _emit(self, node: Node, env: Mapping[Node, Any]) -> Any:
        if node.target is operator.getitem:
            source, index = node.args
            return env[source][index]  # type: ignore[index]
        form = self._forms.get(node.target)
        if form is None:
            return self._expand(node, env)
        keywords = {k: v for k, v in node.kwargs.items() if k not in _PLACEMENT}
        arguments = torch.fx.map_arg(
            (node.args, keywords), lambda source: _value(self._op, env[source])
        )
        values = form(self._op, *arguments[0], **arguments[1])
        _annotate(node.meta["val"], values)
        return values

    def _expand(self, node: Node, env: Mapping[Node, Any]) -> Any:
        """Emit the parts of a composite operator; layers of equal shapes are traced once."""
        composed = COMPOSITES.get(node.target)
        if composed is None:
            raise ExportError(f"{node.target}: this torch operator has no ONNX form")
        given = [a.meta["val"] if isinstance(a, Node) else a for a in node.args]
        key = (node.target, *(_signature(value) for value in given))
        if key not in self._parts:
            self._parts[key] = _trace_parts(composed, given)
        graph = self._parts[key].graph
        sources = (env[a] for a in node.args if isinstance(a, Node))
        places = graph.find_nodes(op="placeholder")
        values = self.run(graph, dict(zip(places, sources, strict=True)))
        return values if isinstance(node.meta["val"], list | tuple) else values[0]


def _signature(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else value


class _Parts(torch.nn.Module):
    """A composite operator as a module of its tensors."""

    def __init__(self, composed: Callable[..., Any], given: Sequence[Any]) -> None:
        super().__init__()
        self._composed, self._given = composed, given

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rest = iter(tensors)
        given = (next(rest) if isinstance(g, torch.Tensor) else g for g in self._given)
        found = self._composed(*given)
        return tuple(found) if isinstance(found, list | tuple) else (found,)


def _trace_parts(
    composed: Callable[..., Any], given: Sequence[Any]
) -> torch.export.ExportedProgram:
    tensors = tuple(g for g in given if isinstance(g, torch.Tensor))
    with tensors[0].fake_mode:  # type: ignore[attr-defined]
        return torch.export.export(_Parts(composed, given), tensors, strict=False)


def _is_known(value: Any) -> bool:
    """Whether a node's value depends on no input: it is a tensor then, or several."""
    return all(isinstance(v, torch.Tensor) for v in _listed(value))


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _evaluate(node: Node, env: Mapping[Node, Any]) -> Any:
    args, keywords = torch.fx.map_arg((node.args, node.kwargs), env.__getitem__)
    return node.target(*args, **keywords)  # type: ignore[operator]


def _value(op: Any, value: Any) -> Any:
    """What a form takes: a tensor that is known becomes a constant of the model."""
    return const(op, value.numpy()) if isinstance(value, torch.Tensor) else value


def _annotate(fake: Any, values: Any) -> None:
    """Put the traced shape and type on the emitted values: the later forms read them."""
    if isinstance(fake, torch.Tensor):
        fake, values = [fake], [values]
    for tensor, value in zip(fake, values, strict=True):
        value.shape = ir.Shape(tensor.shape)
        value.type = ir.TensorType(ir.DataType(ONNX_TYPES[tensor.dtype]))


def input_values(spec: GraphSpec) -> list[ir.Value]:
    """Model-level inputs of a graph, named ``graph/tensor``.

    The width of the block table is left symbolic: the runtime binds as many columns as the
    longest context needs, so that attention costs what the context costs.
    """
    return [
        ir.val(
            f"{spec.name}/{t.name}",
            dtype=_INPUT_TYPES[t.dtype],
            shape=(t.shape[0], "blocks") if t.name == "block_table" else t.shape,
        )
        for t in spec.inputs
    ]
