"""The compiled graphs of a package in ONNX Runtime, and the buffers they run on.

One model with a branch for each graph is one session. Standard models, one for each graph, are a
session each: those share the weight file, but not the packed copies of the weights that a session
makes, so all of them together take about as many times the memory as there are graphs.

Every input and output is a NumPy buffer bound once. State is bound to the same buffer as input
and output, so pools, windows and recurrent state change in place; the stash of a round has two
buffers that take turns, because a graph writes the new one before it has read the old one.
Standard models promise nothing about the order in which they read and write a state, but for the
pools: they read copies of the others.
"""

import ctypes
import hashlib
import math
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from qwen_mtp.errors import PackageError, RequestError
from qwen_mtp.graphs.manifest import REMEDY, SELECTOR
from qwen_mtp.graphs.spec import GraphSpec, StateSpec, TensorSpec
from qwen_mtp.runtime.native import NativeKernels, find_kernels, slow_products
from qwen_mtp.runtime.package import Package

Array = npt.NDArray[Any]
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, others need not
# Sums over the context are taken in fixed strides; a table is widened in steps of this many
# positions so that a row's bits do not depend on how far its neighbours have come.
POSITION_STEP = 128
_POPULATE_READ = 22  # of madvise, Linux 5.14: map and read all pages now


@dataclass(slots=True)
class _Bound:
    """One graph bound to its buffers.

    Attributes:
        binding: What ONNX Runtime runs.
        width: Width of the block table that is bound.
        kept: OrtValues and arrays, which must outlive the binding.
        copies: Arrays that are filled from others before a run.
    """

    binding: Any
    width: int
    kept: list[Any] = field(default_factory=list)
    copies: list[tuple[Array, Array]] = field(default_factory=list)


class Engine:
    """Runs the graphs of a package by name on named buffers."""

    def __init__(
        self,
        package: Package,
        *,
        threads: int | None = None,
        keep_logits: bool = False,
        native: bool | None = None,
    ) -> None:
        """Load the models and allocate the state.

        Args:
            package: The package.
            threads: Threads inside an operator; None takes the number of usable cores.
            keep_logits: Also bind the logits, so that they can be read after each run.
            native: Run on the native kernels of this machine; None where there are some or they
                can be compiled. They read the weights where they lie, so nothing is packed.

        Raises:
            PackageError: ONNX Runtime refuses a model. One for native kernels that is as it was
                written is only refused if they were asked for.
            RequestError: ``threads`` is not a positive number, or ``native`` cannot be.
        """
        if threads is not None and threads < 1:
            raise RequestError(f"threads is {threads}: give a number >= 1")
        self.package = package
        self._apart = "{graph}" in package.manifest.model_file
        self._keep_logits = keep_logits
        self.kernels = _kernels(package, native)
        if self.kernels.library is not None:
            _check_native(package)
        with open(package.directory / package.manifest.weights_file, "rb") as file:
            self._weights = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        threads = threads or len(os.sched_getaffinity(0))
        try:
            self._sessions = self._load(threads)
        except PackageError as error:
            if native or self.kernels.library is None:
                raise
            self.kernels = NativeKernels(None, str(error))  # a package of another release
            self._sessions = self._load(threads)
        self._settle_pages()
        self._states = {
            (s.name, parity): _state(s)
            for s in package.manifest.states
            for parity in range(2 if s.kind == "stash" and not self._apart else 1)
        }
        self._buffers: dict[tuple[str, tuple[int, ...]], Array] = {}
        self._bound: dict[tuple[str, int, int], _Bound] = {}
        self._parity = 0
        # A chunk needs far more scratch memory than a round; it is not kept for the rounds.
        self._shrink = ort.RunOptions()
        self._shrink.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")

    def _load(self, threads: int) -> dict[str, ort.InferenceSession]:
        """The session of each graph."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4  # errors are raised, with all that the log would say
        if self.kernels.library is not None:
            options.register_custom_ops_library(str(self.kernels.library))
        self._initializers = []  # the session reads them as long as it lives
        for tensor in self.package.manifest.weights:
            count = math.prod(tensor.shape)
            data = np.frombuffer(self._weights, tensor.dtype, count, tensor.offset)
            value = ort.OrtValue.ortvalue_from_numpy(data.reshape(tensor.shape))
            self._initializers.append(value)
            options.add_initializer(tensor.name, value)
        paths = {g.name: self._path(g.name) for g in self.package.manifest.graphs}
        opened = {path: _open(path, options) for path in dict.fromkeys(paths.values())}
        return {name: opened[path] for name, path in paths.items()}

    def _path(self, graph: str) -> Path:
        manifest = self.package.manifest
        if self.kernels.library is not None:
            return self.package.directory / str(manifest.native_file)
        return self.package.directory / manifest.model_path(graph)

    def _settle_pages(self) -> None:
        """Map the weight file for native kernels, or give it back to the page cache.

        ONNX Runtime's kernels hold packed copies; all they still read is a few embedding rows a
        run, but each of them may map a whole large page. What is needed again is mapped again.
        """
        if self.kernels.library is None:
            self._weights.madvise(mmap.MADV_DONTNEED)
            return
        try:
            self._weights.madvise(_POPULATE_READ)
        except OSError:  # an older kernel: pages come as they are read
            self._weights.madvise(mmap.MADV_WILLNEED)

    def buffer(self, graph: str, name: str) -> Array:
        """The buffer of an input or output that is neither state nor block table.

        Graphs share a buffer when name and shape agree: that is how the draft graph reads the
        tokens and hidden rows that the verify graph wrote.
        """
        return self._io(self.package.graph(graph).tensor(name))

    def state(self, name: str) -> Array:
        """A state tensor as the next run will read it."""
        twin = (name, self._parity)
        return self._states[twin if twin in self._states else (name, 0)]

    def clear_slot(self, slot: int) -> None:
        """Zero the per-slot state of one batch slot; pool blocks need no clearing."""
        slots = self.package.manifest.geometry.max_num_seqs
        for spec in self.package.manifest.states:
            if spec.per_slot:
                self.state(spec.name).reshape(slots, -1)[slot] = 0

    def run(self, graph: str, table: npt.NDArray[np.int32], slot: int = 0) -> None:
        """Run one graph on its buffers.

        Args:
            graph: Its name.
            table: ``[B, W]`` block table, W from :meth:`table_width`.
            slot: For the prefill graph, the batch slot whose state it advances.

        Raises:
            PackageError: ONNX Runtime stops in the middle of the graph.
        """
        spec = self.package.graph(graph)
        turns = spec.kind == "target_verify" and not self._apart
        key = (graph, self._parity if turns else 0, slot if spec.kind == "prefill" else 0)
        bound = self._bound.get(key)
        if bound is None:
            bound = self._bound[key] = self._bind(spec, key[1], slot)
        self._bind_table(bound, spec, table)
        for target, source in bound.copies:
            target[...] = source
        options = self._shrink if spec.kind == "prefill" else None
        try:
            self._sessions[graph].run_with_iobinding(bound.binding, options)
        except Exception as error:  # the runtime's own exceptions share no base class
            raise PackageError(
                f"{self._path(graph)}: {graph} stopped ({' '.join(str(error).split())}); "
                "run qwen-mtp verify on the package"
            ) from error
        if self.kernels.library is None:
            self._settle_pages()
        if spec.kind == "prefill" and _malloc_trim is not None:
            _malloc_trim(0)  # the scratch memory of a chunk leaves the heap full of holes
        if turns:
            self._parity ^= 1

    def table_width(self, positions: int) -> int:
        """Blocks to pass so that a table covers ``positions``, in steps of whole strides.

        Standard models are static: their table always has all its columns.
        """
        geometry = self.package.manifest.geometry
        if self._apart:
            return geometry.table_width
        step = max(1, POSITION_STEP // geometry.block_size)
        blocks = -(-positions // geometry.block_size)
        return min(-(-blocks // step) * step, geometry.table_width)

    def _bind(self, spec: GraphSpec, parity: int, slot: int) -> _Bound:
        bound = _Bound(self._sessions[spec.name].io_binding(), 0)
        if not self._apart:
            self._give(bound, SELECTOR, np.array(self.package.selector(spec.name), np.int32))
        for tensor in spec.inputs:
            if tensor.name != "block_table":
                data = self._find(tensor, parity, slot)
                if self._apart and tensor.state and tensor.name not in spec.in_place:
                    bound.copies.append((self._copy(tensor), data))
                    data = bound.copies[-1][0]
                self._give(bound, self._name(spec, tensor.name), data)
        for tensor in spec.all_outputs:
            if "logits" in tensor.name and not self._keep_logits:
                continue
            value = ort.OrtValue.ortvalue_from_numpy(self._find(tensor, parity ^ 1, slot))
            bound.kept.append(value)
            bound.binding.bind_ortvalue_output(self._name(spec, tensor.name), value)
        return bound

    def _name(self, spec: GraphSpec, tensor: str) -> str:
        return tensor if self._apart else f"{spec.name}/{tensor}"

    def _copy(self, tensor: TensorSpec) -> Array:
        """A buffer beside a state: one for all graphs, which run one at a time."""
        return self._buffers.setdefault(
            (tensor.name, tensor.shape), np.zeros(tensor.shape, tensor.dtype)
        )

    def _give(self, bound: _Bound, name: str, data: Array) -> None:
        value = ort.OrtValue.ortvalue_from_numpy(data)
        bound.kept += [value, data]
        bound.binding.bind_ortvalue_input(name, value)

    def _bind_table(self, bound: _Bound, spec: GraphSpec, table: npt.NDArray[np.int32]) -> None:
        width = self.package.manifest.geometry.table_width
        columns = width if self._apart else table.shape[1]
        shape = (len(table), columns)
        buffer = self._buffers.setdefault(("block_table", shape), np.zeros(shape, np.int32))
        buffer[:, table.shape[1] :] = 0
        buffer[:, : table.shape[1]] = table
        if bound.width != columns:
            self._give(bound, self._name(spec, "block_table"), buffer)
            bound.width = columns

    def _find(self, tensor: TensorSpec, parity: int, slot: int) -> Array:
        if tensor.state is None:
            return self._io(tensor)
        twin = (tensor.state, parity)
        whole = self._states[twin if twin in self._states else (tensor.state, 0)]
        count = tensor.shape[0]
        return whole if whole.shape == tensor.shape else whole[slot * count : (slot + 1) * count]

    def _io(self, tensor: TensorSpec) -> Array:
        key = (tensor.name, tensor.shape)
        if key not in self._buffers:
            self._buffers[key] = np.zeros(tensor.shape, tensor.dtype)
        return self._buffers[key]


def _kernels(package: Package, native: bool | None) -> NativeKernels:
    """The kernels to run on: none where the package has no model for them or they are unwanted."""
    if native is False or (package.manifest.native_file is None and native is None):
        return NativeKernels(None, "not asked for")
    if package.manifest.native_file is None:
        raise RequestError(f"{package.directory}: has no model for native kernels; leave it out")
    if native is None and (reason := slow_products(package.manifest.geometry.format)):
        return NativeKernels(None, reason)
    found = find_kernels()
    if native and found.library is None:
        raise RequestError(f"native kernels: {found.reason}")
    return found


def _check_native(package: Package) -> None:
    """Refuse a native model that is not the one that was written: kernels believe its sizes."""
    manifest = package.manifest
    (listed,) = (file for file in manifest.files if file.path == manifest.native_file)
    path = package.directory / listed.path
    if hashlib.sha256(path.read_bytes()).hexdigest() != listed.sha256:
        raise PackageError(f"{path}: is not the file that the manifest lists; {REMEDY}")


def _open(path: Path, options: ort.SessionOptions) -> ort.InferenceSession:
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the runtime's own exceptions share no base class
        reason = " ".join(str(error).split())
        raise PackageError(
            f"{path}: ONNX Runtime {ort.__version__} refuses it ({reason}); {REMEDY}"
        ) from error


def _state(spec: StateSpec) -> Array:
    """A zeroed state tensor; a pool takes memory page by page as contexts grow."""
    if spec.per_slot:
        return np.zeros(spec.shape, spec.dtype)
    memory = mmap.mmap(-1, spec.nbytes)
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page would be taken for a single block
    return np.frombuffer(memory, spec.dtype).reshape(spec.shape)
