"""What the loop needs of whatever runs the graphs."""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from qwen_mtp.runtime.package import Package

Array = npt.NDArray[Any]


class GraphRunner(Protocol):
    """Runs the graphs of one package by name on named buffers and owns their state.

    Attributes:
        package: The package.
    """

    package: Package

    def buffer(self, graph: str, name: str) -> Array:
        """The host array of an input or output that is neither state nor block table.

        What is written to it is what the next run reads; what a run gave is read from it. Two
        graphs share one when name and shape agree.
        """
        ...

    def state(self, name: str) -> Array:
        """A state tensor as the next run will read it, to look at."""
        ...

    def clear_slot(self, slot: int) -> None:
        """Zero the per-slot state of one batch slot."""
        ...

    def run(self, graph: str, table: npt.NDArray[np.int32], slot: int = 0) -> None:
        """Run one graph.

        Args:
            graph: Its name.
            table: ``[B, W]`` block table, W from :meth:`table_width`.
            slot: For the prefill graph, the batch slot whose state it advances.

        Raises:
            PackageError: The graph stops in the middle.
        """
        ...

    def table_width(self, positions: int) -> int:
        """Blocks to pass so that a table covers ``positions``."""
        ...
