"""The checks of GE graphs that need neither an NPU nor a run of the graph."""

import ast
import re
from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_mtp.errors import ExportError
from qwen_mtp.ge.check import check_graph
from qwen_mtp.ge.inference import RULES, infer
from qwen_mtp.ge.overlay import OVERLAY, Entry, Extended, Widened, corrected
from qwen_mtp.ge.prototypes import parse
from qwen_mtp.ge.soc import SOCS, check_format, check_rows, find_soc
from qwen_mtp.ge.view import nodes_of
from qwen_mtp.ge.wheel import find_wheel
from qwen_mtp.graphs.spec import GraphSpec, TensorSpec
from tests.ge_graphs import SPEC, GraphBuilder, Type, declared, layer, needs_wheel, prototypes
from tests.ge_graphs import weights as write_weights

pytestmark = needs_wheel
B4 = "Ascend910B4"


def findings(model: Any, soc: str = B4, **given: Any) -> list[str]:
    return [str(f) for f in check_graph(model, prototypes(), find_soc(soc), **given)]


def ops(model: Any) -> Any:
    return model.graph[0].op


# Prototypes


# Operators with a rule whose generated function says something else than its own doc string: it
# cannot name an argument ``else``, or was edited by hand.
EDITED = {"SelectV2", "ScatterPaKvCache", "RotaryPositionEmbedding", "RecurrentGatedDeltaRule"}


@cache
def generated() -> dict[str, ast.FunctionDef]:
    folder = find_wheel().torchair / "_ge_concrete_graph"
    tree = ast.parse((folder / "auto_generated_ge_raw_ops.py").read_text(encoding="utf-8"))
    functions = {f.name.lstrip("_"): f for f in tree.body if isinstance(f, ast.FunctionDef)}
    return {
        name: function
        for name, function in functions.items()
        if "REG_OP" in (ast.get_docstring(function) or "") and declared()(name)
    }


def test_declarations_are_read_as_the_generated_functions_take_them() -> None:
    """Each function beside a declaration was generated from the same source by another parser."""
    differing = set()
    for name, function in generated().items():
        found = declared()(name)
        assert found is not None
        inputs = [argument.arg for argument in function.args.args]
        plain = {a.arg for a in function.args.kwonlyargs} - {"dependencies", "node_name"}
        sizes = {f"size_of_{port.name}" for port in found.outputs}  # of dynamic outputs
        attributes = {attribute.name for attribute in found.attributes}
        if [p.name for p in found.inputs] != inputs or attributes != plain - sizes:
            differing.add(name)
    assert len(generated()) > 1700
    assert len(differing) < 25
    assert differing & RULES.keys() == EDITED


def test_optional_inputs_are_those_the_generated_functions_take_as_none() -> None:
    differing = set()
    for name, function in generated().items():
        found = declared()(name)
        assert found is not None
        hints = {a.arg: ast.unparse(a.annotation) for a in function.args.args if a.annotation}
        optional = {argument for argument, hint in hints.items() if "Optional" in hint}
        if {p.name for p in found.inputs if p.arity == "optional"} != optional:
            differing.add(name)
    assert differing & RULES.keys() <= EDITED
    assert len(differing) < 12


def test_a_declaration_is_parsed_into_ports_and_attributes() -> None:
    found = parse(
        "Op",
        '.INPUT(a, "T1").OPTIONAL_INPUT(b, TensorType({DT_FLOAT, DT_BFLOAT16}))'
        ".DYNAMIC_INPUT(c, TensorType::IndexNumberType()).OUTPUT(y, TensorType({BasicType(), "
        'DT_BOOL})).ATTR(mode, String, "a, b").REQUIRED_ATTR(axes, ListInt)'
        ".DATATYPE(T1, TensorType({DT_INT8})).OP_END_FACTORY_REG(Op)",
    )
    assert [(p.name, p.arity) for p in found.inputs] == [
        ("a", "required"),
        ("b", "optional"),
        ("c", "dynamic"),
    ]
    assert [p.dtypes for p in found.inputs] == [
        {"DT_INT8"},
        {"DT_FLOAT", "DT_BF16"},
        {"DT_INT32", "DT_INT64"},
    ]
    assert found.inputs[0].symbol == "T1"
    assert {"DT_BOOL", "DT_BF16", "DT_INT64"} <= found.outputs[0].dtypes
    assert [(a.name, a.type, a.required, a.default) for a in found.attributes] == [
        ("mode", "String", False, '"a, b"'),
        ("axes", "ListInt", True, ""),
    ]


# The overlay


def test_every_correction_says_why() -> None:
    for entry in OVERLAY:
        assert len(entry.reason.split()) > 5, entry.op


def test_every_correction_changes_what_the_wheel_declares() -> None:
    for entry in OVERLAY:
        assert corrected(declared(), [entry])(entry.op) != declared()(entry.op), entry


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


@pytest.mark.parametrize("entry", OVERLAY, ids=lambda e: f"{e.op}-{type(e).__name__}")
def test_every_correction_is_needed_by_a_graph_of_its_operator(entry: Entry) -> None:
    model = user_of(entry)
    rest = [other for other in OVERLAY if other is not entry]
    assert [f for f in check_graph(model, prototypes()) if f.rule != "unused"] == []
    refused = check_graph(model, corrected(declared(), rest))
    assert {f.rule for f in refused} <= {"prototype", "dtype", "attribute", "unused"}
    assert {f.rule for f in refused} - {"unused"}


# A right graph


def test_a_right_graph_has_no_findings(tmp_path: Path) -> None:
    write_weights(tmp_path)
    assert findings(layer(), spec=SPEC, weights_dir=tmp_path) == []


def test_an_operator_without_a_rule_is_named() -> None:
    b = GraphBuilder()
    edge = b.op("Erf", {"x": b.data("x", "float32", (2,))})
    found = findings(b.end([(edge, "float32", (2,))]))
    assert any(f.startswith("inference: Erf") and "no rule" in f for f in found)
    assert any(f.startswith("soc: Erf") for f in found)


# Inference


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


# Interface, weights, states


def spec(**changed: Any) -> GraphSpec:
    values = {name: getattr(SPEC, name) for name in GraphSpec.__dataclass_fields__}
    return GraphSpec(**{**values, **changed})


def test_the_interface_is_compared_with_the_graph_tables() -> None:
    more = (*SPEC.inputs, TensorSpec("extra", "int32", (1,)))
    assert findings(layer(), spec=spec(inputs=more)) == [
        "interface: extra: no such input",
        "interface: pool: the input has index 2, its place is 3",
    ]
    fewer = findings(layer(), spec=spec(inputs=SPEC.inputs[1:]))
    assert "interface: ids: an input that the graph tables do not have" in fewer
    outputs = (SPEC.outputs[1], SPEC.outputs[0])
    assert any(
        "output tokens comes from hidden:0" in f
        for f in findings(layer(), spec=spec(outputs=outputs))
    )


def test_a_state_that_is_replaced_is_no_refdata() -> None:
    new = (*SPEC.outputs, TensorSpec("pool.new", "float32", (6, 2, 3), "pool"))
    found = findings(layer(), spec=spec(outputs=new))
    assert "interface: pool: the input is RefData, Data is needed" in found


def test_a_weight_file_has_the_bytes_of_its_shape(tmp_path: Path) -> None:
    write_weights(tmp_path)
    (tmp_path / "weights" / "up").write_bytes(b"123")
    assert findings(layer(), weights_dir=tmp_path) == [
        "file: up: weights/up has 3 bytes, 384 are needed"
    ]


def test_a_state_written_through_a_view_is_found() -> None:
    b = GraphBuilder()
    state = b.data("state", "float32", (2, 3, 4), "RefData")
    flat = b.op("Reshape", {"x": state, "shape": b.const([6, 4])})
    rows = {
        "var": flat,
        "indices": b.const([[1]], "int32"),
        "updates": b.data("x", "float32", (1, 4)),
    }
    edge = b.op("ScatterNdUpdate", rows, ("var",))
    found = findings(b.end([(edge, "float32", (6, 4))]))
    assert [f.split(", which")[0] for f in found] == [
        "state: state: RefData: it is written through Reshape/2:0"
    ]


def test_a_read_that_no_edge_puts_before_the_write_is_found() -> None:
    b = GraphBuilder()
    state = b.data("state", "float32", (2, 4), "RefData")
    new, at = b.data("x", "float32", (1, 4)), b.const([[1]], "int32")
    b.op("ScatterNdUpdate", {"var": state, "indices": at, "updates": new}, ("var",), name="write")
    old = b.op("Neg", {"x": state}, name="read")
    model = b.end([(old, "float32", (2, 4)), ("write:0", "float32", (2, 4))])
    assert findings(model) == ["state: state: RefData: read reads it in no order with write"]
    *before, write, read, end = (type(op).FromString(op.SerializeToString()) for op in ops(model))
    write.input.append("read:-1")
    del ops(model)[:]
    ops(model).extend([*before, read, write, end])
    assert findings(model) == []


def test_a_write_that_leads_to_no_output_is_found() -> None:
    b = GraphBuilder()
    state = b.data("state", "float32", (2, 4), "RefData")
    value = b.data("x", "float32", (2, 4))
    b.op("Assign", {"ref": state, "value": value}, ("ref",), name="write")
    model = b.end([(b.op("Neg", {"x": value}), "float32", (2, 4))])
    assert findings(model) == ["unused: write: Assign: it leads to no output"]
    model.graph[0].op[-1].input.append("write:-1")
    assert findings(model) == []


# Processors


def test_processors_are_found_whatever_the_case() -> None:
    assert find_soc("ascend310p3").family == "310P"
    assert len({soc.name for soc in SOCS}) == len(SOCS)


def test_an_unknown_processor_is_refused_with_those_known() -> None:
    with pytest.raises(ExportError, match=r"Ascend999: unknown processor; known are .*310P3"):
        find_soc("Ascend999")


def test_fused_passes_are_limited_in_rows() -> None:
    check_rows(find_soc(B4), "fused", 16)
    check_rows(find_soc(B4), "portable", 40)
    with pytest.raises(ExportError, match="16 drafts make passes of 17 rows"):
        check_rows(find_soc(B4), "fused", 17)
    with pytest.raises(ExportError, match="can take 8"):
        check_rows(find_soc("Ascend310P3"), "fused", 9)


def test_310p_has_neither_int4_nor_bfloat16_nor_float32() -> None:
    soc = find_soc("Ascend310P3")
    check_format(soc, "int8", "float16")
    with pytest.raises(ExportError, match="int4 weights; use fp16, int8"):
        check_format(soc, "int4", "float16")
    with pytest.raises(ExportError, match="bfloat16; use float16"):
        check_format(soc, "int8", "bfloat16")
    with pytest.raises(ExportError, match="fp32 weights; use fp16"):
        check_format(soc, "fp32", "float32")
    with pytest.raises(ExportError, match="computed in float16; use that"):
        check_format(soc, "int8", "float32")


def test_operators_and_dtypes_are_those_of_the_processor() -> None:
    b = GraphBuilder()
    ports = {
        "key": (4, 2, 16),
        "key_cache": (8, 16, 2, 16),
        "value": (4, 2, 16),
        "value_cache": (8, 16, 2, 16),
    }
    edges = {name: b.data(name, "bfloat16", shape) for name, shape in ports.items()}
    edges["slot_mapping"] = b.data("slots", "int32", (4,))
    order = ("key", "key_cache", "slot_mapping", "value", "value_cache")
    outputs = ("key_cache", "value_cache")
    edge = b.op("ScatterPaKvCache", {n: edges[n] for n in order}, outputs)
    model = b.end([(edge, "bfloat16", (8, 16, 2, 16))])
    assert findings(model) == []
    found = findings(model, "Ascend310P3")
    assert any("has no such operator" in f for f in found)
    assert any("does not have DT_BF16" in f for f in found)


def test_an_operator_of_a_package_is_taken_where_the_package_is() -> None:
    entry = next(entry for entry in OVERLAY if entry.op == "RecurrentGatedDeltaRule")
    model = user_of(entry)
    assert any("has no such operator" in f for f in findings(model, "Ascend310P3"))
    assert findings(model, "Ascend310P3", custom_ops=[entry.op]) == []
    assert any("takes DT_BF16, not DT_FLOAT16" in f for f in findings(model, B4))


def test_every_rule_is_of_an_operator_that_is_declared() -> None:
    assert [name for name in RULES if prototypes()(name) is None] == []


# Against what runs and what was traced


def test_inferred_dtypes_and_shapes_are_those_of_a_run(tmp_path: Path) -> None:
    """Every tensor of the graph becomes an output of it."""
    import torch

    from qwen_mtp.ge.interpreter import Interpreter, WeightFiles

    model = layer()
    values = infer(nodes_of(model)).values
    sources = {"Data", "RefData", "Const", "FileConstant"}
    inner = [op for op in model.graph[0].op if op.type not in {*sources, "NetOutput"}]
    edges = [f"{op.name}:{i}" for op in inner for i in range(len(op.output_desc))]
    end = model.graph[0].op[-1]
    del end.input[:], end.input_desc[:]
    for i, edge in enumerate(edges):
        end.input.append(edge)
        end.input_desc.add(name=f"input{i}")
    write_weights(tmp_path)
    inputs = {
        "ids": torch.tensor([3, 1, 4, 15], dtype=torch.int32),
        "start": torch.tensor([2], dtype=torch.int32),
        "pool": torch.zeros(6, 2, 3),
    }
    found = Interpreter(model, WeightFiles(tmp_path), edges).run(inputs)
    names = {torch.float32: "DT_FLOAT", torch.int32: "DT_INT32", torch.int64: "DT_INT64"}
    names[torch.bool] = "DT_BOOL"
    assert len(edges) > 25
    for edge in edges:
        ran = (names[found[edge].dtype], tuple(found[edge].shape))
        assert (values[edge].dtype, values[edge].shape) == ran, edge


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch and torchair warn of their own code
def test_inferred_dtypes_and_sizes_are_those_torch_traced() -> None:
    """torchair notes what torch traced for a node on its last operator; views only reshape it."""
    import torch

    from qwen_mtp.export.air import convert

    class Module(torch.nn.Module):
        def forward(self, x: Any, ids: Any, mask: Any) -> Any:
            rows = x.index_select(0, ids.reshape(-1)).reshape(2, 3, 8)
            a, b = rows.split([3, 5], 2)
            y = torch.bmm(a, a.transpose(1, 2)).softmax(-1)
            low = torch.full((), -1.0)
            y = torch.where(mask.unsqueeze(0) > 0, y, low)
            z = torch.cat([y, b], 2).cumsum(2)
            top, at = z.topk(3, 2)
            tail = torch.stack([z[:, :, i] for i in range(3)], 1).mean(1, keepdim=True)
            near = z.gather(2, at).sum((1, 2)).sigmoid()
            half = (tail.half() * 2).exp().to(torch.bfloat16)
            step = (torch.arange(3, dtype=torch.int32) + ids.sum(1).int().sum()).clamp(0, 5)
            best = z.argmax(2).int().eq(step).any(1)
            return top.neg(), near, half, step, best, z.sort(2)[1], z.max(2)[0].abs()

    args = (torch.ones(9, 8), torch.ones(2, 3, dtype=torch.int32), torch.ones(3, 3))
    program = torch.export.export(Module(), args).run_decompositions()
    for node in list(program.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            program.graph.erase_node(node)
    program.graph_module.recompile()
    model = convert(program).model
    found = infer(nodes_of(model))
    assert [f for f in found.findings if f.rule != "declared"] == []
    names = {
        "float32": "DT_FLOAT", "float16": "DT_FLOAT16", "bfloat16": "DT_BF16",
        "int32": "DT_INT32", "int64": "DT_INT64", "bool": "DT_BOOL",
    }  # fmt: skip
    compared = 0
    for op in model.graph[0].op:
        for i, desc in enumerate(op.output_desc):
            note = desc.attr["_meta"].s.decode() if "_meta" in desc.attr else ""
            match = re.match(r"Tensor\(dtype=torch\.(\w+), shape=torch\.Size\(\[(.*?)\]\)", note)
            if match:
                size = prod(int(d) for d in match[2].split(",") if d.strip())
                value = found.values[f"{op.name}:{i}"]
                assert (value.dtype, prod(value.shape)) == (names[match[1]], size), op.name
                compared += 1
    assert compared > 40
