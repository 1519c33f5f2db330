"""Writes small ONNX models without the package ``onnx``, which a runtime does not have.

A message of protocol buffers is a row of fields: a key, the number of the field times eight plus
how its value is written, and the value: a variable-length integer (0), or a length and bytes (2).
The numbers of the fields are those of ``onnx.proto``. Weights come from outside.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from qwen_mtp.custom_ops.operator import MICROSOFT, NAMESPACE

IR_VERSION, OPSET = 10, 21
GIVEN = "given"  # the file of data that are given to the session instead
TYPES = {"float32": 1, "uint8": 2, "int8": 3, "int64": 7}
Shape = Sequence[int | str]


@dataclass(frozen=True, slots=True)
class Value:
    """A named tensor; a dimension of an input or output may be a name.

    The ``data`` of a weight are stored in the model; without any, the session is given them.
    """

    name: str
    dtype: str
    shape: Shape
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class Node:
    """One operator; an empty domain is ``ai.onnx``."""

    kind: str
    inputs: tuple[str, ...]
    output: str
    domain: str = ""
    attributes: dict[str, int] = field(default_factory=dict)


def model_bytes(
    nodes: Sequence[Node],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    weights: Sequence[Value],
) -> bytes:
    """A model of these nodes.

    Args:
        nodes: In an order in which they can run.
        inputs: What is fed.
        outputs: What is fetched.
        weights: Initializers.
    """
    graph = b"".join(_bytes(1, _node(node)) for node in nodes) + _text(2, "probe")
    graph += b"".join(_bytes(5, _weight(weight)) for weight in weights)
    graph += b"".join(_bytes(11, _value(value)) for value in inputs)
    graph += b"".join(_bytes(12, _value(value)) for value in outputs)
    domains = (("", OPSET), (MICROSOFT, 1), (NAMESPACE, 1))
    opsets = b"".join(_bytes(8, _text(1, name) + _int(2, v)) for name, v in domains)
    return _int(1, IR_VERSION) + _bytes(7, graph) + opsets


def _node(node: Node) -> bytes:
    made = b"".join(_text(1, name) for name in node.inputs) + _text(2, node.output)
    made += _text(4, node.kind) + _text(7, node.domain)
    for name, value in node.attributes.items():
        made += _bytes(5, _text(1, name) + _int(3, value) + _int(20, 2))  # 2: an integer
    return made


def _value(value: Value) -> bytes:
    dims = b"".join(
        _bytes(1, _text(2, d) if isinstance(d, str) else _int(1, d)) for d in value.shape
    )
    tensor = _int(1, TYPES[value.dtype]) + _bytes(2, dims)
    return _text(1, value.name) + _bytes(2, _bytes(1, tensor))


def _weight(weight: Value) -> bytes:
    """A tensor; data that lie elsewhere are those that ``add_initializer`` gives a session."""
    dims = b"".join(_int(1, int(d)) for d in weight.shape)
    named = _int(2, TYPES[weight.dtype]) + _text(8, weight.name)
    if weight.data:
        return dims + named + _bytes(9, weight.data)
    place = _text(1, "location") + _text(2, GIVEN)
    return dims + named + _bytes(13, place) + _int(14, 1)


def _int(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _text(number: int, value: str) -> bytes:
    return _bytes(number, value.encode())


def _bytes(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    made = bytearray()
    while value > 127:
        made.append(value & 127 | 128)
        value >>= 7
    return bytes([*made, value])
