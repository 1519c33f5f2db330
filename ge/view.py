"""A GE graph as plain values: what every check reads instead of the protobuf messages."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwen_mtp.ge.dtypes import descriptor_dtype

Shape = tuple[int, ...]
SOURCES = frozenset({"Data", "RefData", "Const", "FileConstant"})


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What the graph says about one input or output of an operator.

    Attributes:
        name: The port's name; the second tensor of a dynamic port ``x`` is ``x1``.
        dtype: ``DT_FLOAT``, ... torchair leaves that on tensors whose dtype it does not follow.
        shape: Static for graph inputs, constants and graph outputs; empty elsewhere.
    """

    name: str
    dtype: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class Node:
    """One operator of a graph.

    Attributes:
        name: Its unique name.
        type: Its operator type.
        refs: ``producer:output`` of each data input; "" for an optional one left out.
        controls: Names of operators that must run before it.
        inputs: A descriptor for each of ``refs``.
        outputs: A descriptor for each output.
        attributes: ``AttrDef`` messages by name.
    """

    name: str
    type: str
    refs: tuple[str, ...]
    controls: tuple[str, ...]
    inputs: tuple[Descriptor, ...]
    outputs: tuple[Descriptor, ...]
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing wrong with a graph.

    Attributes:
        op: Name of the operator, "" for the graph itself.
        rule: Short name of the rule that was broken.
        message: One line.
    """

    op: str
    rule: str
    message: str

    def __str__(self) -> str:
        """``rule: op: message`` on one line."""
        return f"{self.rule}: {self.op or 'graph'}: {self.message}"


def nodes_of(model: Any) -> tuple[Node, ...]:
    """The operators of a ``ModelDef``'s graph, in file order."""
    return tuple(_node(op) for op in model.graph[0].op)


def split_ref(ref: str) -> tuple[str, int]:
    """``("producer", output)`` of a data input; output -2 where the text has no number."""
    producer, _, output = ref.rpartition(":")
    return producer, int(output) if output.isdigit() else -2


def _node(op: Any) -> Node:
    refs = tuple(op.input)
    return Node(
        op.name,
        op.type,
        tuple(ref for ref in refs if not ref.endswith(":-1")),
        tuple(ref[:-3] for ref in refs if ref.endswith(":-1")),
        tuple(_descriptor(d) for d in op.input_desc),
        tuple(_descriptor(d) for d in op.output_desc),
        dict(op.attr.items()),
    )


def _descriptor(desc: Any) -> Descriptor:
    return Descriptor(desc.name, descriptor_dtype(desc.dtype), tuple(desc.shape.dim))
