"""Small random checkpoints in the layout of the published ones, and transformers' view of them."""

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from qwen_mtp.errors import CheckpointError

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]

# Kept in fp32 by the published checkpoints, whatever the others are.
FLOAT32 = ("A_log", "linear_attn.norm.weight")
TOP_LEVEL = ("mtp.", "lm_head.")


def tiny_config(**overrides: Any) -> Config:
    """A whole ``config.json``; ``overrides`` go into its ``text_config``.

    ``rope_theta`` and ``partial_rotary_factor`` go into ``rope_parameters``, the layer kinds
    follow ``num_hidden_layers`` and the eos id ``vocab_size`` unless they are given.
    """
    text: Config = {
        "model_type": "qwen3_5_text",
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 4096,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "tie_word_embeddings": False,
    }
    rope: Config = {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
    }
    for name in ("rope_theta", "partial_rotary_factor"):
        rope[name] = overrides.pop(name, rope[name])
    text |= overrides
    pairs = int(text["head_dim"] * rope["partial_rotary_factor"]) // 2
    rope["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    text.setdefault("rope_parameters", rope)
    every = text["full_attention_interval"]
    kinds = ("linear_attention", "full_attention")
    text.setdefault(
        "layer_types", [kinds[(i + 1) % every == 0] for i in range(text["num_hidden_layers"])]
    )
    text.setdefault("eos_token_id", text["vocab_size"] - 6)
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


def tensor_shapes(config: Config, *, mtp: bool = True) -> Shapes:
    """Canonical name and shape of every tensor that the checkpoint of ``config`` has."""
    text = config.get("text_config", config)
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    shapes: Shapes = {"embed_tokens.weight": (vocab, hidden), "norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for i, kind in enumerate(text["layer_types"]):
        mixer = _linear_shapes(text) if kind == "linear_attention" else _full_shapes(text)
        shapes |= _under(f"layers.{i}.", mixer | _block_shapes(text))
    if mtp and text["mtp_num_hidden_layers"]:
        shapes["mtp.fc.weight"] = (hidden, 2 * hidden)
        for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            shapes[f"mtp.{norm}.weight"] = (hidden,)
        shapes |= _under("mtp.layers.0.", _full_shapes(text) | _block_shapes(text))
    return shapes


def write_checkpoint(
    directory: str | Path,
    config: Config,
    *,
    seed: int = 0,
    dtype: Literal["bf16", "fp32"] = "bf16",
    prefix: Literal["model.language_model.", "model."] = "model.language_model.",
    shards: int = 1,
    mtp: bool = True,
    scale: float = 1.0,
) -> Path:
    """Write random weights and the two configuration files; returns the directory.

    A tensor depends on its name, its shape and ``seed`` alone, and the bf16 weights are the fp32
    ones rounded, so checkpoints that differ in layout hold the same model. ``scale`` multiplies
    every matrix.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    stored = torch.bfloat16 if dtype == "bf16" else torch.float32
    tensors = {}
    for name, shape in tensor_shapes(config, mtp=mtp).items():
        key = name if name.startswith(TOP_LEVEL) else prefix + name
        keep = name.endswith(FLOAT32)
        tensors[key] = _random(name, shape, seed, scale).to(torch.float32 if keep else stored)
    write_shards(directory, tensors, shards)
    write_json(directory / "config.json", config)
    eos = config.get("text_config", config)["eos_token_id"]
    write_json(
        directory / "generation_config.json", {"eos_token_id": [eos + 2, eos], "do_sample": False}
    )
    return directory


def write_shards(directory: Path, tensors: Mapping[str, torch.Tensor], shards: int = 1) -> None:
    """Write one ``model.safetensors``, or several files and their index."""
    if shards == 1:
        save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
        return
    places = {}
    for i in range(shards):
        name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[i::shards])
        save_file(part, directory / name, metadata={"format": "pt"})
        places |= dict.fromkeys(part, name)
    size = sum(tensor.nbytes for tensor in tensors.values())
    write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": size}, "weight_map": places},
    )


def write_json(path: Path, value: object) -> None:
    """Write a JSON file as the published checkpoints have them."""
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def transformers_model(directory: str | Path) -> Any:
    """``Qwen3_5ForCausalLM`` in fp32, eager attention, eval mode, with exactly these weights.

    The MTP head, which transformers does not have, is left out.
    """
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    raw = json.loads(Path(directory, "config.json").read_text(encoding="utf-8"))
    text = raw.get("text_config", raw) | {"tie_word_embeddings": raw["tie_word_embeddings"]}
    config = Qwen3_5TextConfig(**text)
    config._attn_implementation = "eager"
    model = Qwen3_5ForCausalLM(config).float().eval()
    weights = {}
    for shard in Path(directory).glob("*.safetensors"):
        weights |= load_file(shard)
    state = {
        key.replace("model.language_model.", "model."): weight.float()
        for key, weight in weights.items()
        if not key.startswith("mtp.")
    }
    if raw["tie_word_embeddings"]:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model.requires_grad_(False)


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Let ``change`` alter the tensors of a one-file checkpoint."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    write_shards(directory, tensors)
    return directory


def one_line(action: Callable[[], object], *fragments: str) -> None:
    """Check that ``action`` is refused in one line that has a remedy and all ``fragments``."""
    with pytest.raises(CheckpointError) as caught:
        action()
    line = str(caught.value)
    assert "\n" not in line
    assert ";" in line, "no remedy"
    for fragment in fragments:
        assert fragment in line


def _random(name: str, shape: tuple[int, ...], seed: int, scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    if name.endswith("A_log"):
        return torch.empty(shape).uniform_(1, 16, generator=generator).log()
    if name.endswith("dt_bias"):
        return torch.empty(shape).uniform_(-4, -1, generator=generator)
    normal = torch.randn(shape, generator=generator)
    if name.endswith("linear_attn.norm.weight"):
        return 1 + 0.1 * normal
    if len(shape) == 1:
        return 0.1 * normal
    return scale * normal / shape[-1] ** 0.5


def _under(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


def _block_shapes(text: Config) -> Shapes:
    hidden, inner = text["hidden_size"], text["intermediate_size"]
    return {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


def _full_shapes(text: Config) -> Shapes:
    hidden, width = text["hidden_size"], text["head_dim"]
    query, kv = text["num_attention_heads"] * width, text["num_key_value_heads"] * width
    return {
        "self_attn.q_proj.weight": (2 * query, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.q_norm.weight": (width,),
        "self_attn.k_norm.weight": (width,),
    }


def _linear_shapes(text: Config) -> Shapes:
    hidden, heads = text["hidden_size"], text["linear_num_value_heads"]
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    values = heads * text["linear_value_head_dim"]
    channels = 2 * keys + values
    return {
        "linear_attn.in_proj_qkv.weight": (channels, hidden),
        "linear_attn.in_proj_z.weight": (values, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
        "linear_attn.conv1d.weight": (channels, 1, text["linear_conv_kernel_dim"]),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (text["linear_value_head_dim"],),
        "linear_attn.out_proj.weight": (hidden, values),
    }
