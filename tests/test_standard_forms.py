"""The ONNX forms of aten operators against torch itself, through ONNX Runtime."""

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnxscript import GraphBuilder

from qwen_mtp.custom_ops.pool import scatter_rows
from qwen_mtp.custom_ops.torch_library import ops
from qwen_mtp.export.aten import FORMS, ONNX_TYPES
from qwen_mtp.export.lowering import lower
from qwen_mtp.export.standard import _FORMS, IR_VERSION, OPSET
from qwen_mtp.export.standard_forms import DECOMPOSED

aten = torch.ops.aten
Tensor = torch.Tensor
X = torch.tensor([[-2.5, -0.5, 0.5, 1.5], [3.0, 3.0, -1.0, 0.0]])
Y = torch.tensor([[1.0, -0.5, 2.0, 1.5]])
N = torch.tensor([[-7, -1, 0, 9], [8, -8, 3, 16]], dtype=torch.int32)
WIDE = torch.tensor([[2, 3, 5, 7]], dtype=torch.int64)
YES = torch.tensor([[True, False, True, False], [False, False, False, False]])
Case = tuple[Callable[..., Any], tuple[Tensor, ...]]
CASES: dict[str, Case] = {
    "sums of mixed types": (lambda n, w: (n + w, n * 2, w - n, n.float() + 1), (N, WIDE)),
    "a number that is not an integer": (lambda n: n * 0.5, (N,)),
    "quotients": (lambda x, y: (x / y, x / 127), (X, Y)),
    "floors of negatives": (
        lambda n: (torch.floor_divide(n, 8), torch.remainder(n, 8), n // 3),
        (N,),
    ),
    "extremes": (lambda x, y: (torch.minimum(x, y), torch.maximum(x, y)), (X, Y)),
    "comparisons of integers": (
        lambda n, w: (n < w, n <= w, n > w, n >= w, n == w, n != w, n < 1, n >= 0, n == 9, n != 9),
        (N, WIDE),
    ),
    "comparisons of floats": (lambda x: (x <= 0.5, x > 0.5, x.lt(float("inf")), x.ne(3)), (X,)),
    "logic": (
        lambda b: (b.logical_and(b), b.logical_or(b.logical_not())),
        (YES,),
    ),
    "choices": (
        lambda b, n, w: (
            torch.where(b, n, w),
            torch.where(b, n, torch.full((), 1, dtype=N.dtype)),
        ),
        (YES, N, WIDE),
    ),
    "elementwise": (
        lambda x: (-x, x.abs(), x.exp(), x.cos(), x.sin(), torch.round(x), torch.floor(x)),
        (X,),
    ),
    "roots and logarithms": (
        lambda x: (torch.rsqrt(x), torch.log1p(x), torch.reciprocal(x)),
        (X.abs() + 0.1,),
    ),
    "casts": (lambda x, n: (x.to(torch.int32), n.to(torch.int8), n.gt(0).int()), (X, N)),
    "shapes": (
        lambda x: (x.t(), x.permute(1, -2), x.unsqueeze(1).expand(2, 3, -1), x.unbind(0)[1]),
        (X,),
    ),
    "parts": (lambda x: (*x.unbind(-1), *x[:1].unbind(0), x[:1].squeeze(0)), (X,)),
    "sums and means": (
        lambda x, b: (
            x.sum(-1),
            x.sum([0, 1], keepdim=True),
            x.mean(-1, keepdim=True),
            b.int().sum(1, keepdim=True, dtype=torch.int32),
        ),
        (X, YES),
    ),
    "largest, the first of equal ones": (
        lambda x: (*torch.max(x, dim=-1, keepdim=True), *x.max(0), x.argmax(-1)),
        (X,),
    ),
    "any": (lambda b: (b.any(1, keepdim=True), b.any(0)), (YES,)),
    "running sums": (lambda x: (x.cumsum(-1), x.cumsum(0)), (X,)),
    "sorts, stable": (
        lambda x: (
            *torch.sort(x, stable=True, dim=-1, descending=True),
            *torch.sort(x, stable=True, dim=0),
        ),
        (X,),
    ),
    "softmax": (lambda x: torch.softmax(x, dim=-1), (X,)),
    "products": (
        lambda x, y: (x.mm(y.t()), x.unsqueeze(0).bmm(x.t().unsqueeze(0))),
        (X, X + 1),
    ),
    "integer products": (
        lambda a, b: torch._int_mm(a, b),
        (torch.arange(-64, 64, dtype=torch.int8).view(32, 4), torch.full((4, 8), -3).char()),
    ),
    "reads and writes by index": (
        lambda x, w: (
            x.index_select(0, w[:, :2].view(-1).sub(2)),
            x.gather(1, w.sub(2).clamp(0, 3)),
            x.scatter(1, w[:, :2].sub(2), x[:1, :2] * 10),
        ),
        (X, WIDE),
    ),
    "copies": (
        lambda x: (
            x.clone(),
            x.permute(1, 0).reshape(-1),
            x.unsqueeze(0).transpose(-1, 1),
            aten.alias.default(x),
        ),
        (X,),
    ),
    "half precision": (
        lambda h: (h * 2, h.float() + 0.5, h + 1.5, h.float().to(torch.float16)),
        (X.half(),),
    ),
    "constants of the graph": (lambda x: x + torch.arange(4).float().cumsum(0), (X,)),
}


class _Module(torch.nn.Module):
    """Several functions side by side, each of its own inputs."""

    def __init__(self, cases: Sequence[Case]) -> None:
        super().__init__()
        self._cases = cases

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        left, results = list(inputs), []
        for function, given in self._cases:
            mine, left = left[: len(given)], left[len(given) :]
            results += listed(function(*mine))
        return tuple(results)


def listed(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


@cache
def program() -> torch.export.ExportedProgram:
    """All cases in one: tracing has a price of its own."""
    cases = tuple(CASES.values())
    inputs = tuple(x for _, given in cases for x in given)
    exported = torch.export.export(_Module(cases), inputs, strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return exported.run_decompositions({})


@cache
def found() -> dict[str, list[Any]]:
    """What ONNX Runtime computes, by case."""
    inputs = tuple(x for _, given in CASES.values() for x in given)
    results = iter(through_onnx(program(), inputs))
    return {n: [next(results) for _ in listed(f(*x))] for n, (f, x) in CASES.items()}


def through_onnx(
    exported: torch.export.ExportedProgram, inputs: Sequence[Tensor]
) -> Sequence[Any]:
    graph = ir.Graph([], [], nodes=[], name="cases", opset_imports={"": OPSET})
    builder = GraphBuilder(graph)
    given = [
        ir.val(f"x{i}", dtype=ir.DataType(ONNX_TYPES[x.dtype]), shape=x.shape)
        for i, x in enumerate(inputs)
    ]
    graph.inputs.extend(given)
    for i, value in enumerate(lower(exported, builder.op, given, {}, _FORMS)):
        builder.add_output(builder.op.Identity(value), f"y{i}")
    model = ir.to_proto(ir.Model(graph, ir_version=IR_VERSION))
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    results: Sequence[Any] = session.run(None, {f"x{i}": x.numpy() for i, x in enumerate(inputs)})
    return results


@pytest.mark.parametrize("name", CASES)
def test_a_form_computes_what_torch_computes(name: str) -> None:
    function, inputs = CASES[name]
    for mine, theirs in zip(found()[name], listed(function(*inputs)), strict=True):
        assert mine.dtype == theirs.numpy().dtype
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-5, atol=1e-6)


def test_rows_go_to_their_place_in_a_pool() -> None:
    pool = np.arange(3 * 4 * 2 * 2, dtype=np.float32).reshape(3, 4, 2, 2)
    slots, rows = np.array([5, 11, 0], np.int32), -np.ones((3, 2, 2), np.float32)
    given = tuple(torch.from_numpy(x) for x in (pool, slots, rows))
    exported = torch.export.export(_Module([(ops.scatter_rows, given)]), given, strict=False)
    (result,) = through_onnx(exported, given)
    np.testing.assert_array_equal(result, scatter_rows(pool, slots, rows))


def test_every_form_has_a_case() -> None:
    used = {node.target for node in program().graph.nodes}
    own = {target for target, form in DECOMPOSED.items() if FORMS.get(target) is not form}
    assert {str(target) for target in own - used} == set()
