"""Runs a compiler that may hang, fail or print anything, and leaves nothing of it behind."""

import os
import signal
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FLAGS = (
    "-std=c++20",
    "-O3",
    "-ffp-contract=off",  # a product and a sum must round alike wherever they stand
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-w",
)
LIMIT_S = 180
_GRACE_S = 2  # for a compiler that is told to stop, to remove its files
_LONGEST = 300  # characters of a message


@dataclass(frozen=True, slots=True)
class Workplace:
    """A directory that lives as long as a build."""

    directory: Path

    @property
    def library(self) -> Path:
        """What the compiler writes."""
        return self.directory / "kernels.so"


def build_library(compiler: Sequence[str], sources: Iterable[Path], place: Workplace) -> str:
    """Compile the sources into the library of a workplace.

    Returns:
        Why that failed, one line; empty where it did not.

    Raises:
        OSError: The workplace cannot be written.
    """
    units = [str(path) for path in sources if path.suffix == ".cc"]
    tune = "-mcpu=native" if os.uname().machine == "aarch64" else "-march=native"
    command = [*compiler, *FLAGS, tune, "-o", str(place.library), *units]
    messages = place.directory / "messages"  # a file: a pipe stays open while any child lives
    try:
        with open(messages, "wb") as file:
            code = _run(command, file.fileno(), place.directory)
    except subprocess.TimeoutExpired:
        return f"{compiler[0]} did not finish in {LIMIT_S} s"
    except OSError as error:
        if error.filename != compiler[0]:
            raise
        return f"{compiler[0]} cannot be started: {error.strerror}; set CXX to a C++ compiler"
    if code != 0:
        return f"{compiler[0]} fails: {_first_error(messages) or f'it ended with {code}'}"
    if not place.library.is_file():
        return f"{compiler[0]} wrote no library; set CXX to a C++ compiler"
    return ""


def _run(command: Sequence[str], messages: int, directory: Path) -> int:
    """Run a command in a group of processes that ends with this call, however it ends."""
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=messages,
        env={**os.environ, "TMPDIR": str(directory), "LC_ALL": "C"},
        start_new_session=True,
    )
    try:
        return child.wait(LIMIT_S)
    except BaseException:
        _stop(child)
        raise


def _stop(child: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)


def _first_error(messages: Path) -> str:
    lines = messages.read_bytes()[: 1 << 20].decode(errors="replace").splitlines()
    named = [line for line in lines if "error" in line.lower() or "No space" in line]
    line = next((line for line in [*named, *lines] if line.strip()), "")
    shown = "".join(c if c.isprintable() else " " for c in line)
    return " ".join(shown.split())[:_LONGEST]
