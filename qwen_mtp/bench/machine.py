"""The machine: its processor, the memory of this process, and how fast memory is read."""

import os
import resource
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from time import perf_counter, sleep

import numpy as np

from qwen_mtp.bench.costs import Samples
from qwen_mtp.bench.report import Bandwidth, Machine
from qwen_mtp.checks_report import this_machine
from qwen_mtp.runtime.native import NativeKernels, memory_reader, processor

# What decides which kernels of ONNX Runtime run, in the names of /proc/cpuinfo.
_INSTRUCTIONS = (
    "avx2",
    "avx512f",
    "avx_vnni",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "asimddp",
    "i8mm",
    "sve",
)
ASLEEP_S = 0.1  # threads of a session look for work for a while before they leave the cores
LARGEST, LEAST = 1 << 30, 1 << 26  # bytes: beyond any cache, and worth the threads


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory of this process in bytes: resident, its two parts, and the most there ever was."""

    resident: int
    file_backed: int
    anonymous: int
    peak: int


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def describe_machine(threads: int, kernels: NativeKernels) -> Machine:
    """Describe the machine for a measurement with so many threads on these kernels."""
    names = ("qwen-mtp", "onnxruntime", "numpy")
    return Machine(
        cpu=this_machine(),
        instructions=_instructions(),
        cores=usable_cores(),
        threads=threads,
        kernels=f"ONNX Runtime's ({kernels.reason})" if kernels.library is None else "native",
        memory_bytes=_kilobytes("/proc/meminfo").get("MemTotal", 0),
        versions=(*((name, version(name)) for name in names), ("python", python_version())),
    )


def usage() -> Usage:
    """Look at this process; where the kernel shows no parts, all of it counts as anonymous."""
    peak = _kilobytes("/proc/self/status").get("VmHWM", 0)
    parts = _kilobytes("/proc/self/smaps_rollup")
    if "Rss" not in parts:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        resident = pages * resource.getpagesize()
        return Usage(resident, 0, resident, max(peak, resident))
    resident, anonymous = parts["Rss"], parts["Anonymous"]
    return Usage(resident, resident - anonymous, anonymous, max(peak, resident))


class ReadMeter:
    """Reads a large buffer again and again."""

    def __init__(self, threads: int, kernels: NativeKernels) -> None:
        """Take 1 GiB, or a quarter of what is free where that is less.

        Args:
            threads: Threads that read side by side.
            kernels: The native kernels read faster than NumPy does.
        """
        free = _kilobytes("/proc/meminfo").get("MemAvailable", 4 * LARGEST)
        count = max(LEAST, min(LARGEST, free // 4)) // 4
        self._data = np.ones(count, np.float32)  # written, so that each page is there
        self._parts = np.array_split(self._data, threads)
        self._pool = ThreadPoolExecutor(threads)
        self._one = memory_reader(kernels)
        self._speeds: list[float] = []

    def read(self) -> None:
        """Go through the buffer once."""
        sleep(ASLEEP_S)
        start = perf_counter()
        for _ in self._pool.map(self._one, self._parts):
            pass
        self._speeds.append(self._data.nbytes / (perf_counter() - start) / 1e9)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def result(self) -> Bandwidth:
        """Sum up the reads so far, at least one."""
        speeds = self._speeds
        return Bandwidth(
            buffer_bytes=self._data.nbytes, best=max(speeds), speed=Samples.of(speeds)
        )


def _instructions() -> tuple[str, ...]:
    found = processor()
    return tuple(name for name in _INSTRUCTIONS if name in found)


def _kilobytes(path: str) -> dict[str, int]:
    """The lines ``Name:  123 kB`` of a file, in bytes."""
    pairs = (line.split() for line in _lines(path))
    return {p[0].rstrip(":"): int(p[1]) * 1024 for p in pairs if p[2:] == ["kB"]}


def _lines(path: str) -> Iterable[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
