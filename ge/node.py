"""One operator of a GE graph as the builders of its meaning see it.

Every attribute that is present must be read by the builder, so nothing an operator was told is
ignored; every input is found by name, because optional inputs may be left out of the list.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from qwen_mtp.errors import PackageError

Function = Callable[..., Any]
Ints = Callable[[Sequence[Any]], list[int]]

# GE counts element types twice: descriptors by the message's enum, attributes by the C++ one.
DESCRIPTOR_TYPES = {
    1: torch.float32,
    2: torch.float16,
    3: torch.int8,
    4: torch.uint8,
    5: torch.int16,
    7: torch.int32,
    8: torch.int64,
    11: torch.bool,
    12: torch.float64,
    27: torch.bfloat16,
}
ATTRIBUTE_TYPES = {
    0: torch.float32,
    1: torch.float16,
    2: torch.int8,
    3: torch.int32,
    4: torch.uint8,
    6: torch.int16,
    9: torch.int64,
    11: torch.float64,
    12: torch.bool,
    27: torch.bfloat16,
}
DESCRIPTOR_INT4, ATTRIBUTE_INT4 = 28, 29


@dataclass(slots=True)
class Node:
    """An operator while its function is built.

    Attributes:
        name: Its name in the graph.
        type: Its GE type.
        inputs: Names of all inputs in order, absent ones included.
        present: Names of the inputs that are connected.
        constants: Values of the inputs that are known before the graph runs, by input name.
        attributes: Plain values by name, without those that start with an underscore.
        outputs: How many outputs it has.
        used: Attributes that were read.
    """

    name: str
    type: str
    inputs: list[str]
    present: set[str]
    constants: Mapping[str, torch.Tensor]
    attributes: Mapping[str, Any]
    outputs: int
    used: set[str] = field(default_factory=set)

    def error(self, what: str) -> PackageError:
        """An error that names the operator."""
        return PackageError(f"GE operator {self.name} ({self.type}): {what}")

    def attr(self, name: str, default: Any = None) -> Any:
        """Value of an attribute; without a default it must be there."""
        self.used.add(name)
        value = self.attributes.get(name, default)
        if value is None:
            raise self.error(f"the attribute {name} is missing")
        return value

    def fixed(self, **known: Any) -> None:
        """Refuse attributes with a value other than the one that is implemented."""
        for name, value in known.items():
            given = self.attr(name, value)
            if given != value:
                raise self.error(f"{name}={given} is not implemented")

    def irrelevant(self, *names: str) -> None:
        """Attributes that change how the device computes, not what."""
        self.used.update(names)

    def dtype(self, name: str, default: int | None = None) -> torch.dtype:
        """An attribute that names an element type."""
        code = self.attr(name, default)
        if code not in ATTRIBUTE_TYPES:
            raise self.error(f"{name}={code} is no element type that is implemented")
        return ATTRIBUTE_TYPES[code]

    def at(self, name: str) -> int | None:
        """Place of an input among the arguments, None where it is not connected."""
        return self.inputs.index(name) if name in self.present else None

    def absent(self, *names: str) -> None:
        """Refuse inputs that are not implemented."""
        for name in names:
            if name in self.present:
                raise self.error(f"the input {name} is not implemented")

    def ints(self, name: str) -> Ints:
        """Reader of an integer input, which costs nothing where it is a constant."""
        place = self.at(name)
        if place is None:
            raise self.error(f"the input {name} is missing")
        if name in self.constants:
            value = _listed(self.constants[name])
            return lambda _: value
        return lambda args: _listed(args[place])

    def named(self, function: Function) -> Function:
        """Call a function with the connected inputs by name instead of by place."""
        if len(self.present) == len(self.inputs):
            names = tuple(self.inputs)
            return lambda *args: function(**dict(zip(names, args, strict=True)))
        places = [(name, i) for i, name in enumerate(self.inputs) if name in self.present]
        return lambda *args: function(**{name: args[i] for name, i in places})

    def done(self) -> None:
        """Refuse attributes that nobody read."""
        left = sorted(set(self.attributes) - self.used)
        if left:
            raise self.error(f"the attribute {left[0]} is not implemented")


Builder = Callable[[Node], Function]
BUILDERS: dict[str, Builder] = {}


def operator(*types: str) -> Callable[[Builder], Builder]:
    """Register what builds the function of these operator types."""

    def register(builder: Builder) -> Builder:
        for name in types:
            assert name not in BUILDERS, name
            BUILDERS[name] = builder
        return builder

    return register


def build(node: Node) -> Function:
    """The function of an operator: called with all inputs in order, None where absent.

    Raises:
        PackageError: The type, an attribute or an input is not implemented.
    """
    if node.type not in BUILDERS:
        raise node.error("the type is not implemented")
    function = BUILDERS[node.type](node)
    node.done()
    return function


def attributes(op: Any) -> dict[str, Any]:
    """Plain values of the attributes that mean something (no leading underscore)."""
    return {name: _plain(value) for name, value in op.attr.items() if not name.startswith("_")}


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    held = getattr(value, kind)
    if kind == "list":
        return next((list(part) for part in (held.i, held.f, held.b, held.s) if len(part)), [])
    return held.decode() if kind == "s" else held


def _listed(value: torch.Tensor) -> list[int]:
    return [int(x) for x in value.reshape(-1).tolist()]
