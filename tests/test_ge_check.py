"""The interface, the weights and the states of a GE graph are checked without a run."""

from pathlib import Path
from typing import Any

from qwen_mtp.graphs.spec import GraphSpec, TensorSpec
from tests.ge_findings import findings
from tests.ge_graphs import SPEC, GraphBuilder, layer, needs_wheel, weights

pytestmark = needs_wheel


def test_a_right_graph_has_no_findings(tmp_path: Path) -> None:
    weights(tmp_path)
    assert findings(layer(), spec=SPEC, weights_dir=tmp_path) == []


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
    weights(tmp_path)
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
    *before, write, read, end = (
        type(op).FromString(op.SerializeToString()) for op in model.graph[0].op
    )
    write.input.append("read:-1")
    del model.graph[0].op[:]
    model.graph[0].op.extend([*before, read, write, end])
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
