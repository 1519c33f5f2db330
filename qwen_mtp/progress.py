"""Progress of long work on stderr: one line a phase, redrawn in place on a terminal."""

import sys
from time import perf_counter
from typing import Protocol, TextIO


class Progress(Protocol):
    """What long work reports to."""

    def phase(self, title: str, total: int = 0, unit: str = "") -> None:
        """Begin a phase of ``total`` units; the one before ends."""

    def advance(self, amount: int) -> None:
        """Count units of the phase that are done."""

    def done(self) -> None:
        """End the last phase."""


class Silent:
    """Reports nothing."""

    def phase(self, title: str, total: int = 0, unit: str = "") -> None:
        """Ignore the phase."""

    def advance(self, amount: int) -> None:
        """Ignore the units."""

    def done(self) -> None:
        """Ignore the end."""


class Lines:
    """Writes phases as lines; on a terminal the running one shows its share and time left."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """Write to ``stream``, stderr by default."""
        self._stream = stream or sys.stderr
        self._tty = self._stream.isatty()
        self._title = ""
        self._total = self._count = 0
        self._unit = ""
        self._start = 0.0

    def phase(self, title: str, total: int = 0, unit: str = "") -> None:
        """End the running phase with its time and begin another."""
        self.done()
        self._title, self._total, self._unit = title, total, unit
        self._count, self._start = 0, perf_counter()
        self._draw("")

    def advance(self, amount: int) -> None:
        """Redraw with the share done and an estimate of the time left."""
        self._count += amount
        spent = perf_counter() - self._start
        left = spent * max(self._total - self._count, 0) / max(self._count, 1)
        share = min(100, 100 * self._count // max(self._total, 1))
        self._draw(f"{share:3d} %  {_amount(self._count, self._unit)}  {left:.0f} s left")

    def done(self) -> None:
        """Write the finished line of the running phase."""
        if not self._title:
            return
        amount = f"  {_amount(self._count, self._unit)}" if self._count else ""
        start = "\r\x1b[K" if self._tty else ""
        spent = perf_counter() - self._start
        self._stream.write(f"{start}{self._title:<28}{spent:7.1f} s{amount}\n")
        self._stream.flush()
        self._title = ""

    def _draw(self, text: str) -> None:
        if self._tty:
            self._stream.write(f"\r\x1b[K{self._title:<28}{text}")
            self._stream.flush()


def byte_text(count: int) -> str:
    """Bytes for a person: ``1.50 GB``, ``2.5 MB``, ``0.3 kB``."""
    if count >= 1e9:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def _amount(count: int, unit: str) -> str:
    return byte_text(count) if unit == "B" else f"{count} {unit}".rstrip()
