"""What is wrong with a package or a request is one line that names it."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from qwen_mtp.graphs.manifest import MANIFEST
from tests.checkpoints import write_json
from tests.commands import (
    flip,
    package_copy,
    places,
    qwen_mtp,
    refused,
    untouched,
    verified_package,
    with_value,
)
from tests.native import library

AGAIN = "export the checkpoint again"

# --- packages ---------------------------------------------------------------------------------


def run(path: Path, *options: object, prompt: str = "1,2,3") -> Result:
    return qwen_mtp("run", path, "--prompt-ids", prompt, "--max-tokens", "2", *options)


def manifest_change(path: tuple[Any, ...], value: Any) -> Callable[[Path], object]:
    def change(package: Path) -> None:
        document = (package / MANIFEST).read_text()
        write_json(package / MANIFEST, with_value(document, path, value))

    return change


def garbage(path: Path) -> None:
    path.write_bytes(np.random.default_rng(0).bytes(path.stat().st_size))


PACKAGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "no manifest": (lambda p: (p / MANIFEST).unlink(), ["manifest.json: No such file"]),
    "not JSON": (lambda p: (p / MANIFEST).write_text("{"), ["manifest.json: ", AGAIN]),
    "empty": (lambda p: (p / MANIFEST).write_bytes(b""), ["manifest.json: ", AGAIN]),
    "deep": (lambda p: (p / MANIFEST).write_text("[" * 10**5), ["manifest.json: ", AGAIN]),
    "binary": (lambda p: (p / MANIFEST).write_bytes(b'{"a": "\xff"}'), ["manifest.json: ", AGAIN]),
    "version": (
        manifest_change(("format_version",), 9),
        ["format_version is 9", "reads 2", AGAIN],
    ),
    "backend": (manifest_change(("backend",), "cuda"), ["backend is 'cuda'", AGAIN]),
    "extra": (manifest_change(("mood",), 1), ["manifest.json: ", "mood", AGAIN]),
    "extra inside": (manifest_change(("config", "mood"), 1), ["unknown field $.config.mood"]),
    "extra graph field": (
        manifest_change(("graphs", 1, "inputs", 0, "mood"), 1),
        ["unknown field $.graphs[1].inputs[0].mood"],
    ),
    "zero block": (manifest_change(("geometry", "block_size"), 0), ["geometry.block_size is 0"]),
    "lookaheads": (manifest_change(("geometry", "lookaheads"), [3, 1]), ["geometry.lookaheads"]),
    "eos": (manifest_change(("config", "eos_token_ids"), [2048]), ["config.eos_token_ids"]),
    "sampling": (manifest_change(("generation", "top_p"), 0), ["generation: top_p is 0.0", AGAIN]),
    "graph": (manifest_change(("graphs", 0, "rows"), 9), ["graph prefill contradicts"]),
    "no graphs": (manifest_change(("graphs",), []), ["graphs are missing or too many"]),
    "states": (manifest_change(("states", 0, "kind"), "ssm"), ["states contradict"]),
    "weight place": (manifest_change(("weights", 0, "offset"), 10**12), ["weights: ", AGAIN]),
    "weight size": (manifest_change(("weights", 0, "shape", 0), 10**9), ["weights: ", AGAIN]),
    "no weights": (
        manifest_change(("weights",), []),
        ["weights is (), must not be empty", AGAIN],
    ),
    "weight overlap": (manifest_change(("weights", 1, "offset"), 0), ["weights: ", "overlaps"]),
    "outside": (manifest_change(("files", 0, "path"), "../x"), ["../x lies outside the package"]),
    "absolute": (manifest_change(("files", 0, "path"), "/x"), ["/x lies outside the package"]),
    "unlisted": (manifest_change(("model_file",), "other.onnx"), ["does not list other.onnx"]),
    "missing file": (
        lambda p: (p / "weights.bin").unlink(),
        ["weights.bin: ", "not there", AGAIN],
    ),
    "truncated": (
        lambda p: os.truncate(p / "weights.bin", 4096),
        ["weights.bin: 4096 bytes, the manifest says", AGAIN],
    ),
}


@pytest.mark.parametrize("case", PACKAGES)
def test_a_damaged_package_is_refused_by_name_and_not_repaired(tmp_path: Path, case: str) -> None:
    damage, fragments = PACKAGES[case]
    package = package_copy(tmp_path)
    damage(package)
    with untouched(tmp_path):
        refused(run(package), 1, str(package), *fragments)


def test_a_weight_of_another_shape_stops_the_graph_by_name(tmp_path: Path) -> None:
    package = package_copy(tmp_path)
    manifest_change(("weights", 0, "shape"), [2048 * 32])(package)
    with untouched(tmp_path):
        stopped = run(package, "--no-native")  # native kernels know the shapes themselves
        refused(stopped, 1, "model.onnx: prefill stopped (", "run qwen-mtp verify")


@pytest.mark.parametrize(
    ("name", "option", "said"),
    [
        ("model.onnx", "--no-native", "ONNX Runtime"),
        ("model.native.onnx", "--native", "is not the file that the manifest lists"),
        ("model.native.onnx", "-q", "is not the file that the manifest lists"),
    ],
)
def test_a_garbage_model_is_refused_and_not_replaced_by_the_other(
    tmp_path: Path, name: str, option: str, said: str
) -> None:
    if name == "model.native.onnx":
        library()  # skips where there is no compiler
    package = package_copy(tmp_path)
    garbage(package / name)
    with untouched(tmp_path):
        refused(run(package, option), 1, f"{name}: {said}", AGAIN)


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    package = package_copy(tmp_path)
    data = (package / "tokenizer.json").read_bytes()
    (package / "tokenizer.json").write_bytes(b"[" + data[1:])
    refused(qwen_mtp("run", package, "--prompt", "a"), 1, "tokenizer.json is not a tokenizer")
    refused(qwen_mtp("verify", package, "-q"), 3, "tokenizer.json: sha256 differs")


@pytest.mark.parametrize(
    "name", ["model.onnx", "model.native.onnx", "weights.bin", "golden.npz", "config.json"]
)
def test_verify_notices_a_flipped_byte_in_any_file(tmp_path: Path, name: str) -> None:
    package = package_copy(tmp_path)
    flip(package / name, 40)
    with untouched(tmp_path):
        result = qwen_mtp("verify", package, "-q", "--json")
        refused(result, 3, str(package), f"files: {name}: sha256 differs", AGAIN)
    assert json.loads(result.stdout)["passed"] is False


def test_no_value_of_any_field_of_the_manifest_gives_a_traceback(tmp_path: Path) -> None:
    package = package_copy(tmp_path)
    document = (package / MANIFEST).read_text()
    outcomes = {0: 0, 1: 0}
    for path in places(json.loads(document)):
        for value in (..., None, -1, 0, 10**30, 0.5, "x", [], {"x": 1}):
            write_json(package / MANIFEST, with_value(document, path, value))
            result = qwen_mtp("inspect", package)
            if result.exit_code:
                refused(result, 1, str(package))
            outcomes[result.exit_code] += 1
    assert outcomes[1] > 10 * outcomes[0] > 0, outcomes


# --- requests ---------------------------------------------------------------------------------

REQUESTS: dict[str, tuple[list[object], list[str]]] = {
    "id out of range": (["--prompt-ids", "1,2048"], ["prompt token 1 is 2048", "0 to 2047"]),
    "huge id": (["--prompt-ids", 10**30], ["prompt token 0 is 1000", "0 to 2047"]),
    "negative id": (["--prompt-ids", "3,-1"], ["prompt token 1 is -1", "0 to 2047"]),
    "no ids": (["--prompt-ids", ","], ["the prompt is empty: give at least one token"]),
    "no text": (["--prompt", ""], ["the prompt is empty: give at least one token"]),
    "long": (["--prompt-ids", ",".join("1" * 64)], ["64 tokens", "up to 63", "--max-model-len"]),
    "surrogate": (["--prompt", "a\udcff"], ["the prompt is not a valid text"]),
    "lookahead": (["--prompt-ids", "1", "-k", "2"], ["num_speculative_tokens is 2", "0..1"]),
    **{
        f"{name} {value}": (["--prompt-ids", "1", f"--{name}", value], [name.replace("-", "_")])
        for name, value in (
            ("temperature", "-1"), ("temperature", "nan"), ("temperature", "inf"), ("top-p", "0"),
            ("top-p", "1.5"), ("top-p", "nan"), ("top-k", "-5"), ("max-tokens", "0"),
            ("max-tokens", "-1"), ("seed", "-1"), ("seed", 2**64), ("stop", ""),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("case", REQUESTS)
def test_a_request_that_cannot_be_served_is_refused_by_name(case: str) -> None:
    arguments, fragments = REQUESTS[case]
    with untouched(verified_package()):
        result = qwen_mtp("run", verified_package(), *arguments, "--json")
        refused(result, 1, *fragments)
    assert result.stdout == ""


@pytest.mark.parametrize("command", ["run", "verify", "inspect"])
@pytest.mark.parametrize("kind", ["absent", "file", "empty"])
def test_a_place_that_holds_no_package_is_named(tmp_path: Path, command: str, kind: str) -> None:
    path = tmp_path / "package"
    if kind == "file":
        path.write_text("no folder")
    elif kind == "empty":
        path.mkdir()
    options = ["--prompt-ids", "1"] if command == "run" else []
    with untouched(tmp_path):
        refused(qwen_mtp(command, path, *options), 1, str(path), "; ")
