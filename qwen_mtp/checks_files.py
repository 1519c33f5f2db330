"""Every file of a package against the sizes and sums in its manifest."""

import hashlib
from pathlib import Path, PurePosixPath

from qwen_mtp.checks_report import Check
from qwen_mtp.graphs.manifest import MANIFEST, REMEDY
from qwen_mtp.progress import Progress
from qwen_mtp.runtime.package import Package

CHUNK = 1 << 22


def damaged_files(package: Package, progress: Progress) -> tuple[str, ...]:
    """Names of the files whose contents are not what the manifest says."""
    files = package.manifest.files
    progress.phase("verify files", sum(file.bytes for file in files), "B")
    root = package.directory
    return tuple(f.path for f in files if _sha256(root / f.path, progress) != f.sha256)


def check_files(package: Package, damaged: tuple[str, ...]) -> Check:
    """Nothing damaged, nothing that the manifest does not list.

    Beside the GE models anything may lie: that is where ATC writes.

    Args:
        package: The package.
        damaged: From :func:`damaged_files`.
    """
    files = package.manifest.files
    known = {MANIFEST, *(PurePosixPath(file.path).parts[0] for file in files)}
    extra = sorted(path.name for path in package.directory.iterdir() if path.name not in known)
    problems = [f"{name}: sha256 differs from the manifest" for name in damaged]
    problems += [f"{name}: the manifest does not list it; remove it" for name in extra]
    if problems:
        remedy = f"; {REMEDY}" if damaged else ""
        return Check("files", False, "; ".join(problems) + remedy)
    size = sum(file.bytes for file in files) / 1e6
    return Check("files", True, f"{len(files)} files, {size:.1f} MB, sha256 as recorded")


def _sha256(path: Path, progress: Progress) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(CHUNK):
            digest.update(data)
            progress.advance(len(data))
    return digest.hexdigest()
