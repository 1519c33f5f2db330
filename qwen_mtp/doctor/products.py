"""Times matrix products of a few rows on this machine, and looks whether a row keeps its bits.

A probe is a chain of the two products of a feed-forward layer, again and again over weights of
their own, and a strip of an output head: long enough that the weights come from memory. It is
built of the nodes that packages are built of, for ONNX Runtime's kernels or for the native ones.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from qwen_mtp.bench.costs import Samples
from qwen_mtp.custom_ops.linear import BLOCK
from qwen_mtp.custom_ops.operator import MICROSOFT, NAMESPACE
from qwen_mtp.doctor.onnx_bytes import GIVEN, Node, Value, model_bytes
from qwen_mtp.runtime.native import NativeKernels, memory_reader

Array = npt.NDArray[Any]
HIDDEN, WIDE = 1024, 3584
BITS = {"int8": 8, "int4": 4, "fp32": 32}
_DTYPES = {"int8": "int8", "int4": "uint8", "fp32": "float32"}
_SPREAD = {"int8": 74.0, "int4": 4.6}  # of the stored values: products keep their size
_NUMPY = {"float32": np.float32, "int8": np.int8, "uint8": np.uint8, "int64": np.int64}


@dataclass(frozen=True, slots=True)
class ProbeShape:
    """How much is multiplied.

    Attributes:
        format: Weight format.
        layers: Pairs of products ``1024 x 3584`` and back.
        strip: Outputs of the last product, a strip of a vocabulary.
    """

    format: str
    layers: int
    strip: int

    @classmethod
    def within(cls, format: str, count: int) -> "ProbeShape":
        """As much as ``count`` bytes of weights allow, at least one layer."""
        strip = 16384 if count >= 1 << 28 else 2048
        left = count * 8 // BITS[format] - strip * HIDDEN
        return cls(format, max(1, left // (2 * HIDDEN * WIDE)), strip)

    @property
    def weights(self) -> int:
        """Weights, not bytes."""
        return 2 * HIDDEN * WIDE * self.layers + HIDDEN * self.strip

    @property
    def nbytes(self) -> int:
        """Bytes of the weights without their scales."""
        return self.weights * BITS[self.format] // 8

    def products(self) -> Iterator[tuple[int, int]]:
        """``(outputs, inputs)`` of each product."""
        for _ in range(self.layers):
            yield WIDE, HIDDEN
            yield HIDDEN, WIDE
        yield self.strip, HIDDEN


def some_weights(count: int) -> npt.NDArray[np.uint8]:
    """Bytes that are weights in every format: as float32, between 2 ** -7 and 2 ** -5."""
    tile = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    tile[3::4] = tile[3::4] & 0x80 | 0x3C
    memory = np.empty((-(-count // len(tile)), len(tile)), np.uint8)
    memory[:] = tile
    return memory.reshape(-1)


class Probe:
    """One chain on one kind of kernels."""

    def __init__(
        self, shape: ProbeShape, memory: npt.NDArray[np.uint8], threads: int, library: Path | None
    ) -> None:
        """Prepare; sessions are made when first run.

        Args:
            shape: What to multiply.
            memory: At least ``shape.nbytes`` bytes of weights.
            threads: Threads inside an operator.
            library: The native kernels; None takes ONNX Runtime's.
        """
        self.shape, self.native = shape, library is not None
        self._weights = dict(_weights(shape, memory))
        self._options = ort.SessionOptions()
        self._options.intra_op_num_threads = threads
        self._options.log_severity_level = 4
        # Threads that wait for more work would take the cores from the session that is next.
        self._options.add_session_config_entry("session.force_spinning_stop", "1")
        if library is not None:
            self._options.register_custom_ops_library(str(library))
        large = {name: w for name, w in self._weights.items() if w.size > 1}
        self._kept = {n: ort.OrtValue.ortvalue_from_numpy(w) for n, w in large.items()}
        for name, value in self._kept.items():
            self._options.add_initializer(name, value)
        self._sessions: dict[int, ort.InferenceSession] = {}

    def run(self, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The chain: ``[M, 1024]`` to ``[M, strip]``."""
        rows = len(x)
        key = rows if self.native else 0  # native nodes know their rows, others take any
        if key not in self._sessions:
            self._sessions[key] = self._open(self._model(key))
        feeds: dict[str, Array] = {"x": x}
        if not self.native and self.shape.format == "int8":
            feeds["zeros"] = np.full(rows, 128, np.uint8)
        found: npt.NDArray[np.float32] = self._sessions[key].run(["y"], feeds)[0]
        return found

    def ms(self, rows: int) -> float:
        """Milliseconds of one run."""
        x = np.random.default_rng(rows).standard_normal((rows, HIDDEN), np.float32)
        start = perf_counter()
        self.run(x)
        return (perf_counter() - start) * 1e3

    def difference(self, rows: tuple[int, ...]) -> str:
        """Where a row among others has other bits than alone; empty where it has its own."""
        draw = np.random.default_rng(1)
        row = draw.standard_normal((1, HIDDEN), np.float32)
        alone = self.run(row)[0]
        for count in rows:
            for place in sorted({0, count // 2, count - 1}):
                x = draw.standard_normal((count, HIDDEN), np.float32)
                x[place] = row
                if not np.array_equal(self.run(x)[place].view(np.int32), alone.view(np.int32)):
                    return f"row {place} of {count} has other bits than alone"
        return ""

    def _open(self, model: bytes) -> ort.InferenceSession:
        with TemporaryDirectory(prefix="qwen-mtp-probe-") as name:
            place = Path(name)
            (place / GIVEN).touch()  # external data must be there, whoever gives them
            (place / "model.onnx").write_bytes(model)
            path = str(place / "model.onnx")
            return ort.InferenceSession(path, self._options, providers=["CPUExecutionProvider"])

    def _model(self, rows: int) -> bytes:
        count: int | str = rows or "M"
        inputs = [Value("x", "float32", (count, HIDDEN))]
        if not self.native and self.shape.format == "int8":
            inputs.append(Value("zeros", "uint8", (count,)))
        outputs = [Value("y", "float32", (count, self.shape.strip))]
        weights = [
            Value(n, str(w.dtype), w.shape, w.tobytes() if w.size == 1 else b"")
            for n, w in self._weights.items()
        ]
        return model_bytes(list(self._nodes(rows)), inputs, outputs, weights)

    def _nodes(self, rows: int) -> Iterator[Node]:
        products = list(self.shape.products())
        for i, (outputs, inputs) in enumerate(products):
            x = "x" if i == 0 else f"h{i - 1}"
            y = "y" if i == len(products) - 1 else f"h{i}"
            sizes = {"K": inputs, "N": outputs}
            if self.shape.format == "fp32":
                yield Node("Gemm", (x, f"w{i}"), y, attributes={"transB": 1})
            elif self.native:
                kind = {"int8": "LinearInt8", "int4": "LinearInt4"}[self.shape.format]
                yield Node(kind, (x, f"w{i}", f"s{i}"), y, NAMESPACE, {"M": rows, "B": 0, **sizes})
            elif self.shape.format == "int4":
                blocks = {"bits": 4, "block_size": BLOCK, "accuracy_level": 4}
                yield Node("MatMulNBits", (x, f"w{i}", f"s{i}"), y, MICROSOFT, sizes | blocks)
            else:
                yield from _integer_product(i, x, y, outputs)


def _integer_product(i: int, x: str, y: str, outputs: int) -> Iterator[Node]:
    """Quantise rows, multiply in integers, scale: as the exporter lowers it."""
    yield Node("Abs", (x,), f"abs{i}")
    yield Node("ReduceMax", (f"abs{i}", "last"), f"max{i}", attributes={"keepdims": 0})
    yield Node("Div", (f"max{i}", "steps"), f"scale{i}")
    rows = (x, f"scale{i}", "zeros")
    yield Node("QuantizeLinear", rows, f"q{i}", attributes={"axis": 0})
    parts = (f"q{i}", "one", "zero_point", f"w{i}", f"s{i}", f"none{outputs}")
    yield Node("QGemm", parts, f"product{i}", MICROSOFT, {"transB": 1})
    yield Node("Unsqueeze", (f"scale{i}", "first"), f"column{i}")
    yield Node("Mul", (f"product{i}", f"column{i}"), y)


def _weights(shape: ProbeShape, memory: npt.NDArray[np.uint8]) -> Iterator[tuple[str, Array]]:
    at = 0
    for i, (outputs, inputs) in enumerate(shape.products()):
        count = outputs * inputs * BITS[shape.format] // 8
        data = memory[at : at + count].view(_NUMPY[_DTYPES[shape.format]])
        at += count
        blocks = inputs // BLOCK
        if shape.format == "int4":
            yield f"w{i}", data.reshape(outputs, blocks, BLOCK // 2)
        else:
            yield f"w{i}", data.reshape(outputs, inputs)
        if shape.format != "fp32":
            size = (outputs, blocks) if shape.format == "int4" else (outputs,)
            scale = 1 / (_SPREAD[shape.format] * inputs**0.5)
            yield f"s{i}", np.full(size, scale, np.float32)
    if shape.format == "int8":
        yield "last", np.array([-1], np.int64)
        yield "first", np.array([1], np.int64)
        yield "steps", np.array(127, np.float32)
        yield "one", np.array(1, np.float32)
        yield "zero_point", np.array(128, np.uint8)
        for outputs in {outputs for outputs, _ in shape.products()}:
            yield f"none{outputs}", np.zeros(outputs, np.int8)


def in_turn(actions: Sequence[Callable[[], float]], rounds: int) -> list[Samples]:
    """Take all actions in turn, round by round, after one that does not count.

    What else happens on the machine meets all of them alike that way.
    """
    for action in actions:
        action()
    taken = [[action() for action in actions] for _ in range(rounds)]
    return [Samples.of(values) for values in zip(*taken, strict=True)]


def read_speed(
    memory: npt.NDArray[np.uint8], threads: int, kernels: NativeKernels, rounds: int = 5
) -> float:
    """GB a second at which so many threads read the memory; the best of several rounds."""
    parts = np.array_split(memory[: len(memory) // 4 * 4].view(np.float32), threads)
    read, spent = memory_reader(kernels), []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds):
            start = perf_counter()
            for _ in pool.map(read, parts):
                pass
            spent.append(perf_counter() - start)
    return memory.nbytes / min(spent) / 1e9
