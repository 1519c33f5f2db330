"""What is wrong with an export for Ascend, or with its package, is one line and nothing more."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from qwen_mtp.errors import MissingExtraError
from qwen_mtp.export import torchair
from qwen_mtp.ge.wheel import PLACE, VERSION, find_wheel
from qwen_mtp.graphs.manifest import MANIFEST
from tests.air_commands import air_copy
from tests.checkpoints import write_json
from tests.commands import (
    GEOMETRY,
    checkpoint,
    flip,
    places,
    qwen_mtp,
    qwen_mtp_export,
    refused,
    rejected,
    untouched,
    with_value,
)

AGAIN = "export the checkpoint again"
AIR = ("--target", "air")
SMALL = ["--soc-version", "Ascend310P3"]
FUSED = ["--lowering", "fused"]
WIDE = ["--block-size", "128"]

# --- choices ----------------------------------------------------------------------------------

HALF = "use fp16, int8"
CHOICES: dict[str, tuple[list[str], list[str]]] = {
    "unknown chip": (
        ["--soc-version", "Ascend999"],
        ["soc_version Ascend999: unknown processor; known are Ascend910B1, ", "Ascend310P3"],
    ),
    "no chip": (["--soc-version", ""], ["unknown processor; known are Ascend910B1"]),
    "bf16 on 310P": ([*SMALL, "--format", "bf16"], ["Ascend310P3", "bf16 weights", HALF]),
    "bfloat16 on 310P": ([*SMALL, "--dtype", "bfloat16"], ["bfloat16; use float16"]),
    "fp32 on 310P": ([*SMALL, "--format", "fp32"], ["Ascend310P3", "fp32 weights", HALF]),
    "float32 on 310P": ([*SMALL, "--dtype", "float32"], ["computed in float16; use that"]),
    "int4 on 310P": ([*SMALL, *FUSED, "--format", "int4"], ["Ascend310P3", "int4", HALF]),
    "int4 portable": (["--format", "int4"], ["format int4", "use fused or int8"]),
    "rows on 310P": (
        [*SMALL, *FUSED, "--custom-op", "RecurrentGatedDeltaRule", "-k", "8"],
        ["8 drafts make passes of 9 rows", "can take 8", "at most 7 drafts"],
    ),
    "fused fp32": ([*FUSED, *WIDE, "--format", "fp32"], ["in bfloat16, not float32", "portable"]),
    "fused fp16": ([*FUSED, *WIDE, "--format", "fp16"], ["in bfloat16, not float16", "portable"]),
    "fused blocks": (FUSED, ["block_size is 16: give one of (128, 256)"]),
    "unknown operator": (
        ["--custom-op", "MyOp"],
        ["custom operator MyOp: unknown; known are FusedCausalConv1d, MtpRejectionSample"],
    ),
    "operator without a place": (
        ["--custom-op", "RecurrentGatedDeltaRule"],
        ["RecurrentGatedDeltaRule: portable graphs do not use it; choose the fused lowering"],
    ),
    "two types": (["--format", "bf16", "--dtype", "float16"], ["dtype is float16: bf16 weights"]),
}


@pytest.mark.parametrize("case", CHOICES)
def test_what_the_chip_cannot_do_is_refused_before_anything_is_traced(
    tmp_path: Path, case: str
) -> None:
    options, fragments = CHOICES[case]
    for more in ([], ["--dry-run"]):
        command = ["export", checkpoint(), tmp_path / "p", *GEOMETRY, *AIR, "-q", *options, *more]
        with untouched(tmp_path):
            refused(qwen_mtp(*command), 1, *fragments)


@pytest.mark.parametrize(
    "option",
    [("--lowering", "portable"), ("--soc-version", "Ascend910B4"), ("--custom-op", "X")],
)
def test_options_for_ascend_are_refused_for_onnx(tmp_path: Path, option: tuple[str, str]) -> None:
    line = f"{option[0]} is for --target air"
    refused(rejected(checkpoint(), tmp_path, *option), 2, line)
    refused(rejected(checkpoint(), tmp_path, "--target", "onnx", *option), 2, line)


def test_halves_are_refused_for_onnx_runtime(tmp_path: Path) -> None:
    refused(rejected(checkpoint(), tmp_path, "--format", "bf16"), 1, "format is 'bf16'")
    refused(rejected(checkpoint(), tmp_path, "--dtype", "float16"), 1, "dtype is float16")


# --- installations ----------------------------------------------------------------------------


@pytest.fixture
def wheel_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for torch_npu that this process looks at instead of the real one."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setenv(PLACE, str(folder))
    find_wheel.cache_clear()
    yield folder
    monkeypatch.undo()
    find_wheel.cache_clear()


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_a_missing_wheel_is_answered_with_what_to_install(
    wheel_at: Path, tmp_path: Path, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PLACE)
    monkeypatch.setattr("qwen_mtp.ge.wheel._places", lambda: [wheel_at])
    result = rejected(checkpoint(), tmp_path, *AIR, *options)
    refused(result, 1, f"need torch_npu {VERSION}", "pip install 'qwen-mtp[npu]'", "--target")


def test_a_named_place_without_a_wheel_is_named(wheel_at: Path, tmp_path: Path) -> None:
    line = f"{PLACE} is {wheel_at}, which holds no torch_npu"
    refused(rejected(checkpoint(), tmp_path, *AIR), 1, line, "or unset it")


def test_a_wheel_of_another_version_is_named(wheel_at: Path, tmp_path: Path) -> None:
    root = wheel_at / "torch_npu"
    (root / "dynamo" / "torchair").mkdir(parents=True)
    (root / "dynamo" / "torchair" / "__init__.py").touch()
    (root / "version.py").write_text("__version__ = '2.9.0.post9'\n")
    result = rejected(checkpoint(), tmp_path, *AIR)
    refused(result, 1, f"{root}: torch_npu is 2.9.0.post9, {VERSION} is needed", "pip install")
    (root / "version.py").write_text("no version\n")
    find_wheel.cache_clear()
    refused(rejected(checkpoint(), tmp_path, *AIR), 1, "torch_npu is unknown")
    (root / "version.py").unlink()
    refused(rejected(checkpoint(), tmp_path, *AIR), 1, "torch_npu is unknown")


def test_a_torch_that_does_not_belong_to_the_wheel_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.12.1+cpu")
    monkeypatch.setattr("qwen_mtp.export.air.bring_up", torchair.bring_up.__wrapped__)
    line = f"torch_npu {VERSION} needs torch 2.13, this is torch 2.12.1+cpu"
    refused(rejected(checkpoint(), tmp_path, *AIR, "-k", "1"), 1, line, "pip install torch==2.13")


WITHOUT = """
import sys
sys.modules[sys.argv.pop(1)] = None
from qwen_mtp.cli import main
main()
"""


def test_protobuf_is_asked_for_where_a_graph_is_read(tmp_path: Path) -> None:
    path = air_copy(tmp_path)
    for command in (["run", path, "--prompt-ids", "1", "--interpret"], ["inspect", path]):
        arguments = [sys.executable, "-c", WITHOUT, "google.protobuf", *map(str, command)]
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
        if command[0] == "run":
            assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
            assert "google.protobuf.internal: pip install 'qwen-mtp[npu]'" in done.stderr
        else:
            assert (done.returncode, done.stderr) == (0, "")


# --- interruption and disks -------------------------------------------------------------------


class Model:
    """Stands for a converted graph, which takes long to make."""

    def SerializeToString(self, **_: object) -> bytes:  # noqa: N802
        return b"model"


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are written at once."""

    def compose(blueprint: Any, *rest: Any) -> Iterator[tuple[Any, Model, str]]:
        for spec in blueprint.specs:
            rest[-1](spec.name)
            yield spec, Model(), "stand-in"

    module = "qwen_mtp.export.air_package"
    monkeypatch.setattr(f"{module}.compose_air", compose)
    monkeypatch.setattr(f"{module}.text_format.MessageToString", lambda _: "text")


def full(*_: object, **__: object) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.usefixtures("instant")
@pytest.mark.parametrize(
    ("name", "replaced"),
    [
        ("qwen_mtp.export.package.Path.write_bytes", full),
        ("qwen_mtp.export.package.Path.write_text", full),
        ("qwen_mtp.export.package.Path.mkdir", None),
        ("os.pwrite", full),
        ("qwen_mtp.export.package.Path.rename", full),
    ],
)
def test_a_disk_that_fills_up_leaves_nothing_and_the_old_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, replaced: Any
) -> None:
    package = air_copy(tmp_path)
    if replaced is None:
        made = Path.mkdir
        replaced = lambda path, *a, **k: full() if path.name == "weights" else made(path, *a, **k)  # noqa: E731
    with untouched(tmp_path), monkeypatch.context() as patch:
        patch.setattr(name, replaced)
        options = ("--overwrite", "--no-verify", "-k", "1")
        result = qwen_mtp_export(checkpoint(), package, *AIR, *options)
    refused(result, 1, str(package), "No space left on device; free some space")


@pytest.mark.usefixtures("instant")
def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(1, 1, 10**6))
    refused(rejected(checkpoint(), tmp_path, *AIR), 1, "0.0 GB free", "needs 0.1 GB")


def test_a_conversion_that_is_told_to_stop_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes from inside dynamo, which catches much."""
    torchair.bring_up()

    def stopped(*_: object) -> None:
        assert len(list((tmp_path / "new").iterdir())) == 1, "nothing is staged"
        raise SystemExit(143)

    monkeypatch.setattr(sys.modules["torchair.core._torchair"], "export", stopped)
    result = rejected(checkpoint(), tmp_path, *AIR, "-k", "1")
    assert (result.exit_code, result.output) == (143, "")


def test_an_interrupted_export_leaves_nothing_and_the_old_package(tmp_path: Path) -> None:
    package = air_copy(tmp_path)
    script = (
        "import signal, sys, time; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from qwen_mtp.cli import *; from qwen_mtp.progress import Lines;"
        "wait = lambda self, title, *_: title == 'graph prefill' and "
        "(print('here', flush=True), time.sleep(60)); Lines.phase = wait; export_command()"
    )
    options = ("--overwrite", "-k", "1", *AIR)
    command = [sys.executable, "-c", script, str(checkpoint()), str(package), *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with untouched(tmp_path), subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "here\n"
        assert len(list(tmp_path.iterdir())) == 2, "nothing is staged yet"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.strip()) == (1, "", "Aborted!")


# --- packages ---------------------------------------------------------------------------------


def changed(path: tuple[Any, ...], value: Any) -> Callable[[Path], object]:
    def change(package: Path) -> None:
        document = (package / MANIFEST).read_text()
        write_json(package / MANIFEST, with_value(document, path, value))

    return change


def a_weight(package: Path) -> Path:
    return max((package / "ascend" / "weights").iterdir(), key=lambda path: path.stat().st_size)


PACKAGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "lowering": (changed(("ascend", "choice", "lowering"), "magic"), ["'magic'", AGAIN]),
    "other lowering": (
        changed(("ascend", "choice", "lowering"), "fused"),
        ["ascend.choice.lowering is 'fused', but layout is 'paged'", AGAIN],
    ),
    "chip": (
        changed(("ascend", "choice", "soc_version"), "Ascend1"),
        ["ascend.choice: soc_version Ascend1: unknown processor", AGAIN],
    ),
    "writer": (changed(("ascend", "writer"), "me"), ["'me'", "$.ascend.writer", AGAIN]),
    "no target": (changed(("ascend",), None), ["ascend is None, but backend is 'ascend'", AGAIN]),
    "backend": (
        changed(("backend",), "onnxruntime"),
        ["ascend is 'Ascend910B4', but backend is 'onnxruntime'", AGAIN],
    ),
    "extra": (changed(("ascend", "choice", "mood"), 1), ["ascend.choice.mood", AGAIN]),
    "truncated model": (
        lambda p: os.truncate(p / "ascend" / "prefill.air", 100),
        ["ascend/prefill.air: 100 bytes, the manifest says", AGAIN],
    ),
    "missing model": (
        lambda p: (p / "ascend" / "prefill.air").unlink(),
        ["ascend/prefill.air: ", "not there", AGAIN],
    ),
    "truncated weight": (
        lambda p: os.truncate(a_weight(p), 8), ["ascend/weights/", "8 bytes", AGAIN]
    ),
    "missing weight": (lambda p: a_weight(p).unlink(), ["ascend/weights/", "not there", AGAIN]),
    "models": (changed(("model_file",), "ascend/{graph}.om"), ["does not list ascend/prefill.om"]),
    "weights": (changed(("weights_file",), "w/{tensor}"), ["does not list w/"]),
}  # fmt: skip


@pytest.mark.parametrize("case", PACKAGES)
def test_a_damaged_package_is_refused_by_name_and_not_repaired(tmp_path: Path, case: str) -> None:
    damage, fragments = PACKAGES[case]
    package = air_copy(tmp_path)
    damage(package)
    with untouched(tmp_path):
        for options in ([], ["--interpret"]):
            result = qwen_mtp("run", package, "--prompt-ids", "1", *options)
            refused(result, 1, str(package), *fragments)
        refused(qwen_mtp("inspect", package), 1, str(package), *fragments)


@pytest.mark.parametrize("name", ["prefill.air", "prefill.pbtxt", "atc.sh", "weight", "sum"])
def test_verify_notices_a_flipped_byte_in_any_file(tmp_path: Path, name: str) -> None:
    package = air_copy(tmp_path)
    path = a_weight(package) if name == "weight" else package / "ascend" / name
    if name == "sum":
        files = json.loads((package / MANIFEST).read_text())["files"]
        place = next(i for i, f in enumerate(files) if f["path"] == "ascend/prefill.air")
        path = package / "ascend" / "prefill.air"
        changed(("files", place, "sha256"), "0" * 64)(package)
    else:
        flip(path, 40)
    with untouched(tmp_path):
        result = qwen_mtp("verify", package, "-q", "--json")
        shown = path.relative_to(package)
        refused(result, 3, str(package), f"files: {shown}: sha256 differs", AGAIN)
    assert json.loads(result.stdout)["passed"] is False


def test_no_flipped_byte_of_a_model_gives_a_traceback_where_it_is_interpreted(
    tmp_path: Path,
) -> None:
    package = air_copy(tmp_path)
    model = package / "ascend" / "prefill.air"
    whole, outcomes = model.read_bytes(), {0: 0, 1: 0}
    for i in range(0, len(whole), len(whole) // 24):
        flip(model, i)
        command = ("run", package, "--prompt-ids", "1,2", "--max-tokens", "1", "--interpret", "-q")
        result = qwen_mtp(*command)
        if result.exit_code:
            refused(result, 1, str(model), "; run qwen-mtp verify")
        outcomes[result.exit_code] += 1
        model.write_bytes(whole)
    assert outcomes[1] > 5, outcomes


def test_no_value_of_any_field_about_ascend_gives_a_traceback(tmp_path: Path) -> None:
    package = air_copy(tmp_path)
    document = (package / MANIFEST).read_text()
    outcomes = {0: 0, 1: 0}
    for path in places(json.loads(document)["ascend"]):
        for value in (..., None, -1, 10**30, "x", [], ["x"], {"x": 1}):
            changed(("ascend", *path), value)(package)
            result = qwen_mtp("inspect", package)
            if result.exit_code:
                refused(result, 1, str(package))
            outcomes[result.exit_code] += 1
            (package / MANIFEST).write_text(document)
    assert outcomes[1] > 5 * outcomes[0] > 0, outcomes


def test_a_checkpoint_can_still_be_read_without_the_wheel(wheel_at: Path) -> None:
    assert list(wheel_at.iterdir()) == []
    assert qwen_mtp("inspect", checkpoint()).exit_code == 0
    with pytest.raises(MissingExtraError):
        find_wheel()
