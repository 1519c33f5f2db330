"""What this machine has: processor, memory, limits, versions, compiler, native kernels.

Whatever cannot be found out is empty or None; nothing here fails on a machine that hides it.
"""

import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from qwen_mtp.checks_report import this_machine
from qwen_mtp.runtime.native import cache_directory, find_compiler, find_kernels

# Names in /proc/cpuinfo of what products of a few rows are made of, and what to call them.
_INSTRUCTIONS = {
    "avx2": "AVX2",
    "fma": "FMA",
    "avx512f": "AVX-512",
    "avx_vnni": "AVX-VNNI",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "amx_int8": "AMX int8",
    "amx_bf16": "AMX bf16",
    "asimd": "NEON",
    "asimddp": "dotprod",
    "i8mm": "i8mm",
    "bf16": "bf16",
    "sve": "SVE",
}
_INTEGER = ("AVX-VNNI", "AVX-512 VNNI", "AMX int8", "dotprod", "i8mm")
_NO_LIMIT = 1 << 60  # bytes: what a control group without a limit says


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """This machine as this process sees it.

    Attributes:
        cpu: Name of the processor.
        architecture: As ``uname -m`` says.
        instructions: Instruction sets that decide how fast products are.
        cores: Cores this process may run on.
        cpu_limit: Cores' worth of time its control group may take; None without a limit.
        memory_bytes: Memory of the machine; 0 where it is not told.
        free_bytes: What this process could still take, the control group's limit included; 0
            where it is not told.
        memory_limit: Bytes the control group may take; None without a limit.
        versions: Names and versions of what computes.
        compiler: The C++ compiler's command; empty without one.
        kernels: The compiled native kernels; empty where there are none.
        no_kernels: Why there are none; empty where there are.
        cache: Where they are kept.
        load: Processes that ran or waited in the last minute; None where it is not told.
    """

    cpu: str
    architecture: str
    instructions: tuple[str, ...]
    cores: int
    cpu_limit: float | None
    memory_bytes: int
    free_bytes: int
    memory_limit: int | None
    versions: tuple[tuple[str, str], ...]
    compiler: str
    kernels: str
    no_kernels: str
    cache: str
    load: float | None

    @property
    def busy(self) -> bool:
        """Whether others take so much that what is measured is rough."""
        return self.load is not None and self.load > max(1.0, 0.5 * self.cores)

    @property
    def integer_products(self) -> bool:
        """Whether the processor sums products of bytes in one instruction."""
        return any(name in _INTEGER for name in self.instructions)

    @property
    def threads(self) -> int:
        """Threads that can run at once: the cores, or what a limit leaves of them."""
        allowed = self.cores if self.cpu_limit is None else int(self.cpu_limit)
        return max(1, min(self.cores, allowed))


def look_around(root: Path = Path("/")) -> Environment:
    """Describe this machine; kernels that are not there yet are compiled.

    Args:
        root: Where ``proc`` and ``sys`` are.
    """
    found = find_kernels()
    memory = _memory(root)
    limit = _memory_limit(root)
    free = memory.get("MemAvailable", memory.get("MemFree", 0))
    if limit is not None:
        left = max(0, limit - _memory_used(root))
        free = min(free, left) if free else left
    return Environment(
        cpu=this_machine(),
        architecture=platform.machine(),
        instructions=instruction_sets(root),
        cores=_cores(),
        cpu_limit=_cpu_limit(root),
        memory_bytes=memory.get("MemTotal", 0),
        free_bytes=free,
        memory_limit=limit,
        versions=_versions(),
        compiler=" ".join(find_compiler()),
        kernels="" if found.library is None else str(found.library),
        no_kernels=found.reason,
        cache=_cache(),
        load=_load(),
    )


def instruction_sets(root: Path = Path("/")) -> tuple[str, ...]:
    """Instruction sets of this processor that decide how fast products are."""
    for line in _text(root, "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            flags = set(value.split())
            return tuple(shown for flag, shown in _INSTRUCTIONS.items() if flag in flags)
    return ()


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return os.cpu_count() or 1


def _memory(root: Path) -> dict[str, int]:
    """The lines of ``meminfo`` in bytes."""
    pairs = (line.split() for line in _text(root, "proc/meminfo").splitlines())
    return {p[0].rstrip(":"): int(p[1]) * 1024 for p in pairs if len(p) == 3 and p[1].isdigit()}


def _cpu_limit(root: Path) -> float | None:
    """The share of time of a control group, version 2 or 1."""
    with suppress(ValueError):
        quota, period = _text(root, "sys/fs/cgroup/cpu.max").split()
        if quota != "max":
            return int(quota) / int(period)
    quota = _text(root, "sys/fs/cgroup/cpu/cpu.cfs_quota_us").strip()
    period = _text(root, "sys/fs/cgroup/cpu/cpu.cfs_period_us").strip()
    if quota.isdigit() and period.isdigit() and int(period):  # -1 is no limit
        return int(quota) / int(period)
    return None


def _memory_limit(root: Path) -> int | None:
    names = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
    return next((n for n in _numbers(root, names) if n < _NO_LIMIT), None)


def _memory_used(root: Path) -> int:
    """What the control group takes, without the page cache that could go."""
    names = ("sys/fs/cgroup/memory.current", "sys/fs/cgroup/memory/memory.usage_in_bytes")
    used = next(iter(_numbers(root, names)), 0)
    for name in ("sys/fs/cgroup/memory.stat", "sys/fs/cgroup/memory/memory.stat"):
        for line in _text(root, name).splitlines():
            if line.startswith("inactive_file ") and line.split()[1].isdigit():
                return used - int(line.split()[1])
    return used


def _numbers(root: Path, names: Sequence[str]) -> list[int]:
    texts = [_text(root, name).strip() for name in names]
    return [int(text) for text in texts if text.isdigit()]


def _versions() -> tuple[tuple[str, str], ...]:
    found = [("python", platform.python_version())]
    for name in ("qwen-mtp", "onnxruntime", "numpy"):
        with suppress(PackageNotFoundError):
            found.append((name, version(name)))
    return tuple(found)


def _cache() -> str:
    try:
        return str(cache_directory())
    except OSError:
        return ""


def _text(root: Path, name: str) -> str:
    try:
        return (root / name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
