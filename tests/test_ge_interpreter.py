"""The interpreter of GE graphs: states, order, errors, and the standard operators."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as nn

from qwen_mtp.errors import PackageError
from qwen_mtp.ge.interpreter import Interpreter, WeightFiles
from tests.ge_build import GraphBuilder, Type, evaluate, no_weights

torch.manual_seed(1)
X, Y = torch.randn(3, 4), torch.rand(3, 4) + 0.5
INTS, WIDE = torch.tensor([[7, -7, 3]], dtype=torch.int32), torch.randn(2, 3, 4)
BOOLS = torch.tensor([[True, False, True, False]])
HALF = torch.randn(5, 64).to(torch.bfloat16)
HALVES = torch.randn(64, 6).to(torch.bfloat16)
BYTES = torch.randint(-128, 128, (3, 70), dtype=torch.int8)
SMALL = torch.randint(-128, 128, (70, 5), dtype=torch.int8)
TWO = torch.full_like(INTS, 2)
LONGS = torch.tensor([2, 0])
TABLE = torch.tensor([[2, 0, 1], [1, 1, 0]], dtype=torch.int32)

Case = tuple[str, dict[str, Any], dict[str, Any], torch.Tensor]
MATH: list[Case] = [
    ("Add", {"x1": X, "x2": Y}, {}, X + Y),
    ("Sub", {"x1": X, "x2": Y}, {}, X - Y),
    ("Mul", {"x1": X, "x2": Y}, {}, X * Y),
    ("Mul", {"x1": HALF, "x2": HALF.float()}, {}, HALF.float() ** 2),
    ("RealDiv", {"x1": X, "x2": Y}, {}, X / Y),
    ("Div", {"x1": INTS, "x2": TWO}, {}, torch.tensor([[3, -3, 1]], dtype=torch.int32)),
    ("FloorDiv", {"x1": INTS, "x2": TWO}, {}, torch.tensor([[3, -4, 1]], dtype=torch.int32)),
    ("FloorMod", {"x1": INTS, "x2": TWO}, {}, torch.tensor([[1, 1, 1]], dtype=torch.int32)),
    ("Mod", {"x1": INTS, "x2": TWO}, {}, torch.tensor([[1, -1, 1]], dtype=torch.int32)),
    ("Pow", {"x1": Y, "x2": X}, {}, Y**X),
    ("Maximum", {"x1": X, "x2": Y}, {}, torch.where(X > Y, X, Y)),
    ("Minimum", {"x1": X, "x2": Y}, {}, torch.where(X < Y, X, Y)),
    ("Exp", {"x": X}, {"base": -1.0, "scale": 1.0, "shift": 0.0}, X.exp()),
    ("Log", {"x": Y}, {}, Y.log()),
    ("Muls", {"x": X}, {"value": 0.5}, X / 2),
    ("Swish", {"x": X}, {"scale": 1.0}, X / (1 + (-X).exp())),
    ("SoftplusV2", {"x": X}, {"beta": 1.0}, (1 + X.exp()).log()),
    ("ClipByValueV2", {"x": INTS, "low": -3, "high": 3}, {}, INTS.clamp(-3, 3)),
    ("RightShift", {"x": INTS, "y": TWO}, {}, torch.tensor([[1, -2, 0]], dtype=torch.int32)),
    ("GreaterEqual", {"x1": X, "x2": Y}, {}, X >= Y),
    ("LogicalAnd", {"x1": BOOLS, "x2": ~BOOLS}, {}, torch.zeros(1, 4, dtype=torch.bool)),
    ("SelectV2", {"condition": BOOLS, "then": X, "else": Y}, {}, torch.where(BOOLS, X, Y)),
    ("Cast", {"x": X * 9}, {"dst_type": 3}, (X * 9).int()),
    ("ReduceSum", {"x": INTS, "axes": [1]}, {"keep_dims": True}, INTS.sum(1, True).int()),
    ("ReduceMean", {"x": WIDE, "axes": [0, -1]}, {}, WIDE.mean((0, 2))),
    ("ReduceMax", {"x": WIDE, "axes": [1]}, {}, WIDE.max(1).values),
    ("ReduceProd", {"x": WIDE, "axes": [0, 2]}, {}, WIDE.prod(2).prod(0)),
    ("ReduceAny", {"x": BOOLS, "axes": [1]}, {"keep_dims": True}, torch.tensor([[True]])),
    ("ReduceAll", {"x": BOOLS, "axes": [0, 1]}, {}, torch.tensor(False)),
    (
        "LpNormV2",
        {"x": X},
        {"axes": [-1], "keepdim": True, "p": 2.0},
        X.norm(dim=-1, keepdim=True),
    ),
    ("SoftmaxV2", {"x": WIDE}, {"axes": [1]}, WIDE.exp() / WIDE.exp().sum(1, True)),
    ("LogSoftmaxV2", {"x": X}, {"axes": [-1]}, X - X.exp().sum(1, True).log()),
    ("MatMul", {"x1": X, "x2": Y, "b": None}, {"transpose_x2": True}, X @ Y.T),
    ("MatMulV2", {"x1": X, "x2": Y, "bias": X[:, :3]}, {"transpose_x2": True}, X @ Y.T + X[:, :3]),
    ("BatchMatMul", {"x1": WIDE, "x2": WIDE}, {"adj_x1": True}, WIDE.mT @ WIDE),
    ("MatMul", {"x1": HALF, "x2": HALVES}, {}, (HALF.float() @ HALVES.float()).bfloat16()),
    ("MatMulV2", {"x1": BYTES, "x2": SMALL}, {}, (BYTES.long() @ SMALL.long()).int()),
]
SHAPE: list[Case] = [
    ("Reshape", {"x": WIDE, "shape": [6, -1]}, {"num_axes": -1}, WIDE.reshape(6, 4)),
    ("Transpose", {"x": WIDE, "perm": [2, 0, 1]}, {}, WIDE.permute(2, 0, 1)),
    ("Squeeze", {"x": X[:1, None]}, {"axis": [1]}, X[:1]),
    ("Unsqueeze", {"x": X}, {"axes": [0, 3]}, X[None, ..., None]),
    ("ExpandDims", {"x": X, "axis": -1}, {}, X[..., None]),
    ("ConcatV2", {"x0": X, "x1": Y, "concat_dim": 1}, {"N": 2}, torch.cat([X, Y], 1)),
    ("Pack", {"x0": X, "x1": Y}, {"axis": -1, "N": 2}, torch.stack([X, Y], -1)),
    ("Slice", {"x": X, "offsets": [1, 0], "size": [-1, 2]}, {}, X[1:, :2]),
    ("StridedSlice", {"x": X, "begin": [1, 0], "end": [2, 4], "strides": [1, 2]}, {}, X[1:2, ::2]),
    (
        "StridedSlice",
        {"x": X, "begin": [1, 1], "end": [2, 2], "strides": [1, 1]},
        {"shrink_axis_mask": 1, "begin_mask": 2, "end_mask": 2},
        X[1],
    ),
    (
        "StridedSliceV2",
        {"x": WIDE, "begin": [-2], "end": [2**31 - 1], "axes": [2], "strides": None},
        {},
        WIDE[..., -2:],
    ),
    ("Tile", {"x": X, "multiples": [2, 1]}, {}, torch.cat([X, X])),
    ("BroadcastTo", {"x": BOOLS, "shape": [3, 4]}, {}, BOOLS.expand(3, 4)),
    ("Fill", {"dims": [2, 2], "value": torch.tensor(3.5)}, {}, torch.full((2, 2), 3.5)),
    ("Range", {"start": 1, "limit": 7, "delta": 2}, {}, torch.tensor([1, 3, 5]).int()),
    ("Shape", {"x": WIDE}, {}, torch.tensor([2, 3, 4], dtype=torch.int32)),
    ("Triu", {"x": X}, {"diagonal": 1}, X.triu(1)),
    ("ReverseV2", {"x": X, "axis": [1]}, {}, X.flip(1)),
    ("PadV3", {"x": X, "paddings": [1, 0, 0, 2]}, {"mode": "constant"}, nn.pad(X, (0, 2, 1, 0))),
]
INDEX: list[Case] = [
    ("GatherV2", {"x": WIDE, "indices": TABLE, "axis": 1}, {}, WIDE[:, TABLE.long()]),
    ("GatherV2", {"x": WIDE, "i": -1, "axis": 1}, {"negative_index_support": True}, WIDE[:, -1]),
    ("GatherElements", {"x": X, "index": TABLE}, {"dim": 1}, X.gather(1, TABLE.long())),
    ("GatherNd", {"x": WIDE, "indices": torch.tensor([[1, 2]])}, {}, WIDE[1, 2][None]),
    (
        "ScatterElements",
        {"data": X, "indices": LONGS[:, None], "updates": Y[:2, :1]},
        {"axis": 1, "reduction": "none"},
        X.scatter(1, LONGS[:, None], Y[:2, :1]),
    ),
    (
        "ScatterNdUpdate",
        {"var": X, "indices": LONGS[:, None], "updates": Y[:2]},
        {},
        X.index_copy(0, LONGS, Y[:2]),
    ),
    (
        "ScatterNdUpdate",
        {"var": X, "indices": torch.tensor([[1, 3], [0, 0]]), "updates": Y[0, :2]},
        {},
        X.index_put((torch.tensor([1, 0]), torch.tensor([3, 0])), Y[0, :2]),
    ),
    (
        "Scatter",
        {"var": WIDE, "indices": torch.tensor([2, 0]), "updates": WIDE[:, :1] * 2},
        {"reduce": "update", "axis": 1},
        torch.stack(
            [
                WIDE[0].index_copy(0, LONGS[:1], WIDE[0, :1] * 2),
                WIDE[1].index_copy(0, LONGS[1:], WIDE[1, :1] * 2),
            ]
        ),
    ),
    ("ScatterUpdate", {"var": X, "i": LONGS, "u": Y[:2]}, {}, X.index_copy(0, LONGS, Y[:2])),
    ("Assign", {"ref": X, "value": Y}, {}, Y),
    ("ArgMaxV2", {"x": TABLE, "dimension": 1}, {"dtype": Type(9)}, torch.tensor([0, 0])),
    ("ArgMaxV2", {"x": X, "dimension": -1}, {"dtype": Type(3)}, X.max(1).indices.int()),
    ("Cumsum", {"x": INTS, "axis": 1}, {}, torch.tensor([[7, 0, 3]], dtype=torch.int32)),
    ("Cumprod", {"x": X, "axis": 0}, {}, torch.stack([X[0], X[0] * X[1], X[0] * X[1] * X[2]])),
]


@pytest.mark.parametrize(
    ("kind", "inputs", "attrs", "expected"),
    MATH + SHAPE + INDEX,
    ids=[f"{i}-{case[0]}" for i, case in enumerate(MATH + SHAPE + INDEX)],
)
def test_an_operator_means_what_torch_means(
    kind: str, inputs: dict[str, Any], attrs: dict[str, Any], expected: torch.Tensor
) -> None:
    (found,) = evaluate(kind, inputs, attrs)
    torch.testing.assert_close(found, expected)


def test_operators_with_several_outputs_give_them_in_order() -> None:
    first, second = evaluate(
        "SplitV", {"x": X, "size_splits": [1, -1], "split_dim": 1}, {"num_split": 2}, ("a", "b")
    )
    assert torch.equal(torch.cat([first, second], 1), X)
    assert first.shape == (3, 1)
    (whole,) = evaluate("Unpack", {"x": X[:1]}, {"axis": 0, "num": 1}, ("y0",))
    assert torch.equal(whole, X[0])
    index, values = evaluate("ArgMaxWithValue", {"x": X}, {"dimension": 1}, ("i", "v"))
    assert torch.equal(values, X.gather(1, index.long()[:, None])[:, 0])
    assert index.dtype is torch.int32
    assert torch.equal(values, X.amax(1))


def test_ties_of_an_order_go_to_the_lower_index() -> None:
    row = torch.tensor([[1.0, 3.0, 1.0, 3.0]])
    values, order = evaluate(
        "TopKV2", {"x": row, "k": 3}, {"sorted": True, "sort_policy": 1}, ("v", "i")
    )
    assert order.tolist() == [[1, 3, 0]]
    assert values.tolist() == [[3, 3, 1]]
    _, order = evaluate("Sort", {"x": row}, {"descending": False, "stable": True}, ("a", "b"))
    assert order.tolist() == [[0, 2, 1, 3]]


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
