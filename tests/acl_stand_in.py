"""A stand-in for CANN's module ``acl``: one device in a simulated address space.

It keeps what a device keeps (memory, models, data sets, contexts) and refuses with the codes of
AscendCL what a device would refuse. What a device would not notice (memory freed twice or used
after, a copy past the end, one memory bound as input and output) is noted in ``violations``.
Models run in Python on views of the bound memory.
"""

import ctypes
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np

from qwen_mtp.graphs.spec import ITEM_BYTES, GraphSpec, TensorSpec

Arrays = dict[str, np.ndarray]
Compute = Callable[[Arrays, Arrays], None]

DEVICE = 1 << 60  # no pointer of a process is as large
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3
INVALID, UNINITIALIZED, REPEATED, BAD_FILE = 100000, 100001, 100002, 145002
BAD_DEVICE, NO_CONTEXT, NO_MEMORY, STOPPED, INJECTED = 107001, 107002, 207001, 507011, 507899
NUMPY = {"float32": "f4", "int32": "i4", "float16": "f2", "bfloat16": "u2", "int8": "i1"}
RELEASES = {
    "acl.rt.free": "memory",
    "acl.mdl.unload": "model",
    "acl.mdl.destroy_desc": "desc",
    "acl.mdl.destroy_dataset": "dataset",
    "acl.destroy_data_buffer": "buffer",
    "acl.rt.destroy_context": "context",
    "acl.rt.reset_device": "device",
    "acl.finalize": "process",
}


@dataclass
class OmFile:
    """What an ``.om`` file holds: names and bytes of its tensors, and what it does."""

    inputs: list[tuple[str, int]]
    outputs: list[tuple[str, int]]
    compute: Callable[[list[memoryview], list[memoryview]], None]


def om_file(spec: GraphSpec, compute: Compute) -> OmFile:
    """The compiled form of a graph; ``compute`` fills the outputs and may write to inputs."""

    def run(inputs: list[memoryview], outputs: list[memoryview]) -> None:
        given, wanted = _views(spec.inputs, inputs), _views(spec.outputs, outputs)
        for array in wanted.values():
            array.view("u1").fill(0xFF)
        compute(given, wanted)

    ins = [(t.name, _bytes(t)) for t in spec.inputs]
    outs = [(f"node_{i}:0:{t.name}", _bytes(t)) for i, t in enumerate(spec.outputs)]
    return OmFile(ins, outs, run)


def _bytes(tensor: TensorSpec) -> int:
    return int(np.prod(tensor.shape)) * ITEM_BYTES[tensor.dtype]


def _views(tensors: Iterable[TensorSpec], memory: list[memoryview]) -> Arrays:
    return {
        t.name: np.frombuffer(m, NUMPY[t.dtype]).reshape(t.shape)
        for t, m in zip(tensors, memory, strict=True)
    }


@dataclass
class Live:
    """What has been acquired and not released, by kind: handle to payload."""

    things: dict[str, dict[int, Any]] = field(default_factory=dict)

    def of(self, kind: str) -> dict[int, Any]:
        return self.things.setdefault(kind, {})

    def left(self) -> dict[str, int]:
        return {kind: len(things) for kind, things in self.things.items() if things}


class StandIn:
    """Takes the place of the module ``acl``.

    Attributes:
        files: The ``.om`` files by path.
        calls: Name and arguments of every call.
        violations: What a device would not have noticed.
        live: What is not released.
        fail_at: Index in ``calls`` of a call that fails instead of doing anything. A release
            that fails counts as done: nobody can do it again.
        memory_limit: Bytes of the device.
        on_board: The program runs on the board of the device.
    """

    def __init__(self, files: Mapping[str, OmFile], *, devices: int = 1) -> None:
        self.files, self.devices = dict(files), devices
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.violations: list[str] = []
        self.live, self._ids = Live(), count(1)
        self.fail_at: int | None = None
        self.fail_code = INJECTED
        self.memory_limit, self.on_board = 1 << 40, False
        self._next = DEVICE
        self._thread = threading.local()
        ret, pair, null = "ret", "pair", 0
        self.init = self._make("acl.init", self._init, ret)
        self.finalize = self._make("acl.finalize", self._finalize, ret)
        self.create_data_buffer = self._make("acl.create_data_buffer", self._data_buffer, null)
        self.update_data_buffer = self._make("acl.update_data_buffer", self._update, ret)
        self.destroy_data_buffer = self._make("acl.destroy_data_buffer", self._drop, ret)
        self.rt = SimpleNamespace(
            set_device=self._make("acl.rt.set_device", self._set_device, ret),
            reset_device=self._make("acl.rt.reset_device", self._drop, ret),
            create_context=self._make("acl.rt.create_context", self._create_context, pair),
            set_context=self._make("acl.rt.set_context", self._set_context, ret),
            destroy_context=self._make("acl.rt.destroy_context", self._drop, ret),
            get_run_mode=self._make("acl.rt.get_run_mode", self._run_mode, pair),
            malloc=self._make("acl.rt.malloc", self._malloc, pair),
            free=self._make("acl.rt.free", self._drop, ret),
            memset=self._make("acl.rt.memset", self._memset, ret),
            memcpy=self._make("acl.rt.memcpy", self._memcpy, ret),
        )
        names, drop = "acl.mdl.", self._drop
        self.mdl = SimpleNamespace(
            load_from_file=self._make(names + "load_from_file", self._load, pair),
            unload=self._make(names + "unload", drop, ret),
            create_desc=self._make(names + "create_desc", lambda: self._new("desc", {}), null),
            destroy_desc=self._make(names + "destroy_desc", drop, ret),
            get_desc=self._make(names + "get_desc", self._describe, ret),
            create_dataset=self._make(
                names + "create_dataset", lambda: self._new("dataset", []), null
            ),
            destroy_dataset=self._make(names + "destroy_dataset", drop, ret),
            add_dataset_buffer=self._make(names + "add_dataset_buffer", self._add, pair),
            execute=self._make(names + "execute", self._execute, ret),
        )
        for side in ("input", "output"):
            for what, null_value in (("name", ""), ("size", 0)):
                name = f"get_{side}_{what}_by_index"
                read = self._reader(side, what == "size")
                setattr(self.mdl, name, self._make(names + name, read, null_value))
            name, counter = f"get_num_{side}s", self._counter(side)
            setattr(self.mdl, name, self._make(names + name, counter, 0))

    def get_recent_err_msg(self) -> str:
        """AscendCL's own words; asked for after an error only, so not counted as a call."""
        return "EE9999: Inner Error!\n        said by the stand-in\n"

    def names(self) -> list[str]:
        """Names of all calls so far."""
        return [name for name, _ in self.calls]

    def memory(self, pointer: int, nbytes: int) -> memoryview:
        """A piece of device memory; pieces that are not allocated are a violation."""
        starts = sorted(self.live.of("memory"))
        at = bisect_right(starts, pointer) - 1
        data = self.live.of("memory")[starts[at]] if at >= 0 else bytearray()
        start = pointer - starts[at] if at >= 0 else 0
        if start + nbytes > len(data):
            self.violations.append(f"{nbytes} bytes at {pointer - DEVICE:#x} are not allocated")
            return memoryview(bytearray(nbytes))
        return memoryview(data)[start : start + nbytes]

    def _make(self, name: str, do: Callable[..., Any], failure: Any) -> Callable[..., Any]:
        def function(*args: Any) -> Any:
            self.calls.append((name, args))
            injected = len(self.calls) - 1 == self.fail_at
            if injected and name in RELEASES:
                self._drop(*args, name=name)
            if injected:
                failures = {"ret": self.fail_code, "pair": (0, self.fail_code)}
                return failures.get(failure, failure)
            return do(*args, name=name) if do == self._drop else do(*args)

        return function

    def _new(self, kind: str, payload: Any) -> int:
        handle = next(self._ids)
        self.live.of(kind)[handle] = payload
        return handle

    def _drop(self, handle: int = 0, name: str = "") -> int:
        kind = RELEASES[name]
        if kind == "device":  # as often reset as set
            indices = self.live.of(kind)
            handle = next((h for h, index in indices.items() if index == handle), -1)
        if self.live.of(kind).pop(handle, None) is None:
            self.violations.append(f"{name}({handle}): there is none, or no more")
            return INVALID
        if kind == "context" and self._context() == handle:
            self._thread.context = None
        return 0

    def _context(self) -> int | None:
        return getattr(self._thread, "context", None)

    def _init(self) -> int:
        if self.live.of("process"):
            return REPEATED
        self.live.of("process")[0] = True
        return 0

    def _finalize(self) -> int:
        if left := {k: n for k, n in self.live.left().items() if k != "process"}:
            self.violations.append(f"acl.finalize before the release of {left}")
        return self._drop(0, name="acl.finalize")

    def _set_device(self, index: int) -> int:
        if not self.live.of("process"):
            return UNINITIALIZED
        if not 0 <= index < self.devices:
            return BAD_DEVICE
        self._new("device", index)
        return 0

    def _create_context(self, index: int) -> tuple[int, int]:
        self._thread.context = self._new("context", index)
        return self._thread.context, 0

    def _set_context(self, context: int) -> int:
        if context not in self.live.of("context"):
            return INVALID
        self._thread.context = context
        return 0

    def _run_mode(self) -> tuple[int, int]:
        return (0 if self.on_board else 1), 0

    def _malloc(self, nbytes: int, policy: int) -> tuple[int, int]:
        if self._context() is None:
            return 0, NO_CONTEXT
        if nbytes <= 0 or policy not in (0, 1, 2):
            return 0, INVALID
        if nbytes + sum(map(len, self.live.of("memory").values())) > self.memory_limit:
            return 0, NO_MEMORY
        pointer, self._next = self._next, self._next + (nbytes // 64 + 2) * 64
        self.live.of("memory")[pointer] = bytearray(b"\xff" * nbytes)
        return pointer, 0

    def _memset(self, pointer: int, limit: int, value: int, nbytes: int) -> int:
        if self._context() is None:
            return NO_CONTEXT
        if nbytes > limit:
            return INVALID
        self.memory(pointer, nbytes)[:] = bytes([value]) * nbytes
        return 0

    def _memcpy(self, target: int, room: int, source: int, nbytes: int, kind: int) -> int:
        sides = {(False, True): DEVICE_TO_HOST, (True, False): HOST_TO_DEVICE}
        wanted = sides.get((target >= DEVICE, source >= DEVICE), DEVICE_TO_DEVICE)
        if self._context() is None:
            return NO_CONTEXT
        if nbytes > room or kind != (DEVICE_TO_DEVICE if self.on_board else wanted):
            return INVALID
        if source >= DEVICE:
            data = bytes(self.memory(source, nbytes))
        else:
            data = ctypes.string_at(source, nbytes)
        if target >= DEVICE:
            self.memory(target, nbytes)[:] = data
        else:
            ctypes.memmove(target, data, nbytes)
        return 0

    def _load(self, path: str) -> tuple[int, int]:
        if self._context() is None:
            return 0, NO_CONTEXT
        if path not in self.files:
            return 0, BAD_FILE
        return self._new("model", self.files[path]), 0

    def _describe(self, desc: int, model: int) -> int:
        if model not in self.live.of("model") or desc not in self.live.of("desc"):
            return INVALID
        file: OmFile = self.live.of("model")[model]
        self.live.of("desc")[desc] = {"input": file.inputs, "output": file.outputs}
        return 0

    def _reader(self, side: str, part: int) -> Callable[[int, int], Any]:
        return lambda desc, i: self.live.of("desc")[desc][side][i][part]

    def _counter(self, side: str) -> Callable[[int], int]:
        return lambda desc: len(self.live.of("desc")[desc][side])

    def _data_buffer(self, pointer: int, nbytes: int) -> int:
        return self._new("buffer", (pointer, nbytes))

    def _update(self, buffer: int, pointer: int, nbytes: int) -> int:
        if buffer not in self.live.of("buffer"):
            return INVALID
        self.live.of("buffer")[buffer] = (pointer, nbytes)
        return 0

    def _add(self, dataset: int, buffer: int) -> tuple[int, int]:
        if dataset not in self.live.of("dataset") or buffer not in self.live.of("buffer"):
            return 0, INVALID
        self.live.of("dataset")[dataset].append(buffer)
        return dataset, 0

    def _execute(self, model: int, inputs: int, outputs: int) -> int:
        if self._context() is None:
            return NO_CONTEXT
        if model not in self.live.of("model"):
            return INVALID
        file: OmFile = self.live.of("model")[model]
        places = [
            [self.live.of("buffer")[b] for b in self.live.of("dataset").get(data, [])]
            for data in (inputs, outputs)
        ]
        sizes = [[size for _, size in side] for side in places]
        if sizes != [[n for _, n in file.inputs], [n for _, n in file.outputs]]:
            return INVALID
        self._check_places(*places)
        file.compute(*([self.memory(*place) for place in side] for side in places))
        return 0

    def _check_places(self, inputs: list[tuple[int, int]], outputs: list[tuple[int, int]]) -> None:
        """No output may touch an input or another output, and tensors begin at 64 bytes."""
        self.violations += [
            f"a tensor begins at {pointer:#x}"
            for pointer, _ in (*inputs, *outputs)
            if pointer % 64
        ]
        for i, (start, size) in enumerate(outputs):
            for other, length in (*inputs, *outputs[:i]):
                if start < other + length and other < start + size:
                    self.violations.append(f"output {i} overlaps another tensor")
