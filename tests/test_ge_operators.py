"""The standard operators in the interpreter of GE graphs, against torch and NumPy."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as nn
from scipy.special import erf

from tests.ge_build import Type, evaluate

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
EVEN = torch.tensor([-2.5, -1.5, -0.4, 0.5, 1.5, 2.5])
UNARY: dict[str, Any] = {
    "Abs": np.abs,
    "Sqrt": np.sqrt,
    "Rsqrt": lambda x: 1 / np.sqrt(x),
    "Reciprocal": lambda x: 1 / x,
    "Square": np.square,
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Tanh": np.tanh,
    "Cos": np.cos,
    "Sin": np.sin,
    "Floor": np.floor,
    "Ceil": np.ceil,
    "Round": np.rint,
    "Sign": np.sign,
    "Erf": erf,
    "Expm1": np.expm1,
    "Log1p": np.log1p,
    "Relu": lambda x: np.maximum(x, 0),
    "IsNan": np.isnan,
    "IsInf": np.isinf,
    "IsFinite": np.isfinite,
    "Softplus": lambda x: np.logaddexp(x, 0),
    "ZerosLike": np.zeros_like,
    "OnesLike": np.ones_like,
    "Identity": np.array,
    "StopGradient": np.array,
}
BINARY: dict[str, Any] = {
    "AddV2": np.add,
    "TruncateDiv": lambda x, y: np.trunc(x / y).astype(np.int32),
    "TruncateMod": np.fmod,
    "BitwiseAnd": np.bitwise_and,
    "BitwiseOr": np.bitwise_or,
    "BitwiseXor": np.bitwise_xor,
    "LeftShift": np.left_shift,
    "Equal": np.equal,
    "NotEqual": np.not_equal,
    "Less": np.less,
    "LessEqual": np.less_equal,
    "Greater": np.greater,
}
OTHER: list[Case] = [
    ("LogicalNot", {"x": BOOLS}, {}, ~BOOLS),
    ("LogicalOr", {"x1": BOOLS, "x2": ~BOOLS}, {}, torch.ones(1, 4, dtype=torch.bool)),
    ("Invert", {"x": INTS}, {}, -INTS - 1),
    ("Adds", {"x": X}, {"value": 0.5}, X + 0.5),
    ("AxpyV2", {"x1": X, "x2": Y, "alpha": torch.tensor(2.0)}, {}, X + 2 * Y),
    (
        "MaskedFill",
        {"x": X, "mask": X > 0, "value": torch.tensor(7.0)},
        {},
        X.masked_fill(X > 0, 7),
    ),
    ("Select", {"condition": X > 0, "x1": X, "x2": Y}, {}, torch.where(X > 0, X, Y)),
    ("Bitcast", {"x": X}, {"type": Type(3)}, X.view(torch.int32)),
    ("ReduceMin", {"x": X, "axes": [0]}, {}, X.min(0).values),
    ("ReduceLogSumExp", {"x": X, "axes": [1]}, {}, X.exp().sum(1).log()),
    ("ReduceSumD", {"x": X}, {"axes": [0]}, X.sum(0)),
    ("BatchMatMulV2", {"x1": WIDE, "x2": WIDE}, {"adj_x2": True}, WIDE @ WIDE.mT),
    ("AscendQuantV2", {"x": X, "scale": Y[:1]}, {}, (X * Y[:1]).round().to(torch.int8)),
    ("AscendAntiQuantV2", {"x": BYTES, "scale": torch.ones(70)}, {"dst_type": 0}, BYTES.float()),
    ("FlattenV2", {"x": WIDE}, {"axis": 1, "end_axis": -1}, WIDE.reshape(2, 12)),
    ("TransposeD", {"x": X}, {"perm": [1, 0]}, X.T),
    ("Permute", {"x": X}, {"order": [1, 0]}, X.T),
    ("Concat", {"concat_dim": 0, "x0": X, "x1": Y}, {"N": 2}, torch.cat([X, Y])),
    ("ConcatD", {"x0": X, "x1": Y}, {"concat_dim": 1, "N": 2}, torch.cat([X, Y], 1)),
    ("Expand", {"x": X[:1], "shape": [3, -1]}, {}, X[:1].expand(3, 4)),
    ("Tril", {"x": X}, {}, X.tril()),
    ("Pad", {"x": X, "paddings": [0, 1, 2, 0]}, {}, nn.pad(X, (2, 0, 0, 1))),
    ("Gather", {"x": X, "indices": LONGS}, {"validate_indices": True}, X[LONGS]),
    ("ArgMin", {"x": X, "dimension": 1}, {"dtype": Type(9)}, X.argmin(1)),
    (
        "SearchSorted",
        {"sorted_sequence": torch.tensor([1.0, 2.0, 3.0]), "values": torch.tensor([2.0, 9.0])},
        {"right": False, "dtype": Type(3)},
        torch.tensor([1, 3], dtype=torch.int32),
    ),
    (
        "AsStrided",
        {"x": X, "size": [2, 3], "stride": [4, 1], "storage_offset": 1},
        {},
        X[:2, 1:],
    ),
]


@pytest.mark.parametrize(
    ("kind", "inputs", "attrs", "expected"),
    MATH + SHAPE + INDEX + OTHER,
    ids=[f"{i}-{case[0]}" for i, case in enumerate(MATH + SHAPE + INDEX + OTHER)],
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


@pytest.mark.parametrize("kind", UNARY)
def test_an_elementwise_operator_means_what_numpy_means(kind: str) -> None:
    x = Y if kind in ("Sqrt", "Rsqrt", "Log1p") else torch.cat([EVEN, X.reshape(-1)])
    if kind.startswith("Is"):
        x = torch.tensor([1.0, np.nan, np.inf, -np.inf])
    (found,) = evaluate(kind, {"x": x})
    torch.testing.assert_close(found, torch.from_numpy(UNARY[kind](x.numpy())))


@pytest.mark.parametrize("kind", BINARY)
def test_an_operator_of_two_means_what_numpy_means(kind: str) -> None:
    y = torch.tensor([[2, 3, 3]], dtype=torch.int32)
    (found,) = evaluate(kind, {"x1": INTS, "x2": y})
    assert torch.equal(found, torch.from_numpy(BINARY[kind](INTS.numpy(), y.numpy())))


def test_halves_round_once_an_operator() -> None:
    one, small = torch.tensor([256.0]).bfloat16(), torch.tensor([1.0]).bfloat16()
    (total,) = evaluate("Add", {"x1": one, "x2": small})
    assert total.item() == 256
    (mean,) = evaluate("ReduceSum", {"x": small.expand(1000).clone(), "axes": [0]})
    assert mean.item() == 1000


@pytest.mark.parametrize(
    ("kind", "attrs", "constants"),
    [
        ("Split", {"num_split": 2}, {"split_dim": 1}),
        ("SplitD", {"num_split": 2, "split_dim": 1}, {}),
        ("SplitVD", {"num_split": 2, "split_dim": 1, "size_splits": [2, 2]}, {}),
    ],
)
def test_splits_are_joined_again(
    kind: str, attrs: dict[str, Any], constants: dict[str, Any]
) -> None:
    first, second = evaluate(kind, {**constants, "x": X}, attrs, ("y0", "y1"))
    assert torch.equal(torch.cat([first, second], 1), X)
    assert first.shape == second.shape
