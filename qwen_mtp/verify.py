"""The parity check of a package, on the machine where it runs: numpy and onnxruntime only.

Only the comparison with a checkpoint needs torch and transformers, and loads them when asked to.
"""

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from qwen_mtp.checks_bench import Bench
from qwen_mtp.checks_decoding import check_decoding
from qwen_mtp.checks_files import check_files, damaged_files
from qwen_mtp.checks_golden import check_golden
from qwen_mtp.checks_report import Check, Report, one_line, this_machine
from qwen_mtp.checks_rows import check_rows
from qwen_mtp.checks_sampler import check_sampler
from qwen_mtp.errors import MissingExtraError, PackageError
from qwen_mtp.graphs.manifest import REMEDY, load_manifest
from qwen_mtp.progress import Progress, Silent
from qwen_mtp.runtime.engine import Engine
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
    progress: Progress = _SILENT,
) -> Report:
    """Check that a package computes here what it should.

    In this order: ``files`` (sums), ``load``, ``rows`` (every kernel gives a row its own bits),
    ``golden`` (the graphs equal the torch modules), ``decoding`` (speculation on equals off, bit
    for bit), ``sampler`` (equals its meaning) and, with a checkpoint, ``source`` (the fingerprint)
    and ``transformers`` (logits). A failed check is reported, never raised; when files are damaged
    or the model does not load, the checks after it do not run.

    Args:
        directory: The package.
        checkpoint: Also compare with the checkpoint it was made from.
        threads: Threads inside an operator; None takes the number of usable cores.
        progress: Gets a phase for each check.

    Raises:
        CheckpointError: The checkpoint cannot be read.
        MissingExtraError: A checkpoint was given without torch and transformers to read it.
        PackageError: The manifest is unreadable or contradicts itself.
        RequestError: ``threads`` is not a positive number.
    """
    try:
        package = Package.open(directory)
    except PackageError:
        if (found := _missing_files(Path(directory))) is None:
            raise
        return Report((found,), 0, None, this_machine())
    source = None if checkpoint is None else _open_source(Path(checkpoint))
    run = _Run(package, progress)
    bench = run.load(threads) if run.files_are_whole() else None
    if bench is not None:
        run.graphs(bench)
        if source is not None:
            run.check("source", lambda: source.check_fingerprint(package, progress))
            run.check("transformers", lambda: source.check_logits(bench, progress))
    progress.done()
    return Report(tuple(run.checks), run.patterns, run.max_logit_error, this_machine())


def record_verification(directory: str | PathLike[str], report: Report) -> None:
    """Write the outcome into the manifest.

    Raises:
        OSError: The manifest cannot be written.
        PackageError: The manifest is unreadable.
    """
    replace(load_manifest(directory), verification=report.record()).save(directory)


class _Run:
    """The checks done so far."""

    def __init__(self, package: Package, progress: Progress) -> None:
        self.checks: list[Check] = []
        self.patterns = 0
        self.max_logit_error: float | None = None
        self._package, self._progress = package, progress

    def files_are_whole(self) -> bool:
        """Whether the rest can run: a file too many does no harm to it."""
        damaged = damaged_files(self._package, self._progress)
        self.checks.append(check_files(self._package, damaged))
        return not damaged

    def load(self, threads: int | None) -> Bench | None:
        self._progress.phase("verify load")
        try:
            engine = Engine(self._package, threads=threads, keep_logits=True)
        except PackageError as error:
            self.checks.append(Check("load", False, one_line(error)))
            return None
        count = len(self._package.manifest.graphs)
        self.checks.append(Check("load", True, f"{count} graphs"))
        return Bench(engine)

    def graphs(self, bench: Bench) -> None:
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
        check, self.patterns = check_decoding(bench, self._progress)
        return check


def _missing_files(root: Path) -> Check | None:
    """The failed check on files that are gone or of another size; None if there are none."""
    problems = []
    for file in load_manifest(root).files:
        path = root / file.path
        inside = path.name == file.path
        if inside and not path.is_file():
            problems.append(f"{file.path}: not there")
        elif inside and path.stat().st_size != file.bytes:
            problems.append(
                f"{file.path}: {path.stat().st_size} bytes, the manifest says {file.bytes}"
            )
    return Check("files", False, f"{'; '.join(problems)}; {REMEDY}") if problems else None


def _open_source(directory: Path) -> "Source":
    try:
        from qwen_mtp.checks_checkpoint import Source
    except ImportError as missing:
        raise MissingExtraError(
            f"comparing with a checkpoint needs {missing.name}: "
            "pip install 'qwen-mtp[export,test]'"
        ) from missing
    return Source.open(directory)
