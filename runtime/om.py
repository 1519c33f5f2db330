"""The compiled graphs of a package on an Ascend NPU: one offline model (``.om``) a graph.

Memory on the device, all of it taken when the package is loaded:

- A state that changes in place has one buffer, bound as input.
- Any other state has two buffers. A graph reads one and writes its twin, then they change roles;
  the same memory is never bound to both. A prefill replaces one slot only: it writes that slot of
  the twin, from where it is copied back.
- An input or output that is no state has a buffer beside a host array, shared like it by graphs
  that agree on name and shape. Every run uploads all inputs and downloads all outputs but logits
  nobody asked for, so the host arrays always hold the truth. What a round pays for this beyond
  its tokens is the hidden rows, once down and once up: ``B * P * H * 4`` bytes.
"""

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_mtp.errors import PackageError
from qwen_mtp.graphs.spec import GraphSpec, StateSpec, TensorSpec
from qwen_mtp.runtime.acl import ALIGNMENT, DataSet, Device, OfflineModel
from qwen_mtp.runtime.closing import Closing
from qwen_mtp.runtime.om_signature import check_outputs, inputs_in_order, nbytes
from qwen_mtp.runtime.package import Package

Array = npt.NDArray[Any]
OM_DIRECTORY = Path("ascend", "om")  # where atc.sh puts what it compiles
# bfloat16 has no NumPy type: its bits.
_HOST_TYPES: dict[str, npt.DTypeLike] = {
    "float32": np.float32,
    "int32": np.int32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "int8": np.int8,
}


@dataclass(slots=True)
class _State:
    """A state on the device.

    Attributes:
        spec: What it is.
        buffers: Its memory, or both memories that take turns.
        current: The one that the next run reads.
    """

    spec: StateSpec
    buffers: tuple[int, ...]
    current: int = 0

    def place(self, tensor: TensorSpec, slot: int, turn: int) -> int:
        """Where ``tensor``, the whole state or one slot of it, lies; turn 0 reads, 1 writes."""
        start = 0 if tensor.shape == self.spec.shape else slot * nbytes(tensor)
        return self.buffers[(self.current + turn) % len(self.buffers)] + start


@dataclass(slots=True)
class _Loaded:
    """A graph on the device; the tensors follow the ports of the model."""

    model: OfflineModel
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    read: DataSet
    written: DataSet


class OmEngine(Closing):
    """Runs the graphs of a package by name on named buffers; a context manager.

    Has what a session needs (``Session(package, engine=OmEngine(package))``). Close it when the
    session is done. Not safe for use from several threads at once.
    """

    def __init__(
        self,
        package: Package,
        om_directory: str | PathLike[str] | None = None,
        *,
        device: int = 0,
        keep_logits: bool = False,
        acl: Any | None = None,
    ) -> None:
        """Load every graph and allocate the state.

        Args:
            package: The package.
            om_directory: Where ``<graph>.om`` lie; None takes ``ascend/om`` in the package.
            device: Which NPU, as ``npu-smi info`` counts.
            keep_logits: Also download the logits, so that they can be read after each run.
            acl: What takes the place of CANN's module ``acl``; None imports it.

        Raises:
            MissingExtraError: CANN's module ``acl`` cannot be imported.
            PackageError: A file is missing, contradicts the manifest, or AscendCL refuses it.
            RequestError: There is no such device.
        """
        self.package = package
        self._keep_logits = keep_logits
        self._arrays: dict[tuple[str, tuple[int, ...]], Array] = {}
        self._memory: dict[tuple[str, tuple[int, ...]], int] = {}
        self._device = Device(device, acl)
        try:
            directory = Path(om_directory or package.directory / OM_DIRECTORY)
            self._check_files(directory)
            self._states = {s.name: self._allocate(s) for s in package.manifest.states}
            self._graphs = {g.name: self._load(directory, g) for g in package.manifest.graphs}
        except BaseException:
            self._device.abandon()
            raise

    def close(self) -> None:
        """Give back the device and everything on it; closing twice is harmless.

        Raises:
            PackageError: AscendCL refused to release something; the rest was released.
        """
        self._device.close()

    def buffer(self, graph: str, name: str) -> Array:
        """The host array of an input or output that is neither state nor block table.

        A run reads all inputs from and writes all outputs to these arrays (logits only with
        ``keep_logits``); bfloat16 is held as its bits in uint16.
        """
        return self._array(self.package.graph(graph).tensor(name))

    def state(self, name: str) -> Array:
        """A copy of a state as the next run will read it; bfloat16 as float32."""
        state = self._states[name]
        data = np.empty(state.spec.shape, _HOST_TYPES[state.spec.dtype])
        self._device.enter_thread()
        self._device.download(data, state.buffers[state.current])
        if state.spec.dtype == "bfloat16":
            return (data.astype(np.uint32) << 16).view(np.float32)
        return data

    def clear_slot(self, slot: int) -> None:
        """Zero the per-slot state of one batch slot; pool blocks need no clearing."""
        self._device.enter_thread()
        for state in self._states.values():
            if state.spec.per_slot:
                part = state.spec.nbytes // self.package.manifest.geometry.max_num_seqs
                self._device.clear(state.buffers[state.current] + slot * part, part)

    def run(self, graph: str, table: npt.NDArray[np.int32], slot: int = 0) -> None:
        """Upload the inputs, run one graph, download the outputs.

        Args:
            graph: Its name.
            table: ``[B, W]`` block table; a narrower one is filled up with block 0.
            slot: For the prefill graph, the batch slot whose state it advances.

        Raises:
            PackageError: AscendCL stops in the middle of the graph.
        """
        loaded, device = self._graphs[graph], self._device
        padded = self.buffer(graph, "block_table")
        padded[:] = 0
        padded[:, : table.shape[1]] = table
        device.enter_thread()
        for tensor in loaded.inputs:
            if tensor.state is None:
                device.upload(self._place(tensor, 0, 0), self._array(tensor))
        self._bind(loaded, slot)
        device.execute(loaded.model, loaded.read, loaded.written)
        for tensor in loaded.outputs:
            if tensor.state is not None:
                self._take_over(tensor, slot)
            elif self._keep_logits or "logits" not in tensor.name:
                device.download(self._array(tensor), self._place(tensor, 0, 0))

    def table_width(self, positions: int) -> int:
        """Blocks of a table: compiled shapes are static, so always those of a whole context."""
        return self.package.manifest.geometry.table_width

    def _check_files(self, directory: Path) -> None:
        for graph in self.package.manifest.graphs:
            if not (path := directory / f"{graph.name}.om").is_file():
                raise PackageError(
                    f"{path}: there is no such file; ascend/atc.sh in the package compiles it"
                )

    def _allocate(self, spec: StateSpec) -> _State:
        count = 1 if spec.in_place else 2
        return _State(
            spec, tuple(self._device.malloc(spec.nbytes, spec.name) for _ in range(count))
        )

    def _load(self, directory: Path, graph: GraphSpec) -> _Loaded:
        path = directory / f"{graph.name}.om"
        model = self._device.load(str(path), graph.name)
        check_outputs(path, graph, model.outputs)
        inputs, outputs = inputs_in_order(path, graph, model.inputs), graph.outputs
        for tensor in (*inputs, *outputs):
            self._prepare(path, tensor)
        read = [self._place(tensor, 0, 0) for tensor in inputs]
        written = [self._place(tensor, 0, 1) for tensor in outputs]
        return _Loaded(
            model,
            inputs,
            outputs,
            self._device.dataset(model.inputs, read),
            self._device.dataset(model.outputs, written),
        )

    def _prepare(self, path: Path, tensor: TensorSpec) -> None:
        """Take the memory of a tensor that is no state; a slot of a state must be addressable."""
        key, size = (tensor.name, tensor.shape), nbytes(tensor)
        if tensor.state is None:
            if key not in self._memory:
                self._memory[key] = self._device.malloc(size, tensor.name)
        elif tensor.shape != self._states[tensor.state].spec.shape and size % ALIGNMENT:
            raise PackageError(
                f"{path}: a slot of {tensor.state} takes {size} bytes, which is no multiple of "
                f"{ALIGNMENT}; export with --max-num-seqs 1"
            )

    def _place(self, tensor: TensorSpec, slot: int, turn: int) -> int:
        if tensor.state is None:
            return self._memory[tensor.name, tensor.shape]
        return self._states[tensor.state].place(tensor, slot, turn)

    def _bind(self, loaded: _Loaded, slot: int) -> None:
        read = [self._place(tensor, slot, 0) for tensor in loaded.inputs]
        written = [self._place(tensor, slot, 1) for tensor in loaded.outputs]
        self._device.rebind(loaded.read, loaded.model.inputs, read)
        self._device.rebind(loaded.written, loaded.model.outputs, written)

    def _take_over(self, tensor: TensorSpec, slot: int) -> None:
        """Make what a run wrote the state that the next one reads."""
        assert tensor.state is not None
        state = self._states[tensor.state]
        if tensor.shape == state.spec.shape:
            state.current ^= 1
        else:
            source, target = state.place(tensor, slot, 1), state.place(tensor, slot, 0)
            self._device.copy(target, source, nbytes(tensor))

    def _array(self, tensor: TensorSpec) -> Array:
        key = (tensor.name, tensor.shape)
        if key not in self._arrays:
            self._arrays[key] = np.zeros(tensor.shape, _HOST_TYPES[tensor.dtype])
        return self._arrays[key]
