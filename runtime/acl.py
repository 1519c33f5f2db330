"""AscendCL through ``acl``, the Python module of CANN: one device and what is taken from it.

What was acquired is released once, last first, by ``close``, also when a later step fails; a
device that was never closed is released when it is collected or the process ends.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, finalize

import numpy.typing as npt

from qwen_mtp.errors import PackageError, RequestError
from qwen_mtp.runtime.acl_calls import INITIALIZED_BEFORE, LOG, answer, call, error, import_acl

Array = npt.NDArray[Any]

ALIGNMENT = 64  # bytes; where the memory of a tensor may begin
_HUGE_FIRST = 0  # pages of 2 MiB where there are any
_TO_DEVICE, _TO_HOST, _ON_DEVICE = 1, 2, 3  # directions of a copy
_RUNS_ON_HOST = 1


@dataclass(frozen=True, slots=True)
class Port:
    """One input or output of a compiled model: its name and its bytes."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class OfflineModel:
    """A model on the device.

    Attributes:
        id: What AscendCL knows it by.
        label: What errors call it.
        inputs: In the order of the compiled model.
        outputs: In the order of the compiled model.
    """

    id: int
    label: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


@dataclass(slots=True)
class DataSet:
    """The memory a model reads or writes: a handle for each tensor and where it points."""

    handle: int
    buffers: list[int] = field(default_factory=list)
    pointers: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Holdings:
    """What a device must give back; apart from it, so that it outlives it."""

    acl: Any
    context: int | None = None
    releases: list[Callable[[], Any]] = field(default_factory=list)


@dataclass(slots=True)
class _Process:
    """AscendCL is initialised once a process: the last user ends what the first one began."""

    users: int = 0
    ours: bool = False


_processes: WeakKeyDictionary[Any, _Process] = WeakKeyDictionary()


class Device:
    """One NPU: models, memory and copies. Not safe for several threads at once."""

    def __init__(self, index: int = 0, acl: Any | None = None) -> None:
        """Open it.

        Args:
            index: Which one, as ``npu-smi info`` counts.
            acl: What takes the place of the module ``acl``; None imports it.

        Raises:
            MissingExtraError: There is no ``acl``.
            RequestError: There is no such device.
            PackageError: AscendCL refuses.
        """
        self._held = _Holdings(import_acl() if acl is None else acl)
        self._close = finalize(self, _release, self._held)
        try:
            _enter(self._held.acl)
            self._owe(partial(_leave, self._held.acl))
            label = f"device {index}"
            self._call("acl.rt.set_device", index, of=label)
            self._owe("acl.rt.reset_device", index)
            self._held.context = self._call("acl.rt.create_context", index, of=label)
            self._owe("acl.rt.destroy_context", self._held.context)
            on_host = self._call("acl.rt.get_run_mode") == _RUNS_ON_HOST
        except BaseException:
            self.abandon()
            raise
        # A program on the board itself shares the memory: all copies are copies within it.
        self._to_device, self._to_host = (_TO_DEVICE, _TO_HOST) if on_host else (_ON_DEVICE,) * 2

    def close(self) -> None:
        """Release everything; closing twice is harmless.

        Raises:
            PackageError: AscendCL refused to release something; the rest was released.
        """
        refusal = self._close()
        if refusal is not None:
            raise refusal

    def abandon(self) -> None:
        """Release everything because of an error that matters more than those of releasing."""
        with suppress(PackageError):
            self.close()

    def enter_thread(self) -> None:
        """Make the calling thread work on this device.

        Raises:
            RequestError: It is closed.
        """
        if not self._close.alive:
            raise RequestError("the device is closed: make a new engine")
        self._call("acl.rt.set_context", self._held.context)

    def malloc(self, nbytes: int, of: str) -> int:
        """Zeroed memory; ``of`` says what for. The pointer is a multiple of ``ALIGNMENT``."""
        pointer: int = self._call("acl.rt.malloc", nbytes, _HUGE_FIRST, of=of)
        self._owe("acl.rt.free", pointer)
        self.clear(pointer, nbytes)
        return pointer

    def clear(self, pointer: int, nbytes: int) -> None:
        """Zero memory."""
        self._call("acl.rt.memset", pointer, nbytes, 0, nbytes)

    def upload(self, pointer: int, data: Array) -> None:
        """Copy a contiguous array to the device."""
        size = data.nbytes
        self._call("acl.rt.memcpy", pointer, size, data.ctypes.data, size, self._to_device)

    def download(self, data: Array, pointer: int) -> None:
        """Fill a contiguous array from the device."""
        size = data.nbytes
        self._call("acl.rt.memcpy", data.ctypes.data, size, pointer, size, self._to_host)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy within the device."""
        self._call("acl.rt.memcpy", target, nbytes, source, nbytes, _ON_DEVICE)

    def load(self, path: str, label: str) -> OfflineModel:
        """Load an ``.om`` file and read what it takes and gives."""
        model = self._call("acl.mdl.load_from_file", path, of=label)
        self._owe("acl.mdl.unload", model)
        desc = self._new("acl.mdl.create_desc")
        self._owe("acl.mdl.destroy_desc", desc)
        self._call("acl.mdl.get_desc", desc, model, of=label)
        return OfflineModel(model, label, self._ports(desc, "input"), self._ports(desc, "output"))

    def dataset(self, ports: Sequence[Port], pointers: Sequence[int]) -> DataSet:
        """Bind memory to the inputs or the outputs of a model."""
        data = DataSet(self._new("acl.mdl.create_dataset"))
        self._owe("acl.mdl.destroy_dataset", data.handle)
        for port, pointer in zip(ports, pointers, strict=True):
            buffer = self._new("acl.create_data_buffer", pointer, port.nbytes)
            self._owe("acl.destroy_data_buffer", buffer)
            self._call("acl.mdl.add_dataset_buffer", data.handle, buffer)
            data.buffers.append(buffer)
            data.pointers.append(pointer)
        return data

    def rebind(self, data: DataSet, ports: Sequence[Port], pointers: Sequence[int]) -> None:
        """Bind other memory where it is not the same."""
        for i, (port, pointer) in enumerate(zip(ports, pointers, strict=True)):
            if pointer != data.pointers[i]:
                self._call("acl.update_data_buffer", data.buffers[i], pointer, port.nbytes)
                data.pointers[i] = pointer

    def execute(self, model: OfflineModel, inputs: DataSet, outputs: DataSet) -> None:
        """Run a model and wait for it."""
        self._call("acl.mdl.execute", model.id, inputs.handle, outputs.handle, of=model.label)

    def _ports(self, desc: int, side: str) -> tuple[Port, ...]:
        read = partial(answer, self._held.acl)
        return tuple(
            Port(
                read(f"acl.mdl.get_{side}_name_by_index", desc, i),
                read(f"acl.mdl.get_{side}_size_by_index", desc, i),
            )
            for i in range(read(f"acl.mdl.get_num_{side}s", desc))
        )

    def _call(self, name: str, *args: Any, of: str = "") -> Any:
        return call(self._held.acl, name, *args, of=of)

    def _new(self, name: str, *args: Any) -> int:
        """The handle of a new object; AscendCL answers with a null pointer where it cannot."""
        handle: int | None = answer(self._held.acl, name, *args)
        if not handle:
            raise PackageError(f"{name} gave nothing; {LOG}")
        return handle

    def _owe(self, release: str | Callable[[], Any], *args: Any) -> None:
        if isinstance(release, str):
            release = partial(call, self._held.acl, release, *args)
        self._held.releases.append(release)


def _release(held: _Holdings) -> PackageError | None:
    """Give everything back, last first; the first error is returned, none stops it."""
    first: PackageError | None = None
    if held.context is not None:
        with suppress(PackageError):  # where it fails, the releases say more
            call(held.acl, "acl.rt.set_context", held.context)
    while held.releases:
        try:
            held.releases.pop()()
        except PackageError as found:
            first = first or found
    return first


def _enter(acl: Any) -> None:
    process = _processes.setdefault(acl, _Process())
    if process.users == 0:
        ret = answer(acl, "acl.init")
        if ret not in (0, INITIALIZED_BEFORE):
            raise error(acl, "acl.init", ret)
        process.ours = ret == 0
    process.users += 1


def _leave(acl: Any) -> None:
    process = _processes[acl]
    process.users -= 1
    if process.users == 0 and process.ours:
        call(acl, "acl.finalize")
