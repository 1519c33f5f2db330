"""Examines a machine, and a package on it."""

from collections.abc import Iterator
from os import PathLike
from pathlib import Path

import numpy as np
import numpy.typing as npt

from qwen_mtp.bench.costs import RowsCost
from qwen_mtp.checks_report import one_line
from qwen_mtp.doctor.advice import FORMATS, Bandwidth, advise
from qwen_mtp.doctor.costs import ModelShape, ProductCost
from qwen_mtp.doctor.environment import Environment, look_around
from qwen_mtp.doctor.package import measure_package, open_measurable
from qwen_mtp.doctor.package_advice import advise_package
from qwen_mtp.doctor.products import Probe, ProbeShape, in_turn, read_speed, some_weights
from qwen_mtp.doctor.report import DoctorReport
from qwen_mtp.errors import RequestError
from qwen_mtp.progress import Progress, Silent
from qwen_mtp.runtime.native import find_kernels

ROWS = (1, 2, 4, 8)
ROUNDS = 7
LARGEST, LEAST = 1 << 28, 1 << 23  # bytes of weights: beyond most caches, and worth measuring
DEFAULT_GB = 0.75  # of the published model of 0.8 billion weights, in int8
_SILENT = Silent()


def examine(
    directory: str | PathLike[str] | None = None,
    *,
    weights_gb: float | None = None,
    threads: int | None = None,
    progress: Progress = _SILENT,
) -> DoctorReport:
    """Look at this machine, measure what decides how fast a package runs, and recommend.

    Args:
        directory: A package for ONNX Runtime: its own graphs decide then.
        weights_gb: Without one, how large the model is in int8, in GB.
        threads: Threads to measure with and to recommend; None takes those that can run at once.
        progress: Gets a phase for each part.

    Raises:
        OSError: No temporary file can be written.
        PackageError: The package contradicts itself.
        RequestError: A number is out of range, or the package is not for the CPU.
    """
    if threads is not None and threads < 1:
        raise RequestError(f"threads is {threads}: give a number >= 1")
    package = None if directory is None else open_measurable(directory)
    progress.phase("native kernels")
    environment = look_around()
    count = threads or environment.threads
    progress.phase("memory")
    memory = some_weights(_size(environment))
    kernels = find_kernels(build=False)
    bandwidths = tuple(
        Bandwidth(threads=n, speed=read_speed(memory, n, kernels)) for n in sorted({1, count})
    )
    costs = tuple(_products(environment, memory, count, progress))
    del memory
    facts = (
        None
        if package is None
        else measure_package(package, count, environment.free_bytes, progress)
    )
    progress.done()
    shape = ModelShape.of_size((weights_gb or DEFAULT_GB) * 1e9)
    if facts is None:
        advice = advise(environment, costs, bandwidths, shape, threads)
    else:
        shape = facts.shape
        advice = advise_package(environment, costs, bandwidths, facts, threads)
    return DoctorReport(
        environment=environment,
        threads=count,
        bandwidths=bandwidths,
        products=costs,
        shape=shape,
        package=facts,
        advice=advice,
    )


def _size(environment: Environment) -> int:
    """Bytes to measure with: kernels that pack take as many again, and room is left for others."""
    free = environment.free_bytes or 4 * LARGEST
    return max(LEAST, min(LARGEST, free // 4))


def _products(
    environment: Environment, memory: npt.NDArray[np.uint8], threads: int, progress: Progress
) -> Iterator[ProductCost]:
    library = Path(environment.kernels) if environment.kernels else None
    for name in FORMATS:
        progress.phase(f"products in {name}")
        count = memory.nbytes // 2 if name == "int4" else memory.nbytes
        shape = ProbeShape.within(name, count)
        if shape.nbytes > memory.nbytes:
            memory = some_weights(shape.nbytes)
        kinds: list[Path | None] = [None]
        if library is not None and name != "fp32":
            kinds.insert(0, library)
        yield from _one_format(shape, memory, threads, kinds)


def _one_format(
    shape: ProbeShape,
    memory: npt.NDArray[np.uint8],
    threads: int,
    kinds: list[Path | None],
) -> Iterator[ProductCost]:
    """Time all kinds of kernels in turn, and look at the bits of their rows."""
    probes, failures = [], []
    for library in kinds:
        kernels = "onnxruntime" if library is None else "native"
        try:
            probe = Probe(shape, memory, threads, library)
            probes.append((kernels, probe, probe.difference(ROWS[1:])))
        except Exception as error:  # the runtime's own exceptions share no base class
            failures.append((kernels, one_line(error)))
    actions = [
        lambda probe=probe, rows=rows: probe.ms(rows) for _, probe, _ in probes for rows in ROWS
    ]
    taken = in_turn(actions, ROUNDS)
    for i, (kernels, _, difference) in enumerate(probes):
        times = taken[i * len(ROWS) : (i + 1) * len(ROWS)]
        yield ProductCost(
            format=shape.format,
            kernels=kernels,
            weights=shape.weights,
            rows=tuple(RowsCost(rows=r, ms=ms) for r, ms in zip(ROWS, times, strict=True)),
            difference=difference,
        )
    for kernels, failure in failures:
        yield ProductCost(format=shape.format, kernels=kernels, failure=failure)
