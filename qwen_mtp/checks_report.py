"""What ``verify`` found: checks by name, and the numbers the manifest keeps."""

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from platform import machine
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_mtp.graphs.manifest import Verification


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        name: Short name: files, structure, prototypes, load, rows, golden, decoding, sampler,
            source, transformers.
        passed: Whether what it claims holds; a check that could not apply passes and says so.
        detail: One line: what was compared, or the first thing that differs.
    """

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of ``verify_package``.

    Attributes:
        checks: In the order they ran.
        patterns: Rounds with a forced accept count that were compared.
        max_logit_error: Largest difference from the recorded logits; None without a record.
        machine: The processor of this machine.
        near_ties: Places where speculation took another of two tokens that are as likely as
            rounding can tell.
    """

    checks: tuple[Check, ...]
    patterns: int
    max_logit_error: float | None
    machine: str
    near_ties: int = 0

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    def record(self) -> Verification:
        """The record that the manifest keeps."""
        equal = any(check.name == "decoding" and check.passed for check in self.checks)
        return Verification(
            greedy_equal=equal and not self.near_ties,
            patterns=self.patterns,
            max_logit_error=self.max_logit_error,
            machine=self.machine,
            near_ties=self.near_ties if equal else 0,
        )


def this_machine() -> str:
    """Name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else machine()


def digest(data: npt.NDArray[Any]) -> bytes:
    """A fingerprint of the values of a float32 array; equal bits have equal ones.

    Adding zero turns -0 into 0: the two are the same number to every kernel downstream.
    """
    return blake2b((data + np.float32(0)).tobytes(), digest_size=16).digest()


def one_line(error: BaseException) -> str:
    """The message of any exception in one line."""
    return " ".join(str(error).split()) or type(error).__name__
