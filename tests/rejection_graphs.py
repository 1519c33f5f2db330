"""Models around the rejection sampling functions, and batches to feed them."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import onnxscript

from qwen_mtp.custom_ops.operator import Operator
from qwen_mtp.custom_ops.rejection import REJECTION_SAMPLE, REJECTION_SAMPLE_LAWS

Feeds = dict[str, np.ndarray]
SHAPES = {
    "logits": "BRV",
    "draft_ids": "BK",
    "num_drafts": "B",
    "accept_uniforms": "BK",
    "pick_uniforms": "BR",
    "temperature": "B",
    "top_k": "B",
    "top_p": "B",
    "banned_rows": "B",
    "stop_ids": "BS",
    "draft_probs": "BKV",
}
INTEGERS = {"draft_ids", "num_drafts", "top_k", "banned_rows", "stop_ids"}


def graph_inputs(gb: Any, laws: bool) -> list[Any]:
    names = list(SHAPES) if laws else list(SHAPES)[:-1]
    kinds = [ir.DataType.INT32 if n in INTEGERS else ir.DataType.FLOAT for n in names]
    return [gb.input(n, k, list(SHAPES[n])) for n, k in zip(names, kinds, strict=True)]


def builder() -> Any:
    graph = ir.Graph(inputs=[], outputs=[], nodes=[], opset_imports={"": 24}, name="main")
    return onnxscript.GraphBuilder(graph)


def to_proto(gb: Any, outputs: dict[str, Any]) -> onnx.ModelProto:
    for name, value in outputs.items():
        value.type = value.type or ir.TensorType(ir.DataType.INT32)
        value.shape = value.shape or ir.Shape([None] * (1 + name.startswith("tokens")))
        gb.add_output(value, name)
    functions = list(gb.functions.values())
    proto = ir.to_proto(ir.Model(gb.graph, ir_version=11, functions=functions))
    onnx.checker.check_model(proto)
    return proto


def to_session(
    proto: onnx.ModelProto,
    profile: Path | None = None,
    kernels: Path | None = None,
    threads: int = 2,
) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    if kernels is not None:
        options.register_custom_ops_library(str(kernels))
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile / "run")
    return ort.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])


def model(operator: Operator) -> onnx.ModelProto:
    gb = builder()
    tokens, accepted = operator.onnx(gb.op, *graph_inputs(gb, operator is REJECTION_SAMPLE_LAWS))
    return to_proto(gb, {"tokens": tokens, "accepted": accepted})


@cache
def compiled(laws: bool) -> ort.InferenceSession:
    return to_session(model(REJECTION_SAMPLE_LAWS if laws else REJECTION_SAMPLE))


def random_case(rng: np.random.Generator, b: int, k: int, v: int, laws: bool) -> Feeds:
    """Slots of every kind side by side; logits from flat to peaked, with ties now and then."""
    scale = rng.choice([0.3, 2.0, 6.0], (b, 1, 1))
    logits = (rng.standard_normal((b, k + 1, v)) * scale).astype(np.float32)
    if rng.random() < 0.3:
        logits = np.round(logits * 2) / 2
    best = logits[:, :k].argmax(-1)
    ids = np.where(rng.random((b, k)) < 0.6, best, rng.integers(-1, v, (b, k)))
    top_k = np.where(rng.random(b) < 0.5, 0, rng.choice([1, 5, 20, 64, 65, 900, 2000], b))
    feeds = {
        "logits": logits,
        "draft_ids": ids,
        "num_drafts": rng.integers(0, k + 1, b),
        "accept_uniforms": rng.random((b, k)) ** 2,
        "pick_uniforms": rng.random((b, k + 1)),
        "temperature": rng.choice([0.0, 0.3, 1.0, 1.7], b, p=[0.2, 0.2, 0.4, 0.2]),
        "top_k": top_k,
        "top_p": rng.choice([1.0, 0.95, 0.5, 0.01], b, p=[0.4, 0.3, 0.2, 0.1]),
        "banned_rows": rng.choice([0, 1, k + 1], b),
        "stop_ids": rng.integers(-1, min(v, 9), (b, 3)),
    }
    if laws:
        feeds["draft_probs"] = rng.dirichlet(np.ones(v) * rng.choice([0.05, 1.0]), (b, k))
        near = np.exp(logits[:, :k].astype(np.float64))
        feeds["draft_probs"][: b // 2] = (near / near.sum(-1, keepdims=True))[: b // 2]
    if rng.random() < 0.1:
        logits[rng.integers(b), rng.integers(k + 1), rng.integers(v)] = np.nan
    return typed(feeds)


def typed(feeds: Feeds) -> Feeds:
    kinds = {name: np.int32 if name in INTEGERS else np.float32 for name in feeds}
    return {name: np.ascontiguousarray(a, kinds[name]) for name, a in feeds.items()}


def uniform_batch(
    logits: np.ndarray, rng: np.random.Generator, t: float, k: int, p: float
) -> Feeds:
    b, r, _ = logits.shape
    return typed(
        {
            "logits": logits,
            "draft_ids": logits[:, :-1].argmax(-1),
            "num_drafts": np.full(b, r - 1),
            "accept_uniforms": rng.random((b, r - 1)),
            "pick_uniforms": rng.random((b, r)),
            "temperature": np.full(b, t),
            "top_k": np.full(b, k),
            "top_p": np.full(b, p),
            "banned_rows": np.zeros(b),
            "stop_ids": np.full((b, 1), -1),
        }
    )
