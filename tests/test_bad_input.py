"""What is wrong with a checkpoint, a package, a request or a disk is one line, nothing more."""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result

import qwen_mtp.export.package as package_writer
from qwen_mtp.graphs.manifest import MANIFEST
from tests.checkpoints import rewrite, write_checkpoint, write_json
from tests.commands import (
    GEOMETRY,
    checkpoint,
    flip,
    package_copy,
    qwen_mtp,
    qwen_mtp_export,
    refused,
    small_checkpoint,
    small_config,
    untouched,
    verified_package,
)

Tensors = dict[str, torch.Tensor]
LAYER = "model.language_model.layers."
REPAIR = "download the checkpoint again"
AGAIN = "export the checkpoint again"


def rejected(directory: Path, out: Path, *options: str) -> Result:
    """An export that must leave no trace."""
    with untouched(out):
        return qwen_mtp_export(directory, out / "new" / "package", "--no-verify", *options)


# --- checkpoints: files -----------------------------------------------------------------------


def no_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def corrupt_config(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "qwen3_5", ')


def config_is_a_directory(directory: Path) -> None:
    (directory / "config.json").unlink()
    (directory / "config.json").mkdir()


def config_is_binary(directory: Path) -> None:
    (directory / "config.json").write_bytes(b"\xff\xfe\x00")


def config_is_a_list(directory: Path) -> None:
    write_json(directory / "config.json", [1])


def bad_generation_config(directory: Path) -> None:
    write_json(directory / "generation_config.json", {"do_sample": True, "top_p": 2})


def no_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def corrupt_index(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text("{")


def index_of_an_absent_shard(directory: Path) -> None:
    places = {"model.language_model.norm.weight": "model-00001-of-00002.safetensors"}
    write_json(directory / "model.safetensors.index.json", {"weight_map": places})


def truncated_shard(directory: Path) -> None:
    os.truncate(directory / "model.safetensors", 9000)


def garbage_shard(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"\x00garbage" * 100)


def empty_shard(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"")


def pointer_shard(directory: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    (directory / "model.safetensors").write_text(pointer)


FILES: list[tuple[Callable[[Path], None], list[str]]] = [
    (no_config, ["config.json: no such file", "original checkpoint"]),
    (corrupt_config, ["config.json: not JSON"]),
    (config_is_a_directory, ["config.json: Is a directory"]),
    (config_is_binary, ["config.json: not JSON"]),
    (config_is_a_list, ["config.json: holds [1], not a JSON object"]),
    (bad_generation_config, ["generation_config.json: top_p is 2, must be a number above 0"]),
    (no_weights, ["no *.safetensors file; take the checkpoint in safetensors format"]),
    (corrupt_index, ["model.safetensors.index.json: not JSON"]),
    (index_of_an_absent_shard, ["model-00001-of-00002.safetensors: no such file", REPAIR]),
    (truncated_shard, ["model.safetensors: ", REPAIR]),
    (garbage_shard, ["model.safetensors: ", REPAIR]),
    (empty_shard, ["model.safetensors: ", REPAIR]),
    (pointer_shard, ["model.safetensors: ", "Git LFS pointer, run git lfs pull"]),
]


@pytest.mark.parametrize(("damage", "fragments"), FILES, ids=lambda v: getattr(v, "__name__", ""))
def test_a_damaged_file_is_named(
    tmp_path: Path, damage: Callable[[Path], None], fragments: list[str]
) -> None:
    directory = small_checkpoint(tmp_path / "checkpoint")
    damage(directory)
    refused(rejected(directory, tmp_path), 1, str(directory), *fragments)
    inspected = qwen_mtp("inspect", directory)
    if damage is not bad_generation_config:
        refused(inspected, 1, *fragments)


@pytest.mark.parametrize("kind", ["empty", "absent", "file", "loop"])
def test_a_place_that_holds_no_checkpoint_is_named(tmp_path: Path, kind: str) -> None:
    directory = tmp_path / "checkpoint"
    if kind == "empty":
        directory.mkdir()
    elif kind == "file":
        directory.write_text("no folder")
    elif kind == "loop":
        directory.symlink_to(tmp_path / "other")
        (tmp_path / "other").symlink_to(directory)
    wanted = "config.json: no such file" if kind == "empty" else "no such directory; pass the"
    refused(rejected(directory, tmp_path), 1, str(directory), wanted)
    refused(qwen_mtp("inspect", directory), 1, str(directory), wanted)


# --- checkpoints: tensors ---------------------------------------------------------------------


def dropped(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.__setitem__(name, change(tensors[name]).contiguous())


def one_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor[-1] = float("nan")
    return tensor


TENSORS: dict[str, tuple[Callable[[Tensors], object], list[str]]] = {
    "missing": (dropped(LAYER + "0.linear_attn.A_log"), ["no tensor layers.0.linear_attn.A_log"]),
    "missing head": (dropped("lm_head.weight"), ["lm_head.weight", "tie_word_embeddings"]),
    "missing MTP": (dropped("mtp.fc.weight"), ["no MTP tensor mtp.fc.weight", "--no-mtp"]),
    "no MTP at all": (
        lambda tensors: [tensors.pop(key) for key in [*tensors] if key.startswith("mtp.")],
        ["no MTP tensor mtp.fc.weight", "and 10 more", "--no-mtp"],
    ),
    "shape": (
        changed(LAYER + "1.mlp.up_proj.weight", lambda t: t[:, :16]),
        ["1.mlp.up_proj.weight has shape [32, 16], config.json asks for [32, 32]"],
    ),
    "int8": (
        changed(LAYER + "1.mlp.up_proj.weight", lambda t: t.to(torch.int8)),
        ["1.mlp.up_proj.weight is I8", "take the unquantised bf16 checkpoint"],
    ),
    "fp8": (
        changed(LAYER + "1.mlp.up_proj.weight", lambda t: t.to(torch.float8_e4m3fn)),
        ["1.mlp.up_proj.weight is F8_E4M3", "take the unquantised bf16 checkpoint"],
    ),
    "extra": (
        lambda tensors: tensors.update({LAYER + "0.lora_A.weight": torch.zeros(2)}),
        ["no place for layers.0.lora_A.weight", "take a plain checkpoint"],
    ),
    "third layer": (
        lambda tensors: tensors.update({LAYER + "2.mlp.up_proj.weight": torch.zeros(2)}),
        ["no place for layers.2.mlp.up_proj.weight"],
    ),
    "converted": (
        changed(LAYER + "0.linear_attn.conv1d.weight", lambda t: t.transpose(1, 2)),
        ["0.linear_attn.conv1d.weight", "take the original checkpoint"],
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_a_wrong_tensor_is_named_before_anything_is_built(tmp_path: Path, case: str) -> None:
    change, fragments = TENSORS[case]
    directory = rewrite(small_checkpoint(tmp_path / "checkpoint"), change)
    refused(rejected(directory, tmp_path), 1, str(directory), *fragments)
    refused(rejected(directory, tmp_path, "--dry-run"), 1, *fragments)


@pytest.mark.parametrize("name", ["norm.weight", "layers.1.mlp.up_proj.weight"])
def test_a_weight_that_is_no_number_is_named(tmp_path: Path, name: str) -> None:
    key = f"model.language_model.{name}"
    directory = rewrite(small_checkpoint(tmp_path / "checkpoint"), changed(key, one_nan))
    refused(rejected(directory, tmp_path, "--no-mtp"), 1, f"{name} holds a NaN", REPAIR)


# --- checkpoints: models ----------------------------------------------------------------------


def model_type(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config.update(model_type=name)


def field(name: str, value: object) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config["text_config"].__setitem__(name, value)


MODELS: dict[str, tuple[Callable[[dict[str, Any]], Any], list[str]]] = {
    "qwen3_next": (model_type("qwen3_next"), ["model_type is 'qwen3_next'", "dense Qwen3.5"]),
    "qwen4_exp": (model_type("qwen4_exp"), ["model_type is 'qwen4_exp'"]),
    "qwen2": (model_type("qwen2"), ["model_type is 'qwen2'"]),
    "moe": (
        model_type("qwen3_5_moe"),
        ["model_type", "mixture-of-experts (MoE) is not supported"],
    ),
    "quantised": (
        lambda config: config.update(quantization_config={"quant_method": "fp8"}),
        ["quantization_config", "take the bf16 original"],
    ),
    "sliding": (
        field("layer_types", ["linear_attention", "sliding_attention"]),
        ["text_config.layer_types is a list with 'sliding_attention'"],
    ),
    "yarn": (
        lambda config: config["text_config"]["rope_parameters"].update(rope_type="yarn"),
        ["text_config.rope_parameters.rope_type is 'yarn'"],
    ),
    "huge": (field("hidden_size", 10**30), ["hidden_size is 1000", "at most 16777216"]),
    "large": (field("intermediate_size", 10**9), ["intermediate_size is 1000000000"]),
    "deep": (
        lambda config: config["text_config"].update(layer_types=None, num_hidden_layers=10**9),
        ["num_hidden_layers is 1000000000", "at most 1024"],
    ),
    "wide": (
        field("vocab_size", 10**6),
        ["weight has shape [2048, 32], config.json asks for [1000000, 32]"],
    ),
    "two heads": (field("mtp_num_hidden_layers", 2), ["mtp_num_hidden_layers is 2"]),
    "undeclared": (
        field("mtp_num_hidden_layers", 0),
        ["mtp_num_hidden_layers is 0", "--no-mtp"],
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_cannot_be_exported_is_named_by_its_field(tmp_path: Path, case: str) -> None:
    change, fragments = MODELS[case]
    directory = small_checkpoint(tmp_path / "checkpoint")
    config = small_config()
    change(config)
    write_json(directory / "config.json", config)
    refused(rejected(directory, tmp_path), 1, str(directory), *fragments)


def test_int4_needs_a_width_that_its_blocks_divide(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "checkpoint", small_config(intermediate_size=40))
    line = ["mlp.down_proj.weight has 40 columns, int4 needs a multiple of 32; use --format int8"]
    refused(rejected(directory, tmp_path, "--format", "int4"), 1, *line)
    refused(rejected(directory, tmp_path, "--format", "int4", "--dry-run"), 1, *line)


def test_a_context_beyond_what_the_model_was_made_for_is_refused(tmp_path: Path) -> None:
    with untouched(tmp_path):
        result = qwen_mtp("export", checkpoint(), tmp_path / "p", "--max-model-len", "129", "-q")
    refused(result, 1, "max_model_len is 129", "128 positions; lower it")


ODD: list[Any] = [None, -1, 0, 3, 10**30, 0.5, "x", [], {}, True, [[]]]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a JSON document; of a list, the first two."""
    if path:
        yield path
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from places(inner, (*path, name))
    elif isinstance(value, list):
        for i, inner in enumerate(value[:2]):
            yield from places(inner, (*path, i))


def with_value(document: str, path: tuple[Any, ...], value: Any) -> Any:
    """The document with one value replaced; with ``...``, removed."""
    whole = json.loads(document)
    holder = whole
    for step in path[:-1]:
        holder = holder[step]
    if value is ...:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return whole


def test_no_value_of_any_field_of_config_json_gives_a_traceback(tmp_path: Path) -> None:
    directory = small_checkpoint(tmp_path / "checkpoint")
    config = directory / "config.json"
    document = config.read_text()
    outcomes = {0: 0, 1: 0}
    for path in places(json.loads(document)):
        for value in (..., *ODD):
            write_json(config, with_value(document, path, value))
            result = qwen_mtp("inspect", directory)
            if result.exit_code:
                refused(result, 1, str(directory))
            outcomes[result.exit_code] += 1
    assert min(outcomes.values()) > 100, outcomes


@pytest.mark.slow
def test_no_value_of_any_field_of_config_json_gives_a_traceback_in_a_plan(tmp_path: Path) -> None:
    directory = small_checkpoint(tmp_path / "checkpoint")
    document = (directory / "config.json").read_text()
    for path in places(json.loads(document)):
        for value in (..., 1, 10**6, 10**12, *ODD):
            write_json(directory / "config.json", with_value(document, path, value))
            result = qwen_mtp_export(directory, tmp_path / "package", "--dry-run")
            if result.exit_code:
                refused(result, 1, str(directory))
    assert not (tmp_path / "package").exists()


# --- packages ---------------------------------------------------------------------------------


def run(path: Path, *options: object, prompt: str = "1,2,3") -> Result:
    return qwen_mtp("run", path, "--prompt-ids", prompt, "--max-tokens", "2", *options)


def manifest_change(path: tuple[Any, ...], value: Any) -> Callable[[Path], object]:
    def change(package: Path) -> None:
        document = (package / MANIFEST).read_text()
        write_json(package / MANIFEST, with_value(document, path, value))

    return change


def garbage_model(package: Path) -> None:
    size = (package / "model.onnx").stat().st_size
    (package / "model.onnx").write_bytes(np.random.default_rng(0).bytes(size))


PACKAGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "no manifest": (lambda p: (p / MANIFEST).unlink(), ["manifest.json: No such file"]),
    "not JSON": (lambda p: (p / MANIFEST).write_text("{"), ["manifest.json: ", AGAIN]),
    "empty": (lambda p: (p / MANIFEST).write_bytes(b""), ["manifest.json: ", AGAIN]),
    "deep": (lambda p: (p / MANIFEST).write_text("[" * 10**5), ["manifest.json: ", AGAIN]),
    "binary": (lambda p: (p / MANIFEST).write_bytes(b'{"a": "\xff"}'), ["manifest.json: ", AGAIN]),
    "version": (
        manifest_change(("format_version",), 9),
        ["format_version is 9", "reads 1", AGAIN],
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
        ["weights is '0 bytes', the file has", AGAIN],
    ),
    "weight overlap": (manifest_change(("weights", 1, "offset"), 0), ["weights: ", "overlaps"]),
    "weight shape": (
        manifest_change(("weights", 0, "shape"), [2048 * 32]),
        ["model.onnx: prefill stopped (", "run qwen-mtp verify"],
    ),
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
    "garbage model": (garbage_model, ["model.onnx: ONNX Runtime", "refuses it", AGAIN]),
}


@pytest.mark.parametrize("case", PACKAGES)
def test_a_damaged_package_is_refused_by_name_and_not_repaired(tmp_path: Path, case: str) -> None:
    damage, fragments = PACKAGES[case]
    package = package_copy(tmp_path)
    damage(package)
    with untouched(tmp_path):
        refused(run(package), 1, str(package), *fragments)


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    package = package_copy(tmp_path)
    data = (package / "tokenizer.json").read_bytes()
    (package / "tokenizer.json").write_bytes(b"[" + data[1:])
    refused(qwen_mtp("run", package, "--prompt", "a"), 1, "tokenizer.json is not a tokenizer")
    refused(qwen_mtp("verify", package, "-q"), 3, "tokenizer.json: sha256 differs")


@pytest.mark.parametrize("name", ["model.onnx", "weights.bin", "golden.npz", "config.json"])
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


# --- where a package goes ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "fragments"),
    [
        ("package", [], ["is not empty; give another directory or --overwrite"]),
        ("folder", [], ["is not empty"]),
        ("folder", ["--overwrite"], ["holds no package; --overwrite only replaces packages"]),
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
        ("qwen_mtp.export.package.ir", "save", ""),
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
