"""Every operator in its three forms (NumPy, torch, compiled) against torch and transformers."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as reference

from qwen_mtp.custom_ops import attention, causal_conv, delta_rule, linear, norm, rotary, rows
from qwen_mtp.custom_ops.torch_library import OPERATORS, ops
from tests.checkpoints import tiny_config
from tests.operators import (
    BLOCK_SIZE,
    Array,
    Run,
    attention_inputs,
    cases,
    close,
    compiled,
    delta_inputs,
    each,
    gate_inputs,
    ints,
    normal,
    quantised,
    same_bits,
    tensor,
    with_extra,
    write_inputs,
)

NAN = np.float32(np.nan)


BY_NAME = {operator.name: operator for operator in OPERATORS}
CASES = sorted(cases(np.random.default_rng(0)))


def test_every_operator_but_the_sampler_has_a_case() -> None:
    own = {o.name for o in OPERATORS if o.composed is None and not o.name.startswith("rejection")}
    assert {case.split()[0] for case in CASES} == own


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", CASES)
def test_the_compiled_form_computes_the_meaning(case: str, seed: int) -> None:
    args, stored, tolerance = cases(np.random.default_rng(seed))[case]
    operator = BY_NAME[case.split()[0]]
    found, expected = compiled(operator, *args, stored=stored)(*args), operator.meaning(*args)
    if tolerance == 0:
        same_bits(found, expected)
    else:
        close(found, expected, tolerance)


@pytest.mark.parametrize("case", CASES)
def test_the_torch_operator_is_the_meaning_and_its_fake_kernel_tells_the_shapes(case: str) -> None:
    args, name = cases(np.random.default_rng(1))[case][0], case.split()[0]
    op, tensors = getattr(ops, name), [tensor(a) for a in args]
    same_bits(
        tuple(t.numpy() for t in each(op(*tensors))),
        tuple(np.asarray(x) for x in each(BY_NAME[name].meaning(*args))),
    )
    kinds = ("test_schema", "test_faketensor")
    torch.library.opcheck(op.default, tuple(tensors), test_utils=kinds)


def test_rms_norm_is_that_of_torch_and_with_one_added_that_of_transformers() -> None:
    rng = np.random.default_rng(2)
    x, weight = normal(rng, 3, 5, 64) * 4, normal(rng, 64)
    torch_norm = functional.rms_norm(tensor(x), (64,), tensor(weight), 1e-6)
    close(norm.rms_norm(x, weight, 1e-6), torch_norm)
    module = reference.Qwen3_5RMSNorm(64, eps=1e-6)
    module.weight.data = tensor(weight)
    close(norm.rms_norm(x, weight + 1, 1e-6), module(tensor(x)).detach())


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0])
def test_rotary_is_the_multi_axis_embedding_of_transformers_on_text(factor: float) -> None:
    rng, dim = np.random.default_rng(3), int(32 * factor)
    config = Qwen3_5TextConfig(**tiny_config(partial_rotary_factor=factor)["text_config"])
    q, k = normal(rng, 2, 6, 4, 32), normal(rng, 2, 6, 2, 32)
    start = ints(0, 1000)
    positions = tensor(start[:, None] + np.arange(6))
    tables = reference.Qwen3_5TextRotaryEmbedding(config)(tensor(q), positions[None])
    expected = reference.apply_rotary_pos_emb(tensor(q), tensor(k), *tables, unsqueeze_dim=2)
    cos, sin = rotary.rotary_table(start, 6, dim, 1e7)
    # Frequencies may differ in the last bit, which position 1000 makes a thousand times larger.
    for table, wanted in zip((cos, sin), tables, strict=True):
        close(table, wanted[..., : dim // 2], 1e-4)
        close(table[:1], wanted[:1, :, : dim // 2])
    for x, turned in zip((q, k), expected, strict=True):
        close(rotary.rotary_embedding(x, cos, sin), turned, 1e-4)


@pytest.mark.parametrize("taps", [2, 4])
def test_causal_conv_is_conv1d_over_the_window_and_the_rows(taps: int) -> None:
    rng = np.random.default_rng(4)
    u, weight, window = (
        normal(rng, 2, 7, 12),
        normal(rng, 12, 1, taps),
        normal(rng, 2, taps - 1, 12),
    )
    line = tensor(np.concatenate([window, u], axis=1)).transpose(1, 2)
    expected = functional.silu(functional.conv1d(line, tensor(weight), groups=12))
    close(causal_conv.causal_conv(u, weight, window), expected.transpose(1, 2))


def test_the_gates_are_softplus_and_sigmoid_of_torch() -> None:
    a, b, decay, bias = gate_inputs(np.random.default_rng(6))
    g, beta = delta_rule.delta_gates(a, b, decay, bias)
    close(g, tensor(decay) * functional.softplus(tensor(a + bias)))
    close(beta, torch.sigmoid(tensor(b)))


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
def test_the_delta_rule_is_the_recurrence_of_transformers(ratio: int) -> None:
    args = delta_inputs(np.random.default_rng(ratio), 2, 9, ratio)
    tensors = [tensor(a) for a in args]
    expected = reference.torch_recurrent_gated_delta_rule(
        *tensors[:5], initial_state=tensors[5], output_final_state=True
    )
    close(delta_rule.gated_delta_rule(*args), expected)
    run = compiled(delta_rule.GATED_DELTA_RULE, *args, None)
    close(run(*args, None), expected)


@pytest.mark.parametrize(
    ("ratio", "length", "dim"), [(1, 2, 16), (2, 4, 16), (3, 4, 16), (4, 7, 16), (1, 4, 128)]
)
def test_rows_from_count_on_leave_the_state_with_the_bits_of_single_steps(
    ratio: int, length: int, dim: int
) -> None:
    args = delta_inputs(np.random.default_rng(5), length + 1, length, ratio, dim)
    count = np.arange(length + 1, dtype=np.int32)  # slot b keeps b rows
    args[:5] = [poison_rows(a, count) for a in args[:5]]
    single = [a[:1, :1] for a in args[:5]] + [args[5][:1]]
    whole = compiled(delta_rule.GATED_DELTA_RULE, *args, count)
    step = compiled(delta_rule.GATED_DELTA_RULE, *single, None)
    forms: tuple[tuple[Run, Run], ...] = (
        (lambda *a: list(delta_rule.gated_delta_rule(*a)),) * 2,  # type: ignore[assignment]
        (whole, step),
    )
    for all_rows, one_row in forms:
        out, states = all_rows(*args, count)
        for b in range(length + 1):
            state = args[5][b : b + 1]
            for t in range(b):
                row = [a[b : b + 1, t : t + 1] for a in args[:5]]
                o, state = one_row(*row, state, None)
                same_bits(out[b, t], o[0, 0])
            same_bits(states[b : b + 1], state)


def poison_rows(x: Array, count: Array) -> Array:
    """NaN in every row at or after ``count[b]``."""
    x = x.copy()
    for b, kept in enumerate(count):
        x[b, kept:] = NAN
    return x


@pytest.mark.parametrize("length", [1, 2, 4, 7])
def test_the_window_after_count_rows_is_that_of_single_steps_whatever_follows(length: int) -> None:
    rng, batch = np.random.default_rng(6), length + 1
    window, count = normal(rng, batch, 3, 8), np.arange(batch, dtype=np.int32)
    u = poison_rows(normal(rng, batch, length, 8), count)
    run = compiled(causal_conv.CONV_WINDOW, window, u, count)
    for found in (run(window, u, count)[0], causal_conv.conv_window(window, u, count)):
        for b in range(batch):
            line = np.concatenate([window[b], u[b, :b]])
            same_bits(found[b], line[-3:])


def _slot(table: Array, position: int) -> int:
    return int(table[position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE


def poison_pools(args: list[Any]) -> list[Any]:
    """NaN in every slot that no live position owns, except the zero slot."""
    args = list(args)
    table, start, count = args[3:6]
    ends = start + count
    live = {_slot(table[b], p) for b, end in enumerate(ends) for p in range(end)}
    stale = [s for s in range(args[1].shape[1]) if s not in live | {attention.ZERO_SLOT}]
    for i in (1, 2):
        args[i] = args[i].copy()
        args[i][:, stale] = NAN
    return args


@pytest.mark.parametrize("extra", [0, 2])
@pytest.mark.parametrize("heads", [2, 4, 6])
def test_paged_attention_is_scaled_dot_product_attention_over_what_the_blocks_hold(
    heads: int, extra: int
) -> None:
    rng = np.random.default_rng(7)
    args = attention_inputs(rng, 3, heads)
    args[5] = ints(3, 2)  # the last row of slot 1 is padding
    args = poison_pools(with_extra(rng, args, extra) if extra else args)
    args[0] = poison_rows(args[0], args[5])
    narrow = [*args[:3], np.ascontiguousarray(args[3][:, :4]), *args[4:]]
    run = compiled(attention.PAGED_ATTENTION, *args)
    with np.errstate(invalid="ignore"):
        meaning = attention.paged_attention(*args), attention.paged_attention(*narrow)
    for found in (run(*args)[0], run(*narrow)[0], *meaning):
        for b, kept in enumerate(args[5]):
            close(found[b, :kept], _dense(args, b, extra))


def _dense(args: list[Any], b: int, extra: int) -> Any:
    """torch's attention over the gathered sequence of one slot, ``[count, Nh, D]``."""
    q, *pools, table, start, count = args[:6]
    end = start[b] + count[b]
    slots = [_slot(table[b], p) for p in range(end)]
    seen = torch.arange(end) <= torch.arange(start[b], end)[:, None]
    keys, values = (tensor(pool[:, slots]) for pool in pools)
    if extra:
        seen = functional.pad(seen, (0, extra), value=True)
        more = (tensor(x[b]).transpose(0, 1) for x in args[6:8])
        keys, values = (torch.cat(x, dim=1) for x in zip((keys, values), more, strict=True))
    query = tensor(q[b, : count[b]]).transpose(0, 1)
    mixed = functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=seen, enable_gqa=True
    )
    return mixed.transpose(0, 1)


@pytest.mark.parametrize(
    ("start", "count", "kept"),
    [
        ([11, 2], [3, 1], [3, 1]),
        ([14, 9], [3, 3], [2, 3]),  # slot 0 runs into a block that is not assigned
        ([18, 30], [3, 3], [0, 0]),  # beyond the assigned blocks, beyond the table
        ([0, 5], [0, 0], [0, 0]),  # idle slots
    ],
)
def test_rows_that_are_not_kept_change_the_trash_slot_alone(
    start: list[int], count: list[int], kept: list[int]
) -> None:
    args = write_inputs(np.random.default_rng(8))
    args[5], args[6] = ints(*start), ints(*count)
    args[:2] = [poison_rows(x, ints(*kept)) for x in args[:2]]
    expected = [pool.copy() for pool in args[2:4]]
    for pool, new in zip(expected, args[:2], strict=True):
        for b, rows_kept in enumerate(kept):
            for t in range(rows_kept):
                pool[:, _slot(args[4][b], start[b] + t)] = new[b, t]
    for found in (compiled(attention.KV_WRITE, *args)(*args), attention.kv_write(*args)):
        for pool, wanted in zip(found, expected, strict=True):
            keep = np.arange(pool.shape[1]) != attention.TRASH_SLOT
            same_bits(pool[:, keep], wanted[:, keep])
            assert not pool[:, attention.ZERO_SLOT].any()


def test_an_index_of_minus_one_takes_row_zero() -> None:
    x = normal(np.random.default_rng(9), 3, 4, 8)
    same_bits(rows.take_row(x, ints(-1, 3, 0)), np.stack([x[0, 0], x[1, 3], x[2, 0]]))


def test_int8_and_int4_round_to_the_nearest_step_and_keep_zeros() -> None:
    weight = normal(np.random.default_rng(10), 24, 96)
    weight[3], weight[5, 32:64] = 0, 0
    values, scale = linear.quantize_int8(weight)
    error = np.abs(values.T.astype(np.float64) * scale[:, None] - weight)
    assert (error <= scale[:, None] * 0.5001).all()
    assert not values[:, 3].any()
    packed, scale = linear.quantize_int4(weight)
    back = linear.dequantize_int4(packed, scale)
    assert (np.abs(back - weight) <= np.repeat(scale, 32, axis=1) * 0.5001).all()
    assert not back[3].any()
    assert not back[5, 32:64].any()
    rows_, row_scale = linear.quantize_rows(weight)
    assert (np.abs((rows_ - 128.0) * row_scale - weight) <= row_scale * 0.5001).all()
    assert (rows_[3] == 128).all()


def _int8_rows(weight: Array) -> list[Array]:
    values, scale = linear.quantize_int8(weight)
    return [values.T, scale]


FORMATS: dict[str, Any] = {
    "linear": (linear.LINEAR, lambda w: [w], 1e-6),
    "linear_int8": (linear.LINEAR_INT8, linear.quantize_int8, 0.02),
    "linear_int8_rows": (linear.LINEAR_INT8_ROWS, _int8_rows, 0.02),
    "linear_int4": (linear.LINEAR_INT4, linear.quantize_int4, 0.2),
}


@pytest.mark.parametrize("shape", [(48, 64), (384, 256), (1000, 1024)])
@pytest.mark.parametrize("name", FORMATS)
def test_a_row_of_a_product_has_the_same_bits_among_any_other_rows(
    name: str, shape: tuple[int, int]
) -> None:
    operator, quantise, loss = FORMATS[name]
    rng = np.random.default_rng(11)
    weight = normal(rng, *shape)
    stored = quantised(quantise, weight)
    places = tuple(range(1, 1 + len(stored)))
    x = normal(rng, 16, shape[1])
    x[1] = 0
    alone = [compiled(operator, x[:1], *stored, stored=places)(x[i : i + 1])[0] for i in (0, 1, 2)]
    for m in (2, 4, 8, 16):
        run = compiled(operator, x[:m], *stored, stored=places)
        other = x[:m].copy()
        other[2:] *= 1000
        for i in range(2):
            same_bits(run(x[:m])[0][i], alone[i][0])
            same_bits(run(other)[0][i], alone[i][0])
        if m > 2:
            same_bits(run(x[:m])[0][2], alone[2][0])
    assert not alone[1].any()
    exact = x[0].astype(np.float64) @ weight.T.astype(np.float64)
    assert np.linalg.norm(alone[0][0] - exact) <= loss * np.linalg.norm(exact)


@pytest.mark.parametrize("group", [2, 4])
def test_a_row_of_attention_has_the_same_bits_among_more_rows_and_in_a_wider_table(
    group: int,
) -> None:
    rng, size, dim = np.random.default_rng(12), 16, 64
    pools = [normal(rng, 2, 40 * size, dim) for _ in range(2)]
    for pool in pools:
        pool[:, attention.ZERO_SLOT] = 0
    table = np.zeros((1, 16), np.int32)
    table[0, :8] = rng.permutation(np.arange(1, 40))[:8]
    q = normal(rng, 1, 8, 2 * group, dim)
    first = None
    for count in (1, 2, 4, 8):
        for width in (8, 16):
            args = [q[:, :count].copy(), *pools, table[:, :width].copy()]
            args += [ints(100), ints(count), None, None, size]
            run = compiled(attention.PAGED_ATTENTION, *args)
            found = run(*args)[0][0, 0]
            args[0][:, 1:] *= 50
            same_bits(run(*args)[0][0, 0], found)
            first = found if first is None else first
            same_bits(found, first)
