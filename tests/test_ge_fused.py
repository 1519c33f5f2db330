"""The fused kernels in the interpreter of GE graphs, against oracles from elsewhere."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as nn

from qwen_mtp.custom_ops.delta_rule import gated_delta_rule
from qwen_mtp.errors import PackageError
from tests.ge_build import evaluate

BF16 = torch.bfloat16


def _rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_rms_norm_is_torchs(dtype: torch.dtype) -> None:
    x, gamma = _rand(2, 3, 16, dtype=dtype), _rand(16, dtype=dtype, seed=1)
    y, rstd = evaluate("RmsNorm", {"x": x, "gamma": gamma}, {"epsilon": 1e-6}, ("y", "rstd"))
    expected = nn.rms_norm(x.float(), (16,), gamma.float(), 1e-6)
    torch.testing.assert_close(y, expected.to(dtype))
    assert rstd.shape == (2, 3, 1)
    inputs = {"x1": x, "x2": x, "gamma": gamma}
    y, _, total = evaluate("AddRmsNorm", inputs, {"epsilon": 1e-6}, ("y", "rstd", "x"))
    assert torch.equal(total, x + x)
    expected = nn.rms_norm((x + x).float(), (16,), gamma.float(), 1e-6)
    torch.testing.assert_close(y, expected.to(dtype))


def test_swiglu_gates_the_second_half_with_the_first() -> None:
    x = _rand(3, 8)
    (y,) = evaluate("SwiGlu", {"x": x}, {"dim": -1})
    torch.testing.assert_close(y, nn.silu(x[:, :4]) * x[:, 4:])


def test_rotation_is_a_product_of_complex_numbers() -> None:
    x, angle = _rand(5, 2, 8), _rand(5, 1, 4, seed=1)
    table = torch.cat([angle, angle], -1)
    (y,) = evaluate("RotaryMul", {"x": x, "r1": table.cos(), "r2": table.sin()})
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(y, torch.cat([turned.real, turned.imag], -1))
    inputs = {"query": x, "key": -x, "cos": table.cos(), "sin": table.sin()}
    query, key = evaluate("ApplyRotaryPosEmb", inputs, {"layout": 4}, ("query", "key"))
    torch.testing.assert_close(query, y)
    torch.testing.assert_close(key, -y)


def test_the_cache_takes_rows_at_their_slots() -> None:
    key, value = _rand(3, 2, 8), _rand(3, 2, 8, seed=1)
    empty = torch.zeros(4, 16, 2, 8)
    inputs = {
        "key": key,
        "key_cache": empty,
        "slot_mapping": _ints(17, 3, 63),
        "value": value,
        "value_cache": empty,
    }
    found = evaluate("ScatterPaKvCache", inputs, {"cache_mode": "Norm"}, ("key_cache", "v"))
    for cache, rows in zip(found, (key, value), strict=True):
        assert torch.equal(cache[[1, 0, 3], [1, 3, 15]], rows)
        assert cache.count_nonzero() == rows.count_nonzero()


@pytest.mark.parametrize("layout", ["TND", "BSND", "BSH"])
@pytest.mark.parametrize("by_head", [False, True])
def test_attention_is_causal_softmax_over_the_pages_of_each_sequence(
    layout: str, by_head: bool
) -> None:
    heads, kv_heads, dim, size, rows = 4, 2, 8, 16, 3
    pools = [_rand(9, size, kv_heads, dim, seed=s) for s in (1, 2)]
    table, lengths = _ints(4, 7, 0, 1, 2, 8).reshape(2, 3), [20, 48]
    query = _rand(2, rows, heads, dim)
    shapes = {"TND": (6, heads, dim), "BSND": query.shape, "BSH": (2, rows, heads * dim)}
    given = [p.transpose(1, 2) if by_head else p.reshape(9, size, -1) for p in pools]
    inputs = {
        "query": query.reshape(shapes[layout]),
        "key0": given[0].contiguous(),
        "value0": given[1].contiguous(),
        "pse_shift": None,
        "atten_mask": torch.ones(2048, 2048, dtype=torch.int8).triu(1),
        "actual_seq_lengths": torch.tensor([3, 6] if layout == "TND" else [3, 3]),
        "actual_seq_lengths_kv": torch.tensor(lengths),
        "block_table": table,
    }
    attrs = {
        "num_heads": heads,
        "num_key_value_heads": kv_heads,
        "scale": dim**-0.5,
        "input_layout": layout,
        "sparse_mode": 3,
        "block_size": size,
    }
    out, _ = evaluate("FusedInferAttentionScore", inputs, attrs, ("out", "lse"))
    for b, length in enumerate(lengths):
        key, value = (p[table[b].long()].flatten(0, 1)[:length].transpose(0, 1) for p in pools)
        mask = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)
        expected = nn.scaled_dot_product_attention(
            query[b].transpose(0, 1), key, value, attn_mask=mask, enable_gqa=True
        )
        torch.testing.assert_close(out.reshape(query.shape)[b], expected.transpose(0, 1))


def test_attention_past_the_block_table_is_an_error() -> None:
    inputs = {
        "query": _rand(1, 1, 8),
        "key0": _rand(2, 16, 8),
        "value0": _rand(2, 16, 8),
        "actual_seq_lengths_kv": torch.tensor([17]),
        "block_table": _ints(1).reshape(1, 1),
        "actual_seq_lengths": torch.tensor([1]),
    }
    attrs = {"num_heads": 1, "input_layout": "TND", "block_size": 16}
    with pytest.raises(PackageError, match="17 keys need 2 blocks, the table has 1"):
        evaluate("FusedInferAttentionScore", inputs, attrs, ("out", "lse"))
    with pytest.raises(PackageError, match="does not have blocks of 8"):
        evaluate("FusedInferAttentionScore", inputs, attrs | {"block_size": 8}, ("out", "lse"))


ROWS, NK, NV, DK, DV = 4, 2, 4, 8, 6


def _delta_inputs(batch: int, accepted: torch.Tensor) -> dict[str, torch.Tensor]:
    total = batch * ROWS
    unit = [nn.normalize(_rand(total, NK, DK, seed=s), dim=-1) for s in (1, 2)]
    return {
        "query": unit[0],
        "key": unit[1],
        "value": _rand(total, NV, DV, seed=3),
        "beta": _rand(total, NV, seed=4).sigmoid(),
        "state": _rand(batch * ROWS, NV, DV, DK, seed=5),
        "actual_seq_lengths": _ints(*[ROWS] * batch),
        "ssm_state_indices": _ints(*range(total)),
        "g": -_rand(total, NV, seed=6).abs(),
        "num_accepted_tokens": accepted,
    }


def _split(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(2, ROWS, *x.shape[1:])


def _run_delta(inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    attrs = {"scale_value": DK**-0.5}
    return evaluate("RecurrentGatedDeltaRule", inputs, attrs, ("out", "state"))


def test_the_delta_rule_goes_on_from_the_accepted_slot_and_keeps_every_row() -> None:
    inputs = _delta_inputs(2, _ints(3, 1))
    out, state = _run_delta(inputs)
    q, k, v, beta, g = (_split(inputs[n]).numpy() for n in ("query", "key", "value", "beta", "g"))
    start = _split(inputs["state"])[[0, 1], [2, 0]].mT.numpy()
    for rows in range(1, ROWS + 1):
        first = [x[:, :rows] for x in (q, k, v, g, beta)]
        wanted, after = gated_delta_rule(first[0], first[1], first[2], first[3], first[4], start)
        found = _split(out)[:, :rows]
        torch.testing.assert_close(found, torch.from_numpy(wanted), rtol=1e-4, atol=1e-5)
        slots = _split(state)[:, rows - 1].mT
        torch.testing.assert_close(slots, torch.from_numpy(after), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("refused", [0, ROWS + 1])
def test_the_delta_rule_stops_without_a_word_where_the_accepted_count_is_no_row(
    refused: int,
) -> None:
    inputs = _delta_inputs(3, _ints(1, refused, 1))
    out, state = _run_delta(inputs)
    assert out[:ROWS].count_nonzero() == out[:ROWS].numel()
    assert not out[ROWS:].any()
    assert torch.equal(state[ROWS:], inputs["state"][ROWS:])
    assert not torch.equal(state[:ROWS], inputs["state"][:ROWS])


def test_the_delta_rule_keeps_its_state_in_float32_between_rows() -> None:
    inputs = _delta_inputs(1, _ints(1))
    halves = {
        n: x.to(BF16) if x.is_floating_point() and n != "g" else x for n, x in inputs.items()
    }
    wide = {n: x.float() if x.dtype is BF16 else x for n, x in halves.items()}
    out, state = _run_delta(halves)
    exact, _ = _run_delta(wide)
    assert out.dtype is state.dtype is BF16
    assert torch.equal(out, exact.to(BF16))


TAPS, WIDTH = 4, 5


def _conv(
    states: torch.Tensor, u: torch.Tensor, accepted: Any, **extra: Any
) -> list[torch.Tensor]:
    inputs = {
        "x": u.reshape(-1, WIDTH),
        "weight": _rand(TAPS, WIDTH, seed=9),
        "conv_states": states,
        "query_start_loc": _ints(*range(0, len(u) * u.shape[1] + 1, u.shape[1])),
        "cache_indices": _ints(*range(len(u))),
        "num_accepted_tokens": accepted,
    }
    attrs = {"activation_mode": 1, "run_mode": 1, "residual_connection": 0, **extra}
    return evaluate("FusedCausalConv1d", inputs, attrs, ("conv_states", "y"))


def test_the_convolution_goes_on_from_the_last_accepted_row() -> None:
    rows, weight = 3, _rand(TAPS, WIDTH, seed=9)
    kept = [_rand(2, TAPS - 1, WIDTH, seed=1)]  # what each sequence has seen so far
    states = torch.zeros(2, TAPS - 1 + rows - 1, WIDTH)
    states[:, : TAPS - 1] = kept[0]
    accepted, line = [1, 1], list(kept[0])
    for turn, count in enumerate(([2, 3], [1, 2], [3, 1])):
        u = _rand(2, rows, WIDTH, seed=20 + turn)
        states, y = _conv(states, u, _ints(*accepted))
        for b in range(2):
            past = torch.cat([line[b], u[b]])[-(TAPS - 1 + rows) :]
            wanted = nn.conv1d(past.T[None], weight.T[:, None], groups=WIDTH)[0].T
            torch.testing.assert_close(y[b * rows : (b + 1) * rows], nn.silu(wanted))
            line[b] = torch.cat([line[b], u[b][: count[b]]])
        accepted = count


def test_the_convolution_leaves_the_padding_slot_alone() -> None:
    states, u = _rand(2, TAPS - 1, WIDTH, seed=1), _rand(2, 3, WIDTH, seed=2)
    after, y = _conv(states, u, None, pad_slot_id=1)
    assert torch.equal(y[3:], u[1])
    assert torch.equal(after[1], states[1])
    assert torch.equal(after[0], u[0])


def test_the_convolution_in_place_is_the_other_one() -> None:
    states, u = _rand(1, TAPS - 1, WIDTH, seed=1), _rand(1, 3, WIDTH, seed=2)
    inputs = {
        "x": u,
        "weight": _rand(TAPS, WIDTH, seed=9),
        "conv_states": states,
        "num_computed_tokens": _ints(0),
    }
    attrs = {"activation_mode": 1, "residual_connection": 0}
    inplace = evaluate("InplaceFusedCausalConv1d", inputs, attrs, ("conv_states", "x"))
    zeros = {**inputs, "conv_states": torch.zeros_like(states), "num_computed_tokens": _ints(7)}
    apart = evaluate("FusedCausalConv1d", zeros, attrs, ("conv_states", "y"))
    assert torch.equal(inplace[0], apart[0])
    assert torch.equal(inplace[1], apart[1])


def test_dynamic_quantisation_is_exact_to_half_a_step_of_each_row() -> None:
    x = _rand(4, 64) * torch.tensor([[1.0], [100.0], [1e-3], [0.0]])
    y, scale = evaluate(
        "DynamicQuant", {"x": x, "smooth_scales": None}, {"dst_type": 2}, ("y", "s")
    )
    assert y.dtype is torch.int8
    assert y.abs().amax(1).tolist() == [127, 127, 127, 0]
    assert ((y * scale[:, None] - x).abs() <= scale[:, None] * 0.5001).all()


def test_the_quantised_product_scales_rows_and_columns() -> None:
    x = torch.randint(-128, 128, (3, 40), dtype=torch.int8)
    w = torch.randint(-128, 128, (6, 40), dtype=torch.int8)
    rows, columns = _rand(3, seed=1).abs(), _rand(6, seed=2).abs()
    inputs = {"x1": x, "x2": w, "scale": columns, "pertoken_scale": rows}
    (y,) = evaluate("QuantBatchMatmulV3", inputs, {"dtype": 0, "transpose_x2": True})
    exact = (rows[:, None].double() * x) @ (columns[:, None].double() * w).T
    torch.testing.assert_close(y, exact.float())


@pytest.mark.parametrize("packed_along", ["N", "K"])
def test_int4_weights_are_eight_to_a_word_lowest_bits_first(packed_along: str) -> None:
    depth, columns, group = 64, 16, 32
    values = np.random.default_rng(0).integers(-8, 8, (depth, columns))
    line = values if packed_along == "N" else values.T
    words = np.zeros((line.shape[0], line.shape[1] // 8), np.uint32)
    for i in range(8):
        words |= (line[:, i::8] & 15).astype(np.uint32) << np.uint32(4 * i)
    words = words if packed_along == "N" else np.ascontiguousarray(words.T)
    scale, x = _rand(depth // group, columns, seed=1), _rand(3, depth)
    inputs = {"x": x, "weight": torch.from_numpy(words.view(np.int32)), "antiquant_scale": scale}
    (y,) = evaluate("WeightQuantBatchMatmulV2", inputs, {"antiquant_group_size": group})
    weight = torch.from_numpy(values).float() * scale.repeat_interleave(group, 0)
    torch.testing.assert_close(y, x @ weight)


def test_the_sampler_is_the_meaning_of_the_operator() -> None:
    logits = torch.full((1, 3, 5), 0.0)
    logits[0, [0, 1, 2], [4, 2, 1]] = 9.0
    inputs = {
        "logits": logits,
        "draft_ids": _ints(4, 3).reshape(1, 2),
        "num_drafts": _ints(2),
        "accept_uniforms": torch.zeros(1, 2),
        "pick_uniforms": torch.zeros(1, 3),
        "temperature": torch.zeros(1),
        "top_k": _ints(0),
        "top_p": torch.ones(1),
        "banned_rows": _ints(0),
        "stop_ids": _ints(-1).reshape(1, 1),
    }
    tokens, count = evaluate("MtpRejectionSample", inputs, {}, ("tokens", "num_accepted_drafts"))
    assert tokens.tolist() == [[4, 2, -1]]
    assert count.tolist() == [1]
