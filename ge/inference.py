"""Dtypes and static shapes of a whole graph, inferred from its inputs and constants alone.

torchair leaves most descriptors without a shape and some with a default dtype, since GE infers
both when it compiles. So does this: what it finds is held against the prototypes, against what
the graph declares where that can be trusted, and against the interface of the graph.

Declarations are trusted on graph inputs, constants and ``NetOutput``, dtype and shape, and
wherever else a shape is declared. A dtype without one is trusted unless it is ``DT_FLOAT``: that
is what torchair writes where it does not know, as is no dtype at all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qwen_mtp.ge import inference_fused, inference_math, inference_shapes
from qwen_mtp.ge.dtypes import descriptor_dtype
from qwen_mtp.ge.folding import fold
from qwen_mtp.ge.proto import const_value
from qwen_mtp.ge.sampler import RULES as SAMPLER_RULES
from qwen_mtp.ge.values import SMALL, Call, InferenceError, Rule, Value
from qwen_mtp.ge.view import SOURCES, Descriptor, Finding, Node

RULES: Mapping[str, Rule] = {
    **inference_math.RULES,
    **inference_shapes.RULES,
    **inference_fused.RULES,
    **SAMPLER_RULES,
}


MAX_RANK = 8  # GE's tensors have no more dimensions
UNKNOWN = ("DT_FLOAT", "DT_UNDEFINED")  # declared where nobody knew better


@dataclass(slots=True)
class Inferred:
    """What is known after the walk.

    Attributes:
        values: Every tensor by ``producer:output``; those behind a failed operator are missing.
        calls: Every operator whose inputs are all known.
        findings: What did not hold.
    """

    values: dict[str, Value] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def fail(self, node: Node, rule: str, message: str) -> None:
        """Note a finding at an operator."""
        self.findings.append(Finding(node.name, rule, f"{node.type}: {message}"))


def infer(nodes: Sequence[Node]) -> Inferred:
    """Walk a graph in file order, which must be topological."""
    found = Inferred()
    for node in nodes:
        if node.type in SOURCES:
            _source(node, found)
        else:
            _operator(node, found)
    return found


def _source(node: Node, found: Inferred) -> None:
    try:
        value = _SOURCE_RULES[node.type](node)
    except (InferenceError, ValueError, KeyError) as error:
        found.fail(node, "inference", str(error))
        return
    found.values[f"{node.name}:0"] = value
    for desc in (*node.inputs, *node.outputs):
        if (desc.dtype, desc.shape) != (value.dtype, value.shape):
            declared = Value(desc.dtype, desc.shape)
            found.fail(
                node, "declared", f"{desc.name or 'value'} is declared {declared}, not {value}"
            )


def _data(node: Node) -> Value:
    if not node.outputs:
        raise InferenceError("it declares no output")
    return Value(node.outputs[0].dtype, node.outputs[0].shape)


def _const(node: Node) -> Value:
    tensor = _attribute(node, "value").t
    shape = tuple(tensor.desc.shape.dim)
    declared = _data(node)
    small = len(tensor.data) <= 8 * SMALL
    const = const_value(tensor) if small and declared.dtype != "DT_BF16" else None
    if const is not None and const.size > SMALL:
        const = None
    return Value(descriptor_dtype(tensor.desc.dtype), shape, const)


def _file_constant(node: Node) -> Value:
    call = Call(node, {})
    return Value(call.dtype_attr("dtype"), tuple(call.list_attr("shape")))


def _attribute(node: Node, name: str) -> Any:
    if name not in node.attributes:
        raise InferenceError(f"attribute {name} is missing")
    return node.attributes[name]


_SOURCE_RULES = {
    "Data": _data,
    "RefData": _data,
    "Const": _const,
    "FileConstant": _file_constant,
}


def _operator(node: Node, found: Inferred) -> None:
    inputs = _inputs(node, found)
    if inputs is None:
        return  # the reason is a finding already
    call = Call(node, inputs)
    found.calls.append(call)
    if node.type == "NetOutput":
        _outputs_fit(node, call, found)
        return
    rule = RULES.get(node.type)
    if rule is None:
        found.fail(node, "inference", "no rule for this operator type")
        return
    try:
        values = [fold(call, value) for value in rule(call)]
    except InferenceError as error:
        found.fail(node, "inference", str(error))
        return
    _publish(node, values, found)


def _inputs(node: Node, found: Inferred) -> dict[str, Value] | None:
    pairs = [(d.name, ref) for d, ref in zip(node.inputs, node.refs, strict=False) if ref]
    if any(ref not in found.values for _, ref in pairs):
        return None
    return {name: found.values[ref] for name, ref in pairs}


def _publish(node: Node, values: Sequence[Value], found: Inferred) -> None:
    if len(values) != len(node.outputs):
        found.fail(node, "inference", f"{len(node.outputs)} outputs, {len(values)} are computed")
    for i, (value, desc) in enumerate(zip(values, node.outputs, strict=False)):
        if len(value.shape) > MAX_RANK:
            found.fail(node, "inference", f"{value} has more than {MAX_RANK} dimensions")
        found.values[f"{node.name}:{i}"] = value
        _fits(node, desc, value, found)
    for desc in node.inputs:
        known = found.calls[-1].inputs.get(desc.name)
        if known is not None:
            _fits(node, desc, known, found)


def _fits(node: Node, desc: Descriptor, value: Value, found: Inferred) -> None:
    if desc.shape:
        right = (desc.dtype, desc.shape) == (value.dtype, value.shape)
    else:
        right = desc.dtype in (value.dtype, *UNKNOWN)
    if not right:
        declared = Value(desc.dtype, desc.shape)
        found.fail(node, "declared", f"{desc.name} is declared {declared}, it is {value}")


def _outputs_fit(node: Node, call: Call, found: Inferred) -> None:
    for desc in node.inputs:
        value = call.inputs.get(desc.name)
        if value is not None and (desc.dtype, desc.shape) != (value.dtype, value.shape):
            declared = Value(desc.dtype, desc.shape)
            found.fail(node, "declared", f"{desc.name} is declared {declared}, it is {value}")
