"""``verify`` fails, by name, on kernels and operators that were changed in either model."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qwen_mtp.custom_ops import causal_conv, delta_rule, linear, rejection
from qwen_mtp.custom_ops.delta_round import DELTA_ROUND
from qwen_mtp.custom_ops.operator import MICROSOFT, Operator
from qwen_mtp.export import lowering
from qwen_mtp.export.aten import Form
from qwen_mtp.runtime.native import find_kernels
from qwen_mtp.verify import verify_package
from tests.verified import SMALL, export, failed


def test_a_matrix_kernel_that_couples_rows_fails_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def per_tensor(op: Any, x: Any, weight: Any, scale: Any) -> Any:
        columns = op.Transpose(weight, perm=[1, 0])
        return op.DynamicQuantizeMatMul(x, columns, scale, None, None, _domain=MICROSOFT)

    patch_form(monkeypatch, linear.LINEAR_INT8_ROWS, per_tensor, native=per_tensor)
    for found in both(export(tmp_path / "p")):
        assert found["rows"].startswith("layers.0.stash.u differs in row 0 of ")
        assert "not row-exact" in found["rows"]


def test_a_commit_that_replays_rejected_rows_fails_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unmasked(
        op: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, count: Any
    ) -> Any:
        return delta_rule.GATED_DELTA_RULE.onnx(op, q, k, v, g, beta, state, None)

    patch_form(monkeypatch, delta_rule.GATED_DELTA_RULE, unmasked)
    patch_count(monkeypatch, lambda op, count: op.Max(count, op.Cast(3, to=6)))
    ours, native = both(export(tmp_path / "p"))
    assert ours["rows"].startswith("layers.0.ssm differs in the state before ")
    assert re.match(r"layers\.0\.(ssm|conv) differs in the state before ", native["rows"])


def test_a_window_that_does_not_move_fails_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one(op: Any, count: Any) -> Any:
        return op.Min(count, op.Cast(1, to=6))

    def late(op: Any, window: Any, rows: Any, count: Any) -> Any:
        return causal_conv.CONV_WINDOW.onnx(op, window, rows, one(op, count))

    patch_form(monkeypatch, causal_conv.CONV_WINDOW, late)
    patch_count(monkeypatch, one)
    for found in both(export(tmp_path / "p")):
        expected = "layers.0.conv differs in the state after committing 2 rows"
        assert found["rows"].startswith(expected)


@pytest.mark.parametrize(("lost", "asked"), [(6, "top_k"), (7, "top_p"), (8, "banned_rows")])
def test_a_sampler_that_ignores_a_parameter_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int, asked: str
) -> None:
    def deaf(form: Form) -> Form:
        def changed(op: Any, *inputs: Any) -> Any:
            neutral = op.Sub(inputs[lost], inputs[lost])
            if asked == "top_p":
                neutral = op.Add(neutral, 1.0)
            return form(op, *inputs[:lost], neutral, *inputs[lost + 1 :])

        return changed

    sample = rejection.REJECTION_SAMPLE
    assert sample.native is not None
    patch_form(monkeypatch, sample, deaf(sample.onnx), native=deaf(sample.native))
    geometry = replace(SMALL, lookaheads=(), format="fp32")
    for found in both(export(tmp_path / "p", geometry)):
        assert found.keys() == {"sampler"}
        assert asked in found["sampler"]


def patch_form(
    monkeypatch: pytest.MonkeyPatch, operator: Operator, form: Form, *, native: Form | None = None
) -> None:
    """Lower an operator otherwise in ``model.onnx`` and, if given, in ``model.native.onnx``."""
    overload = lowering.OWN[operator.name]
    monkeypatch.setitem(lowering.ONNX_FORMS, overload, form)
    if native is not None:
        monkeypatch.setitem(lowering.NATIVE_FORMS, overload, native)


def patch_count(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, Any], Any]) -> None:
    """Give the native kernel of a round another count of rows to commit."""
    real = DELTA_ROUND.native
    assert real is not None

    def form(op: Any, *args: Any) -> Any:
        *inputs, count, eps, gate = args
        return real(op, *inputs, change(op, count), eps, gate)

    monkeypatch.setitem(lowering.NATIVE_FORMS, lowering.OWN[DELTA_ROUND.name], form)


def both(path: Path) -> list[dict[str, str]]:
    """What fails on ONNX Runtime's kernels and, where there are some, on the native ones."""
    engines = (False, True) if find_kernels().library is not None else (False, False)
    return [failed(verify_package(path, threads=1, native=native)) for native in engines]
