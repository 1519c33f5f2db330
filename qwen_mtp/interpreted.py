"""Runs the GE models of a package through the interpreter: for checks, not for speed.

The loop is the same as everywhere (``runtime.session``); only what runs the graphs differs. States
are torch tensors in their own type: those that a graph changes in place are handed over as they
are, those that it answers with are replaced.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from qwen_mtp.errors import PackageError
from qwen_mtp.ge.interpreter import Interpreter, WeightFiles
from qwen_mtp.ge.proto import load_air
from qwen_mtp.graphs.layers import DTYPES
from qwen_mtp.graphs.spec import StateSpec, TensorSpec
from qwen_mtp.runtime.package import Package

Array = npt.NDArray[Any]
_DAMAGE = (LookupError, RuntimeError, TypeError, ValueError)  # PackageError among the last


class InterpretedEngine:
    """A ``GraphRunner`` over the models of a package for Ascend."""

    def __init__(self, package: Package) -> None:
        """Read the models; a graph is compiled when it first runs.

        Raises:
            PackageError: The package is not for Ascend.
        """
        if package.manifest.ascend is None:
            raise PackageError(
                f"{package.directory}: holds no GE models; export with --target air"
            )
        self.package = package
        folder = Path(package.manifest.model_file).parent
        self._weights = WeightFiles(package.directory / folder)
        self._graphs: dict[str, Interpreter] = {}
        self._buffers: dict[tuple[str, tuple[int, ...]], Array] = {}
        self._states = {s.name: _zeros(s) for s in package.manifest.states}

    def interpreter(self, graph: str) -> Interpreter:
        """The compiled graph.

        Raises:
            PackageError: Its file is damaged, or something in it is not implemented.
        """
        if graph not in self._graphs:
            path = self.package.directory / self.package.manifest.model_path(graph)
            outputs = [t.name for t in self.package.graph(graph).outputs]
            try:
                self._graphs[graph] = Interpreter(load_air(path), self._weights, outputs)
            except _DAMAGE as error:
                raise self._stopped(graph, error) from error
        return self._graphs[graph]

    def buffer(self, graph: str, name: str) -> Array:
        """The array of an input or output that is neither state nor block table."""
        return self._io(self.package.graph(graph).tensor(name))

    def state(self, name: str) -> Array:
        """A state tensor; bfloat16 comes as a float32 copy, all others as they are in memory."""
        tensor = self._states[name]
        return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()

    def put_state(self, name: str, value: Array) -> None:
        """Replace a state tensor, which :meth:`state` may have given as a copy."""
        self._states[name].copy_(torch.from_numpy(value))

    def clear_slot(self, slot: int) -> None:
        """Zero the per-slot state of one batch slot."""
        slots = self.package.manifest.geometry.max_num_seqs
        for spec in self.package.manifest.states:
            if spec.per_slot:
                self._states[spec.name].view(slots, -1)[slot] = 0

    def table_width(self, positions: int) -> int:
        """Every dimension is static: a table always has all its columns."""
        return self.package.manifest.geometry.table_width

    def run(self, graph: str, table: npt.NDArray[np.int32], slot: int = 0) -> None:
        """Run one graph on its buffers.

        Raises:
            PackageError: The graph stops in the middle.
        """
        spec = self.package.graph(graph)
        inputs = {t.name: self._bound(t, slot) for t in spec.inputs if t.name != "block_table"}
        wide = np.zeros((len(table), self.table_width(0)), np.int32)
        wide[:, : table.shape[1]] = table
        inputs["block_table"] = torch.from_numpy(wide)
        interpreter = self.interpreter(graph)
        try:
            results = interpreter.run(inputs)
            for tensor in spec.outputs:
                self._keep(tensor, results[tensor.name], slot)
        except _DAMAGE as error:
            raise self._stopped(graph, error) from error

    def _stopped(self, graph: str, error: Exception) -> PackageError:
        path = self.package.directory / self.package.manifest.model_path(graph)
        reason = " ".join(str(error).split())
        return PackageError(f"{path}: {reason}; run qwen-mtp verify on the package")

    def _keep(self, tensor: TensorSpec, value: torch.Tensor, slot: int) -> None:
        if tensor.state is None:
            self._io(tensor)[...] = value.numpy()
        else:
            self._bound(tensor, slot).copy_(value)

    def _bound(self, tensor: TensorSpec, slot: int) -> torch.Tensor:
        if tensor.state is None:
            return torch.from_numpy(self._io(tensor))
        whole, count = self._states[tensor.state], tensor.shape[0]
        same = tuple(whole.shape) == tensor.shape
        return whole if same else whole[slot * count : (slot + 1) * count]

    def _io(self, tensor: TensorSpec) -> Array:
        key = (tensor.name, tensor.shape)
        if key not in self._buffers:
            self._buffers[key] = np.zeros(tensor.shape, tensor.dtype)
        return self._buffers[key]


def _zeros(spec: StateSpec) -> torch.Tensor:
    return torch.zeros(spec.shape, dtype=DTYPES[spec.dtype])
