"""Measure the making of GE models for a shape, without weights: time, memory, size by graph.

    python benchmarks/measure_air.py 27b --lowering fused
    python benchmarks/measure_air.py path/to/config.json --lowering portable --format fp16

Prints a JSON line for each graph as it is done. The time is that of tracing, decomposing,
converting and finishing; ``cpu_s`` is what the process itself took of it, which on a machine with
other work says more. Memory is the peak of the process so far.
"""

import argparse
import json
import resource
import time
import warnings
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from qwen_mtp.config import ModelConfig
from qwen_mtp.export.air import compose_air
from qwen_mtp.export.blueprint import Blueprint
from qwen_mtp.export.torchair import bring_up
from qwen_mtp.ge.choice import activation_dtype, check_choice, has_fused_attention
from qwen_mtp.graphs.spec import AscendChoice, Geometry, WeightFormat

SHAPES: dict[str, dict[str, Any]] = {
    "0.8b": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "intermediate_size": 3584,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
    },
    "27b": {
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "intermediate_size": 17408,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
        "tie_word_embeddings": False,
    },
}
COMMON: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "eos_token_id": 248044,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
}


def config_of(shape: str) -> ModelConfig:
    """Sizes by the name of a shape, or of the checkpoint beside a ``config.json``."""
    if shape not in SHAPES:
        path = Path(shape)
        return ModelConfig.from_checkpoint(path.parent if path.is_file() else path)
    text = COMMON | SHAPES[shape]
    kinds = ("linear_attention", "full_attention")
    every = text["full_attention_interval"]
    text["layer_types"] = [kinds[(i + 1) % every == 0] for i in range(text["num_hidden_layers"])]
    whole = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text,
    }
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(whole), encoding="utf-8")
        return ModelConfig.from_checkpoint(folder)


def main() -> None:
    """Convert every graph of a geometry and measure each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", help="0.8b, 27b, or a config.json")
    parser.add_argument("--lowering", choices=("portable", "fused"), default="portable")
    parser.add_argument("--format", help="default: fp16 for portable, bf16 for fused")
    parser.add_argument("--soc-version", default="Ascend910B4")
    parser.add_argument("-k", "--num-speculative-tokens", type=int, default=3)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-seqs", type=int, default=1)
    parser.add_argument("--prefill-chunk", type=int, default=128)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    choice = AscendChoice(lowering=asked.lowering, soc_version=asked.soc_version)
    format: WeightFormat = asked.format or ("fp16" if asked.lowering == "portable" else "bf16")
    geometry = Geometry(
        max_num_seqs=asked.max_num_seqs,
        max_model_len=asked.max_model_len,
        block_size=128 if has_fused_attention(choice) else 64,
        prefill_chunk=asked.prefill_chunk,
        lookaheads=(asked.num_speculative_tokens,),
        format=format,
        layout="slots" if asked.lowering == "fused" else "paged",
        dtype=activation_dtype(choice, format, None),
    )
    check_choice(choice, geometry)
    bring_up()
    blueprint = Blueprint(config_of(asked.shape), geometry)
    wall, cpu = time.perf_counter(), time.process_time()
    for spec, model, _ in compose_air(blueprint, choice, "weights", lambda _: None):
        ops = Counter(op.type for op in model.graph[0].op)
        line = {
            "shape": asked.shape,
            "lowering": asked.lowering,
            "format": format,
            "graph": spec.name,
            "wall_s": round(time.perf_counter() - wall, 1),
            "cpu_s": round(time.process_time() - cpu, 1),
            "ops": sum(ops.values()),
            "without_sources": sum(
                n for t, n in ops.items() if t not in ("Data", "RefData", "FileConstant", "Const")
            ),
            "air_mb": round(len(model.SerializeToString(deterministic=True)) / 1e6, 2),
            "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            "most": dict(ops.most_common(8)),
        }
        print(json.dumps(line), flush=True)
        wall, cpu = time.perf_counter(), time.process_time()


if __name__ == "__main__":
    main()
