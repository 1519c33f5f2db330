"""The parity check of a package, on the machine where it runs: numpy and onnxruntime only.

Only the comparison with a checkpoint needs torch and transformers, and loads them when asked to.
GE models are checked without an NPU: against what GE declares, and by running them with torch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from msgspec.structs import replace

from qwen_mtp.checks_bench import Bench
from qwen_mtp.checks_decoding import check_decoding
from qwen_mtp.checks_files import check_files, damaged_files
from qwen_mtp.checks_golden import check_golden
from qwen_mtp.checks_report import Check, Report, one_line, this_machine
from qwen_mtp.checks_rows import check_rows
from qwen_mtp.checks_sampler import check_sampler
from qwen_mtp.checks_tolerant import check_tolerant
from qwen_mtp.errors import MissingExtraError, PackageError, RequestError
from qwen_mtp.graphs.manifest import REMEDY, load_manifest
from qwen_mtp.progress import Progress, Silent
from qwen_mtp.runtime.engine import Engine
from qwen_mtp.runtime.engines import prepare_kernels
from qwen_mtp.runtime.package import Package

if TYPE_CHECKING:
    from qwen_mtp.checks_checkpoint import Source

__all__ = ["Check", "Report", "record_verification", "verify_package"]

_SILENT = Silent()


def verify_package(
    directory: str | PathLike[str],
    *,
    checkpoint: str | PathLike[str] | None = None,
    threads: int | None = None,
    native: bool | None = None,
    progress: Progress = _SILENT,
) -> Report:
    """Check that a package computes here what it should.

    In this order: ``files`` (sums), ``load``, ``rows`` (every kernel gives a row its own bits),
    ``golden`` (the graphs equal the torch modules), ``decoding`` (speculation on equals off, bit
    for bit), ``sampler`` (equals its meaning) and, with a checkpoint, ``source`` (the fingerprint)
    and ``transformers`` (logits). A failed check is reported, never raised; when files are damaged
    or the model does not load, the checks after it do not run.

    For Ascend, ``structure`` (the graphs hang together and have the interface of the manifest) and
    ``prototypes`` (GE declares every operator like that, and the chip has it) come before
    ``load``, and the rest runs in the interpreter of GE models. There, and for standard ONNX, the
    bits of a row depend on its pass: there is no ``rows``, and ``decoding`` allows for rounding.

    Args:
        directory: The package.
        checkpoint: Also compare with the checkpoint it was made from.
        threads: Threads inside an operator; None takes the number of usable cores, or for GE
            models that are small, one.
        native: Check on the native kernels of this machine, or on ONNX Runtime's; None takes what
            a run would take.
        progress: Gets a phase for each check.

    Raises:
        CheckpointError: The checkpoint cannot be read.
        MissingExtraError: A checkpoint was given without torch and transformers to read it, or a
            package for Ascend without torch, torch_npu and protobuf.
        PackageError: The manifest is unreadable or contradicts itself.
        RequestError: ``threads`` is not a positive number, or ``native`` cannot be.
    """
    try:
        package = Package.open(directory)
    except PackageError:
        if (found := _missing_files(Path(directory))) is None:
            raise
        return Report((found,), 0, None, this_machine())
    source = None if checkpoint is None else _open_source(Path(checkpoint))
    run = _Run(package, progress, native)
    with _threads(package, threads):
        bench = run.load(threads) if run.files_are_whole() else None
        if bench is not None:
            run.graphs(bench)
            if source is not None:
                run.check("source", lambda: source.check_fingerprint(package, progress))
                run.check("transformers", lambda: source.check_logits(bench, progress))
    progress.done()
    return run.report()


def record_verification(directory: str | PathLike[str], report: Report) -> None:
    """Write the outcome into the manifest.

    Raises:
        OSError: The manifest cannot be written.
        PackageError: The manifest is unreadable.
    """
    replace(load_manifest(directory), verification=report.record()).save(directory)


class _Run:
    """The checks done so far."""

    def __init__(self, package: Package, progress: Progress, native: bool | None) -> None:
        self.checks: list[Check] = []
        self.patterns = self.near_ties = 0
        self.max_logit_error: float | None = None
        self._package, self._progress, self._native = package, progress, native

    def files_are_whole(self) -> bool:
        """Whether the rest can run: a file too many does no harm to it."""
        damaged = damaged_files(self._package, self._progress)
        self.checks.append(check_files(self._package, damaged))
        return not damaged

    def report(self) -> Report:
        found = tuple(self.checks), self.patterns, self.max_logit_error
        return Report(*found, this_machine(), self.near_ties)

    def load(self, threads: int | None) -> Bench | None:
        native = self._native
        if self._package.manifest.ascend is not None:
            if native is not None:
                raise RequestError("native kernels are for packages that run on the CPU")
            return self._load_ge()
        prepare_kernels(self._package, native, self._progress)
        self._progress.phase("verify load")
        try:
            engine = Engine(self._package, threads=threads, keep_logits=True, native=native)
        except PackageError as error:
            self.checks.append(Check("load", False, one_line(error)))
            return None
        count = len(self._package.manifest.graphs)
        self.checks.append(Check("load", True, f"{count} graphs on {_kernels(engine)}"))
        return Bench(engine)

    def _load_ge(self) -> Bench | None:
        """Nothing can be run where graphs do not hang together."""
        with _ge_extra():
            from qwen_mtp.checks_ge import check_static
            from qwen_mtp.checks_ge_bench import GeBench
        static = check_static(self._package, self._progress)
        self.checks += [static.structure, static.prototypes]
        if not static.structure.passed:
            return None
        bench = GeBench(self._package)
        self.check("load", lambda: bench.load(self._progress))
        return bench if self.checks[-1].passed else None

    def graphs(self, bench: Bench) -> None:
        if self._exact():
            self.check("rows", lambda: check_rows(bench, self._progress))
        self.check("golden", lambda: self._golden(bench))
        self.check("decoding", lambda: self._decoding(bench))
        self.check("sampler", lambda: check_sampler(bench, self._progress))

    def check(self, name: str, action: Callable[[], Check]) -> None:
        try:
            self.checks.append(action())
        except Exception as error:  # ONNX Runtime's share no base class; all are findings here
            line = f"stopped by {type(error).__name__}: {one_line(error)}"
            self.checks.append(Check(name, False, line))

    def _golden(self, bench: Bench) -> Check:
        check, self.max_logit_error = check_golden(bench, self._progress)
        return check

    def _decoding(self, bench: Bench) -> Check:
        if self._exact():
            check, self.patterns = check_decoding(bench, self._progress)
            return check
        found = check_tolerant(bench, self._progress)
        self.patterns, self.near_ties = found.patterns, found.near_ties
        return found.check

    def _exact(self) -> bool:
        """Whether all kernels of the package were chosen to give a row its own bits."""
        return self._package.manifest.geometry.layout == "lazy"


def _kernels(engine: Engine) -> str:
    if engine.kernels.library is not None:
        return "native kernels"
    asked = engine.package.manifest.native_file is not None and engine.kernels.reason
    return f"ONNX Runtime's kernels{f' ({asked})' if asked else ''}"


def _missing_files(root: Path) -> Check | None:
    """The failed check on files that are gone or of another size; None if there are none."""
    problems = []
    for file in load_manifest(root).files:
        path, inner = root / file.path, PurePosixPath(file.path)
        inside = not inner.is_absolute() and ".." not in inner.parts
        if inside and not path.is_file():
            problems.append(f"{file.path}: not there")
        elif inside and path.stat().st_size != file.bytes:
            problems.append(
                f"{file.path}: {path.stat().st_size} bytes, the manifest says {file.bytes}"
            )
    return Check("files", False, f"{'; '.join(problems)}; {REMEDY}") if problems else None


@contextmanager
def _threads(package: Package, threads: int | None) -> Iterator[None]:
    """What runs GE models counts its threads for the whole process."""
    if package.manifest.ascend is None:
        yield
        return
    with _ge_extra():
        from qwen_mtp.checks_ge_bench import torch_threads
        from qwen_mtp.ge.wheel import messages
    if threads is not None and threads < 1:
        raise RequestError(f"threads is {threads}: give a number >= 1")
    messages()  # before any work
    with torch_threads(package, threads):
        yield


@contextmanager
def _ge_extra() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as missing:
        raise MissingExtraError(
            f"checking a package for Ascend needs {missing.name}: pip install 'qwen-mtp[export]'"
        ) from missing


def _open_source(directory: Path) -> "Source":
    try:
        from qwen_mtp.checks_checkpoint import Source
    except ImportError as missing:
        raise MissingExtraError(
            f"comparing with a checkpoint needs {missing.name}: "
            "pip install 'qwen-mtp[export,test]'"
        ) from missing
    return Source.open(directory)
