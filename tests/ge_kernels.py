"""Ports of the fused kernels at sizes that fit, and the graph each correction is there for."""

from typing import Any

from qwen_mtp.ge.overlay import Entry, Extended, Widened
from tests.ge_graphs import GraphBuilder


def sampler() -> dict[str, Any]:
    slot, row = (2,), (2, 4)
    return {
        "logits": ("float32", *row, 9),
        "draft_ids": ("int32", 2, 3),
        "num_drafts": ("int32", *slot),
        "accept_uniforms": ("float32", 2, 3),
        "pick_uniforms": ("float32", *row),
        "temperature": ("float32", *slot),
        "top_k": ("int32", *slot),
        "top_p": ("float32", *slot),
        "banned_rows": ("int32", *slot),
        "stop_ids": ("int32", 2, 16),
        "draft_probs": ("float32", 2, 3, 9),
    }


def delta(**changed: Any) -> dict[str, Any]:
    ports = {
        "query": ("bfloat16", 8, 2, 32),
        "key": ("bfloat16", 8, 2, 32),
        "value": ("bfloat16", 8, 4, 16),
        "beta": ("bfloat16", 8, 4),
        "state": ("bfloat16", 9, 4, 16, 32),
        "actual_seq_lengths": ("int32", 2),
        "ssm_state_indices": ("int32", 8),
        "g": ("float32", 8, 4),
        "num_accepted_tokens": ("int32", 2),
    }
    return {**ports, **changed}


def attention(**changed: Any) -> dict[str, Any]:
    ports = {
        "query": ("bfloat16", 2, 4, 6, 16),
        "key0": ("bfloat16", 8, 16, 32),
        "value0": ("bfloat16", 8, 16, 32),
        "actual_seq_lengths_kv": ("int64", 2),
        "block_table": ("int32", 2, 5),
    }
    return {**ports, **changed}


def user_of(entry: Entry) -> Any:
    """The smallest graph that the correction is there for."""
    b = GraphBuilder()
    if entry.op == "FileConstant":
        edge = b.op("Neg", {"x": b.weight("w", "bfloat16", (2,))})
        return b.end([(edge, "bfloat16", (2,))])
    if entry.op == "TopKV2":
        x = b.data("x", "float32", (9,))
        k = b.const(2, "int64" if isinstance(entry, Widened) else "int32")
        more: dict[str, Any] = {"sort_policy": 1} if isinstance(entry, Extended) else {}
        edge = b.op("TopKV2", {"x": x, "k": k}, ("values", "indices"), **more)
        return b.end([(edge, "float32", (2,))])
    if entry.op == "MtpRejectionSample":
        ports = sampler()
        edges = {name: b.data(name, dtype, shape) for name, (dtype, *shape) in ports.items()}
        edge = b.op(entry.op, edges, ("tokens", "num_accepted_drafts"))
        return b.end([(edge, "int32", (2, 4))])
    if entry.op == "WeightQuantBatchMatmulV2":
        x = b.data("x", "bfloat16", (4, 64))
        packed, scale = b.weight("w", "int32", (64, 2)), b.weight("s", "bfloat16", (2, 16))
        inputs = {"x": x, "weight": packed, "antiquant_scale": scale}
        edge = b.op(entry.op, inputs, antiquant_group_size=32)
        return b.end([(edge, "bfloat16", (4, 16))])
    if entry.op == "RecurrentGatedDeltaRule":
        half = {
            name: ("float16", *rest) if dtype == "bfloat16" else (dtype, *rest)
            for name, (dtype, *rest) in delta().items()
        }
        edges = {name: b.data(name, dtype, shape) for name, (dtype, *shape) in half.items()}
        edge = b.op(entry.op, edges, ("out", "state"), scale_value=0.2)
        return b.end([(edge, "float16", (8, 4, 16))])
    x = b.data("x", "bfloat16", (2,))
    extras: dict[str, dict[str, Any]] = {"Cast": {"dst_type": 27}, "Muls": {"value": 2.0}}
    op = entry.op if entry.op not in ("Data", "Const", "NetOutput") else "Neg"
    edge = b.op(op, {"x": x}, **extras.get(entry.op, {}))
    if entry.op == "Const":
        edge = b.op("Add", {"x1": b.const([1.0], "float32"), "x2": b.data("z", "float32", (2,))})
        return b.end([(edge, "float32", (2,)), ("x:0", "bfloat16", (2,))])
    return b.end([(edge, "bfloat16", (2,))])
