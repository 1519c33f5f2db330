"""The tree, the metadata and the imports are what the packaging says they are."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("custom_ops", "export", "ge", "graphs", "runtime")
OWN = ("bench", "doctor")  # folders of qwen_mtp that are no links
HEAVY = ("torch", "onnx", "onnx_ir", "onnxscript", "transformers", "scipy")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def modules_loaded_by(statement: str) -> set[str]:
    """Top-level names in ``sys.modules`` of a fresh interpreter after ``statement``."""
    report = "import json, sys; print(json.dumps([name.split('.')[0] for name in sys.modules]))"
    command = [sys.executable, "-W", "error", "-c", f"{statement}\n{report}"]
    run = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    return set(json.loads(run.stdout))


def python_files(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in (ROOT / folder).glob("**/*.py")]
    assert found, folders
    return found


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = modules_loaded_by("import qwen_mtp")
    assert "qwen_mtp" in loaded
    assert not loaded & {*HEAVY, "onnxruntime"}


def test_importing_every_runtime_module_loads_neither_torch_nor_onnx_tools() -> None:
    names = [f"qwen_mtp.runtime.{path.stem}" for path in python_files("runtime")]
    loaded = modules_loaded_by(f"import {', '.join(names)}")
    assert "numpy" in loaded
    assert not loaded & set(HEAVY)


def test_the_torch_free_half_of_graphs_loads_no_torch() -> None:
    names = ("manifest", "signature", "spec", "weights")
    loaded = modules_loaded_by("\n".join(f"import qwen_mtp.graphs.{name}" for name in names))
    assert not loaded & set(HEAVY)


def test_the_heavy_packages_are_seen_where_they_are_loaded() -> None:
    assert "torch" in modules_loaded_by("import qwen_mtp.graphs.model")


def test_the_listed_packages_are_the_folders_of_the_tree() -> None:
    inits = [path.parent for folder in FOLDERS for path in python_files(folder)]
    found = {"qwen_mtp", *(".".join(("qwen_mtp", *p.relative_to(ROOT).parts)) for p in inits)}
    found |= {f"qwen_mtp.{folder}" for folder in OWN}
    own = {path.parent.name for path in (ROOT / "qwen_mtp").glob("*/__init__.py")}
    assert own == {*FOLDERS, *OWN}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == found
    mapped = PYPROJECT["tool"]["setuptools"]["package-dir"]
    assert mapped == {f"qwen_mtp.{folder}": folder for folder in FOLDERS}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_link_says_where_the_sub_package_is(folder: str) -> None:
    link = ROOT / "qwen_mtp" / folder
    assert link.is_symlink(), (
        f"{link} is no symlink: git config core.symlinks true, check out again"
    )
    assert link.readlink() == Path("..", folder)


def test_no_source_file_is_longer_than_400_lines() -> None:
    files = [*python_files(*FOLDERS, "tests", "examples"), *(ROOT / "qwen_mtp").glob("*.py")]
    files += [path for folder in OWN for path in (ROOT / "qwen_mtp" / folder).glob("*.py")]
    lengths = {p.relative_to(ROOT): len(p.read_bytes().splitlines()) for p in files}
    assert {path: lines for path, lines in lengths.items() if lines > 400} == {}


def test_the_version_is_the_one_of_the_installed_metadata_and_of_the_changelog() -> None:
    stated = PYPROJECT["project"]["version"]
    assert version("qwen-mtp") == stated
    assert f"## {stated}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_command_of_the_metadata_can_be_loaded() -> None:
    installed = {e.name: e for e in distribution("qwen-mtp").entry_points}
    for name, target in PYPROJECT["project"]["scripts"].items():
        assert installed[name].value == target, "install the project again"
        assert callable(installed[name].load())


def test_the_base_install_is_four_light_packages() -> None:
    lines = PYPROJECT["project"]["dependencies"]
    names = {re.split(r"[<>=~!]", line)[0] for line in lines}
    assert names == {"click", "msgspec", "numpy", "onnxruntime"}


def test_the_constraints_pin_exact_releases_and_name_no_place() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert "torch==2.13.0" in pins
    for line in pins:
        name, _, release = line.partition("==")
        assert name, line
        assert release.replace(".", "").isalnum(), line
