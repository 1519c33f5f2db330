"""Re-executes a GE graph (``.air``) with torch on the CPU: the reference for what it means.

A graph is compiled once (``compiler.py``); a run is a loop over bound calls that drops each
intermediate after its last use. States (RefData) are updated in place.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from qwen_mtp.errors import PackageError
from qwen_mtp.ge.compiler import FAILURES, Compiler, Loader, Port, Step
from qwen_mtp.ge.node import Function

Tensor = torch.Tensor


class WeightFiles:
    """Weights of a directory, each file mapped once and shared between graphs."""

    def __init__(self, directory: Path) -> None:
        """Read files as they are asked for, from ``directory``."""
        self._directory = directory
        self._held: dict[tuple[str, torch.dtype, tuple[int, ...]], Tensor] = {}

    def __call__(self, path: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Map ``path`` as a dense tensor.

        Raises:
            PackageError: It is missing or has another size.
        """
        key = (path, dtype, shape)
        if key not in self._held:
            file, count = self._directory / path, torch.Size(shape).numel()
            size = file.stat().st_size if file.is_file() else -1
            if size != count * dtype.itemsize:
                raise PackageError(
                    f"{file}: {size} bytes, {count * dtype.itemsize} are needed; export again"
                )
            flat = torch.from_file(str(file), shared=False, size=count, dtype=dtype)
            self._held[key] = flat.reshape(shape)
        return self._held[key]


class Interpreter:
    """A compiled graph.

    Attributes:
        inputs: Data and RefData by name.
        outputs: Names of the outputs, in order.
    """

    inputs: dict[str, Port]
    outputs: list[str]

    def __init__(
        self, model: Any, weights: Loader, output_names: Sequence[str] | None = None
    ) -> None:
        """Compile the graph of a model.

        Args:
            model: A ``ModelDef`` with one graph.
            weights: Called with path, element type and shape of every FileConstant.
            output_names: Names of the outputs; else those of the operators that make them.

        Raises:
            PackageError: Something in it is not implemented, is malformed, or depends on an order
                that no edge guarantees.
        """
        compiler = Compiler(model.graph[0], weights)
        compiler.compile()
        self.inputs = compiler.ports
        self.outputs = list(output_names or compiler.output_names)
        if len(self.outputs) != len(compiler.output_slots):
            raise PackageError(
                f"the graph has {len(compiler.output_slots)} outputs, {len(self.outputs)} named"
            )
        self._template = compiler.values
        self._slots = compiler.input_slots
        self._steps = [_packed(step) for step in compiler.steps]
        self._results = list(zip(self.outputs, compiler.output_slots, strict=True))
        self._owned = compiler.copied_outputs

    @property
    def size(self) -> int:
        """How many operators a run executes."""
        return len(self._steps)

    @torch.no_grad()
    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Execute the graph once; RefData tensors are updated in place.

        Args:
            inputs: A tensor for every Data and RefData.

        Returns:
            The outputs by name; none of them is the memory of a state.

        Raises:
            PackageError: An input is missing or has another type or shape, or an operator failed.
        """
        values = self._template.copy()
        for name, slot in self._slots.items():
            values[slot] = self._checked(name, inputs)
        running = ""
        try:
            for label, function, ins, outs, free in self._steps:
                running = label
                result = function(*[values[i] for i in ins])
                if outs.__class__ is int:
                    values[outs] = result
                else:
                    for slot, value in zip(outs, result, strict=True):
                        values[slot] = value
                for slot in free:
                    values[slot] = None
        except FAILURES as error:
            detail = str(error).splitlines()[:1] or [""]
            raise PackageError(f"GE operator {running}: {detail[0]}") from error
        found = {name: values[slot] for name, slot in self._results}
        return {n: v.clone() if n in self._owned else v for n, v in found.items()}

    def _checked(self, name: str, inputs: Mapping[str, Tensor]) -> Tensor:
        port, given = self.inputs[name], inputs.get(name)
        if given is None:
            raise PackageError(f"the input {name} is missing")
        fits = len(port.shape) == given.dim() and all(
            want in (-1, have) for want, have in zip(port.shape, given.shape, strict=True)
        )
        if given.dtype is not port.dtype or not fits:
            raise PackageError(
                f"the input {name} is {given.dtype} {list(given.shape)}, "
                f"the graph takes {port.dtype} {list(port.shape)}"
            )
        return given


def _packed(step: Step) -> tuple[str, Function, tuple[int, ...], Any, tuple[int, ...]]:
    outs = step.outs[0] if len(step.outs) == 1 else step.outs
    return step.label, step.function, step.ins, outs, step.free
