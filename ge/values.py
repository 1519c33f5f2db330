"""What inference knows of a tensor, and how a rule sees the operator it is for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_mtp.ge.proto import attribute_dtype
from qwen_mtp.ge.view import Node, Shape

Array = npt.NDArray[Any]
SMALL = 4096  # elements up to which the value of a constant is followed


class InferenceError(Exception):
    """A rule cannot hold; the message is what the finding will say."""


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A tensor: its dtype, its static shape, and its elements where they are known and few."""

    dtype: str
    shape: Shape
    const: Array | None = None

    def __str__(self) -> str:
        """``DT_FLOAT[4, 64]``."""
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Call:
    """One operator with its inputs by name."""

    node: Node
    inputs: dict[str, Value]

    def __getitem__(self, name: str) -> Value:
        """The input of that name, which must be there."""
        if name not in self.inputs:
            raise InferenceError(f"input {name} is missing")
        return self.inputs[name]

    def get(self, name: str) -> Value | None:
        """The optional input of that name."""
        return self.inputs.get(name)

    def many(self, port: str) -> list[Value]:
        """The tensors of a dynamic input, in order."""
        found = [self.inputs[f"{port}{i}"] for i in range(len(self.inputs)) if self.has(port, i)]
        if not found:
            raise InferenceError(f"input {port} has no tensor")
        return found

    def has(self, port: str, index: int) -> bool:
        """Whether a dynamic input has that many tensors."""
        return f"{port}{index}" in self.inputs

    def const(self, name: str) -> Array:
        """The elements of an input that shapes depend on."""
        value = self[name].const
        if value is None:
            raise InferenceError(f"input {name} must be a constant the shape can be told from")
        return value

    def ints(self, name: str) -> list[int]:
        """The elements of an integer input, flat."""
        value = self.const(name)
        if value.dtype.kind not in "iu":
            raise InferenceError(f"input {name} is {self[name].dtype}, integers are needed")
        return [int(element) for element in value.reshape(-1)]

    def scalar(self, name: str) -> int:
        """The only element of an integer input."""
        values = self.ints(name)
        if len(values) != 1:
            raise InferenceError(f"input {name} has {len(values)} elements, one is needed")
        return values[0]

    def int_attr(self, name: str, default: int | None = None) -> int:
        """An attribute of type Int."""
        found = self._attr(name, "i", default)
        return int(found)

    def flag(self, name: str, default: bool = False) -> bool:
        """An attribute of type Bool."""
        return bool(self._attr(name, "b", default))

    def float_attr(self, name: str, default: float | None = None) -> float:
        """An attribute of type Float."""
        return float(self._attr(name, "f", default))

    def text(self, name: str, default: str | None = None) -> str:
        """An attribute of type String."""
        found = self._attr(name, "s", default)
        return found.decode(errors="replace") if isinstance(found, bytes) else str(found)

    def list_attr(self, name: str, default: Sequence[int] | None = None) -> list[int]:
        """An attribute of type ListInt."""
        if name not in self.node.attributes:
            return list(_required(name, default))
        return [int(element) for element in self.node.attributes[name].list.i]

    def dtype_attr(self, name: str, default: str | None = None) -> str:
        """A dtype in an attribute of type Type or, as older operators have it, Int."""
        attribute = self.node.attributes.get(name)
        if attribute is None:
            return str(_required(name, default))
        found = attribute_dtype(attribute.dt if attribute.HasField("dt") else attribute.i)
        if not found:
            raise InferenceError(f"attribute {name} is no dtype code we know")
        return found

    def _attr(self, name: str, field: str, default: Any) -> Any:
        attribute = self.node.attributes.get(name)
        return _required(name, default) if attribute is None else getattr(attribute, field)


Rule = Callable[[Call], Sequence[Value]]


def _required(name: str, default: Any) -> Any:
    if default is None:
        raise InferenceError(f"attribute {name} is missing")
    return default


def require(condition: bool, message: str) -> None:
    """Fail the inference of an operator.

    Raises:
        InferenceError: ``condition`` is false.
    """
    if not condition:
        raise InferenceError(message)


def axis_of(axis: int, rank: int, what: str = "axis") -> int:
    """An axis counted from the front.

    Raises:
        InferenceError: It is outside the rank.
    """
    require(-rank <= axis < rank, f"{what} {axis} is outside a tensor of rank {rank}")
    return axis % rank


def broadcast(*shapes: Shape) -> Shape:
    """The common shape under NumPy's rules.

    Raises:
        InferenceError: There is none.
    """
    try:
        return tuple(int(dim) for dim in np.broadcast_shapes(*shapes))
    except ValueError:
        listed = " and ".join(str(list(shape)) for shape in shapes)
        raise InferenceError(f"shapes {listed} do not broadcast") from None


def same_dtype(*values: Value) -> str:
    """The dtype all of them have.

    Raises:
        InferenceError: They differ.
    """
    found = {value.dtype for value in values}
    require(len(found) == 1, f"inputs have different dtypes: {', '.join(sorted(found))}")
    return values[0].dtype
