"""GE models in the interpreter, for the checks that run them."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from qwen_mtp.checks_bench import Bench
from qwen_mtp.checks_report import Check
from qwen_mtp.graphs.weights import file_bytes
from qwen_mtp.interpreted import InterpretedEngine
from qwen_mtp.progress import Progress
from qwen_mtp.runtime.package import Package
from qwen_mtp.runtime.runner import Array

ONE_THREAD = 1 << 28  # bytes of weights below which threads cost more than they give


class GeBench(Bench):
    """A bench over the interpreter."""

    def __init__(self, package: Package) -> None:
        """Read nothing yet.

        Raises:
            PackageError: The package is not for Ascend.
        """
        self._interpreted = InterpretedEngine(package)
        super().__init__(self._interpreted)

    def load(self, progress: Progress) -> Check:
        """Compile every graph.

        Raises:
            PackageError: A file is damaged, or something in it is not implemented.
        """
        graphs = self.engine.package.manifest.graphs
        progress.phase("verify load", len(graphs), "graphs")
        operators = 0
        for graph in graphs:
            operators += self._interpreted.interpreter(graph.name).size
            progress.advance(1)
        return Check("load", True, f"{len(graphs)} graphs, {operators} operators to run")

    def restore(self, states: Mapping[str, Array]) -> None:
        """Go back to a snapshot."""
        for name, data in states.items():
            self._interpreted.put_state(name, data)


@contextmanager
def torch_threads(package: Package, threads: int | None) -> Iterator[None]:
    """Let torch use as many threads as asked for, or as make sense."""
    small = file_bytes(package.manifest.weights) < ONE_THREAD
    before = torch.get_num_threads()
    torch.set_num_threads(threads or (1 if small else len(os.sched_getaffinity(0))))
    try:
        yield
    finally:
        torch.set_num_threads(before)
