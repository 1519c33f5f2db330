"""The bundled checkpoint has the published layout, so that what works on it works on them."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

FOLDER = Path(__file__).parents[1] / "artifacts" / "tiny-qwen3_5"
HIDDEN, FFN, VOCAB = 192, 512, 2048
Q, KV, HEAD = 4 * 64, 2 * 64, 64
CONV, VALUES, VALUE_HEADS = 2 * 4 * 32 + 8 * 32, 8 * 32, 8

FULL_LAYER = {
    "input_layernorm.weight": [HIDDEN],
    "post_attention_layernorm.weight": [HIDDEN],
    "self_attn.q_proj.weight": [2 * Q, HIDDEN],
    "self_attn.k_proj.weight": [KV, HIDDEN],
    "self_attn.v_proj.weight": [KV, HIDDEN],
    "self_attn.o_proj.weight": [HIDDEN, Q],
    "self_attn.q_norm.weight": [HEAD],
    "self_attn.k_norm.weight": [HEAD],
    "mlp.gate_proj.weight": [FFN, HIDDEN],
    "mlp.up_proj.weight": [FFN, HIDDEN],
    "mlp.down_proj.weight": [HIDDEN, FFN],
}
LINEAR_LAYER = {k: v for k, v in FULL_LAYER.items() if "self_attn" not in k} | {
    "linear_attn.in_proj_qkv.weight": [CONV, HIDDEN],
    "linear_attn.in_proj_z.weight": [VALUES, HIDDEN],
    "linear_attn.in_proj_b.weight": [VALUE_HEADS, HIDDEN],
    "linear_attn.in_proj_a.weight": [VALUE_HEADS, HIDDEN],
    "linear_attn.conv1d.weight": [CONV, 1, 4],
    "linear_attn.A_log": [VALUE_HEADS],
    "linear_attn.dt_bias": [VALUE_HEADS],
    "linear_attn.norm.weight": [32],
    "linear_attn.out_proj.weight": [HIDDEN, VALUES],
}
MTP = {
    "mtp.fc.weight": [HIDDEN, 2 * HIDDEN],
    "mtp.norm.weight": [HIDDEN],
    "mtp.pre_fc_norm_embedding.weight": [HIDDEN],
    "mtp.pre_fc_norm_hidden.weight": [HIDDEN],
    **{f"mtp.layers.0.{name}": shape for name, shape in FULL_LAYER.items()},
}


def read(name: str) -> Any:
    return json.loads((FOLDER / name).read_text())


@pytest.fixture(scope="module")
def tensors() -> dict[str, tuple[list[int], str]]:
    with safe_open(FOLDER / "model.safetensors", "np") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (s.get_shape(), s.get_dtype()) for name, s in slices.items()}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def test_is_small_enough_to_ship() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 15e6


def test_config_is_that_of_a_published_repository_in_small() -> None:
    config = read("config.json")
    text = config["text_config"]
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert (config["model_type"], text["model_type"]) == ("qwen3_5", "qwen3_5_text")
    assert text["layer_types"] == (["linear_attention"] * 3 + ["full_attention"]) * 2
    assert len(text["layer_types"]) == text["num_hidden_layers"]
    assert (text["hidden_size"], text["intermediate_size"]) == (HIDDEN, FFN)
    assert text["vocab_size"] == VOCAB
    assert text["mtp_num_hidden_layers"] == 1
    assert text["mtp_use_dedicated_embeddings"] is False
    assert text["attn_output_gate"] is True
    assert text["tie_word_embeddings"] is True
    assert text["mamba_ssm_dtype"] == "float32"
    rope = text["rope_parameters"]
    assert rope["mrope_interleaved"] is True
    assert 2 * sum(rope["mrope_section"]) == text["head_dim"] * rope["partial_rotary_factor"]


def test_has_exactly_the_published_tensors(tensors: dict[str, tuple[list[int], str]]) -> None:
    prefix = "model.language_model."
    want = {f"{prefix}embed_tokens.weight": [VOCAB, HIDDEN], f"{prefix}norm.weight": [HIDDEN]}
    for i, kind in enumerate(read("config.json")["text_config"]["layer_types"]):
        layer = FULL_LAYER if kind == "full_attention" else LINEAR_LAYER
        want |= {f"{prefix}layers.{i}.{name}": shape for name, shape in layer.items()}
    assert len(MTP) == 15
    assert {name: shape for name, (shape, _) in tensors.items()} == want | MTP


def test_is_bf16_but_for_the_two_kinds_published_in_fp32(
    tensors: dict[str, tuple[list[int], str]],
) -> None:
    exact = ("A_log", "linear_attn.norm.weight")
    for name, (_, dtype) in tensors.items():
        assert dtype == ("F32" if name.endswith(exact) else "BF16"), name


def test_both_eos_ids_stop_generation(tokenizer: Tokenizer) -> None:
    generation = read("generation_config.json")
    turn, end = (tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>"))
    assert generation["eos_token_id"] == [turn, end]
    assert read("config.json")["text_config"]["eos_token_id"] == end
    sampling = [generation[key] for key in ("do_sample", "temperature", "top_k", "top_p")]
    assert sampling == [True, 0.6, 20, 0.95]


def test_tokenizer_round_trips_source_text(tokenizer: Tokenizer) -> None:
    text = Path(__file__).read_text() + "\tnaïve = '💡 日本語'\r\n\n\n    "
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert len(ids) < len(text) / 2
    assert max(ids) < VOCAB


def test_tokenizer_knows_the_tokens_of_the_chat_template(tokenizer: Tokenizer) -> None:
    config = read("tokenizer_config.json")
    assert tokenizer.get_vocab_size() == VOCAB
    assert config["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in config["chat_template"]
    special = {int(i): t["content"] for i, t in config["added_tokens_decoder"].items()}
    assert sorted(special) == list(range(VOCAB - len(special), VOCAB))
    assert {i: tokenizer.id_to_token(i) for i in special} == special
    text = "<|im_start|>user\nwrite heapq<|im_end|>\n<|im_start|>assistant\n"
    encoded = tokenizer.encode(text)
    assert [t for t in encoded.tokens if t.startswith("<|")] == [
        "<|im_start|>",
        "<|im_end|>",
        "<|im_start|>",
    ]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
