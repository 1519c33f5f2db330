"""Compiles the native kernels for this machine, once, and finds them again.

The kernels (``custom_ops/native``) are C++ without any dependency; they are compiled for exactly
the CPU they run on and kept in the user's cache. Whoever has no compiler, or does not want them,
runs the same graphs on ONNX Runtime's own operators.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
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
COMPILERS = ("c++", "g++", "clang++")
SWITCH = "QWEN_MTP_NATIVE"
CACHE = "QWEN_MTP_CACHE"
LIMIT_S = 300


@dataclass(frozen=True, slots=True)
class NativeKernels:
    """Whether this machine has the kernels.

    Attributes:
        library: The compiled library, or None.
        reason: Why there is none, one line; empty where there is.
    """

    library: Path | None
    reason: str = ""


def find_kernels(*, build: bool = True) -> NativeKernels:
    """The compiled kernels of this machine.

    Args:
        build: Compile them where they are not in the cache yet, which takes some seconds.

    Returns:
        Their place, or why there are none: switched off by ``QWEN_MTP_NATIVE=0``, no compiler,
        a compiler that fails, or nowhere to keep them.
    """
    if os.environ.get(SWITCH) == "0":
        return NativeKernels(None, f"{SWITCH}=0 switches them off")
    compiler = _compiler()
    library = cache_directory() / f"kernels-{_digest(compiler)}.so"
    if library.is_file():
        return NativeKernels(library)
    if compiler is None:
        names = ", ".join(COMPILERS)
        return NativeKernels(None, f"no C++ compiler ({names}) found; install g++ or set CXX")
    if not build:
        return NativeKernels(None, "not compiled yet; run qwen-mtp compile")
    return _build(compiler, library)


def cache_directory() -> Path:
    """Where compiled kernels are kept: ``QWEN_MTP_CACHE``, else the user's cache directory."""
    own = os.environ.get(CACHE)
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "qwen-mtp"


def sources() -> list[Path]:
    """The files the kernels are made of, in a fixed order."""
    folder = Path(str(files("qwen_mtp.custom_ops"))) / "native"
    return sorted(path for path in folder.iterdir() if path.suffix in (".cc", ".h"))


@cache
def _compiler() -> str | None:
    named = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, (named,) if named else COMPILERS)), None)


@cache
def _digest(compiler: str | None) -> str:
    """One name for sources, flags and processor: another of any is another library."""
    whole = hashlib.sha256("\0".join((*FLAGS, *_processor())).encode())
    for path in sources():
        whole.update(path.name.encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()[:16]


def _processor() -> Sequence[str]:
    """What ``-march=native`` depends on: architecture and instruction sets."""
    lines = [os.uname().machine]
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return [*lines, *sorted(value.split())]
    return lines


def _build(compiler: str, library: Path) -> NativeKernels:
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(suffix=".so", prefix=".kernels-", dir=library.parent)
        os.close(handle)
    except OSError as error:
        where = f"{library.parent}: {error.strerror}"
        return NativeKernels(None, f"{where}; set {CACHE} to a directory that can be written")
    try:
        failed = _compile(compiler, Path(name))
        if failed:
            return NativeKernels(None, failed)
        os.replace(name, library)  # two processes may build at once: either result serves
    finally:
        Path(name).unlink(missing_ok=True)
    return NativeKernels(library)


def _compile(compiler: str, target: Path) -> str:
    """Compile into ``target``; what went wrong, or nothing."""
    units = [str(path) for path in sources() if path.suffix == ".cc"]
    tune = "-mcpu=native" if os.uname().machine == "aarch64" else "-march=native"
    command = [compiler, *FLAGS, tune, "-o", str(target), *units]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{compiler} did not finish: {error}"
    lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
    return "" if done.returncode == 0 else f"{compiler} fails: {lines[0].strip()}"
