"""The edges of a GE graph, and whether they alone decide what its state holds.

The compiler on the device orders operators by edges, not by their place in the file. So an
operator that reads a state and one that writes it must be joined by a path, or the value read
is a matter of luck; and an operator from which no path leads to the outputs is removed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qwen_mtp.errors import PackageError

Source = tuple[int, int]  # place of the operator in the file, number of its output

# Outputs that are the memory of an input, by operator type: output number, input name.
WRITES: Mapping[str, Mapping[int, str]] = {
    "Assign": {0: "ref"},
    "Scatter": {0: "var"},
    "ScatterNdUpdate": {0: "var"},
    "ScatterUpdate": {0: "var"},
    "ScatterPaKvCache": {0: "key_cache", 1: "value_cache"},
    "RecurrentGatedDeltaRule": {1: "state"},
    "FusedCausalConv1d": {0: "conv_states"},
    "InplaceFusedCausalConv1d": {0: "conv_states", 1: "x"},
}
# What a compiler may turn into another name of the same memory, or into a copy.
RESHAPES = frozenset(["ExpandDims", "FlattenV2", "Identity", "Reshape", "Squeeze", "Unsqueeze"])


@dataclass(frozen=True, slots=True)
class Wire:
    """One operator and where its inputs come from.

    Attributes:
        name: The operator's name.
        type: Its GE type.
        names: Names of its data inputs, absent ones included.
        sources: Where each comes from, None where absent.
        after: Operators joined by a control edge alone.
        outputs: How many outputs it has.
    """

    name: str
    type: str
    names: list[str]
    sources: list[Source | None]
    after: list[int]
    outputs: int

    @property
    def written(self) -> dict[int, int]:
        """Which input's memory an output is: output number to input place."""
        held = WRITES.get(self.type, {})
        return {out: self.names.index(name) for out, name in held.items() if name in self.names}

    @property
    def before(self) -> set[int]:
        """Operators that must have run."""
        return {source[0] for source in self.sources if source} | set(self.after)


def read_wires(graph: Any) -> list[Wire]:
    """The edges of a ``GraphDef``, in its order.

    Raises:
        PackageError: A name is doubled, or an edge starts nowhere or at a later operator.
    """
    wires: list[Wire] = []
    places: dict[str, int] = {}
    for op in graph.op:
        wires.append(_wire(op, places, wires))
        if op.name in places:
            raise PackageError(f"GE operator {op.name}: the name is there twice")
        places[op.name] = len(wires) - 1
    return wires


def _wire(op: Any, places: Mapping[str, int], wires: Sequence[Wire]) -> Wire:
    sources: list[Source | None] = []
    after: list[int] = []
    for reference in op.input:
        name, _, number = reference.rpartition(":")
        if reference and name not in places:
            raise PackageError(f"GE operator {op.name}: its input {reference} is not defined yet")
        if number == "-1":
            after.append(places[name])
            continue
        source = (places[name], int(number)) if reference else None
        if source and not 0 <= source[1] < wires[source[0]].outputs:
            raise PackageError(f"GE operator {op.name}: its input {reference} does not exist")
        sources.append(source)
    names = [desc.name for desc in op.input_desc]
    if not sources and op.type in ("Data", "RefData", "Const", "FileConstant"):
        names = []
    if len(names) != len(sources):
        raise PackageError(f"GE operator {op.name}: {len(sources)} inputs, {len(names)} names")
    return Wire(op.name, op.type, names, sources, after, len(op.output_desc))


@dataclass(slots=True)
class State:
    """One RefData and who touches it.

    Attributes:
        name: Its name.
        aliases: Outputs that are its memory.
        writers: Operators that write it, in the order of the file.
        readers: Operators that only read it.
    """

    name: str
    aliases: set[Source] = field(default_factory=set)
    writers: list[int] = field(default_factory=list)
    readers: list[int] = field(default_factory=list)


def find_states(wires: Sequence[Wire]) -> list[State]:
    """Every RefData with the operators that read and write its memory.

    Raises:
        PackageError: An operator writes into a constant.
    """
    states: list[State] = []
    owner: dict[Source, State] = {}
    for place, wire in enumerate(wires):
        if wire.type == "RefData":
            states.append(State(wire.name))
            owner[place, 0] = states[-1]
            states[-1].aliases.add((place, 0))
        written = wire.written
        for out, at in written.items():
            _follow(wires, wire, owner, (place, out), at)
        for at, source in enumerate(wire.sources):
            if source in owner and at not in written.values():
                owner[source].readers.append(place)
    return states


def _follow(
    wires: Sequence[Wire], wire: Wire, owner: dict[Source, State], out: Source, at: int
) -> None:
    """Note that an operator writes the memory of the input at this place."""
    source = wire.sources[at]
    if source is None:
        raise PackageError(f"GE operator {wire.name}: nothing to write into")
    if wires[source[0]].type in ("Const", "FileConstant", "Data"):
        raise PackageError(
            f"GE operator {wire.name} ({wire.type}): it writes into {wires[source[0]].name}, "
            "which is no state; export the checkpoint again"
        )
    viewed = _viewed_state(wires, owner, source)
    if viewed is not None:
        raise PackageError(
            f"GE operator {wire.name} ({wire.type}): it writes {wires[source[0]].name}, a view "
            f"of {viewed.name}, which need not be its memory; give the state the operator's shape"
        )
    if source in owner:
        state = owner[out] = owner[source]
        state.aliases.add(out)
        if out[0] not in state.writers:
            state.writers.append(out[0])


def _viewed_state(
    wires: Sequence[Wire], owner: Mapping[Source, State], source: Source
) -> State | None:
    """The state that this is a view of, in another shape."""
    while source not in owner and wires[source[0]].type in RESHAPES:
        first = wires[source[0]].sources[0]
        if first is None:
            return None
        if first in owner:
            return owner[first]
        source = first
    return None


def check_order(wires: Sequence[Wire], states: Sequence[State]) -> None:
    """Whether edges alone decide what every reader of a state sees.

    Raises:
        PackageError: A read and a write, or two writes, are in no order, a write leads to no
            output, or a state is never written.
    """
    if not states:
        return
    past = _ancestors(wires)
    kept = next((past[i] for i, wire in enumerate(wires) if wire.type == "NetOutput"), 0)
    for state in states:
        if not state.writers:
            raise PackageError(f"nothing writes the state {state.name}; export again")
        for i, writer in enumerate(state.writers):
            if not kept >> writer & 1:
                raise PackageError(
                    f"GE operator {wires[writer].name}: it writes {state.name} but nothing leads "
                    "from it to an output, so the compiler removes it; export again"
                )
            for other in (*state.writers[:i], *state.readers):
                if other != writer and not (past[writer] >> other | past[other] >> writer) & 1:
                    raise PackageError(
                        f"GE operators {wires[other].name} and {wires[writer].name}: the first "
                        f"reads {state.name}, the second writes it, and no edge orders them"
                    )


def _ancestors(wires: Sequence[Wire]) -> list[int]:
    """Of each operator, the set of those before it, one bit each."""
    past: list[int] = []
    for wire in wires:
        mine = 0
        for place in wire.before:
            mine |= past[place] | 1 << place
        past.append(mine)
    return past
