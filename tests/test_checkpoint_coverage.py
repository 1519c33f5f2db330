"""What an export uses against what a checkpoint holds: nothing is missing or left over unseen."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from qwen_mtp.export.checkpoint import Checkpoint
from tests.checkpoints import (
    one_line,
    rewrite,
    tensor_shapes,
    tiny_config,
    write_checkpoint,
    write_json,
)

CONFIG = tiny_config()
SHAPES = tensor_shapes(CONFIG)
MTP = sorted(name for name in SHAPES if name.startswith("mtp."))
CONV = "layers.1.linear_attn.conv1d.weight"


def test_the_vision_tower_is_ignored_and_counted(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG)
    keys = ("model.visual.blocks.0.norm1.weight", "visual.merger.norm.weight")
    rewrite(tmp_path, lambda t: t.update({key: torch.zeros(2) for key in keys}))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.ignored == keys
    assert checkpoint.check_coverage(SHAPES) == ()


def test_a_covered_checkpoint_has_nothing_unused(tmp_path: Path) -> None:
    assert Checkpoint.open(write_checkpoint(tmp_path, CONFIG)).check_coverage(SHAPES) == ()


def test_an_mtp_head_may_be_left_out_when_allowed(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, CONFIG))
    target = tensor_shapes(CONFIG, mtp=False)
    assert checkpoint.check_coverage(target, allow_unused=["mtp."]) == tuple(MTP)
    one_line(
        lambda: checkpoint.check_coverage(target),
        f"no place for {', '.join(MTP[:5])} and {len(MTP) - 5} more",
    )


def test_an_unannounced_mtp_head_is_refused_with_the_two_ways_out(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG)
    quiet = tiny_config(mtp_num_hidden_layers=0)
    write_json(tmp_path / "config.json", quiet)
    one_line(
        lambda: Checkpoint.open(tmp_path).check_coverage(tensor_shapes(quiet)),
        "mtp.fc.weight",
        "mtp_num_hidden_layers to 1",
        "--no-mtp",
    )


def test_missing_mtp_tensors_are_named_with_the_two_ways_out(tmp_path: Path) -> None:
    bare = Checkpoint.open(write_checkpoint(tmp_path, CONFIG, mtp=False))
    ways = ("--no-mtp", "original checkpoint")
    one_line(lambda: bare.check_coverage(SHAPES), MTP[0], f"{len(MTP) - 5} more", *ways)
    one_line(lambda: bare.read(MTP[0], SHAPES[MTP[0]]), f"no MTP tensor {MTP[0]};", *ways)
    write_checkpoint(tmp_path, CONFIG)
    rewrite(tmp_path, lambda t: t.pop("mtp.fc.weight"))
    one_line(
        lambda: Checkpoint.open(tmp_path).check_coverage(SHAPES),
        "no MTP tensor mtp.fc.weight;",
        *ways,
    )


def test_other_missing_tensors_are_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG)
    rewrite(tmp_path, lambda t: (t.pop("mtp.fc.weight"), t.pop(f"model.language_model.{CONV}")))
    checkpoint = Checkpoint.open(tmp_path)
    one_line(lambda: checkpoint.check_coverage(SHAPES), f"no tensor {CONV};", "download")
    for use in (checkpoint.shape, checkpoint.dtype):
        one_line(lambda use=use: use(CONV), f"no tensor {CONV};")


def test_a_missing_head_points_at_the_tie(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG)
    rewrite(tmp_path, lambda t: t.pop("lm_head.weight"))
    one_line(
        lambda: Checkpoint.open(tmp_path).check_coverage(SHAPES),
        "no tensor lm_head.weight;",
        "set tie_word_embeddings to true",
    )


def test_unexpected_tensors_are_listed_up_to_five(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG)
    extra = {f"model.layers.0.lora.{i}": torch.zeros(1) for i in range(7)}
    rewrite(tmp_path, lambda t: t.update(extra | {"odd\nname": torch.zeros(1)}))
    one_line(
        lambda: Checkpoint.open(tmp_path).check_coverage(SHAPES),
        "layers.0.lora.0, layers.0.lora.1, ",
        "layers.0.lora.4 and 3 more",
    )
    write_checkpoint(tmp_path, CONFIG)
    rewrite(tmp_path, lambda t: t.update({"odd\nname": torch.zeros(1)}))
    one_line(lambda: Checkpoint.open(tmp_path).check_coverage(SHAPES), r"'odd\nname'")


def test_a_tied_head_may_be_stored_when_it_equals_the_embedding(tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=True)
    write_checkpoint(tmp_path, config)
    embedding = load_file(tmp_path / "model.safetensors")[
        "model.language_model.embed_tokens.weight"
    ]
    shapes = tensor_shapes(config)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": embedding}))
    assert Checkpoint.open(tmp_path).check_coverage(shapes) == ("lm_head.weight",)
    other = embedding.clone()
    other[-1, -1] += 1
    for head in (other, embedding[:-1].clone()):
        rewrite(tmp_path, lambda t, head=head: t.update({"lm_head.weight": head}))
        one_line(
            lambda: Checkpoint.open(tmp_path).check_coverage(shapes),
            "lm_head.weight differs from",
            "tie_word_embeddings",
            "false",
        )
