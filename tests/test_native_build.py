"""Native kernels are compiled by whatever ``CXX`` names, kept safely, and never required."""

import os
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from qwen_mtp.runtime import native_build, native_cache
from qwen_mtp.runtime.native import NativeKernels, cache_directory, find_kernels
from tests.packages import scratch

SOURCE = "void* RegisterCustomOps(void* a, void* b) { return 0; }"


@cache
def some_library() -> Path:
    """A library that ONNX Runtime can load."""
    compiler = shutil.which("cc") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no compiler")
    path = scratch() / "some.so"
    command = [compiler, "-x", "c", "-shared", "-fPIC", "-o", str(path), "-"]
    subprocess.run(command, input=SOURCE.encode(), check=True)
    return path


class Machine:
    """A cache directory and a compiler of one's own; each call of it leaves a line."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache, self.compiler = root / "cache", root / "cxx"
        self._calls = root / "calls"
        self._good = some_library()
        monkeypatch.setenv("QWEN_MTP_CACHE", str(self.cache))
        monkeypatch.setenv("CXX", str(self.compiler))
        monkeypatch.delenv("QWEN_MTP_NATIVE", raising=False)
        self.does(f'cp {self._good} "$out"')

    def does(self, script: str) -> None:
        """Let the compiler run a line of shell, in which ``$out`` is what it should write."""
        find = 'while [ "$1" != -o ]; do shift; done; out=$2'
        self.compiler.write_text(f"#!/bin/sh\necho x >> {self._calls}\n{find}\n{script}\n")
        self.compiler.chmod(0o755)
        changed = time.time_ns() + 10**9 * len(script)
        os.utime(self.compiler, ns=(changed, changed))

    def called(self) -> bool:
        """Whether the compiler ran since this was last asked."""
        found = self._calls.exists()
        self._calls.unlink(missing_ok=True)
        return found

    def left(self) -> list[str]:
        """What the cache holds, but for noted failures."""
        return [p.name for p in self.cache.iterdir() if p.suffix != ".failed"]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def library(found: NativeKernels) -> Path:
    assert found.library is not None, found.reason
    return found.library


def refused(found: NativeKernels, *fragments: str) -> None:
    assert found.library is None
    assert "\n" not in found.reason
    assert [f for f in fragments if f not in found.reason] == [], found.reason


def test_kernels_are_compiled_once_and_only_when_asked(machine: Machine) -> None:
    assert find_kernels(build=False).pending
    assert not machine.called()
    first = find_kernels()
    assert first.seconds > 0
    assert machine.called()
    assert find_kernels() == NativeKernels(first.library)
    assert not machine.called()
    assert machine.left() == [library(first).name]
    assert find_kernels(force=True).library == first.library
    assert machine.called()


@pytest.mark.parametrize("size", [0, 10, 5000, -1])
def test_a_library_that_was_cut_short_is_compiled_again(machine: Machine, size: int) -> None:
    path = library(find_kernels())
    whole = path.read_bytes()
    path.unlink()  # another file: the mapped one must stay whole
    path.write_bytes(whole[:size])
    assert machine.called()
    assert library(find_kernels()).read_bytes() == whole
    assert machine.called()


def test_a_library_of_another_kind_is_compiled_again(machine: Machine) -> None:
    path = library(find_kernels())
    whole = path.read_bytes()
    foreign = b"not for this machine"
    path.unlink()
    path.write_bytes(foreign + native_cache.hashlib.sha256(foreign).digest())
    assert library(find_kernels()).read_bytes() == whole


@pytest.mark.parametrize(
    ("script", "fragment"),
    [
        ("echo 'x.cc:1: error: no such thing' >&2; exit 1", "x.cc:1: error: no such thing"),
        ("printf 'ld: No space left\\n' >&2; exit 1", "No space left"),
        ("head -c 9999 /dev/urandom >&2; exit 1", "fails"),
        ("exit 1", "ended with 1"),
        ("exit 0", "wrote no library"),
        ('echo rubbish > "$out"', "cannot be loaded"),
        ("kill -9 $$", "ended with -9"),
    ],
)
def test_a_compiler_that_fails_is_one_line_and_is_not_asked_again(
    machine: Machine, script: str, fragment: str
) -> None:
    machine.does(script)
    refused(find_kernels(), fragment)
    assert machine.called()
    refused(find_kernels(), fragment, "qwen-mtp compile")
    assert not machine.called()
    assert machine.left() == []
    machine.does(f'cp {some_library()} "$out"')
    assert find_kernels().library is not None
    assert list(machine.cache.glob("*.failed")) == []


def test_a_compiler_that_hangs_is_stopped_with_its_children(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_build, "LIMIT_S", 0.5)
    machine.does("sh -c 'sleep 60; :' & echo $! >> ${0%/*}/child; wait")
    start = time.monotonic()
    refused(find_kernels(), "did not finish")
    assert time.monotonic() - start < 30
    children = (machine.compiler.parent / "child").read_text().split()
    assert children
    for status in (Path(f"/proc/{child}/stat") for child in children):
        assert not status.exists() or status.read_text().split()[2] == "Z"
    assert machine.left() == []


def test_an_interrupted_build_leaves_nothing(machine: Machine) -> None:
    machine.does('touch "$out" ${0%/*}/started; sleep 60')
    command = [sys.executable, "-c", "from qwen_mtp.runtime.native import *; find_kernels()"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while not (machine.compiler.parent / "started").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) != 0
    assert list(machine.cache.iterdir()) == []


def test_processes_that_build_at_once_all_get_kernels(machine: Machine) -> None:
    machine.does(f'sleep 0.3; cp {some_library()} "$out"')
    code = (
        "from qwen_mtp.runtime.native import *; import sys; sys.exit(not find_kernels().library)"
    )
    running = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait(60) for process in running] == [0, 0]
    assert len(machine.left()) == 1


def test_what_others_can_write_or_own_is_not_loaded(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = library(find_kernels())
    path.chmod(0o777)
    assert machine.called()
    find_kernels()
    assert machine.called()
    machine.cache.chmod(0o777)
    refused(find_kernels(), "can be written by others", "chmod go-w", "QWEN_MTP_CACHE")
    machine.cache.chmod(0o755)
    monkeypatch.setattr(native_cache.os, "geteuid", lambda: machine.cache.stat().st_uid + 1)
    monkeypatch.setattr(native_cache, "_ROOT", -1)
    refused(find_kernels(), "belongs to another user", "QWEN_MTP_CACHE")
    assert not machine.called()


def test_nowhere_to_keep_kernels_is_a_reason(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_cache.os, "ST_NOEXEC", os.statvfs("/").f_flag or 1)
    if os.statvfs(machine.compiler).f_flag & os.ST_NOEXEC:
        refused(find_kernels(), "noexec", "QWEN_MTP_CACHE")
    machine.compiler.with_name("file").touch()
    monkeypatch.setenv("QWEN_MTP_CACHE", str(machine.compiler.with_name("file") / "below"))
    refused(find_kernels(), "QWEN_MTP_CACHE")
    monkeypatch.setenv("QWEN_MTP_CACHE", "/proc/nowhere")
    refused(find_kernels(), "/proc/nowhere", "QWEN_MTP_CACHE")
    monkeypatch.delenv("QWEN_MTP_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError()))
    refused(find_kernels(), "home directory", "QWEN_MTP_CACHE")
    with pytest.raises(OSError, match="home"):
        cache_directory()
    assert not machine.called()


def test_a_cache_that_only_can_be_read_serves(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = library(find_kernels())
    machine.cache.chmod(0o555)
    monkeypatch.setenv("CXX", "nothing-of-this-name")
    assert find_kernels().library == path


@pytest.mark.parametrize("name", ["nothing-of-this-name", "a 'quote", "/dev/null"])
def test_a_compiler_that_is_not_there_is_named(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("CXX", name)
    refused(find_kernels(), "CXX names", name.split()[0])


def test_a_compiler_that_cannot_be_started_is_named(machine: Machine) -> None:
    machine.compiler.write_bytes(b"\x7fELF rubbish")
    refused(find_kernels(), f"{machine.compiler} cannot be started", "set CXX")


def test_a_compiler_may_have_a_launcher(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"/bin/sh {machine.compiler}")
    assert find_kernels().library is not None


def test_one_variable_switches_them_off(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN_MTP_NATIVE", "0")
    refused(find_kernels(force=True), "QWEN_MTP_NATIVE=0")
    assert not machine.called()
