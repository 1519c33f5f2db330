"""Plans a package and writes it into a staging directory that takes its place when complete."""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from tempfile import mkdtemp

from qwen_mtp.config import GenerationDefaults
from qwen_mtp.errors import CheckpointError, ExportError
from qwen_mtp.export.air_package import write_air
from qwen_mtp.export.compose import write_onnx
from qwen_mtp.export.form import Form
from qwen_mtp.export.plan import Plan
from qwen_mtp.export.standard import write_standard
from qwen_mtp.export.weights import write_weights
from qwen_mtp.graphs.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    FileEntry,
    PackageManifest,
    Source,
)
from qwen_mtp.graphs.spec import state_specs
from qwen_mtp.progress import Progress

COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "LICENSE",
)
TOOLS = ("qwen-mtp", "torch", "safetensors", "numpy")
RESERVE = 64 << 20  # bytes of graphs, tokenizer and slack beside the weights


def write_package(plan: Plan, directory: Path, progress: Progress) -> PackageManifest:
    """Write every file into an existing directory.

    Raises:
        CheckpointError: A tensor or file cannot be read or is damaged.
        ExportError: The disk has too little space, or a graph cannot be converted.
        MissingExtraError: GE models are asked for without torch_npu.
        OSError: The disk cannot be written; :func:`staged` names the remedy.
    """
    _check_space(plan, directory)
    form = _writer(plan)(plan, directory, progress)
    progress.phase("weights", plan.weight_bytes, "B")
    write_weights(
        lambda tensor: directory / form.weights_file.replace("{tensor}", tensor.name),
        plan.checkpoint,
        plan.blueprint.groups,
        plan.blueprint.stored,
        progress.advance,
    )
    for name in COPIED:
        if (plan.checkpoint.directory / name).is_file():
            data = _source_bytes(plan.checkpoint.directory / name)
            (directory / name).write_bytes(data)
    progress.phase("checksums")
    manifest = _describe(plan, form, directory)
    manifest.save(directory)
    return manifest


@contextmanager
def staged(package: Path, *, overwrite: bool) -> Iterator[Path]:
    """A temporary sibling that takes the package's place when the block ends well.

    Whatever goes wrong, interruption included, the sibling is removed and an existing package
    stays as it was. A symbolic link is followed: what it names is made or replaced.

    Args:
        package: The directory to make.
        overwrite: Replace an existing package.

    Raises:
        ExportError: The directory exists, or something in it or its parent cannot be written.
    """
    target = Path(os.path.realpath(package))
    with _disk_errors(package), _parents(target):
        check_target(package, overwrite)
        staging = Path(mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        old = staging.with_name(staging.name + ".old")
        try:
            with _disk_errors(package, staging):
                yield staging
            staging.chmod(0o755)
            check_target(package, overwrite)  # the export took its time
            _swap(staging, target, old)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _parents(target: Path) -> Iterator[None]:
    """Make the directories above a target; those that end up empty go again."""
    made = [path for path in target.parents if not path.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        with suppress(OSError):
            for path in made:
                path.rmdir()


def check_target(package: Path, overwrite: bool) -> None:
    """Refuse a place that no package may be written to.

    Args:
        package: The directory to make.
        overwrite: An existing package may be replaced.

    Raises:
        ExportError: It is a file, holds something else than a package, or may not be replaced.
        OSError: It cannot be looked at.
    """
    above = next(path for path in Path(os.path.abspath(package)).parents if path.exists())
    if not above.is_dir():
        raise ExportError(f"{above}: is a file; choose a directory that can be written")
    if not package.exists() and not package.is_symlink():
        return
    if not package.is_dir():
        raise ExportError(f"{package}: is a file; give a directory that does not exist yet")
    if not any(package.iterdir()):
        return
    if not overwrite:
        raise ExportError(
            f"{package}: is not empty; give another directory, or replace the package "
            "with --overwrite, overwrite=True"
        )
    if not (package / MANIFEST).is_file():
        raise ExportError(
            f"{package}: holds no package; --overwrite, overwrite=True only replaces packages"
        )


def _swap(staging: Path, package: Path, old: Path) -> None:
    """Put the sibling in the package's place and what was there under ``old``."""
    try:
        if package.exists():
            package.rename(old)
        staging.rename(package)
    except BaseException:
        if old.exists() and not package.exists():
            old.rename(package)
        raise


def _writer(plan: Plan) -> Callable[[Plan, Path, Progress], Form]:
    if plan.ascend is not None:
        return write_air
    return write_standard if plan.opset_domain == "standard" else write_onnx


def _check_space(plan: Plan, directory: Path) -> None:
    need, free = plan.weight_bytes + RESERVE, shutil.disk_usage(directory).free
    if free < need:
        raise ExportError(
            f"{directory.parent}: {free / 1e9:.1f} GB free, the package needs "
            f"{need / 1e9:.1f} GB; free some space or export to another disk"
        )


@contextmanager
def _disk_errors(package: Path, staging: Path | None = None) -> Iterator[None]:
    """Name the file and the remedy; a file in the sibling goes by its place in the package."""
    try:
        yield
    except BrokenPipeError:  # whoever read the progress is gone; the disk is fine
        raise
    except OSError as error:
        where = Path(os.fsdecode(error.filename or package))
        if staging is not None and where.is_relative_to(staging):
            where = package / where.relative_to(staging)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "free some space" if full else "choose a directory that can be written"
        raise ExportError(f"{where}: {error.strerror or error}; {remedy}") from error


def _source_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; make the file readable") from error


def _describe(plan: Plan, form: Form, directory: Path) -> PackageManifest:
    files = (path for path in directory.rglob("*") if path.is_file())
    names = sorted(path.relative_to(directory).as_posix() for path in files)
    return PackageManifest(
        format_version=FORMAT_VERSION,
        backend=form.backend,
        model_file=form.model_file,
        weights_file=form.weights_file,
        config=plan.config,
        generation=GenerationDefaults.from_checkpoint(plan.checkpoint.directory),
        geometry=plan.geometry,
        graphs=plan.blueprint.specs,
        states=state_specs(plan.config, plan.geometry),
        weights=plan.blueprint.stored,
        files=tuple(file_entry(directory, name) for name in names),
        source=Source(
            fingerprint=plan.checkpoint.fingerprint(),
            ignored=plan.checkpoint.ignored,
            unused=plan.unused,
        ),
        tools={name: version(name) for name in TOOLS} | form.tools,
        ascend=form.ascend,
        native_file=form.native_file,
    )


def file_entry(directory: Path, name: str) -> FileEntry:
    """Size and sha256 of one file."""
    path = directory / name
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileEntry(path=name, bytes=path.stat().st_size, sha256=digest)
