"""The directory compiled kernels are kept in: who may write there, and what is whole.

A library ends with the hash of what stands before it, because loading one that was cut short can
kill the process. What a compiler failed at is noted, so that it does not delay every start.
"""

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import time

import onnxruntime as ort

from qwen_mtp.runtime.native_build import Workplace

_HASH_BYTES = 32
_ABANDONED_S = 3600
_ROOT = 0
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class Cache:
    """One cache directory; it may not exist yet."""

    directory: Path

    def distrust(self) -> str:
        """Why nothing from here may be loaded, one line with a remedy; empty where it may.

        Raises:
            OSError: It cannot be looked at.
        """
        if not self.directory.exists():
            return ""
        return _distrust(self.directory)

    def noexec(self) -> bool:
        """Whether no library can be loaded from here."""
        place = next((p for p in (self.directory, *self.directory.parents) if p.exists()), None)
        return place is not None and bool(os.statvfs(place).f_flag & os.ST_NOEXEC)

    def library(self, digest: str) -> Path | None:
        """The kernels of that name, if they are whole, trusted and can be loaded."""
        path = self._path(digest)
        try:
            whole = not _distrust(path) and _is_whole(path)
        except OSError:
            return None
        return path if whole and not load_failure(path) else None

    def failure(self, digest: str, compiler: str) -> str:
        """What this compiler failed at before; empty if it did not, or has changed since."""
        try:
            known, _, reason = self._note(digest).read_text(encoding="utf-8").partition("\n")
        except (OSError, UnicodeDecodeError):
            return ""
        return reason.strip() if known == _identity(compiler) else ""

    def note_failure(self, digest: str, compiler: str, reason: str) -> None:
        """Remember why this compiler made no kernels; where that cannot be kept, it is not."""
        with suppress(OSError):
            self._note(digest).write_text(f"{_identity(compiler)}\n{reason}\n", encoding="utf-8")

    @contextmanager
    def workplace(self) -> Iterator[Workplace]:
        """A directory to build in, beside what it is built for, that vanishes at the end.

        Raises:
            OSError: It cannot be made.
        """
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o755)
        self._remove_abandoned()
        place = Path(tempfile.mkdtemp(prefix=".build-", dir=self.directory))
        try:
            yield Workplace(place)
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def keep(self, library: Path, digest: str) -> tuple[Path, str]:
        """Put a built library in its place, where two processes may do so at once.

        Returns:
            Its place, and why it is not there; empty where it is.

        Raises:
            OSError: It cannot be written.
        """
        path = self._path(digest)
        data = library.read_bytes()
        with open(library, "ab") as file:
            file.write(hashlib.sha256(data).digest())
        library.chmod(0o755)
        if failed := load_failure(library):
            return path, f"what was compiled cannot be loaded: {failed}"
        os.replace(library, path)
        self._note(digest).unlink(missing_ok=True)
        return path, ""

    def _remove_abandoned(self) -> None:
        """Remove what builds left that were killed an hour ago or more."""
        for path in self.directory.glob(".build-*"):
            with suppress(OSError):
                if path.stat().st_mtime < time() - _ABANDONED_S:
                    shutil.rmtree(path, ignore_errors=True)

    def _path(self, digest: str) -> Path:
        return self.directory / f"kernels-{digest}.so"

    def _note(self, digest: str) -> Path:
        return self.directory / f"kernels-{digest}.failed"


def load_failure(library: Path) -> str:
    """Why ONNX Runtime cannot load a library, one line; empty where it can."""
    try:
        ort.SessionOptions().register_custom_ops_library(str(library.absolute()))
    except Exception as error:  # the runtime's own exceptions share no base class
        return " ".join(str(error).split())
    return ""


def _distrust(path: Path) -> str:
    """Why others than this user and root could have written what lies here."""
    found = path.stat()
    if found.st_uid not in (_ROOT, os.geteuid()):
        return f"{path} belongs to another user: give it to this one"
    if found.st_mode & _OTHERS:
        return f"{path} can be written by others: chmod go-w it"
    return ""


def _is_whole(path: Path) -> bool:
    data = path.read_bytes()
    return hashlib.sha256(data[:-_HASH_BYTES]).digest() == data[-_HASH_BYTES:]


def _identity(compiler: str) -> str:
    found = os.stat(compiler)
    return f"{compiler} {found.st_size} {found.st_mtime_ns}"
