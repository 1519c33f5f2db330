"""Runs a compiler that may hang, fail or print anything, and leaves nothing of it behind."""

import os
import signal
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

FLAGS = (
    "-std=c++20",
    "-O3",
    "-ffp-contract=off",  # a product and a sum must round alike wherever they stand
    "-fPIC",
    "-fvisibility=hidden",
    "-w",
)
LIMIT_S = 180
_GRACE_S = 2  # for a compiler that is told to stop, to remove its files
_PAUSE_S = 0.02
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
    """Compile the sources side by side and link them into the library of a workplace.

    Returns:
        Why that failed, one line; empty where it did not.

    Raises:
        OSError: The workplace cannot be written.
    """
    units = [path for path in sources if path.suffix == ".cc"]
    objects = [place.directory / f"{unit.stem}.o" for unit in units]
    tune = "-mcpu=native" if os.uname().machine == "aarch64" else "-march=native"
    start, deadline = [*compiler, *FLAGS, tune], monotonic() + LIMIT_S
    pairs = zip(units, objects, strict=True)
    jobs = [[*start, "-c", "-o", str(made), str(unit)] for unit, made in pairs]
    link = [*start, "-shared", "-o", str(place.library), *map(str, objects)]
    try:
        failed = _run(jobs, place.directory, deadline) or _run([link], place.directory, deadline)
    except OSError as error:
        if error.filename != compiler[0]:
            raise
        return f"{compiler[0]} cannot be started: {error.strerror}; set CXX to a C++ compiler"
    if not failed and not place.library.is_file():
        return f"{compiler[0]} wrote no library; set CXX to a C++ compiler"
    return failed


def _run(commands: Sequence[Sequence[str]], directory: Path, deadline: float) -> str:
    """Run commands, as many at once as there are cores; why one failed, or nothing.

    None of them and of what they started is left when this returns, however it does.
    """
    waiting, cores = list(enumerate(commands)), len(os.sched_getaffinity(0))
    running: dict[subprocess.Popen[bytes], Path] = {}
    try:
        while waiting or running:
            while waiting and len(running) < cores:
                number, command = waiting.pop(0)
                messages = directory / f"messages-{number}"
                running[_start(command, messages)] = messages
            done = next((child for child in running if child.poll() is not None), None)
            if done is not None:
                messages = running.pop(done)
                if done.returncode != 0:
                    why = _first_error(messages) or f"it ended with {done.returncode}"
                    return f"{commands[0][0]} fails: {why}"
            elif monotonic() > deadline:
                return f"{commands[0][0]} did not finish in {LIMIT_S} s"
            else:
                sleep(_PAUSE_S)
        return ""
    finally:
        _stop(running)


def _start(command: Sequence[str], messages: Path) -> subprocess.Popen[bytes]:
    """Start a command in a group of processes of its own."""
    with open(messages, "wb") as file:  # a file: a pipe stays open while any child lives
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            env={**os.environ, "TMPDIR": str(messages.parent), "LC_ALL": "C"},
            start_new_session=True,
        )


def _stop(children: Iterable[subprocess.Popen[bytes]]) -> None:
    """Ask each group to end, then make it."""
    left = list(children)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for child in left:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, number)
        for child in left:
            with suppress(subprocess.TimeoutExpired):
                child.wait(_GRACE_S)


def _first_error(messages: Path) -> str:
    lines = messages.read_bytes()[: 1 << 20].decode(errors="replace").splitlines()
    named = [line for line in lines if "error" in line.lower() or "No space" in line]
    line = next((line for line in [*named, *lines] if line.strip()), "")
    shown = "".join(c if c.isprintable() else " " for c in line)
    return " ".join(shown.split())[:_LONGEST]
