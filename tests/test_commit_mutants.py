"""The checks of exactness and state can fail: each broken loop or operator is noticed."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qwen_mtp.custom_ops import attention, causal_conv, delta_rule, linear
from qwen_mtp.custom_ops.delta_round import DELTA_CHUNK, DELTA_ROUND
from qwen_mtp.custom_ops.operator import Operator, const
from qwen_mtp.export import lowering
from qwen_mtp.export.package import write_package
from qwen_mtp.export.plan import plan_export
from qwen_mtp.graphs.spec import Geometry, WeightFormat
from qwen_mtp.progress import Silent
from qwen_mtp.runtime.package import Package
from tests.mutants import RUNTIME, K, Mutant, noticed
from tests.native import library
from tests.packages import package, random_checkpoint

SLOTS = 2
GEOMETRY: dict[str, Any] = {"max_num_seqs": SLOTS, "max_model_len": 128, "lookaheads": (K,)}


@cache
def checkpoint() -> Path:
    return random_checkpoint(6, num_hidden_layers=2, full_attention_interval=2)


@pytest.mark.parametrize("format", ["fp32", "int8"])
def test_the_checks_find_nothing_in_what_is_not_broken(format: str) -> None:
    assert noticed(package(checkpoint(), **GEOMETRY, format=format)) == []


@pytest.mark.parametrize("name", RUNTIME)
def test_a_broken_loop_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = package(checkpoint(), **GEOMETRY, format="fp32")
    RUNTIME[name](monkeypatch)
    assert noticed(whole) != []


def _number(op: Any, value: int) -> Any:
    return const(op, np.array(value, np.int32))


def _count(change: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """The window of a verify graph moved by another count."""

    def form(op: Any, window: Any, rows: Any, count: Any) -> Any:
        if int(window.shape[0]) == SLOTS:
            count = change(op, count)
        return causal_conv._window_onnx(op, window, rows, count)

    return form


def _unmasked(*names: str) -> Callable[..., Any]:
    """Rejected rows keep their decay, or everything, when a verify graph replays them."""

    def form(op: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, count: Any) -> Any:
        real = delta_rule.GATED_DELTA_RULE.onnx
        if count is None or int(q.shape[0]) != SLOTS:
            return real(op, q, k, v, g, beta, state, count)
        if "all" in names:
            return real(op, q, k, v, g, beta, state, None)
        keep, zero = delta_rule._keep_mask(op, count, int(q.shape[1])), const(op, np.float32(0))
        beta = op.Where(keep, beta, zero)
        beta.shape = g.shape
        return real(op, q, k, v, g, beta, state, None)

    return form


def _one_scale(op: Any, x: Any, weight: Any, scale: Any) -> Any:
    """Activations of all rows share one scale, so a draft moves the rows before it."""
    tiny, steps, zero = (const(op, np.array(c, np.float32)) for c in (linear.TINY, 127, 128))
    shared = op.Div(op.Max(op.ReduceMax(op.Abs(x), keepdims=1), tiny), steps)
    q = op.Cast(op.Add(op.Round(op.Div(x, shared)), zero), to=2)
    one, middle = const(op, np.ones((), np.float32)), const(op, np.array(128, np.uint8))
    columns = op.Transpose(weight, perm=[1, 0])
    product = op.MatMulIntegerToFloat(q, columns, one, scale, middle, _domain=linear.MICROSOFT)
    return op.Mul(product, shared)


def _sees_next(patch: pytest.MonkeyPatch) -> None:
    """A row attends to the draft after it."""
    real = attention._seen

    def seen(op: Any, table: Any, start: Any, *rest: Any) -> Any:
        return real(op, table, op.Add(start, _number(op, 1)), *rest)

    patch.setattr(attention, "_seen", seen)


def _form(operator: str, form: Callable[..., Any]) -> Mutant:
    """Lower an operator to another ONNX form."""
    overload = getattr(torch.ops.qwen_mtp, operator).default
    return lambda patch: patch.setitem(lowering.ONNX_FORMS, overload, form)


def _kernel(operator: Operator, change: Callable[[Any, Any], Any]) -> Mutant:
    """Give the kernel of a recurrence another count of rows to commit."""
    native = operator.native
    assert native is not None

    def form(op: Any, *args: Any) -> Any:
        *inputs, count, eps, gate = args
        return native(op, *inputs, change(op, count), eps, gate)

    overload = getattr(torch.ops.qwen_mtp, operator.name).default
    return lambda patch: patch.setitem(lowering.NATIVE_FORMS, overload, form)


GRAPHS: dict[str, tuple[WeightFormat, Mutant]] = {
    "rejected rows are replayed": ("fp32", _form("gated_delta_rule", _unmasked("all"))),
    "rejected rows decay the state": ("fp32", _form("gated_delta_rule", _unmasked("g"))),
    "the window does not move": ("fp32", _form("conv_window", lambda op, w, r, n: op.Identity(w))),
    "the window moves by at most 3": (
        "fp32",
        _form("conv_window", _count(lambda op, n: op.Min(n, _number(op, 3)))),
    ),
    "the window moves past all rows": (
        "fp32",
        _form("conv_window", _count(lambda op, n: op.Max(n, _number(op, K + 1)))),
    ),
    "a row sees the draft after it": ("fp32", _sees_next),
    "rows share an activation scale": ("int8", _form("linear_int8_rows", _one_scale)),
}


KERNELS: dict[str, Mutant] = {
    "the kernel commits all rows": _kernel(
        DELTA_ROUND, lambda op, n: op.Max(n, _number(op, K + 1))
    ),
    "the kernel commits at most 3": _kernel(DELTA_ROUND, lambda op, n: op.Min(n, _number(op, 3))),
    "the kernel runs a chunk's padding": _kernel(
        DELTA_CHUNK, lambda op, n: op.Max(n, _number(op, 16))
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_broken_kernel_is_noticed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library()  # skips where there is no compiler
    KERNELS[name](monkeypatch)
    geometry = Geometry(**GEOMETRY, block_size=16, prefill_chunk=16, format="fp32")
    write_package(plan_export(checkpoint(), geometry), tmp_path, Silent())
    assert noticed(Package.open(tmp_path), native=True) != []


@pytest.mark.parametrize("name", GRAPHS)
def test_a_broken_operator_is_noticed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    format, mutate = GRAPHS[name]
    mutate(monkeypatch)
    geometry = Geometry(**GEOMETRY, block_size=16, prefill_chunk=16, format=format)
    write_package(plan_export(checkpoint(), geometry), tmp_path, Silent())
    assert noticed(Package.open(tmp_path), native=False) != []
