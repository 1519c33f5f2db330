"""The interpreter of GE graphs: states, order and errors."""

from pathlib import Path
from typing import Any

import pytest
import torch

from qwen_mtp.errors import PackageError
from qwen_mtp.ge.interpreter import Interpreter, WeightFiles
from tests.ge_build import GraphBuilder, Type, evaluate, no_weights

torch.manual_seed(1)
X, Y = torch.randn(3, 4), torch.rand(3, 4) + 0.5
INTS = torch.tensor([[7, -7, 3]], dtype=torch.int32)
BYTES = torch.randint(-128, 128, (3, 70), dtype=torch.int8)
SMALL = torch.randint(-128, 128, (70, 5), dtype=torch.int8)
TWO = torch.full_like(INTS, 2)
LONGS = torch.tensor([2, 0])


@pytest.mark.parametrize(
    ("kind", "inputs", "attrs", "message"),
    [
        ("Frobnicate", {"x": X}, {}, r"made \(Frobnicate\): the type is not implemented"),
        ("Add", {"x1": X, "x2": Y}, {"alpha": 2.0}, "attribute alpha is not implemented"),
        ("GatherV2", {"x": X, "i": LONGS, "axis": 0}, {"batch_dims": 1}, "batch_dims=1"),
        ("Exp", {"x": X}, {"base": 2.0}, "base=2.0 is not implemented"),
        ("Muls", {"x": X}, {}, "attribute value is missing"),
        ("Add", {"x1": X, "x2": X.double()}, {}, "GE does not promote"),
        ("ConcatV2", {"x0": X, "x1": INTS, "concat_dim": 0}, {"N": 2}, "GE does not promote"),
        ("RealDiv", {"x1": INTS, "x2": TWO}, {}, "it takes floats"),
        ("GatherV2", {"x": X, "i": LONGS + 2, "axis": 0}, {}, "out of range"),
        ("ScatterNdUpdate", {"var": X, "i": LONGS[:, None] - 1, "u": Y[:2]}, {}, "lies outside"),
        ("QuantBatchMatmulV3", {"x1": BYTES, "x2": SMALL, "offset": X}, {"dtype": 1}, "offset"),
        ("FusedInferAttentionScore", {"query": X, "pse_shift": X}, {}, "pse_shift"),
    ],
)
def test_what_is_not_implemented_is_an_error_that_names_the_operator(
    kind: str, inputs: dict[str, Any], attrs: dict[str, Any], message: str
) -> None:
    with pytest.raises(PackageError, match=message) as caught:
        evaluate(kind, inputs, attrs)
    assert "made" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_input_of_another_shape_or_type_is_an_error() -> None:
    graph = GraphBuilder()
    run = Interpreter(graph.model(graph.op("Neg", {"x": graph.data("x", X)})), no_weights).run
    for wrong in (X[:2], X.double()):
        with pytest.raises(PackageError, match="the input x is"):
            run({"x": wrong})
    with pytest.raises(PackageError, match="the input x is missing"):
        run({})


def _stored(graph: GraphBuilder, state: str, after: tuple[str, ...] = ()) -> str:
    place, rows = graph.const([[1]]), graph.const(Y[:1])
    edges = {"var": state, "indices": place, "updates": rows}
    return graph.op("ScatterNdUpdate", edges, {}, ("var",), after=after, name="write")


def test_a_state_is_updated_in_place_and_outputs_are_never_its_memory() -> None:
    graph = GraphBuilder()
    interpreter = Interpreter(graph.model(_stored(graph, graph.ref("s", X))), no_weights)
    state = X.clone()
    address = state.data_ptr()
    (out,) = interpreter.run({"s": state}).values()
    assert state.data_ptr() == address
    assert torch.equal(state[1], Y[0])
    assert torch.equal(state[0], X[0])
    out.zero_()
    assert torch.equal(state[1], Y[0])


def test_what_is_not_a_state_is_not_changed_in_place() -> None:
    graph = GraphBuilder()
    copied = graph.op("TensorMove", {"x": graph.data("s", X)})
    written = _stored(graph, copied)
    model = graph.model(written, graph.op("Neg", {"x": copied}, name="neg"))
    state = X.clone()
    out = Interpreter(model, no_weights).run({"s": state})
    assert torch.equal(state, X)
    assert torch.equal(out["write"][1], Y[0])
    assert torch.equal(out["neg"], -X)


def test_a_value_read_before_a_write_stays_what_it_was() -> None:
    graph = GraphBuilder()
    state = graph.ref("s", X)
    read = graph.op("Reshape", {"x": state, "shape": graph.const([12])}, name="read")
    before = f"{read.split(':')[0]}:-1"
    model = graph.model(_stored(graph, state, (before,)), graph.op("Neg", {"x": read}, name="neg"))
    out = Interpreter(model, no_weights).run({"s": X.clone()})
    assert torch.equal(out["neg"], -X.reshape(12))
    assert torch.equal(out["write"][1], Y[0])


def test_a_read_and_a_write_that_no_edge_orders_are_an_error() -> None:
    graph = GraphBuilder()
    state = graph.ref("s", X)
    written = _stored(graph, state)
    model = graph.model(written, graph.op("Neg", {"x": state}, name="late"))
    with pytest.raises(PackageError, match=r"late and write: .* reads s, .* no edge orders them"):
        Interpreter(model, no_weights)


def test_two_writes_of_a_state_need_an_order() -> None:
    graph = GraphBuilder()
    state, rows = graph.ref("s", X), graph.data("rows", X)
    first = graph.op("Assign", {"ref": state, "value": rows}, {}, ("ref",), name="first")
    second = graph.op("Assign", {"ref": state, "value": rows}, {}, ("ref",), name="second")
    with pytest.raises(PackageError, match="first and second"):
        Interpreter(graph.model(first, second), no_weights)


def test_a_write_that_leads_nowhere_is_an_error_and_a_control_edge_mends_it() -> None:
    for after, fails in (((), True), (("write:-1",), False)):
        graph = GraphBuilder()
        kept = graph.op("Neg", {"x": graph.data("x", X)})
        _stored(graph, graph.ref("s", X))
        model = graph.model(kept, after=after)
        if fails:
            with pytest.raises(PackageError, match="the compiler removes it"):
                Interpreter(model, no_weights)
        else:
            state = X.clone()
            Interpreter(model, no_weights).run({"x": X, "s": state})
            assert torch.equal(state[1], Y[0])


def test_a_state_that_nothing_writes_is_an_error() -> None:
    graph = GraphBuilder()
    model = graph.model(graph.op("Neg", {"x": graph.ref("s", X)}))
    with pytest.raises(PackageError, match="nothing writes the state s"):
        Interpreter(model, no_weights)


def test_a_write_into_a_view_of_a_state_is_an_error() -> None:
    graph = GraphBuilder()
    view = graph.op("Reshape", {"x": graph.ref("s", X), "shape": graph.const([6, 2])}, name="v")
    with pytest.raises(PackageError, match="it writes v, a view of s"):
        Interpreter(graph.model(_stored(graph, view)), no_weights)


def test_a_write_into_a_constant_is_an_error() -> None:
    graph = GraphBuilder()
    with pytest.raises(PackageError, match="which is no state"):
        Interpreter(graph.model(_stored(graph, graph.const(X))), no_weights)


def test_edges_that_start_nowhere_and_doubled_names_are_errors() -> None:
    graph = GraphBuilder()
    with pytest.raises(PackageError, match="ghost:0 is not defined yet"):
        Interpreter(graph.model(graph.op("Neg", {"x": "ghost:0"})), no_weights)
    graph = GraphBuilder()
    edge = graph.op("Neg", {"x": graph.op("Neg", {"x": graph.data("x", X)}, name="n")}, name="n")
    with pytest.raises(PackageError, match="the name is there twice"):
        Interpreter(graph.model(edge), no_weights)


def test_constants_are_folded_and_weights_are_read_once(tmp_path: Path) -> None:
    graph = GraphBuilder()
    weight = graph.op(
        "FileConstant",
        {},
        {"file_path": "w", "file_id": "w", "shape": [3, 4], "dtype": Type(0)},
        name="weight",
    )
    turned = graph.op("Transpose", {"x": weight, "perm": graph.const([1, 0])})
    model = graph.model(graph.op("MatMul", {"x1": graph.data("x", X), "x2": turned}, name="out"))
    (tmp_path / "w").write_bytes(Y.numpy().tobytes())
    files = WeightFiles(tmp_path)
    interpreter = Interpreter(model, files)
    assert interpreter.size == 1
    torch.testing.assert_close(interpreter.run({"x": X})["out"], X @ Y.T)
    held = files("w", torch.float32, (3, 4))
    assert held.data_ptr() == files("w", torch.float32, (3, 4)).data_ptr()
    with pytest.raises(PackageError, match="48 bytes, 64 are needed"):
        files("w", torch.float32, (4, 4))


def test_a_run_leaves_no_trace_of_the_run_before() -> None:
    graph = GraphBuilder()
    total = graph.op("Add", {"x1": graph.data("x", X), "x2": graph.const(Y)}, name="sum")
    interpreter = Interpreter(graph.model(total), no_weights)
    first = interpreter.run({"x": X})["sum"]
    assert torch.equal(interpreter.run({"x": -X})["sum"], Y - X)
    assert torch.equal(first, X + Y)
