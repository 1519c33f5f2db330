"""An operator of a GE graph and small changes of it: attributes, constants, edges."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(slots=True)
class Place:
    """An operator of a copy of the graph that a change may touch."""

    graph: Any
    index: int

    @property
    def op(self) -> Any:
        return self.graph.op[self.index]

    def producer(self, port: str) -> Any | None:
        """What feeds an input."""
        for ref, desc in zip(self.op.input, self.op.input_desc, strict=False):
            if desc.name == port and ref:
                name = ref.rpartition(":")[0]
                return next(op for op in self.graph.op if op.name == name)
        return None

    def own_const(self, port: str) -> Any | None:
        """The constant behind an input, copied if other operators read it too."""
        shared = self.producer(port)
        if shared is None or shared.type != "Const":
            return None
        if sum(ref == f"{shared.name}:0" for op in self.graph.op for ref in op.input) == 1:
            return shared
        position = next(i for i, op in enumerate(self.graph.op) if op.name == shared.name)
        ops = list(self.graph.op)
        copy = type(shared)()
        copy.CopyFrom(shared)
        copy.name = f"{shared.name}/own"
        i = next(i for i, desc in enumerate(self.op.input_desc) if desc.name == port)
        self.op.input[i] = f"{copy.name}:0"
        del self.graph.op[:]
        self.graph.op.extend([*ops[: position + 1], copy, *ops[position + 1 :]])
        self.index += 1
        return self.graph.op[position + 1]


Change = Callable[[Place], bool]
_TYPES = {1: np.float32, 2: np.float16, 7: np.int32, 8: np.int64, 11: np.bool_}


def exchanged(op: Any, i: int, j: int) -> bool:
    """Two edges change places with what is declared of them; port names stay."""
    op.input[i], op.input[j] = op.input[j], op.input[i]
    first, second = op.input_desc[i], op.input_desc[j]
    first.dtype, second.dtype = second.dtype, first.dtype
    shape = list(first.shape.dim)
    first.shape.dim[:] = second.shape.dim
    second.shape.dim[:] = shape
    return True


def integer(name: str, value: int) -> Change:
    def change(place: Place) -> bool:
        if name not in place.op.attr or place.op.attr[name].i == value:
            return False
        place.op.attr[name].i = value
        return True

    return change


def dtype(name: str, value: int) -> Change:
    def change(place: Place) -> bool:
        same = place.op.attr[name].dt == value
        place.op.attr[name].dt = value
        return not same

    return change


def integers(name: str, *values: int) -> Change:
    def change(place: Place) -> bool:
        del place.op.attr[name].list.i[:]
        place.op.attr[name].list.i.extend(values)
        return True

    return change


def text(name: str, value: bytes) -> Change:
    def change(place: Place) -> bool:
        place.op.attr[name].s = value
        return True

    return change


def without(name: str) -> Change:
    def change(place: Place) -> bool:
        if name not in place.op.attr:
            return False
        del place.op.attr[name]
        return True

    return change


def flipped(name: str) -> Change:
    def change(place: Place) -> bool:
        if name not in place.op.attr:
            return False
        place.op.attr[name].b = not place.op.attr[name].b
        return True

    return change


def other_type(name: str) -> Change:
    def change(place: Place) -> bool:
        place.op.type = name
        return True

    return change


def constant(port: str, change_value: Callable[[Any], Any]) -> Change:
    """Another value, of the same shape, for the constant behind an input."""

    def change(place: Place) -> bool:
        const = place.own_const(port)
        if const is None:
            return False
        tensor = const.attr["value"].t
        kind = _TYPES[tensor.desc.dtype]
        old = np.frombuffer(tensor.data, kind).reshape(tuple(tensor.desc.shape.dim))
        new: Any = np.asarray(change_value(old.copy())).astype(kind)
        if new.shape != old.shape or np.array_equal(new, old):
            return False
        tensor.data = new.tobytes()
        return True

    return change


def scaled(name: str, factor: float) -> Change:
    def change(place: Place) -> bool:
        if name not in place.op.attr:
            return False
        place.op.attr[name].f = place.op.attr[name].f * factor
        return True

    return change
