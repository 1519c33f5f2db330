"""Which kernels run is a choice, seen in what the commands say; ``qwen-mtp compile``."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qwen_mtp.errors import PackageError, RequestError
from qwen_mtp.runtime.engine import Engine
from qwen_mtp.runtime.engines import kernels_of, open_engine
from qwen_mtp.runtime.llm import LLM
from qwen_mtp.runtime.native import find_kernels
from qwen_mtp.runtime.package import Package
from qwen_mtp.verify import verify_package
from tests.commands import package_copy, qwen_mtp, refused, verified_package
from tests.packages import relist

PHASE = "compiling the native kernels for this CPU, once"
RUN = ("run", "--prompt-ids", "1,2,3", "--max-tokens", 3, "--json")


@pytest.fixture
def kernels() -> None:
    """Skip where they cannot be compiled."""
    if (found := find_kernels()).library is None:
        pytest.skip(found.reason)


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, and a compiler that fails."""
    monkeypatch.setenv("QWEN_MTP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", shutil.which("false") or "false")
    monkeypatch.delenv("QWEN_MTP_NATIVE", raising=False)


def ran_on(*options: str) -> str:
    result = qwen_mtp(*RUN, verified_package(), "-q", *options)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    return str(json.loads(result.stdout)["kernels"])


@pytest.mark.usefixtures("kernels")
def test_kernels_are_native_unless_told_otherwise() -> None:
    assert ran_on() == ran_on("--native") == "native"
    assert ran_on("--no-native") == "onnxruntime"
    with LLM(verified_package(), native=False) as llm:
        assert llm.kernels == "onnxruntime"
    assert llm.kernels == ""
    report = verify_package(verified_package(), native=False, threads=1)
    assert report.passed
    assert "ONNX Runtime's kernels" in report.checks[1].detail


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_everything_runs_and_says_what_it_tried() -> None:
    first = qwen_mtp(*RUN, verified_package())
    assert first.exit_code == 0, first.stderr
    assert json.loads(first.stdout)["kernels"] == "onnxruntime"
    assert first.stderr.count(PHASE) == 1
    assert PHASE not in qwen_mtp(*RUN, verified_package()).stderr
    refused(qwen_mtp(*RUN, verified_package(), "--native", "-q"), 1, "native kernels", "fails")
    refused(qwen_mtp("compile", "-q"), 1, "native kernels", "fails")


@pytest.mark.usefixtures("no_compiler")
def test_no_kernels_are_looked_for_where_none_are_wanted(tmp_path: Path) -> None:
    result = qwen_mtp(*RUN, verified_package(), "--no-native")
    assert result.exit_code == 0, result.stderr
    assert PHASE not in result.stderr
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("kernels")
def test_compile_says_what_it_made_and_runs_a_package_on_it() -> None:
    result = qwen_mtp("compile", verified_package(), "--json", "-q")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["library"] == str(find_kernels().library)
    assert (found["compiler"], found["seconds"]) == ("", 0)
    assert found["package"] == str(verified_package())
    text = qwen_mtp("compile").stdout
    assert found["library"] in text


def test_a_package_without_a_native_model_has_no_choice(tmp_path: Path) -> None:
    directory = package_copy(tmp_path)
    manifest = json.loads((directory / "manifest.json").read_text())
    name = manifest.pop("native_file")
    manifest["files"] = [file for file in manifest["files"] if file["path"] != name]
    (directory / "manifest.json").write_text(json.dumps(manifest))
    (directory / name).unlink()
    assert kernels_of(Engine(Package.open(directory), threads=1)) == "onnxruntime"
    refused(qwen_mtp(*RUN, directory, "--native", "-q"), 1, "no model for native kernels")
    refused(qwen_mtp("compile", directory, "-q"), 1, "no model for native kernels")
    assert "native" not in qwen_mtp("inspect", directory).stdout
    assert "native" in qwen_mtp("inspect", verified_package()).stdout


@pytest.mark.usefixtures("kernels")
def test_a_native_model_of_another_release_is_passed_over(tmp_path: Path) -> None:
    package = Package.open(package_copy(tmp_path))
    path = package.directory / str(package.manifest.native_file)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"LinearInt8", b"LinearInt9"))
    with pytest.raises(PackageError, match="is not the file"):  # kernels believe what it says
        Engine(package, threads=1)
    relist(package.directory, path.name)
    engine = Engine(Package.open(package.directory), threads=1)
    assert kernels_of(engine) == "onnxruntime"
    assert "LinearInt9" in engine.kernels.reason


def test_ascend_has_no_native_kernels_to_choose() -> None:
    package: Any = SimpleNamespace(manifest=SimpleNamespace(backend="ascend"))
    with pytest.raises(RequestError, match="leave it out"):
        open_engine(package, native=False)
    result = qwen_mtp(*RUN, verified_package(), "--interpret", "--no-native")
    refused(result, 2, "--native and --interpret")
