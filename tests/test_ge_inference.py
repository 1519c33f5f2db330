"""Dtypes and shapes that operators of a GE graph have by their rules."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qwen_mtp.ge.inference import infer
from qwen_mtp.ge.view import nodes_of
from tests.ge_findings import findings
from tests.ge_graphs import GraphBuilder, Type, needs_wheel
from tests.ge_kernels import attention, delta, sampler

pytestmark = needs_wheel


def one(op: str, inputs: dict[str, Any], outputs: tuple[str, ...] = ("y",), **more: Any) -> str:
    """Dtypes and shapes one operator has, or why it has none. Arrays become constants."""
    b = GraphBuilder()
    edges = {}
    for port, given in inputs.items():
        if isinstance(given, np.ndarray):
            edges[port] = b.const(given, str(given.dtype))
        else:
            dtype, *shape = given
            edges[port] = b.data(port, dtype, shape)
    b.op(op, edges, outputs, name="it", **more)
    found = infer(nodes_of(b.model))
    values = [found.values.get(f"it:{i}") for i in range(len(outputs))]
    return "; ".join(str(v) for v in values if v) or found.findings[-1].message


def ints(*values: int) -> Any:
    return np.array(values)


OUT = ("attention_out", "softmax_lse")
ATTENTION: dict[str, Any] = {
    "num_heads": 6,
    "num_key_value_heads": 2,
    "block_size": 16,
    "scale": 0.25,
    "input_layout": "BSND",
}


CASES: dict[str, tuple[Callable[[], str], str]] = {
    "operands broadcast": (
        lambda: one("Add", {"x1": ("float32", 4, 1), "x2": ("float32", 3)}),
        "DT_FLOAT[4, 3]",
    ),
    "dtypes are never mixed": (
        lambda: one("Less", {"x1": ("int32", 4), "x2": ("int64", 4)}),
        "Less: inputs have different dtypes: DT_INT32, DT_INT64",
    ),
    "a product has rows and columns": (
        lambda: one(
            "MatMul", {"x1": ("float16", 5, 3), "x2": ("float16", 7, 3)}, transpose_x2=True
        ),
        "DT_FLOAT16[5, 7]",
    ),
    "inner dimensions agree": (
        lambda: one("BatchMatMul", {"x1": ("float32", 2, 5, 3), "x2": ("float32", 2, 4, 5)}),
        "BatchMatMul: DT_FLOAT[2, 5, 3] by DT_FLOAT[2, 4, 5]: inner dimensions 3 and 4 differ",
    ),
    "a reshape fills its open dimension": (
        lambda: one("Reshape", {"x": ("int32", 4, 6), "shape": ints(-1, 8)}),
        "DT_INT32[3, 8]",
    ),
    "a reshape keeps every element": (
        lambda: one("Reshape", {"x": ("int32", 4, 6), "shape": ints(5, 5)}),
        "Reshape: DT_INT32[4, 6] does not fit shape [5, 5]",
    ),
    "a slice takes from the end": (
        lambda: one(
            "StridedSliceV2",
            {"x": ("float32", 9, 4), "begin": ints(-3), "end": ints(2**31), "axes": ints(0)},
        ),
        "DT_FLOAT[3, 4]",
    ),
    "parts of a split add up": (
        lambda: one(
            "SplitV",
            {"x": ("float32", 9), "size_splits": ints(4, -1), "split_dim": ints(0)},
            ("y0", "y1"),
            num_split=2,
        ),
        "DT_FLOAT[4]; DT_FLOAT[5]",
    ),
    "a gather puts its indices in place of an axis": (
        lambda: one(
            "GatherV2", {"x": ("float32", 9, 4), "indices": ("int32", 2, 5), "axis": ints(1)}
        ),
        "DT_FLOAT[9, 2, 5]",
    ),
    "constant indices lie inside": (
        lambda: one("GatherV2", {"x": ("float32", 9), "indices": ints(9), "axis": ints(0)}),
        "GatherV2: indices reach outside 0..8",
    ),
    "a scatter fits what it writes": (
        lambda: one(
            "ScatterNdUpdate",
            {"var": ("float32", 9, 4), "indices": ("int32", 3, 1), "updates": ("float32", 3, 5)},
            ("var",),
        ),
        "ScatterNdUpdate: updates DT_FLOAT[3, 5] where [3, 4] is written",
    ),
    "a mixed range is a float": (
        lambda: one(
            "Range",
            {
                "start": np.array(0, "int32"),
                "limit": np.array(5),
                "delta": np.array(1, "int32"),
            },
        ),
        "DT_FLOAT[5]",
    ),
    "a shape must be known": (
        lambda: one("Fill", {"dims": ("int64", 2), "value": np.array(1.0, "float32")}),
        "Fill: input dims must be a constant the shape can be told from",
    ),
    "packed weights are cast to their bits": (
        lambda: one("Bitcast", {"x": ("float32", 4, 2)}, type=Type("float16")),
        "DT_FLOAT16[4, 2, 2]",
    ),
    "a norm has a factor for each row": (
        lambda: one("RmsNorm", {"x": ("bfloat16", 4, 8), "gamma": ("bfloat16", 8)}, ("y", "rstd")),
        "DT_BF16[4, 8]; DT_FLOAT[4, 1]",
    ),
    "a gated unit halves its width": (
        lambda: one("SwiGlu", {"x": ("bfloat16", 4, 8)}, dim=-1),
        "DT_BF16[4, 4]",
    ),
    "quantised rows have a scale each": (
        lambda: one("DynamicQuant", {"x": ("float16", 4, 8)}, ("y", "scale")),
        "DT_INT8[4, 8]; DT_FLOAT[4]",
    ),
    "a quantised product has its own dtype": (
        lambda: one(
            "QuantBatchMatmulV3",
            {
                "x1": ("int8", 4, 8),
                "x2": ("int8", 8, 6),
                "scale": ("float32", 6),
                "pertoken_scale": ("float32", 4),
            },
            dtype=27,
        ),
        "DT_BF16[4, 6]",
    ),
    "products of bytes are summed in words": (
        lambda: one("MatMulV2", {"x1": ("int8", 4, 8), "x2": ("int8", 8, 6)}),
        "DT_INT32[4, 6]",
    ),
    "a drawn token for each row": (
        lambda: one("MtpRejectionSample", sampler(), ("tokens", "num_accepted_drafts")),
        "DT_INT32[2, 4]; DT_INT32[2]",
    ),
    "groups of a quantised weight have a scale each": (
        lambda: one(
            "WeightQuantBatchMatmulV2",
            {
                "x": ("bfloat16", 4, 64),
                "weight": ("int8", 64, 6),
                "antiquant_scale": ("bfloat16", 3, 6),
            },
            antiquant_group_size=32,
        ),
        "WeightQuantBatchMatmulV2: antiquant_scale is DT_BF16[3, 6], not one of ((2, 6),)",
    ),
    "rotation keeps the heads": (
        lambda: one(
            "RotaryMul",
            {
                "x": ("bfloat16", 2, 4, 3, 16),
                "r1": ("bfloat16", 2, 4, 1, 16),
                "r2": ("bfloat16", 2, 4, 1, 16),
            },
        ),
        "DT_BF16[2, 4, 3, 16]",
    ),
    "rows go into pools of their heads": (
        lambda: one(
            "ScatterPaKvCache",
            {
                "key": ("bfloat16", 4, 2, 16),
                "key_cache": ("bfloat16", 8, 16, 3, 16),
                "slot_mapping": ("int32", 4),
                "value": ("bfloat16", 4, 2, 16),
                "value_cache": ("bfloat16", 8, 16, 2, 16),
            },
            ("key_cache", "value_cache"),
        ),
        "ScatterPaKvCache: DT_BF16[4, 2, 16] does not fit pool DT_BF16[8, 16, 3, 16]",
    ),
    "the delta rule answers for every row and slot": (
        lambda: one("RecurrentGatedDeltaRule", delta(), ("out", "state")),
        "DT_BF16[8, 4, 16]; DT_BF16[9, 4, 16, 32]",
    ),
    "the state of the delta rule is by value, then key": (
        lambda: one(
            "RecurrentGatedDeltaRule",
            delta(state=("bfloat16", 9, 4, 32, 16)),
            ("out", "state"),
        ),
        "RecurrentGatedDeltaRule: state is DT_BF16[9, 4, 32, 16], slots are [4, 16, 32]",
    ),
    "a convolution keeps its rows": (
        lambda: one(
            "FusedCausalConv1d",
            {
                "x": ("bfloat16", 8, 64),
                "weight": ("bfloat16", 3, 64),
                "conv_states": ("bfloat16", 2, 5, 64),
                "query_start_loc": ("int32", 3),
                "cache_indices": ("int32", 2),
            },
            ("conv_states", "y"),
            residual_connection=0,
        ),
        "DT_BF16[2, 5, 64]; DT_BF16[8, 64]",
    ),
    "attention answers in the layout of its queries": (
        lambda: one("FusedInferAttentionScore", attention(), OUT, **ATTENTION),
        "DT_BF16[2, 4, 6, 16]; DT_FLOAT[0]",
    ),
    "attention has a table for each sequence": (
        lambda: one(
            "FusedInferAttentionScore", attention(block_table=("int32", 3, 5)), OUT, **ATTENTION
        ),
        "FusedInferAttentionScore: block_table [3, 5] for [2] sequences",
    ),
    "causal attention has the mask its kernel wants": (
        lambda: one(
            "FusedInferAttentionScore", attention(), OUT, **{**ATTENTION, "sparse_mode": 3}
        ),
        "FusedInferAttentionScore: sparse_mode 3 needs a mask of 2048 x 2048, found None",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_inference_of_one_operator(case: str) -> None:
    found, wanted = CASES[case]
    assert found() == wanted


def test_a_shape_that_is_computed_from_constants_is_followed() -> None:
    b = GraphBuilder()
    x = b.data("x", "float32", (4, 6))
    head = b.op(
        "GatherV2", {"x": b.op("Shape", {"x": x}), "indices": b.const([0]), "axis": b.const(0)}
    )
    rest = b.op("Mul", {"x1": b.const([2], "int32"), "x2": b.const([3], "int32")})
    shape = b.op("ConcatV2", {"x0": head, "x1": rest, "concat_dim": b.const(0)}, N=2)
    edge = b.op("Reshape", {"x": x, "shape": shape})
    assert findings(b.end([(edge, "float32", (4, 6))])) == []


def test_an_operator_without_a_rule_is_named() -> None:
    b = GraphBuilder()
    edge = b.op("Erf", {"x": b.data("x", "float32", (2,))})
    found = findings(b.end([(edge, "float32", (2,))]))
    assert any(f.startswith("inference: Erf") and "no rule" in f for f in found)
    assert any(f.startswith("soc: Erf") for f in found)
