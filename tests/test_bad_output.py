"""A place, a disk or an installation that will not do is one line and leaves nothing behind."""

import errno
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

import qwen_mtp.export.package as package_writer
from tests.commands import (
    GEOMETRY,
    checkpoint,
    package_copy,
    qwen_mtp_export,
    refused,
    rejected,
    untouched,
    verified_package,
)

# --- where a package goes ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "fragments"),
    [
        ("package", [], ["is not empty; give another directory", "--overwrite, overwrite=True"]),
        ("folder", [], ["is not empty"]),
        (
            "folder",
            ["--overwrite"],
            ["holds no package; --overwrite, overwrite=True only replaces packages"],
        ),
        ("file", [], ["is a file; give a directory that does not exist yet"]),
        ("file", ["--overwrite"], ["is a file"]),
        ("loop", [], ["is a file"]),
        ("below a file", [], ["package: File exists; choose a directory that can be written"]),
        ("long name", [], ["File name too long; choose a directory"]),
    ],
)
def test_a_place_that_is_taken_stays_as_it_is(
    tmp_path: Path, kind: str, options: list[str], fragments: list[str]
) -> None:
    path = tmp_path / "package"
    if kind == "package":
        path = package_copy(tmp_path)
    elif kind == "folder":
        path.mkdir()
        (path / "mine").write_text("keep")
    elif kind == "file":
        path.write_text("keep")
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "below a file":
        path.write_text("keep")
        path /= "package"
    elif kind == "long name":
        path /= "n" * 300
    with untouched(tmp_path):
        refused(qwen_mtp_export(checkpoint(), path, *options), 1, "package", *fragments)


def test_a_parent_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object, **place: Any) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(place["dir"]))

    monkeypatch.setattr(package_writer, "mkdtemp", denied)
    result = rejected(checkpoint(), tmp_path)
    refused(result, 1, str(tmp_path), "Permission denied; choose a directory that can be written")


AS_NOBODY = """
import os, sys
import qwen_mtp.describe, qwen_mtp.golden, qwen_mtp.pipeline, qwen_mtp.runtime.llm
from click.testing import CliRunner
from qwen_mtp.cli import main
os.setresuid(65534, 65534, 65534)
for arguments in (["inspect", sys.argv[1]], ["run", sys.argv[1], "--prompt-ids", "1"],
                  ["verify", sys.argv[1], "-q"], ["inspect", sys.argv[2]]):
    done = CliRunner().invoke(main, arguments)
    print(done.exit_code, repr(done.exception), done.stderr or "-\\n", end="")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_directory_without_permission_is_named(tmp_path: Path) -> None:
    closed, source = Path(tempfile.mkdtemp()), tmp_path / "checkpoint"  # nobody can list /tmp
    shutil.copytree(checkpoint(), source)
    (source / "config.json").chmod(0)
    with untouched(tmp_path):
        command = [sys.executable, "-c", AS_NOBODY, str(closed), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    closed.rmdir()
    assert (len(lines), done.stderr) == (4, ""), done.stdout
    for line in lines:
        assert line.startswith("1 SystemExit(1) Error: "), line
        assert "; " in line
        assert "ermission" in line


# --- disks ------------------------------------------------------------------------------------


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 10**6))
    refused(rejected(checkpoint(), tmp_path), 1, str(tmp_path), "0.0 GB free", "needs 0.1 GB")


def full(*_: object, **__: object) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("owner", "name", "file"),
    [
        ("qwen_mtp.export.compose.ir", "save", ""),
        ("os", "pwrite", ""),
        ("qwen_mtp.export.package.Path", "write_bytes", ""),
        ("qwen_mtp.golden.np", "savez_compressed", ""),
        ("qwen_mtp.export.package.Path", "rename", ""),
    ],
)
def test_a_disk_that_fills_up_leaves_nothing_and_the_old_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str, name: str, file: str
) -> None:
    package = package_copy(tmp_path)
    options = ["--no-mtp", "--overwrite", *(["--no-verify"] if "golden" not in owner else [])]
    with untouched(tmp_path), monkeypatch.context() as patch:
        patch.setattr(f"{owner}.{name}", full)
        result = qwen_mtp_export(checkpoint(), package, *options)
    refused(result, 1, str(package) + file, "No space left on device; free some space")


LIMITED = """
import sys
from qwen_mtp.cli import export_command
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)), resource.RLIM_INFINITY))
export_command()
"""


@pytest.mark.parametrize("limit", [100_000, 250_000])
def test_a_limit_on_file_sizes_is_one_line(tmp_path: Path, limit: int) -> None:
    """The first stops the model file, the second the weights."""
    sizes = {path.name: path.stat().st_size for path in verified_package().iterdir()}
    assert sizes["model.onnx"] > 100_000
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    with untouched(tmp_path):
        command = [sys.executable, "-c", LIMITED, str(limit), str(checkpoint())]
        command += [str(tmp_path / "package"), "--no-mtp", "--format", "fp32", "-q", *GEOMETRY]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"Error: {tmp_path / 'package'}")
    assert done.stderr.endswith(": File too large; free some space\n")
    assert done.stderr.count("\n") == 1


def test_a_package_that_fails_its_check_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qwen_mtp.checks_report import Check

    broken = Check("sampler", False, "row 0 differs")
    monkeypatch.setattr("qwen_mtp.verify.check_sampler", lambda *_: broken)
    package = package_copy(tmp_path)
    with untouched(tmp_path):
        result = qwen_mtp_export(checkpoint(), package, "--overwrite", "-k", "1")
    refused(result, 3, "the package failed its check and was not kept: sampler: row 0 differs")


# --- extras -----------------------------------------------------------------------------------

WITHOUT = """
import sys
sys.modules[sys.argv.pop(1)] = None
from qwen_mtp.cli import main
main()
"""


@pytest.mark.parametrize(
    ("missing", "command", "extra"),
    [
        ("torch", ["export", "CHECKPOINT", "OUT/package", "-q"], "qwen-mtp[export]"),
        ("onnxscript", ["export", "CHECKPOINT", "OUT/package", "--dry-run"], "qwen-mtp[export]"),
        ("torch", ["inspect", "CHECKPOINT"], "qwen-mtp[export]"),
        ("tokenizers", ["run", "PACKAGE", "--prompt", "Once"], "qwen-mtp[text]"),
        ("tokenizers", ["run", "PACKAGE", "--prompt-ids", "1", "--stop", "x"], "qwen-mtp[text]"),
        ("torch", ["verify", "PACKAGE", "--checkpoint", "CHECKPOINT", "-q"], "qwen-mtp[export"),
    ],
)
def test_a_missing_extra_is_answered_with_what_to_install(
    tmp_path: Path, missing: str, command: list[str], extra: str
) -> None:
    places = {"CHECKPOINT": checkpoint(), "PACKAGE": verified_package()}
    arguments = [str(places.get(part, part)).replace("OUT", str(tmp_path)) for part in command]
    with untouched(tmp_path):
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT, missing, *arguments],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
    assert done.stderr.startswith("Error: ")
    assert missing in done.stderr
    assert f"pip install '{extra}" in done.stderr
