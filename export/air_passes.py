"""Rewrites a GE model as torchair left it into the file of a package.

torchair numbers inputs by first use, names them after FX nodes, keeps debugging notes and copies
what it may not overwrite. Here inputs and outputs get the names of the manifest, weights become
files, states that change in place become ``RefData``, equal constants become one, and what nobody
reads goes. Nothing in the result depends on when or where it was made.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qwen_mtp.errors import ExportError
from qwen_mtp.ge.inference import infer
from qwen_mtp.ge.proto import ATTRIBUTE_CODES, TENSOR_TYPES
from qwen_mtp.ge.values import Value
from qwen_mtp.ge.view import nodes_of
from qwen_mtp.ge.wheel import messages
from qwen_mtp.graphs.spec import GraphSpec, TensorSpec
from qwen_mtp.graphs.weights import StoredTensor

_KEPT = {
    *(f"_{side}_name_{part}" for side in ("input", "output") for part in ("key", "value")),
    "_inference_rule",
}
_CONTROL = ":-1"  # the port of an edge that carries no value
_COPIES = ("Identity", "TensorMove")
_SOURCES = ("Data", "RefData", "FileConstant")
_UNIQUE = (*_SOURCES, "NetOutput")


@dataclass(frozen=True, slots=True)
class Interface:
    """What the inputs and outputs of a converted graph are.

    Attributes:
        spec: The signature: its inputs follow the weights; the values of the states it changes in
            place follow its outputs.
        weights: The stored tensors that the first inputs stand for.
        used: Which of weights and inputs the converted graph has, in its order.
        folder: Folder of the weight files, relative to the model.
    """

    spec: GraphSpec
    weights: Sequence[StoredTensor]
    used: Sequence[bool]
    folder: str


def finish(model: Any, interface: Interface) -> Any:
    """The model of a package.

    Args:
        model: The ``ModelDef`` that torchair wrote.
        interface: Names and kinds of inputs and outputs.

    Returns:
        A new ``ModelDef``.

    Raises:
        ExportError: Inputs or outputs are not what the interface says.
    """
    graph = _Graph(model.graph[0])
    graph.name_inputs(interface)
    graph.drop_copies()
    graph.write_states(interface.spec)
    graph.drop_casts(graph.infer())
    graph.merge_equal()
    graph.drop_unread({t.name for t in interface.spec.inputs})
    graph.name_outputs([t.name for t in interface.spec.outputs])
    graph.name_others()
    graph.describe(graph.infer())
    return graph.model(interface.spec.name)


class _Graph:
    """The operators of a graph in order; edges are ``name:output``."""

    def __init__(self, graph: Any) -> None:
        self.ops: list[Any] = list(graph.op)

    def _output(self) -> Any:
        (found,) = (op for op in self.ops if op.type == "NetOutput")
        return found

    def _reroute(self, edges: Mapping[str, str]) -> None:
        """Replace edges; a replacement may itself be replaced."""
        for op in self.ops:
            for i, edge in enumerate(op.input):
                while edge in edges:
                    edge = edges[edge]
                op.input[i] = edge

    def _rename(self, names: Mapping[str, str]) -> None:
        for op in self.ops:
            op.name = names.get(op.name, op.name)
            for i, edge in enumerate(op.input):
                name, _, port = edge.rpartition(":")
                if name in names:
                    op.input[i] = f"{names[name]}:{port}"

    def name_inputs(self, interface: Interface) -> None:
        spec = interface.spec
        given: list[StoredTensor | TensorSpec] = [*interface.weights, *spec.inputs]
        used = [t for t, is_used in zip(given, interface.used, strict=True) if is_used]
        data = [op for op in self.ops if op.type == "Data"]
        if len(data) != len(used):
            raise ExportError(f"{spec.name}: {len(data)} inputs were traced, {len(used)} expected")
        _check_shapes(data, used)
        rest = [op for op in self.ops if op.type != "Data"]
        # Two namespaces may meet: all operators first get names that no tensor has.
        self._rename({op.name: f"op/{i}" for i, op in enumerate(self.ops)})
        self._rename({op.name: t.name for op, t in zip(data, used, strict=True)})
        places = {op.name: op for op in data}
        weights = [_file(t, interface.folder) for t in interface.weights if t.name in places]
        changed = set(spec.in_place)
        plain = [t for t in spec.inputs if t.name not in changed]
        kept = [t for t in spec.inputs if t.name in changed]
        inputs = [_input(t, i, "Data") for i, t in enumerate(plain)]
        inputs += [_input(t, i, "RefData") for i, t in enumerate(kept, len(plain))]
        self.ops = [*weights, *inputs, *rest]

    def write_states(self, spec: GraphSpec) -> None:
        """Of the values of states that change in place only the order stays: a control edge.

        Without it nothing would lead from the last write to the output, and the compiler removes
        what leads nowhere. A value that no operator has written into the state is assigned.
        """
        output, count = self._output(), len(spec.outputs)
        places = {op.name: op for op in self.ops}
        writers = []
        for name, edge in zip(spec.in_place, output.input[count:], strict=True):
            writer = places[edge.rpartition(":")[0]]
            if not any(_changes(writer, e) for e in writer.input if e == f"{name}:0"):
                writer = _assign(f"op/assign/{name}", name, edge)
                self.ops.insert(-1, writer)
            writers.append(writer.name)
        del output.input[count:]
        del output.input_desc[count:]
        output.input.extend(f"{name}{_CONTROL}" for name in dict.fromkeys(writers))
        _port_names(output, [f"input{i}" for i in range(count)], [])

    def merge_equal(self) -> None:
        """Of operators with the same inputs and attributes one is enough.

        Index arithmetic and masks stand in every layer of a traced graph, and constants wherever
        they are used. What changes a state, or is an input, stays.
        """
        seen: dict[tuple[object, ...], str] = {}
        edges: dict[str, str] = {}
        kept = []
        for op in self.ops:
            op.input[:] = [edges.get(edge, edge) for edge in op.input]
            if op.type not in _UNIQUE and not any(_changes(op, edge) for edge in op.input):
                first = seen.setdefault(_key(op), op.name)
                if first != op.name:
                    count = len(op.output_desc)
                    edges |= {f"{op.name}:{i}": f"{first}:{i}" for i in range(count)}
                    continue
            kept.append(op)
        self.ops = kept

    def drop_casts(self, values: Mapping[str, Value]) -> None:
        """A converter casts every product to the type that it has already."""
        edges = {}
        for op in self.ops:
            if op.type == "Cast":
                source, own = (values.get(edge) for edge in (op.input[0], f"{op.name}:0"))
                if source and own and source.dtype == own.dtype:
                    edges[f"{op.name}:0"] = op.input[0]
        gone = {edge.rpartition(":")[0] for edge in edges}
        self.ops = [op for op in self.ops if op.name not in gone]
        self._reroute(edges)

    def describe(self, values: Mapping[str, Value]) -> None:
        """Write types and shapes, which torchair leaves to the compiler, into the file."""
        for op in (op for op in self.ops if op.type not in _SOURCES):
            edges = [edge for edge in op.input if not edge.endswith(_CONTROL)]
            own = [f"{op.name}:{i}" for i in range(len(op.output_desc))]
            described = (*op.input_desc, *op.output_desc)
            for desc, edge in zip(described, (*edges, *own), strict=True):
                if edge in values:
                    _describe(desc, values[edge].dtype, values[edge].shape)

    def infer(self) -> Mapping[str, Value]:
        return infer(nodes_of(self.model("graph"))).values

    def drop_copies(self) -> None:
        """Copies keep a traced graph functional; here order and memory are the compiler's.

        A state that an operator changes in place must come to it directly. A copy of a state for
        any other reader stays: it may be what keeps the old value.
        """
        readers: dict[str, list[Any]] = {}
        for op in self.ops:
            for edge in op.input:
                readers.setdefault(edge, []).append(op)
        states = {f"{op.name}:0" for op in self.ops if op.type == "RefData"}
        edges = {}
        for op in self.ops:
            if op.type in _COPIES:
                source, here = op.input[0], readers.get(f"{op.name}:0", [])
                if source not in states or all(_changes(r, f"{op.name}:0") for r in here):
                    edges[f"{op.name}:0"] = source
        gone = {edge.rpartition(":")[0] for edge in edges}
        self.ops = [op for op in self.ops if op.name not in gone]
        self._reroute(edges)

    def drop_unread(self, named: set[str]) -> None:
        live = {edge.rpartition(":")[0] for edge in self._output().input}
        kept = []
        for op in reversed(self.ops):
            changes = any(_changes(op, edge) for edge in self._states() & set(op.input))
            if op.type == "NetOutput" or op.name in live | named or changes:
                kept.append(op)
                live |= {edge.rpartition(":")[0] for edge in op.input}
        self.ops = kept[::-1]

    def _states(self) -> set[str]:
        return {f"{op.name}:0" for op in self.ops if op.type == "RefData"}

    def name_outputs(self, names: Sequence[str]) -> None:
        """Give each producer the name of its output; one that has several gets a copy each."""
        output, places = self._output(), {op.name: op for op in self.ops}
        taken: dict[str, str] = {}
        added = []
        for i, name in enumerate(names):
            source = output.input[i].rpartition(":")[0]
            producer = places[source]
            if producer.type in _SOURCES or len(producer.output_desc) > 1 or source in taken:
                added.append(_copy(name, output.input[i]))
                output.input[i] = f"{name}:0"
            else:
                taken[source] = name
        self.ops[-1:-1] = added
        self._rename(taken)

    def name_others(self) -> None:
        counts: Counter[str] = Counter()
        names = {}
        for op in self.ops:
            if op.name.startswith("op/"):
                names[op.name] = f"{op.type}/{counts[op.type]}"
                counts[op.type] += 1
        self._rename(names)
        self._output().name = "NetOutput"

    def model(self, name: str) -> Any:
        model = messages().ModelDef(name=name, version=1)
        graph = model.graph.add(name=name)
        for op in self.ops:
            graph.op.append(_clean(op))
        return model


def _check_shapes(data: Sequence[Any], used: Sequence[StoredTensor | TensorSpec]) -> None:
    for op, tensor in zip(data, used, strict=True):
        found = tuple(op.input_desc[0].shape.dim)
        if found != tensor.shape:
            raise ExportError(f"{tensor.name}: traced as {found}, {tensor.shape} expected")


def _changes(op: Any, edge: str) -> bool:
    """Whether ``op`` overwrites what ``edge`` brings: it has an output of that input's name."""
    outputs = {desc.name for desc in op.output_desc}
    values = (e for e in op.input if not e.endswith(_CONTROL))
    named = zip(values, op.input_desc, strict=True)
    return any(e == edge and desc.name in outputs for e, desc in named)


def _key(op: Any) -> tuple[object, ...]:
    notes = {n for n in op.attr if n.startswith("_") and n not in _KEPT}
    attributes = [
        (name, value.SerializeToString(deterministic=True))
        for name, value in sorted(op.attr.items())
        if name not in notes
    ]
    return op.type, tuple(op.input), tuple(attributes)


def _file(tensor: StoredTensor, folder: str) -> Any:
    op = messages().OpDef(name=tensor.name, type="FileConstant")
    op.attr["file_path"].s = f"{folder}/{tensor.name}".encode()
    op.attr["file_id"].s = tensor.name.encode()
    _list(op, "shape", tensor.shape)
    op.attr["dtype"].dt = ATTRIBUTE_CODES[TENSOR_TYPES[tensor.dtype]]
    _describe(op.output_desc.add(name="y"), TENSOR_TYPES[tensor.dtype], tensor.shape)
    _port_names(op, [], ["y"])
    return op


def _input(tensor: TensorSpec, index: int, kind: str) -> Any:
    op = messages().OpDef(name=tensor.name, type=kind)
    op.attr["index"].i = index
    for desc in (op.input_desc.add(name="x"), op.output_desc.add(name="y")):
        _describe(desc, TENSOR_TYPES[tensor.dtype], tensor.shape)
    _port_names(op, ["x"], ["y"])
    return op


def _copy(name: str, edge: str) -> Any:
    op = messages().OpDef(name=name, type="Identity", input=[edge])
    op.input_desc.add(name="x", layout="ND")
    op.output_desc.add(name="y", layout="ND")
    _port_names(op, ["x"], ["y"])
    return op


def _assign(name: str, state: str, edge: str) -> Any:
    op = messages().OpDef(name=name, type="Assign", input=[f"{state}:0", edge])
    for port in ("ref", "value"):
        op.input_desc.add(name=port, layout="ND")
    op.output_desc.add(name="ref", layout="ND")
    _port_names(op, ["ref", "value"], ["ref"])
    return op


def _describe(desc: Any, dtype: str, shape: Sequence[int]) -> None:
    desc.layout = "ND"
    desc.dtype = messages().DataType.Value(dtype)
    desc.shape.dim[:] = shape


def _list(op: Any, name: str, values: Iterable[int]) -> None:
    op.attr[name].list.i.extend(values)
    op.attr[name].list.val_type = 2  # VT_LIST_INT


def _port_names(op: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    for side, names in (("input", inputs), ("output", outputs)):
        for part in ("key", "value"):
            op.attr.pop(f"_{side}_name_{part}", None)
            entry = op.attr[f"_{side}_name_{part}"].list
            if part == "key":
                entry.s.extend(name.encode() for name in names)
            else:
                entry.i.extend(range(len(names)))


def _clean(op: Any) -> Any:
    """A copy without torchair's notes: attributes of its executor and of its debugger."""
    copy = messages().OpDef()
    copy.CopyFrom(op)
    for name in [n for n in copy.attr if n.startswith("_") and n not in _KEPT]:
        del copy.attr[name]
    for desc in (*copy.input_desc, *copy.output_desc):
        desc.attr.clear()
        desc.device_type = "NPU"
    return copy
