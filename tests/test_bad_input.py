"""What is wrong with a checkpoint is one line, nothing more, and leaves nothing behind."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import rewrite, write_checkpoint, write_json
from tests.commands import (
    checkpoint,
    places,
    qwen_mtp,
    qwen_mtp_export,
    refused,
    rejected,
    small_checkpoint,
    small_config,
    untouched,
    with_value,
)

Tensors = dict[str, torch.Tensor]
LAYER = "model.language_model.layers."
REPAIR = "download the checkpoint again"

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


NEITHER = "is neither a package (manifest.json) nor a checkpoint (config.json)"
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
    if damage is no_config:
        refused(inspected, 1, str(directory), NEITHER)
    elif damage is not bad_generation_config:
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
    inspected = NEITHER if kind == "empty" else wanted
    refused(qwen_mtp("inspect", directory), 1, str(directory), inspected)


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


def test_no_value_of_any_field_of_config_json_gives_a_traceback_in_a_plan(tmp_path: Path) -> None:
    directory = small_checkpoint(tmp_path / "checkpoint")
    document = (directory / "config.json").read_text()
    for path in places(json.loads(document)):
        for value in (..., 1, 10**6, 10**12, *ODD):
            write_json(directory / "config.json", with_value(document, path, value))
            result = qwen_mtp_export(directory, tmp_path / "package", "--dry-run")
            if result.exit_code:
                refused(result, 1, "; ")
    assert not (tmp_path / "package").exists()
