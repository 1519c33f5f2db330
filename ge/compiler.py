"""Turns the operators of a GE graph into bound calls: the half of the interpreter that runs once.

Attributes are read, constants folded, slots assigned, states kept apart from everything else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qwen_mtp.errors import PackageError
from qwen_mtp.ge import ops_attention, ops_fused, ops_index, ops_math, ops_quant, ops_shape
from qwen_mtp.ge.node import (
    ATTRIBUTE_TYPES,
    DESCRIPTOR_TYPES,
    Function,
    Node,
    attributes,
    build,
)
from qwen_mtp.ge.wiring import Source, State, Wire, check_order, find_states, read_wires

OPERATOR_FILES = (ops_attention, ops_fused, ops_index, ops_math, ops_quant, ops_shape)
Tensor = torch.Tensor
Loader = Callable[[str, torch.dtype, tuple[int, ...]], Tensor]
FOLDED_BYTES = 1 << 20  # what is computed from weights once is kept up to this size
FAILURES = (RuntimeError, ValueError, TypeError, IndexError, AttributeError)
SEQUENCES = frozenset(["Split", "SplitD", "SplitV", "SplitVD", "Unpack"])

# Operators whose result may be a view: it would change with the state it was read from.
VIEWS = frozenset(
    [
        *("AsStrided", "Bitcast", "BroadcastTo", "Cast", "Expand", "ExpandDims", "Fill"),
        *("FlattenV2", "Identity", "Permute", "Reshape", "Slice", "Split", "SplitD", "SplitV"),
        *("SplitVD", "Squeeze", "StopGradient", "StridedSlice", "StridedSliceV2", "TensorMove"),
        *("Transpose", "TransposeD", "Unpack", "Unsqueeze"),
    ]
)


@dataclass(frozen=True, slots=True)
class Port:
    """An input of the graph.

    Attributes:
        name: Its name.
        dtype: Element type.
        shape: Its shape; -1 where any size will do.
        mutable: A state, which a run updates in place.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    mutable: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One bound call: ``values[outs] = function(*values[ins])``, then ``free`` is dropped."""

    label: str
    function: Function
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    free: tuple[int, ...]


class Compiler:
    """Turns operators into steps; slot 0 is the value of inputs that are absent."""

    def __init__(self, graph: Any, weights: Loader) -> None:
        """Read the edges of a ``GraphDef`` and check the order of its states."""
        self.graph, self.weights = graph, weights
        self.wires = read_wires(graph)
        self.states = find_states(self.wires)
        check_order(self.wires, self.states)
        self.owner = {source: state for state in self.states for source in state.aliases}
        self.slots: dict[Source, int] = {}
        self.values: list[Any] = [None]
        self.from_weights: set[int] = set()
        self.ports: dict[str, Port] = {}
        self.input_slots: dict[str, int] = {}
        self.steps: list[Step] = []
        self.output_names: list[str] = []
        self.output_slots: list[int] = []
        self.copied_outputs: set[str] = set()

    def compile(self) -> None:
        """Fill steps, ports and outputs."""
        for place, (wire, op) in enumerate(zip(self.wires, self.graph.op, strict=True)):
            special = {
                "Const": self._const,
                "FileConstant": self._file_constant,
                "Data": self._input,
                "RefData": self._input,
                "NetOutput": self._net_output,
            }.get(wire.type, self._operator)
            special(place, wire, op)
        if not self.output_slots:
            raise PackageError("the graph has no outputs")
        self._free()

    def _define(self, place: int, values: Sequence[Any]) -> list[int]:
        first = len(self.values)
        self.values.extend(values)
        found = list(range(first, len(self.values)))
        self.slots.update({(place, i): slot for i, slot in enumerate(found)})
        return found

    def _const(self, place: int, wire: Wire, op: Any) -> None:
        self._define(place, [_constant(wire.name, op.attr["value"].t)])

    def _file_constant(self, place: int, wire: Wire, op: Any) -> None:
        held = attributes(op)
        dtype = ATTRIBUTE_TYPES.get(held.get("dtype", -1))
        if dtype is None or not held.get("file_path") or held.get("offset", 0):
            raise PackageError(f"GE operator {wire.name} (FileConstant): no file or element type")
        shape = tuple(held.get("shape", ()))
        slots = self._define(place, [self.weights(held["file_path"], dtype, shape)])
        self.from_weights.update(slots)

    def _input(self, place: int, wire: Wire, op: Any) -> None:
        desc = op.output_desc[0]
        dtype = DESCRIPTOR_TYPES.get(desc.dtype)
        if dtype is None:
            raise PackageError(f"GE operator {wire.name}: its element type is not implemented")
        shape = tuple(desc.shape.dim)
        self.ports[wire.name] = Port(wire.name, dtype, shape, wire.type == "RefData")
        (self.input_slots[wire.name],) = self._define(place, [None])

    def _net_output(self, place: int, wire: Wire, op: Any) -> None:
        for name, source in zip(wire.names, wire.sources, strict=True):
            if source is None:
                raise PackageError(f"GE operator {wire.name}: its input {name} is missing")
            maker = self.wires[source[0]].name + (f":{source[1]}" if source[1] else "")
            name = name if maker in self.output_names else maker
            self.output_names.append(name)
            self.output_slots.append(self.slots[source])
            if self._state_behind(source) is not None:
                self.copied_outputs.add(name)

    def _operator(self, place: int, wire: Wire, op: Any) -> None:
        ins = tuple(self.slots[source] if source else 0 for source in wire.sources)
        known = {n: self.values[i] for n, i in zip(wire.names, ins, strict=True)}
        known = {name: value for name, value in known.items() if value is not None}
        connected = {n for n, source in zip(wire.names, wire.sources, strict=True) if source}
        node = Node(
            wire.name, wire.type, wire.names, connected, known, attributes(op), wire.outputs
        )
        function = self._guarded(place, wire, build(node))
        if wire.type in SEQUENCES and wire.outputs == 1:
            function = _only(function)
        if connected and len(known) == len(connected) and self._fold(place, ins, function, node):
            return
        outs = tuple(self._define(place, [None] * wire.outputs))
        self.steps.append(Step(f"{wire.name} ({wire.type})", function, ins, outs, ()))

    def _fold(self, place: int, ins: tuple[int, ...], function: Function, node: Node) -> bool:
        try:
            result = function(*[self.values[i] for i in ins])
        except FAILURES as error:
            raise node.error(str(error)) from error
        found = list(result) if isinstance(result, (tuple, list)) else [result]
        weights = [self.values[i] for i in ins if i in self.from_weights]
        if weights and any(_extra(value, weights) > FOLDED_BYTES for value in found):
            return False
        slots = self._define(place, found)
        if weights:
            self.from_weights.update(slots)
        return True

    def _guarded(self, place: int, wire: Wire, function: Function) -> Function:
        """Keep states and everything else apart: copy what must not, or no longer, be shared."""
        copied = [at for at in wire.written.values() if wire.sources[at] not in self.owner]
        if copied:
            return _with_copies(function, frozenset(copied))
        writes = self._writes_after(place, wire)
        if writes and self._last_view(place) >= min(writes):
            return lambda *args: _cloned(function(*args))
        return function

    def _writes_after(self, place: int, wire: Wire) -> list[int]:
        state = self._state_behind((place, 0)) if wire.type in VIEWS else None
        return [w for w in state.writers if w > place] if state else []

    def _state_behind(self, source: Source) -> State | None:
        """The state whose memory this may be, directly or through views."""
        if source in self.owner:
            return self.owner[source]
        wire = self.wires[source[0]]
        first = wire.sources[0] if wire.type in VIEWS and wire.sources else None
        return self._state_behind(first) if first else None

    def _last_view(self, place: int) -> int:
        """The last operator that uses this one's result, directly or through views."""
        reach = {place}
        last = place
        for later in range(place + 1, len(self.wires)):
            wire = self.wires[later]
            if any(source and source[0] in reach for source in wire.sources):
                last = later
                if wire.type in VIEWS:
                    reach.add(later)
        return last

    def _free(self) -> None:
        """Drop every intermediate after its last use, outputs nobody uses at once."""
        kept = set(self.output_slots) | set(self.input_slots.values()) | {0}
        made = {slot for step in self.steps for slot in step.outs} - kept
        for i in range(len(self.steps) - 1, -1, -1):
            step = self.steps[i]
            free = tuple(slot for slot in {*step.ins, *step.outs} if slot in made)
            made -= set(free)
            self.steps[i] = Step(step.label, step.function, step.ins, step.outs, free)


def _with_copies(function: Function, places: frozenset[int]) -> Function:
    def run(*args: Any) -> Any:
        return function(*[a.clone() if i in places else a for i, a in enumerate(args)])

    return run


def _only(function: Function) -> Function:
    return lambda *args: function(*args)[0]


def _cloned(result: Any) -> Any:
    return tuple(r.clone() for r in result) if isinstance(result, tuple) else result.clone()


def _extra(value: Tensor, sources: Sequence[Tensor]) -> int:
    """Bytes that keeping a result costs: none where it is a view."""
    shared = {source.untyped_storage().data_ptr() for source in sources}
    return 0 if value.untyped_storage().data_ptr() in shared else value.nbytes


def _constant(name: str, held: Any) -> Tensor:
    dtype, shape = DESCRIPTOR_TYPES.get(held.desc.dtype), tuple(held.desc.shape.dim)
    if dtype is None:
        raise PackageError(f"GE operator {name} (Const): its element type is not implemented")
    if len(held.data) != torch.Size(shape).numel() * dtype.itemsize:
        raise PackageError(f"GE operator {name} (Const): its value is cut off")
    if not held.data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(held.data), dtype=dtype).reshape(shape)
