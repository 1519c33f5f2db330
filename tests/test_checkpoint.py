"""Checkpoint directories: the same model in every layout, and one line for every defect."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5ForCausalLM

from qwen_mtp.errors import MissingExtraError
from qwen_mtp.export.checkpoint import Checkpoint
from tests.checkpoints import (
    one_line,
    rewrite,
    tensor_shapes,
    tiny_config,
    transformers_model,
    write_checkpoint,
    write_json,
)

CONFIG = tiny_config()
SHAPES = tensor_shapes(CONFIG)
INDEX = "model.safetensors.index.json"
CONV = "layers.1.linear_attn.conv1d.weight"


def contents(directory: Path) -> dict[str, np.ndarray[Any, Any]]:
    checkpoint = Checkpoint.open(directory)
    return {name: checkpoint.read(name, SHAPES[name]) for name in checkpoint.names}


def assert_equal(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name], err_msg=name)


@pytest.mark.parametrize("prefix", ["model.language_model.", "model."])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
def test_every_layout_offers_the_same_tensors(
    tmp_path: Path,
    prefix: Literal["model.language_model.", "model."],
    shards: int,
    nested: bool,
) -> None:
    config = CONFIG if nested else CONFIG["text_config"]
    got = contents(write_checkpoint(tmp_path / "a", config, prefix=prefix, shards=shards))
    assert got.keys() == SHAPES.keys()
    stored: dict[str, torch.Tensor] = {}
    for shard in (tmp_path / "a").glob("*.safetensors"):
        stored |= load_file(shard)
    assert_equal(got, {k.removeprefix(prefix): v.float().numpy() for k, v in stored.items()})
    assert_equal(got, contents(write_checkpoint(tmp_path / "b", CONFIG)))
    assert all(v.dtype == np.float32 and v.flags.c_contiguous for v in got.values())


def test_the_only_safetensors_file_may_have_any_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG)
    before = contents(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "tuned.safetensors")
    assert_equal(contents(tmp_path), before)


def test_without_an_index_model_safetensors_is_the_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG)
    before = contents(tmp_path)
    save_file({"stale": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    assert_equal(contents(tmp_path), before)


def test_an_index_decides_which_files_count(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, shards=2)
    before = contents(tmp_path)
    save_file({"stale": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert_equal(contents(tmp_path), before)


def test_bf16_tensors_are_the_fp32_ones_rounded(tmp_path: Path) -> None:
    wide = contents(write_checkpoint(tmp_path / "wide", CONFIG, dtype="fp32"))
    narrow = Checkpoint.open(write_checkpoint(tmp_path / "narrow", CONFIG, dtype="bf16"))
    for name, value in wide.items():
        dtype = narrow.dtype(name)
        assert dtype == ("F32" if name.endswith(("A_log", "linear_attn.norm.weight")) else "BF16")
        if dtype == "BF16":
            value = torch.from_numpy(value).bfloat16().float().numpy()
        np.testing.assert_array_equal(narrow.read(name, SHAPES[name]), value)


def test_fp16_tensors_are_read_exactly(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, dtype="fp32")
    rewrite(tmp_path, lambda t: t.update({"mtp.fc.weight": t["mtp.fc.weight"].half()}))
    stored = load_file(tmp_path / "model.safetensors")["mtp.fc.weight"]
    read = Checkpoint.open(tmp_path).read("mtp.fc.weight", SHAPES["mtp.fc.weight"])
    np.testing.assert_array_equal(read, stored.float().numpy())


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "rows",
    [slice(0, 7), slice(100, 256), slice(-3, None), slice(250, 300), slice(5, 5), slice(None)],
    ids=str,
)
def test_rows_are_those_of_the_whole_tensor(
    tmp_path: Path, dtype: Literal["bf16", "fp32"], rows: slice
) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, CONFIG, dtype=dtype))
    shape = SHAPES["embed_tokens.weight"]
    part = checkpoint.read("embed_tokens.weight", shape, rows)
    np.testing.assert_array_equal(part, checkpoint.read("embed_tokens.weight", shape)[rows])
    assert part.flags.c_contiguous
    assert part.dtype == np.float32


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux to see mappings")
def test_no_file_stays_mapped(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, CONFIG, dtype="fp32", shards=2))
    kept = [checkpoint.read(name, SHAPES[name]) for name in checkpoint.names]
    checkpoint.fingerprint()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert kept[0].flags.owndata


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_whole_model_is_the_one_that_transformers_loads(tmp_path: Path, tied: bool) -> None:
    config = tiny_config(tie_word_embeddings=tied)
    write_checkpoint(tmp_path, config, shards=2)
    theirs = transformers_model(tmp_path).state_dict()
    checkpoint = Checkpoint.open(tmp_path)
    shapes = tensor_shapes(config, mtp=False)
    assert ("lm_head.weight" in checkpoint.names) is not tied
    assert {k.removeprefix("model.") for k in theirs} == shapes.keys() | {"lm_head.weight"}
    for name, shape in shapes.items():
        key = name if name == "lm_head.weight" else f"model.{name}"
        np.testing.assert_array_equal(checkpoint.read(name, shape), theirs[key].numpy())


def test_the_written_layout_is_one_that_transformers_reads(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, shards=3)
    read, info = Qwen3_5ForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_equal(read.state_dict(), transformers_model(tmp_path).state_dict())


def test_another_shape_is_refused_with_both(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, CONFIG))
    assert checkpoint.shape("mtp.fc.weight") == (64, 128)
    one_line(
        lambda: checkpoint.read("mtp.fc.weight", (64, 64), slice(0, 1)),
        "model.safetensors: mtp.fc.weight has shape [64, 128]",
        "asks for [64, 64]",
    )


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float64])
def test_another_dtype_is_refused_by_name(tmp_path: Path, dtype: torch.dtype) -> None:
    write_checkpoint(tmp_path, CONFIG)
    rewrite(tmp_path, lambda t: t.update({"mtp.fc.weight": t["mtp.fc.weight"].to(dtype)}))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.dtype("mtp.fc.weight") not in ("BF16", "F16", "F32")
    one_line(
        lambda: checkpoint.read("mtp.fc.weight", (64, 128)),
        f"mtp.fc.weight is {checkpoint.dtype('mtp.fc.weight')}, must be BF16 or F16 or F32",
    )


def test_a_convolution_stored_for_another_engine_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG)
    key = f"model.language_model.{CONV}"
    rewrite(tmp_path, lambda t: t.update({key: t[key].transpose(1, 2).contiguous()}))
    one_line(lambda: Checkpoint.open(tmp_path), f"{CONV} has shape [128, 4, 1]", "GGUF, MLX")


def test_a_tensor_under_both_prefixes_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG)
    rewrite(tmp_path, lambda t: t.update({"model.norm.weight": torch.zeros(64)}))
    keys = ("model.norm.weight", "model.language_model.norm.weight")
    one_line(lambda: Checkpoint.open(tmp_path), "norm.weight once more", *keys)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, shards=2)
    first, second = sorted(tmp_path.glob("*.safetensors"))
    repeated = min(load_file(first))
    save_file(load_file(second) | {repeated: load_file(first)[repeated]}, second)
    one_line(lambda: Checkpoint.open(tmp_path), repeated, first.name, second.name)


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (lambda raw: raw[:-10], "not fully covered"),
        (lambda raw: b"", "header too small"),
        (lambda raw: raw[:8] + b"\0" * 400, "header"),
        (lambda raw: b"\xff" * 16 + raw, "header too large"),
        (
            lambda raw: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "git lfs pull",
        ),
    ],
    ids=["cut", "empty", "zeros", "huge", "pointer"],
)
def test_a_damaged_shard_is_refused_by_name(
    tmp_path: Path, content: Callable[[bytes], bytes], fragment: str
) -> None:
    write_checkpoint(tmp_path, CONFIG, shards=2)
    shard = max(tmp_path.glob("*.safetensors"))
    shard.write_bytes(content(shard.read_bytes()))
    one_line(lambda: Checkpoint.open(tmp_path), str(shard), fragment)


def test_a_shard_that_disappears_after_opening_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, CONFIG))
    (tmp_path / "model.safetensors").unlink()
    for use in (lambda: checkpoint.read("mtp.fc.weight", (64, 128)), checkpoint.fingerprint):
        one_line(use, "model.safetensors: no such file")
    (tmp_path / "config.json").unlink()
    one_line(checkpoint.fingerprint, "config.json: No such file")


def test_an_index_that_names_an_absent_shard_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, shards=2)
    shard = max(tmp_path.glob("*.safetensors"))
    shard.unlink()
    one_line(lambda: Checkpoint.open(tmp_path), f"{shard}: no such file")


def test_an_index_that_names_an_absent_tensor_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG, shards=2)
    shard = max(tmp_path.glob("*.safetensors"))
    tensors = load_file(shard)
    key = min(tensors)
    del tensors[key]
    save_file(tensors, shard)
    one_line(lambda: Checkpoint.open(tmp_path), f"{shard}: does not hold {key}", INDEX)


@pytest.mark.parametrize(
    ("index", "fragment"),
    [
        ({}, "weight_map is absent"),
        ({"weight_map": {}}, "weight_map is {}"),
        ({"weight_map": ["a"]}, "weight_map is ['a']"),
        ({"weight_map": {"norm.weight": 3}}, "weight_map.norm.weight is 3"),
        ({"weight_map": {"norm.weight": "../x.safetensors"}}, "'../x.safetensors', must be"),
        ({"weight_map": {"norm.weight": ""}}, "weight_map.norm.weight is ''"),
        ({"weight_map": {"norm.weight": "a\0.safetensors"}}, "must be the name"),
        ({"weight_map": {"norm.weight": ".."}}, "weight_map.norm.weight is '..'"),
        ([], "not a JSON object"),
    ],
    ids=str,
)
def test_an_odd_index_is_refused_by_field(tmp_path: Path, index: object, fragment: str) -> None:
    write_checkpoint(tmp_path, CONFIG)
    write_json(tmp_path / INDEX, index)
    one_line(lambda: Checkpoint.open(tmp_path), INDEX, fragment)


def test_a_directory_without_one_clear_file_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG)
    only = tmp_path / "model.safetensors"
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(only.read_bytes())
    only.unlink()
    one_line(
        lambda: Checkpoint.open(tmp_path), f"{tmp_path}: 2 *.safetensors files but no {INDEX}"
    )
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).unlink()
    one_line(lambda: Checkpoint.open(tmp_path), "no *.safetensors file")


def test_a_configuration_is_refused_before_any_tensor_is_looked_at(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", tiny_config(attention_bias=True))
    one_line(lambda: Checkpoint.open(tmp_path), "config.json", "attention_bias")


def test_the_fingerprint_depends_on_the_contents_alone(tmp_path: Path) -> None:
    prints = [
        Checkpoint.open(write_checkpoint(tmp_path / name, CONFIG)).fingerprint()
        for name in ("a", "b")
    ]
    assert prints[0] == prints[1]
    assert len(bytes.fromhex(prints[0])) == 32


@pytest.mark.parametrize("change", ["weights", "dtype", "config", "name"])
def test_the_fingerprint_tells_checkpoints_apart(tmp_path: Path, change: str) -> None:
    write_checkpoint(tmp_path, CONFIG)
    before = Checkpoint.open(tmp_path).fingerprint()
    if change == "weights":
        rewrite(tmp_path, lambda t: t["mtp.norm.weight"].mul_(2))
    elif change == "dtype":
        rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].half()}))
    elif change == "config":
        write_json(tmp_path / "config.json", tiny_config(rms_norm_eps=1e-5))
    else:
        (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    assert Checkpoint.open(tmp_path).fingerprint() != before


@pytest.mark.parametrize("package", ["torch", "safetensors"])
def test_a_missing_package_is_answered_with_what_to_install(
    tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, CONFIG)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"{package}.* pip install 'qwen-mtp\[export\]'"):
        Checkpoint.open(tmp_path)
