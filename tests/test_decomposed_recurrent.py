"""The aten forms of norms, rotary, convolution, delta rule, rows and slots against the meaning."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from qwen_mtp.custom_ops import causal_conv, delta_rule, rotary, slots
from qwen_mtp.custom_ops.operator import Operator
from qwen_mtp.custom_ops.torch_library import OPERATORS
from tests.operators import (
    Array,
    cases,
    close,
    delta_inputs,
    each,
    ints,
    normal,
    same_bits,
    slot_inputs,
    tensor,
)

NAN = np.float32(np.nan)
BY_NAME = {operator.name: operator for operator in OPERATORS}
NAMES = {
    "rms_norm", "rotary_table", "rotary_embedding", "causal_conv", "conv_window", "delta_gates",
    "gated_delta_rule", "take_row", "pad_rows", "swiglu", "slot_conv", "slot_delta_rule",
}  # fmt: skip
CASES = sorted(c for c in cases(np.random.default_rng(0)) if c.split()[0] in NAMES)
RULE, ROWS = delta_rule.GATED_DELTA_RULE, (1, 2, 4, 7, 16)
# Half a step of the mantissa: what rounding a result once may change.
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# What torchair converts and every SoC runs, less what the graphs have no need for.
CONVERTED = {
    "add", "sub", "mul", "neg", "abs", "exp", "log1p", "rsqrt", "sigmoid", "silu", "cos", "sin",
    "clamp", "cumsum", "mean", "sum", "bmm", "cat", "stack", "split_with_sizes", "unbind",
    "slice", "select", "index_select", "view", "_unsafe_view", "reshape", "expand", "transpose",
    "permute", "unsqueeze", "squeeze", "clone", "where", "lt", "ge", "gt", "eq", "arange",
    "full", "zeros", "_to_copy", "floor_divide",
}  # fmt: skip


def run(operator: Operator, *args: Any, dtype: torch.dtype = torch.float32) -> Any:
    """The aten form with every float tensor in ``dtype``; results as tensors."""
    assert operator.decomposed is not None
    return operator.decomposed(*(cast(tensor(a), dtype) for a in args))


def cast(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def rounded(x: Any, dtype: torch.dtype) -> Any:
    """What is left of an array in ``dtype``, as float32."""
    if not isinstance(x, Array) or x.dtype != np.float32:
        return x
    return tensor(x).to(dtype).float().numpy()


def poisoned(x: Array, count: Array) -> Array:
    x = x.copy()
    for b, kept in enumerate(count):
        x[b, kept:] = NAN
    return x


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", CASES)
def test_the_aten_form_computes_the_meaning(case: str, seed: int) -> None:
    args, _, tolerance = cases(np.random.default_rng(seed))[case]
    operator = BY_NAME[case.split()[0]]
    found, expected = each(run(operator, *args)), each(operator.meaning(*args))
    if tolerance == 0:
        same_bits(tuple(t.numpy() for t in found), expected)
    else:
        close(found, expected)


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("case", CASES)
def test_in_half_precision_the_result_is_the_meaning_rounded_in_the_promised_type(
    case: str, dtype: torch.dtype
) -> None:
    args, operator = cases(np.random.default_rng(1))[case][0], BY_NAME[case.split()[0]]
    found = each(run(operator, *args, dtype=dtype))
    expected = each(operator.meaning(*(rounded(a, dtype) for a in args)))
    promised = each(operator.fake(*(cast(tensor(a), dtype) for a in args)))
    # SwiGLU rounds twice. A state is rounded after each of up to five rows, and all of a row's
    # outputs read it: errors add up in sums of up to 128 terms.
    steps = {"swiglu": 3, "gated_delta_rule": 8, "slot_delta_rule": 8}.get(operator.name, 1)
    for a, b, fake in zip(found, expected, promised, strict=True):
        assert (a.dtype, a.shape) == (fake.dtype, fake.shape)
        if a.dtype == torch.float32:
            close(a, b)
        elif a.dtype == dtype:
            close(a.float(), b, steps * ROUNDING[dtype] * 1.01)
        else:
            assert torch.equal(a, tensor(b))


class Called(TorchDispatchMode):
    """Notes the aten operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_aten_forms_keep_to_operators_that_every_back_end_converts(dtype: torch.dtype) -> None:
    chosen = [(BY_NAME[c.split()[0]], cases(np.random.default_rng(0))[c][0]) for c in CASES]
    chosen.append((RULE, [*delta_inputs(np.random.default_rng(0), 2, 130, 3), ints(9, 130)]))
    for operator, args in chosen:
        tensors = [cast(tensor(a), dtype) for a in args]
        assert operator.decomposed is not None
        with Called() as called:
            operator.decomposed(*tensors)
        assert called.names <= CONVERTED, operator.name


def test_a_commit_that_drops_the_outputs_does_not_pay_for_them() -> None:
    args = [tensor(a) for a in (*delta_inputs(np.random.default_rng(0), 2, 4), ints(1, 4))]

    def users(keep: slice) -> int:
        graph = make_fx(lambda *a: RULE.decomposed(*a)[keep])(*args).graph  # type: ignore[misc]
        graph.eliminate_dead_code()
        return len(next(iter(graph.nodes)).users)  # of q

    assert users(slice(0, 2)) == 1
    assert users(slice(1, 2)) == 0


@pytest.mark.parametrize("large", [20.0, 90.0, 1e4])
def test_the_gates_neither_overflow_nor_vanish_far_from_zero(large: float) -> None:
    a = np.array([[[-large, large, 0, -1]]], np.float32)
    decay, bias = -np.ones(4, np.float32), np.zeros(4, np.float32)
    found = run(delta_rule.DELTA_GATES, a, a, decay, bias)
    with np.errstate(under="ignore"):
        close(found, delta_rule.delta_gates(a, a, decay, bias))


@pytest.mark.parametrize("dim", [8, 24, 64])
def test_a_late_position_has_the_table_of_the_meaning(dim: int) -> None:
    args = (ints(0, 262_000, 1_000_000), 3, dim, 1e7)
    close(run(rotary.ROTARY_TABLE, *args), rotary.rotary_table(*args))


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("rows", ROWS)
def test_rows_from_count_on_reach_neither_state_nor_window(rows: int, batch: int) -> None:
    rng = np.random.default_rng(rows)
    for count in {*range(min(rows, 4)), rows}:
        kept = np.minimum(count + np.arange(batch), rows).astype(np.int32)
        args = delta_inputs(rng, batch, rows, 1 + rows % 3)
        args[:5] = [poisoned(a, kept) for a in args[:5]]
        out, state = run(RULE, *args, kept)
        expected = RULE.meaning(*args, kept)
        close(state, expected[1])
        for b in range(batch):
            if kept[b]:
                close(out[b, : kept[b]], expected[0][b, : kept[b]])
        window, u = normal(rng, batch, 3, 8), poisoned(normal(rng, batch, rows, 8), kept)
        moved = run(causal_conv.CONV_WINDOW, window, u, kept).numpy()
        same_bits(moved, causal_conv.conv_window(window, u, kept))
        assert np.isfinite(moved).all()


@pytest.mark.parametrize("dtype", [torch.float32, *ROUNDING])
@pytest.mark.parametrize("rows", ROWS)
def test_a_masked_commit_has_the_bits_of_single_steps(rows: int, dtype: torch.dtype) -> None:
    args = delta_inputs(np.random.default_rng(rows), 3, rows)
    whole = [cast(tensor(a), dtype) for a in args]
    assert RULE.decomposed is not None
    state = whole[5]
    for count in range(rows + 1):
        kept = ints(count, count, count)
        poison = [cast(tensor(poisoned(a, kept)), dtype) for a in args[:5]]
        committed = RULE.decomposed(*poison, whole[5], tensor(kept))[1]
        assert committed.dtype == dtype
        assert torch.equal(committed, state)
        if count < rows:
            row = [x[:, count : count + 1] for x in whole[:5]]
            state = RULE.decomposed(*row, state, None)[1]


@pytest.mark.parametrize("ratio", [1, 3])
@pytest.mark.parametrize("rows", [17, 32, 64, 100, 128, 130])
def test_chunks_compute_what_steps_compute(rows: int, ratio: int) -> None:
    args = delta_inputs(np.random.default_rng(rows), 3, rows, ratio)
    close(run(RULE, *args, None), RULE.meaning(*args, None), 1e-5)
    for kept in (ints(0, 1, rows), ints(rows - 1, 16, 5), ints(63 % rows, 64 % rows, 65 % rows)):
        masked = [*(poisoned(a, kept) for a in args[:5]), args[5]]
        out, state = run(RULE, *masked, kept)
        expected = RULE.meaning(*masked, kept)
        close(state, expected[1], 1e-5)
        for b in range(3):
            if kept[b]:
                close(out[b, : kept[b]], expected[0][b, : kept[b]], 1e-5)


def adversarial(rows: int, kind: str) -> list[Array]:
    """Inputs whose triangular system has large powers, or decays beyond what exp can hold."""
    q, k, v, g, beta, state = delta_inputs(np.random.default_rng(rows), 2, rows)
    if kind == "no decay":
        return [q, k, v, np.zeros_like(g), np.ones_like(beta), state]
    k = np.broadcast_to(k[:, :1], k.shape).copy()
    if kind == "equal keys":
        return [q, k, v, np.zeros_like(g), np.ones_like(beta), state]
    if kind == "opposite keys":
        k[:, 1::2] *= -1
        return [q, k, v, np.zeros_like(g), np.ones_like(beta), state]
    return [q, k, v, g * 100, beta, state]


@pytest.mark.parametrize("kind", ["no decay", "equal keys", "opposite keys", "steep decay"])
@pytest.mark.parametrize("rows", [17, 64, 100, 128, 130])
def test_chunks_stay_accurate_where_the_inverse_is_hard(rows: int, kind: str) -> None:
    args = adversarial(rows, kind)
    close(run(RULE, *args, None), RULE.meaning(*args, None), 1e-5)


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_round_over_slots_is_a_commit_and_a_round_for_every_number_accepted(
    rows: int, batch: int
) -> None:
    rng = np.random.default_rng(rows)
    first, second = (slot_inputs(rng, ints(*[0] * batch), rows) for _ in range(2))
    _, states = slots.slot_delta_rule(*first)
    start = first[5][::rows].swapaxes(2, 3)
    for accepted in range(rows + 1):
        kept = np.minimum(accepted + np.arange(batch), rows).astype(np.int32)
        count = np.maximum(kept, 1)  # 0 reads what one row would have left
        _, state = RULE.meaning(*first[:5], start, count)
        expected = [np.empty_like(second[2]), np.empty_like(states)]
        for t in range(rows):
            row = [x[:, t : t + 1] for x in second[:5]]
            out, state = RULE.meaning(*row, state)
            expected[0][:, t], expected[1][t::rows] = out[:, 0], state.swapaxes(2, 3)
        stale = states.copy()
        for b in range(batch):
            stale[[b * rows + t for t in range(rows) if t != count[b] - 1]] = NAN
        args = (*second[:5], stale, kept)
        close(slots.slot_delta_rule(*args), expected)
        close(run(slots.SLOT_DELTA_RULE, *args), expected)


@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_window_over_slots_holds_the_history_behind_every_row(rows: int, taps: int) -> None:
    rng, batch, channels = np.random.default_rng(rows), 3, 12
    weight, length = normal(rng, channels, 1, taps), taps + rows - 2
    history = normal(rng, batch, taps - 1, channels)
    window = np.full((batch, length, channels), NAN)
    window[:, : taps - 1] = history  # as prefill leaves it
    u = normal(rng, batch, rows, channels)
    act, window = slots.slot_conv(u, weight, window, ints(0, 0, 1))
    same_bits(act, causal_conv.causal_conv(u, weight, history))
    for accepted in range(rows + 1):
        kept = np.minimum(accepted + np.arange(batch), rows).astype(np.int32)
        count = np.maximum(kept, 1)
        before, new = causal_conv.conv_window(history, u, count), normal(rng, *u.shape)
        stale = window.copy()
        for b in range(batch):
            stale[b, : count[b] - 1] = NAN
            stale[b, count[b] + taps - 2 :] = NAN
        expected = causal_conv.causal_conv(new, weight, before)
        line = np.concatenate([before, new], axis=1)
        for found in (
            slots.slot_conv(new, weight, stale, kept),
            run(slots.SLOT_CONV, new, weight, stale, kept),
        ):
            close(found[0], expected)
            same_bits(np.asarray(found[1]), line[:, 1:])


@pytest.mark.parametrize("dtype", [torch.float32, *ROUNDING])
def test_slots_hold_the_bits_of_single_steps(dtype: torch.dtype) -> None:
    args = [cast(tensor(a), dtype) for a in slot_inputs(np.random.default_rng(3), ints(3, 1))]
    assert slots.SLOT_DELTA_RULE.decomposed is not None
    out, states = slots.SLOT_DELTA_RULE.decomposed(*args)
    state = torch.stack([args[5][2], args[5][4]])
    for t in range(4):
        row = [x[:, t : t + 1] for x in args[:5]]
        o, state = slots.SLOT_DELTA_RULE.decomposed(*row, state, tensor(ints(1, 1)))
        assert torch.equal(out[:, t], o[:, 0])
        assert torch.equal(states[t::4], state)
