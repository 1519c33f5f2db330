"""Small GE models by hand, and what the interpreter makes of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from qwen_mtp.errors import MissingExtraError
from qwen_mtp.ge.interpreter import Interpreter
from qwen_mtp.ge.node import DESCRIPTOR_TYPES
from qwen_mtp.ge.wheel import messages
from qwen_mtp.ge.wiring import WRITES

CODES = {dtype: code for code, dtype in DESCRIPTOR_TYPES.items()}
Value = torch.Tensor | Sequence[Any] | int | None


@dataclass(frozen=True)
class Type:
    """An element type where an attribute names one."""

    code: int


class GraphBuilder:
    """Adds operators in order; every method answers with the edge ``name:output``."""

    def __init__(self) -> None:
        try:
            self.messages = messages()
        except MissingExtraError as missing:
            pytest.skip(str(missing))
        self.proto = self.messages.ModelDef()
        self.graph = self.proto.graph.add()
        self.outputs: list[str] = []
        self.after: list[str] = []

    def data(self, name: str, value: torch.Tensor, kind: str = "Data") -> str:
        op = self._op(name, kind, [], {"index": len(self.graph.op)}, ["y"])
        op.output_desc[0].dtype = CODES[value.dtype]
        op.output_desc[0].shape.dim.extend(value.shape)
        return f"{name}:0"

    def ref(self, name: str, value: torch.Tensor) -> str:
        return self.data(name, value, "RefData")

    def const(self, value: Value, dtype: torch.dtype = torch.int32) -> str:
        held = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=dtype)
        op = self._op(f"const{len(self.graph.op)}", "Const", [], {}, ["y"])
        tensor = op.attr["value"].t
        tensor.desc.dtype = CODES[held.dtype]
        tensor.desc.shape.dim.extend(held.shape)
        tensor.data = (
            held.contiguous().view(torch.uint8).numpy().tobytes()
            if held.dim()
            else (held.reshape(1).view(torch.uint8).numpy().tobytes())
        )
        return f"{op.name}:0"

    def op(
        self,
        type_: str,
        inputs: Mapping[str, str | None],
        attrs: Mapping[str, Any] | None = None,
        outputs: Sequence[str] = ("y",),
        after: Sequence[str] = (),
        name: str = "",
    ) -> str:
        name = name or f"{type_}{len(self.graph.op)}"
        op = self._op(name, type_, [], attrs or {}, outputs)
        for key, edge in inputs.items():
            op.input.append(edge or "")
            op.input_desc.add().name = key
        op.input.extend(after)
        return f"{name}:0"

    def model(self, *outputs: str, after: Sequence[str] = ()) -> Any:
        names = {f"input{i}": edge for i, edge in enumerate(outputs)}
        self.op("NetOutput", names, outputs=(), after=after, name="NetOutput")
        return self.proto

    def _op(
        self,
        name: str,
        type_: str,
        inputs: Sequence[str],
        attrs: Mapping[str, Any],
        outputs: Sequence[str],
    ) -> Any:
        op = self.graph.op.add()
        op.name, op.type = name, type_
        op.input.extend(inputs)
        for key, value in attrs.items():
            _set(op.attr[key], value)
        for output in outputs:
            op.output_desc.add().name = output
        return op


def _set(attr: Any, value: Any) -> None:
    if isinstance(value, Type):
        attr.dt = value.code
    elif isinstance(value, bool):
        attr.b = value
    elif isinstance(value, int):
        attr.i = value
    elif isinstance(value, float):
        attr.f = value
    elif isinstance(value, str):
        attr.s = value.encode()
    else:
        attr.list.i.extend(value)
        attr.list.val_type = 2


def no_weights(path: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    raise AssertionError(f"{path} was asked for")


def evaluate(
    type_: str,
    inputs: Mapping[str, Value],
    attrs: Mapping[str, Any] | None = None,
    outputs: Sequence[str] = ("y",),
) -> list[torch.Tensor]:
    """Run one operator: tensors are fed (states where it writes), numbers are constants."""
    graph = GraphBuilder()
    feeds: dict[str, torch.Tensor] = {}
    edges: dict[str, str | None] = {}
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            written = name in WRITES.get(type_, {}).values()
            feeds[name] = value.clone() if written else value
            edges[name] = graph.data(name, value, "RefData" if written else "Data")
        else:
            edges[name] = None if value is None else graph.const(value)
    made = graph.op(type_, edges, attrs, outputs, name="made")
    ends = [f"{made[:-1]}{i}" for i in range(len(outputs))]
    return list(Interpreter(graph.model(*ends), no_weights).run(feeds).values())
