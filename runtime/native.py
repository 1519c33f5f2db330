"""Compiles the native kernels for this machine, once, and finds them again.

The kernels (``custom_ops/native``) are C++ without any dependency; they are compiled for exactly
the CPU they run on and kept in the user's cache. Whoever has no compiler, or does not want them,
runs the same graphs on ONNX Runtime's own operators: nothing here raises.
"""

import ctypes
import hashlib
import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from time import perf_counter

import numpy as np
import numpy.typing as npt

from qwen_mtp.graphs.spec import WeightFormat
from qwen_mtp.runtime.native_build import FLAGS, build_library
from qwen_mtp.runtime.native_cache import Cache

COMPILERS = ("c++", "g++", "clang++")
SWITCH = "QWEN_MTP_NATIVE"
FAST = ("avx512_vnni", "avx512bw")
CACHE = "QWEN_MTP_CACHE"
ELSEWHERE = f"set {CACHE} to another directory"
AGAIN = "qwen-mtp compile --force tries again"


@dataclass(frozen=True, slots=True)
class NativeKernels:
    """Whether this machine has the kernels.

    Attributes:
        library: The compiled library, or None.
        reason: Why there is none, one line; empty where there is.
        pending: Whether nothing but compiling is missing.
        seconds: What compiling took, where it was done now.
    """

    library: Path | None
    reason: str = ""
    pending: bool = False
    seconds: float = 0.0


def find_kernels(*, build: bool = True, force: bool = False) -> NativeKernels:
    """The compiled kernels of this machine, loaded once to see that they can be.

    A library that is damaged or cannot be loaded is compiled again. A compiler that failed is not
    asked again before it changes.

    Args:
        build: Compile them where they are not in the cache yet, which takes some seconds.
        force: Compile them anew, whatever is there and whatever failed before.

    Returns:
        Their place, or why there are none: switched off by ``QWEN_MTP_NATIVE=0``, no compiler,
        a compiler that fails, or nowhere safe to keep them.
    """
    if os.environ.get(SWITCH) == "0":
        return NativeKernels(None, f"{SWITCH}=0 switches them off")
    try:
        return _find(Cache(cache_directory()), build, force)
    except OSError as error:
        where = f"{os.fsdecode(error.filename)}: " if error.filename else ""
        return NativeKernels(None, f"{where}{error.strerror or error}; {ELSEWHERE}")


def slow_products(format: WeightFormat) -> str:
    """Why packages of a weight format run better without the kernels here; "" where they do not.

    The integer products are written for AVX-512 VNNI. On other processors they are plain loops,
    several times slower than those of ONNX Runtime.
    """
    if format not in ("int8", "int4") or set(FAST) <= set(processor()):
        return ""
    return f"this CPU lacks {' or '.join(FAST)}, which fast products need; --native insists"


def memory_reader(kernels: NativeKernels) -> Callable[[npt.NDArray[np.float32]], object]:
    """What reads an array once, for measuring how fast memory is; threads may do so side by side.

    Without the kernels it is the maximum, which NumPy computes nearly as fast as it reads.
    """
    if kernels.library is None:
        return np.max
    read = ctypes.CDLL(str(kernels.library)).qwen_mtp_read  # ctypes lets other threads run
    read.argtypes, read.restype = (ctypes.c_void_p, ctypes.c_int64), ctypes.c_uint64
    return lambda part: read(part.ctypes.data, part.nbytes)


def cache_directory() -> Path:
    """Where compiled kernels are kept: ``QWEN_MTP_CACHE``, else the user's cache directory.

    Raises:
        OSError: There is no home directory to keep them in.
    """
    own = os.environ.get(CACHE)
    if own:
        return Path(own)
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise OSError("there is no home directory to keep compiled kernels in") from error
    return Path(base) / "qwen-mtp"


def sources() -> list[Path]:
    """The files the kernels are made of, in a fixed order."""
    folder = Path(str(files("qwen_mtp.custom_ops"))) / "native"
    return sorted(path for path in folder.iterdir() if path.suffix in (".cc", ".h"))


def find_compiler() -> tuple[str, ...]:
    """The command that starts the C++ compiler, from ``CXX`` or of a usual name; empty if none."""
    own = _own_compiler()
    for names in (own,) if own else ((name,) for name in COMPILERS):
        if (path := shutil.which(names[0])) is not None:
            return (path, *names[1:])
    return ()


def _own_compiler() -> tuple[str, ...]:
    named = os.environ.get("CXX", "")
    try:
        return tuple(shlex.split(named))
    except ValueError:  # a quote that does not end
        return (named,)


def _find(cache: Cache, build: bool, force: bool) -> NativeKernels:
    if distrust := cache.distrust():
        return NativeKernels(None, f"{distrust}, or {ELSEWHERE}")
    digest, compiler = _digest(), find_compiler()
    if not force and (library := cache.library(digest)) is not None:
        return NativeKernels(library)
    if not compiler:
        return NativeKernels(None, _no_compiler())
    if not force and (failed := cache.failure(digest, compiler[0])):
        return NativeKernels(None, f"{failed}; {AGAIN}")
    if cache.noexec():
        reason = f"{cache.directory}: its file system lets nothing run (noexec); {ELSEWHERE}"
        return NativeKernels(None, reason)
    if not build:
        return NativeKernels(None, "not compiled yet; run qwen-mtp compile", pending=True)
    return _build(cache, digest, compiler)


def _build(cache: Cache, digest: str, compiler: Sequence[str]) -> NativeKernels:
    start = perf_counter()
    with cache.workplace() as place:
        failed = build_library(compiler, sources(), place)
        if not failed:
            library, failed = cache.keep(place.library, digest)
    if failed:
        cache.note_failure(digest, compiler[0], failed)
        return NativeKernels(None, failed)
    return NativeKernels(library, seconds=perf_counter() - start)


def _no_compiler() -> str:
    if own := _own_compiler():
        return f"CXX names {own[0]}, which is not there; give a C++ compiler or unset it"
    return f"no C++ compiler ({', '.join(COMPILERS)}) found; install g++ or set CXX"


def _digest() -> str:
    """One name for sources, flags and processor: another of any is another library."""
    whole = hashlib.sha256("\0".join((*FLAGS, *processor())).encode())
    for path in sources():
        whole.update(path.name.encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()[:16]


def processor() -> Sequence[str]:
    """What ``-march=native`` depends on: architecture and instruction sets."""
    lines = [os.uname().machine]
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return [*lines, *sorted(value.split())]
    return lines
