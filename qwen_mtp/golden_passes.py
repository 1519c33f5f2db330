"""Runs the torch modules over states of their own: exactly, or with every result rounded."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from qwen_mtp.checks_golden import results
from qwen_mtp.graphs.model import Graph, Model
from qwen_mtp.graphs.signature import graph_specs
from qwen_mtp.graphs.spec import Activation, GraphSpec, TensorSpec

Array = npt.NDArray[Any]
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Result:
    """One run: inputs that are not state, and all outputs, by name.

    Attributes:
        spec: The graph.
        slot: For a prefill, the batch slot.
        inputs: Inputs that are not state.
        before: States as the run read them, as ``{name}.out``.
        outputs: Outputs, and states changed in place as ``{name}.out``.
    """

    spec: GraphSpec
    slot: int
    inputs: dict[str, Array]
    before: dict[str, Array]
    outputs: dict[str, Array]


class _Rounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Rounds the result of every operator to half precision, and widens it again."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return tree_map(self._round, func(*args, **(kwargs or {})))

    def _round(self, value: Any) -> Any:
        rounded = isinstance(value, torch.Tensor) and value.dtype is torch.float32
        return value.to(self._dtype).float() if rounded else value


class Player:
    """The graphs over states of their own.

    Attributes:
        hidden: Hidden rows for the next draft pass.
    """

    def __init__(
        self, model: Model, states: dict[str, Array], rounding: Activation = "float32"
    ) -> None:
        """Share ``model``.

        Args:
            model: With float32 weights.
            states: The first states by name; they are written to.
            rounding: What the results of operators are rounded to.
        """
        self._model, self._states = model, states
        self._half = HALVES.get(rounding)
        specs = graph_specs(model.config, model.geometry)
        self._specs = {spec.name: spec for spec in specs}
        shape = (model.geometry.max_num_seqs, model.geometry.max_rows, model.config.hidden_size)
        self.hidden = np.zeros(shape, np.float32)

    def run(self, graph: str, slot: int, given: Mapping[str, Any]) -> Result:
        """One pass from these inputs and the states."""
        spec = self._specs[graph]
        given = dict(given) | {"hidden": self.hidden}
        inputs = {
            t.name: self._view(t, slot).copy() if t.state else _input(t, given)
            for t in spec.inputs
        }
        with torch.no_grad(), _Rounding(self._half) if self._half else nullcontext():
            flat = (torch.from_numpy(data) for data in inputs.values())
            found = Graph(self._model, spec)(*flat)
        outputs = {}
        for tensor, result in zip(results(spec), found, strict=True):
            outputs[tensor.name] = result.numpy()
            if tensor.state is not None:
                self._view(tensor, slot)[:] = outputs[tensor.name]
        own = {t.name: inputs[t.name] for t in spec.inputs if t.state is None}
        before = {f"{t.name}.out": inputs[t.name] for t in spec.inputs if t.state}
        return Result(spec, slot, own, before, outputs)

    def _view(self, tensor: TensorSpec, slot: int) -> Array:
        assert tensor.state is not None
        whole, count = self._states[tensor.state], tensor.shape[0]
        return whole if whole.shape == tensor.shape else whole[slot * count : (slot + 1) * count]


def _input(tensor: TensorSpec, given: Mapping[str, Any]) -> Array:
    absent = {"stop_ids": -1, "top_p": 1}.get(tensor.name, 0)
    data = np.full(tensor.shape, absent, tensor.dtype)
    data[:] = given.get(tensor.name, absent)
    return data
