"""Packages for Ascend as a user meets them: what they are, and how they are run."""

import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from qwen_mtp.errors import MissingExtraError, PackageError, RequestError
from qwen_mtp.ge.proto import load_air
from qwen_mtp.ge.soc import find_soc
from qwen_mtp.interpreted import InterpretedEngine
from qwen_mtp.runtime.llm import LLM
from qwen_mtp.runtime.om import OM_DIRECTORY, OmEngine
from qwen_mtp.runtime.package import Package
from qwen_mtp.runtime.sampling import SamplingParams
from qwen_mtp.runtime.session import Session
from qwen_mtp.verify import verify_package
from tests.acl_stand_in import StandIn
from tests.air_commands import air_copy, air_package_of_the_commands
from tests.air_packages import air_package
from tests.commands import checkpoint, exported, qwen_mtp, qwen_mtp_export, refused, untouched
from tests.om_packages import module_acl
from tests.packages import random_checkpoint

GREEDY = ("--max-tokens", "8", "--temperature", "0", "--ignore-eos")


def compiled(directory: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, StandIn]:
    """A package with ``.om`` files, on a machine with AscendCL."""
    path = air_copy(directory)
    acl = module_acl(Package.open(path), checkpoint(), path / OM_DIRECTORY)
    monkeypatch.setitem(sys.modules, "acl", acl)
    return path, acl


def text_of_onnx_runtime() -> str:
    package = exported("-k", "1", "--format", "fp32", "--no-verify", "-q")[0]
    return qwen_mtp("run", package, "--prompt", "Once upon", *GREEDY).stdout


# --- export and inspect -----------------------------------------------------------------------


def test_an_export_names_the_chip_as_atc_does_and_says_what_was_written() -> None:
    path, result = air_package_of_the_commands()
    manifest = Package.open(path).manifest
    assert manifest.ascend is not None
    assert manifest.ascend.choice.soc_version == "Ascend910B4"
    script = (path / "ascend" / "atc.sh").read_text()
    assert "SOC_VERSION:-Ascend910B4" in script
    assert script.index("command -v atc") < script.index("mkdir -p om")
    assert "Qwen checkpoint with its MTP head," in (path / "ascend" / "README.md").read_text()
    lines = result.stdout.splitlines()
    assert any(
        line.startswith("ascend    portable operators in float32 for Ascend910B4, written with")
        for line in lines
    )
    assert any(line.startswith("models    ") and line.endswith("by ATC") for line in lines)
    assert any("weights and state; Ascend910B4 has 32 GB and up" in line for line in lines)
    assert "warning" not in result.stdout
    assert result.stderr == ""
    assert qwen_mtp("inspect", path).stdout == result.stdout


def test_inspect_counts_the_operators_of_each_graph() -> None:
    path, _ = air_package_of_the_commands()
    shown = json.loads(qwen_mtp("inspect", path, "--json").stdout)
    assert shown["ascend"]["choice"]["lowering"] == "portable"
    assert shown["ascend"]["writer"] in ("cann", "stand-in")
    models = (path / "ascend").glob("*.air")
    assert shown["ascend"]["model_bytes"] == sum(model.stat().st_size for model in models)
    text = qwen_mtp("inspect", path, "--graphs").stdout
    for graph, types in shown["ascend"]["operators"].items():
        nodes = load_air(path / "ascend" / f"{graph}.air").graph[0].op
        found = Counter(node.type for node in nodes)
        for source in ("Const", "Data", "FileConstant", "RefData", "NetOutput"):
            del found[source]
        count = found.total()
        assert types == found
        assert count > 50
        assert f"{count} operators of {len(types)} types" in text
        assert f"    ops {next(iter(types))} " in text


def plan(*options: str) -> Any:
    result = qwen_mtp_export(
        checkpoint(), "unused", "--dry-run", "--json", "--target", "air", *options
    )
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_a_plan_counts_the_memory_of_the_device() -> None:
    found = plan("--format", "fp32", "-k", "1")
    package = Package.open(air_package_of_the_commands()[0])
    states = package.manifest.states
    assert {state.in_place for state in states} == {False, True}
    expected = sum(t.nbytes for t in package.manifest.weights)
    expected += sum(state.nbytes * (1 if state.in_place else 2) for state in states)
    assert found["ascend"]["device_bytes"] == expected
    assert found["ascend"]["card_bytes"] == 32 * 10**9
    assert found["ascend"]["operators"] == {}


def test_a_plan_that_no_card_holds_is_warned_of() -> None:
    def text(seqs: int) -> str:
        options = ("--soc-version", "Ascend310P3", "--max-num-seqs", str(seqs))
        target = ("unused", "--dry-run", "--target", "air", "--prefill-chunk", "4096")
        found = qwen_mtp_export(checkpoint(), *target, *options, "-k", "15", "--no-verify")
        return str(found.stdout)

    assert "warning" not in text(1)
    from qwen_mtp import describe

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(describe, "_device_bytes", lambda *_: 25 * 10**9)
        assert "at least 25.00 GB of weights and state; Ascend310P3 has 24 GB and up" in text(1)
        assert "warning   that is more than a card of 24 GB holds: choose a smaller" in text(1)


@pytest.mark.parametrize(
    ("options", "dtype", "layout"),
    [
        ([], "float16", "paged"),
        (["--format", "fp16"], "float16", "paged"),
        (["--lowering", "fused"], "float16", "slots"),
        (["--lowering", "fused", "--block-size", "16"], "float16", "slots"),
        (["--lowering", "fused", "-k", "15"], "float16", "slots"),
        (
            ["--lowering", "fused", "--custom-op", "RecurrentGatedDeltaRule", "-k", "7"],
            "float16",
            "slots",
        ),
    ],
)
def test_310p_takes_either_lowering_in_float16(
    options: list[str], dtype: str, layout: str
) -> None:
    found = plan("--soc-version", "ascend310p3", *options)
    assert found["geometry"]["dtype"] == dtype
    assert found["geometry"]["layout"] == layout
    assert found["ascend"]["choice"]["soc_version"] == "Ascend310P3"


@pytest.mark.slow
def test_what_310p_takes_passes_its_checks() -> None:
    package = air_package(
        random_checkpoint(),
        "fused",
        format="fp16",
        block_size=16,
        soc_version="Ascend310P3",
    )
    report = verify_package(package.directory)
    assert report.passed, report.checks
    shown = json.loads(qwen_mtp("inspect", package.directory, "--json").stdout)["ascend"]
    types = {name for operators in shown["operators"].values() for name in operators}
    assert "RmsNorm" in types
    assert not types & find_soc("Ascend310P3").lacks


# --- run --------------------------------------------------------------------------------------


def test_run_interpret_says_what_onnx_runtime_says() -> None:
    path, _ = air_package_of_the_commands()
    found = qwen_mtp("run", path, "--prompt", "Once upon", "--interpret", *GREEDY, "-q")
    assert (found.exit_code, found.stderr) == (0, "")
    assert found.stdout == text_of_onnx_runtime()


def test_run_takes_the_compiled_models_and_gives_the_device_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, acl = compiled(tmp_path, monkeypatch)
    found = qwen_mtp("run", path, "--prompt", "Once upon", "--device", "0", *GREEDY, "-q")
    assert (found.exit_code, found.stderr) == (0, "")
    assert found.stdout == text_of_onnx_runtime()
    assert acl.names().count("acl.mdl.execute") > 3
    assert (acl.violations, acl.live.left()) == ([], {})


def test_an_llm_gives_its_device_back_once_and_leaves_an_engine_that_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, acl = compiled(tmp_path, monkeypatch)
    with LLM(path) as llm:
        assert acl.live.left() != {}
        llm.close()
        assert acl.live.left() == {}
    with OmEngine(Package.open(path)) as engine:
        with LLM(path, engine=engine, num_speculative_tokens=0) as llm:
            llm.generate([1, 2, 3], SamplingParams(max_tokens=2))
        assert acl.live.left() != {}
        with Session(Package.open(path), engine=engine):
            pass
        assert acl.live.left() != {}
    with Session(Package.open(path), device=0):
        assert acl.live.left() != {}
    assert acl.live.left() == {}


def test_a_device_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, acl = compiled(tmp_path, monkeypatch)
    result = qwen_mtp("run", path, "--prompt-ids", "1", "--device", "7")
    refused(result, 1, "device 7", "there is no such device", "npu-smi info lists them")
    assert acl.live.left() == {}
    with pytest.raises(RequestError, match="device is -1: give a number >= 0"):
        LLM(path, device=-1)


def test_graphs_that_are_not_compiled_are_refused_with_what_to_do(tmp_path: Path) -> None:
    path = air_copy(tmp_path)
    with untouched(tmp_path):
        result = qwen_mtp("run", path, "--prompt-ids", "1")
    line = [f"{path}/ascend/om: no prefill.om", f"sh {path}/ascend/atc.sh", "run --interpret"]
    refused(result, 1, *line, "qwen-mtp verify")
    with pytest.raises(PackageError, match="compile the graphs"):
        Session(Package.open(path))


def test_a_machine_without_cann_is_told_where_acl_comes_from(tmp_path: Path) -> None:
    path = air_copy(tmp_path)
    folder = path / OM_DIRECTORY
    folder.mkdir()
    for graph in Package.open(path).manifest.graphs:
        (folder / f"{graph.name}.om").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "acl", None)
        result = qwen_mtp("run", path, "--prompt-ids", "1")
        refused(result, 1, "module acl cannot be imported", "set_env.sh", "run --interpret")
        with pytest.raises(MissingExtraError, match="install CANN"):
            LLM(path)
    (folder / "prefill.om").unlink()
    refused(qwen_mtp("run", path, "--prompt-ids", "1"), 1, "no prefill.om")


def test_options_of_the_other_back_end_are_refused() -> None:
    path, _ = air_package_of_the_commands()
    onnx = exported("-k", "1", "--format", "fp32", "--no-verify", "-q")[0]
    ids = ("--prompt-ids", "1")
    refused(qwen_mtp("run", path, *ids, "--threads", "2"), 1, "threads is 2", "leave it out")
    refused(qwen_mtp("run", onnx, *ids, "--device", "0"), 1, "device is 0", "--target air")
    refused(qwen_mtp("run", onnx, *ids, "--interpret"), 1, "holds no GE models", "--target air")
    refused(qwen_mtp("run", path, *ids, "--device", "x"), 2, "--device")
    for option in ("--threads", "--device"):
        result = qwen_mtp("run", path, *ids, "--interpret", option, "1")
        refused(result, 2, f"{option} and --interpret exclude each other")


def test_an_engine_must_be_made_for_the_package() -> None:
    path, _ = air_package_of_the_commands()
    engine = InterpretedEngine(Package.open(path))
    other = exported("-k", "1", "--format", "fp32", "--no-verify", "-q")[0]
    with pytest.raises(RequestError, match=r"the engine runs .*; give its own package"):
        LLM(other, engine=engine)
    with pytest.raises(RequestError, match="threads is 2: the engine that is given has its own"):
        LLM(path, engine=engine, threads=2)


def test_a_package_without_its_text_form_can_be_inspected(tmp_path: Path) -> None:
    path = air_copy(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"] = [f for f in manifest["files"] if not f["path"].endswith(".pbtxt")]
    (path / "manifest.json").write_text(json.dumps(manifest))
    for text in (path / "ascend").glob("*.pbtxt"):
        text.unlink()
    assert "operators of" not in qwen_mtp("inspect", path, "--graphs").stdout
    shutil.rmtree(path)
