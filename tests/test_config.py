"""Configuration files: the published sizes are read, everything odd is refused in one line."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import Qwen3_5TextConfig

from qwen_mtp.config import GenerationDefaults, ModelConfig
from qwen_mtp.errors import CheckpointError
from tests.checkpoints import Config, tiny_config, write_json

# name: hidden, layers, full layers, heads, kv heads, linear value heads, MLP, tied, channels
PUBLISHED = {
    "3.5-0.8B": (1024, 24, 6, 8, 2, 16, 3584, True, 6144),
    "3.5-2B": (2048, 24, 6, 8, 2, 16, 6144, True, 6144),
    "3.5-4B": (2560, 32, 8, 16, 4, 32, 9216, True, 8192),
    "3.5-9B": (4096, 32, 8, 16, 4, 32, 12288, False, 8192),
    "3.8-27B": (5120, 64, 16, 24, 4, 48, 17408, False, 10240),
}


def published(name: str) -> Config:
    hidden, layers, _, heads, kv_heads, value_heads, inner, tied, _ = PUBLISHED[name]
    return tiny_config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        intermediate_size=inner,
        tie_word_embeddings=tied,
        vocab_size=248320,
        max_position_embeddings=262144,
        eos_token_id=248044,
        **({"output_gate_type": "swish"} if name == "3.8-27B" else {}),
    )


def save(directory: Path, config: object, generation: object | None = None) -> Path:
    write_json(directory / "config.json", config)
    if generation is not None:
        write_json(directory / "generation_config.json", generation)
    return directory


def refused(read: Callable[[Path], object], directory: Path, *fragments: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(directory)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(str(directory))
    assert ";" in line, "no remedy"
    for fragment in fragments:
        assert fragment in line
    return line


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_dense_size_is_read(tmp_path: Path, name: str) -> None:
    _, layers, full, _, _, value_heads, _, tied, channels = PUBLISHED[name]
    generation = {"eos_token_id": [248046, 248044], "do_sample": True}
    config = ModelConfig.from_checkpoint(save(tmp_path, published(name), generation))
    assert (config.num_layers, config.num_full_layers) == (layers, full)
    assert config.num_linear_layers == layers - full
    assert [i for i, k in enumerate(config.layer_kinds) if k == "full_attention"] == [
        *range(3, layers, 4)
    ]
    assert (config.rotary_dim, config.rope_theta) == (64, 1e7)
    assert config.conv_channels == channels
    assert (config.key_size, config.value_size) == (2048, 128 * value_heads)
    assert config.eos_token_ids == (248046, 248044)
    assert config.tie_word_embeddings is tied
    assert (config.num_mtp_layers, config.gate_activation) == (1, "silu")


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"layer_types": None, "full_attention_interval": 2},
        {"layer_types": ["full_attention", "linear_attention"] * 2},
        {"rope_parameters": None},
        {"rope_parameters": None, "rope_theta_flat": 5e5, "partial_rotary_factor_flat": 0.5},
        {"rope_parameters": {"rope_theta": 3e4}, "partial_rotary_factor_flat": 0.5},
        {"rope_scaling": {"type": "default", "rope_theta": 7e4, "partial_rotary_factor": 1.0}},
        {"rope_scaling": {}},
    ],
    ids=str,
)
def test_fields_mean_what_they_mean_to_transformers(
    tmp_path: Path, nested: bool, overrides: Config
) -> None:
    raw = tiny_config()
    raw["text_config"] |= {k.removesuffix("_flat"): v for k, v in overrides.items()}
    agrees_with_transformers(tmp_path, raw if nested else raw["text_config"])


def test_absent_fields_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    required = {
        "model_type": "qwen3_5_text",
        "hidden_size": 32,
        "intermediate_size": 48,
        "vocab_size": 99,
        "num_hidden_layers": 5,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    config = agrees_with_transformers(tmp_path, required)
    assert (config.num_mtp_layers, config.eos_token_ids) == (0, ())
    for name in required:
        short = {k: v for k, v in required.items() if k != name}
        refused(ModelConfig.from_checkpoint, save(tmp_path, short), f"json: {name} is absent")


def agrees_with_transformers(directory: Path, raw: Config) -> ModelConfig:
    ours = ModelConfig.from_checkpoint(save(directory, raw))
    theirs = Qwen3_5TextConfig(**copy.deepcopy(raw.get("text_config", raw)))
    rope = theirs.rope_parameters
    assert ours.hidden_size == theirs.hidden_size
    assert ours.intermediate_size == theirs.intermediate_size
    assert ours.vocab_size == theirs.vocab_size
    assert list(ours.layer_kinds) == theirs.layer_types
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == theirs.head_dim
    assert ours.rope_theta == rope["rope_theta"]
    assert ours.rotary_dim == int(theirs.head_dim * rope["partial_rotary_factor"])
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.linear_num_key_heads == theirs.linear_num_key_heads
    assert ours.linear_num_value_heads == theirs.linear_num_value_heads
    assert ours.linear_key_head_dim == theirs.linear_key_head_dim
    assert ours.linear_value_head_dim == theirs.linear_value_head_dim
    assert ours.conv_kernel == theirs.linear_conv_kernel_dim
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    return ours


def test_msgspec_carries_a_configuration_unchanged(tmp_path: Path) -> None:
    config = ModelConfig.from_checkpoint(save(tmp_path, tiny_config()))
    assert msgspec.json.decode(msgspec.json.encode(config), type=ModelConfig) == config


@pytest.mark.parametrize(
    ("field", "value", "fragments"),
    [
        ("hidden_size", None, ["is absent", "an integer, at least 1"]),
        ("hidden_size", "64", ["'64'"]),
        ("hidden_size", 64.0, ["64.0"]),
        ("hidden_size", True, ["True"]),
        ("vocab_size", 0, ["is 0"]),
        ("intermediate_size", -1, ["is -1"]),
        ("intermediate_size", [1, 2], ["[1, 2]"]),
        ("rms_norm_eps", "1e-6", ["a number above 0"]),
        ("rms_norm_eps", 0, ["a number above 0"]),
        ("rms_norm_eps", float("nan"), ["nan"]),
        ("rms_norm_eps", 10**400, ["a number above 0"]),
        ("attention_bias", True, ["True, must be false"]),
        ("attention_bias", 0, ["is 0, must be false"]),
        ("layer_scale", True, ["must be false"]),
        ("mtp_use_dedicated_embeddings", True, ["must be false"]),
        ("attn_output_gate", False, ["must be true"]),
        ("hidden_act", "gelu", ["'gelu', must be \"silu\""]),
        ("output_gate_type", "tanh", ["'tanh'", '"silu" or "swish" or "sigmoid"']),
        ("output_gate_type", ["silu"], ["['silu']"]),
        ("mtp_num_hidden_layers", 2, ["is 2, must be 0 or 1"]),
        ("mtp_num_hidden_layers", True, ["is True"]),
        ("linear_conv_kernel_dim", 1, ["an integer, at least 2"]),
        ("num_attention_heads", 3, ["is 3", "multiple of num_key_value_heads (2)"]),
        ("linear_num_value_heads", 5, ["is 5", "multiple of linear_num_key_heads (2)"]),
        ("num_hidden_layers", 3, []),
        ("layer_types", ["linear_attention"] * 3, ["a list of 3, must be a list of 4"]),
        ("layer_types", "full_attention", ["must be a list of 4"]),
        ("layer_types", ["mamba"] * 4, ["'mamba'", "linear_attention and full_attention"]),
        ("layer_types", [["full_attention"]] * 4, ["['full_attention']"]),
        ("tie_word_embeddings", "yes", ["'yes', must be true or false"]),
        ("eos_token_id", "<|endoftext|>", ["token ids below 256"]),
        ("eos_token_id", [1, 256], ["[1, 256]"]),
        ("eos_token_id", -1, ["is -1"]),
        ("rope_parameters", "default", ["must be a JSON object"]),
        ("quantization_config", {"quant_method": "fp8"}, ["quantised", "bf16"]),
    ],
)
def test_an_odd_field_is_refused_by_name(
    tmp_path: Path, field: str, value: Any, fragments: list[str]
) -> None:
    raw = tiny_config()
    raw["text_config"][field] = value
    if field == "num_hidden_layers":
        field = "layer_types"
    line = f"config.json: text_config.{field} is "
    refused(ModelConfig.from_checkpoint, save(tmp_path, raw), line, *fragments)


@pytest.mark.parametrize(
    ("field", "value", "fragments"),
    [
        ("rope_type", "yarn", ["'yarn'", '"default"']),
        ("type", "linear", ["'linear'"]),
        ("mrope_interleaved", False, ["must be true"]),
        ("partial_rotary_factor", 0.1, ["head_dim 32", "even"]),
        ("partial_rotary_factor", 2, ["head_dim 32"]),
        ("partial_rotary_factor", 0.01, ["head_dim 32"]),
        ("rope_theta", 0, ["a number above 0"]),
        ("full_attention", {"rope_theta": 1e4}, ["one rope for all layers"]),
    ],
)
def test_an_odd_rope_is_refused_by_name(
    tmp_path: Path, field: str, value: Any, fragments: list[str]
) -> None:
    raw = tiny_config()
    raw["text_config"]["rope_parameters"][field] = value
    line = f"text_config.rope_parameters.{field} is "
    refused(ModelConfig.from_checkpoint, save(tmp_path, raw), line, *fragments)


@pytest.mark.parametrize("place", ["top", "text_config"])
@pytest.mark.parametrize(
    ("family", "fragment"),
    [
        ("qwen3_5_moe", "mixture-of-experts (MoE) is not supported yet"),
        ("qwen3_5_moe_text", "mixture-of-experts (MoE) is not supported yet"),
        ("qwen3_next", "dense Qwen3.5, Qwen3.6 and Qwen3.8"),
        ("qwen4_exp", "dense Qwen3.5, Qwen3.6 and Qwen3.8"),
        ("qwen2", "dense Qwen3.5, Qwen3.6 and Qwen3.8"),
        (["qwen3_5"], "dense Qwen3.5"),
    ],
)
def test_another_model_family_is_refused_with_what_is_supported(
    tmp_path: Path, place: str, family: object, fragment: str
) -> None:
    raw = tiny_config()
    (raw if place == "top" else raw["text_config"])["model_type"] = family
    refused(ModelConfig.from_checkpoint, save(tmp_path, raw), "model_type", str(family), fragment)


def test_a_quantisation_at_the_top_of_a_nested_file_is_seen(tmp_path: Path) -> None:
    raw = tiny_config() | {"quantization_config": {"quant_method": "gptq"}}
    refused(ModelConfig.from_checkpoint, save(tmp_path, raw), "json: quantization_config is")


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1, 2]", "[1, 2], not a JSON object"),
        (b"null", "None, not a JSON object"),
    ],
    ids=["cut", "empty", "binary", "deep", "list", "null"],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_without_a_json_object_is_refused(
    tmp_path: Path, name: str, content: bytes, fragment: str
) -> None:
    save(tmp_path, tiny_config())
    (tmp_path / name).write_bytes(content)
    refused(ModelConfig.from_checkpoint, tmp_path, name, fragment)


def test_a_missing_file_or_directory_is_refused(tmp_path: Path) -> None:
    refused(ModelConfig.from_checkpoint, tmp_path / "none", "no such directory")
    refused(ModelConfig.from_checkpoint, tmp_path, "config.json: no such file")
    (tmp_path / "config.json").mkdir()
    refused(ModelConfig.from_checkpoint, tmp_path, "config.json: Is a directory")


@pytest.mark.parametrize(
    ("gate", "activation"),
    [(None, "silu"), ("silu", "silu"), ("swish", "silu"), ("sigmoid", "sigmoid")],
)
def test_the_output_gate_is_named_by_its_function(
    tmp_path: Path, gate: str | None, activation: str
) -> None:
    save(tmp_path, tiny_config(output_gate_type=gate))
    assert ModelConfig.from_checkpoint(tmp_path).gate_activation == activation


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "union"),
    [
        (44, [46, 44], (46, 44)),
        ([44, 45], 46, (46, 44, 45)),
        (44, None, (44,)),
        (None, [46], (46,)),
        (None, None, ()),
    ],
)
def test_stop_ids_are_the_union_of_both_files(
    tmp_path: Path, config_eos: object, generation_eos: object, union: tuple[int, ...]
) -> None:
    save(tmp_path, tiny_config(eos_token_id=config_eos), {"eos_token_id": generation_eos})
    assert ModelConfig.from_checkpoint(tmp_path).eos_token_ids == union


def test_the_top_of_a_nested_file_decides_whether_the_head_is_tied(tmp_path: Path) -> None:
    raw = tiny_config(tie_word_embeddings=True)
    assert ModelConfig.from_checkpoint(save(tmp_path, raw)).tie_word_embeddings
    raw["tie_word_embeddings"] = False
    assert not ModelConfig.from_checkpoint(save(tmp_path, raw)).tie_word_embeddings
    del raw["tie_word_embeddings"]
    assert ModelConfig.from_checkpoint(save(tmp_path, raw)).tie_word_embeddings


@pytest.mark.parametrize(
    ("raw", "defaults"),
    [
        (None, (0.0, 0, 1.0, False)),
        ({}, (0.0, 0, 1.0, False)),
        ({"do_sample": False, "temperature": 0.6, "top_k": 20}, (0.0, 20, 1.0, False)),
        ({"do_sample": True}, (1.0, 50, 1.0, True)),
        (
            {"do_sample": True, "temperature": 1, "top_k": 20, "top_p": 0.95},
            (1.0, 20, 0.95, True),
        ),
        ({"do_sample": True, "top_k": 0, "temperature": 0.0}, (0.0, 0, 1.0, True)),
    ],
)
def test_sampling_defaults_mean_what_they_mean_to_transformers(
    tmp_path: Path, raw: Config | None, defaults: tuple[float, int, float, bool]
) -> None:
    read = GenerationDefaults.from_checkpoint(save(tmp_path, tiny_config(), raw))
    assert (read.temperature, read.top_k, read.top_p, read.do_sample) == defaults


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0),
        ("top_p", 1.1),
        ("do_sample", "no"),
    ],
)
def test_an_odd_sampling_default_is_refused_by_name(
    tmp_path: Path, field: str, value: object
) -> None:
    save(tmp_path, tiny_config(), {field: value})
    line = f"generation_config.json: {field} is {json.loads(json.dumps(value))!r}, must be"
    refused(GenerationDefaults.from_checkpoint, tmp_path, line)
