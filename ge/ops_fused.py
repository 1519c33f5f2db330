"""Meanings of the fused kernels of Ascend 910B and A3, as their public documentation has them.

They compute in float32 and round once at the end. What a kernel leaves alone (a row of no
sequence, a sequence its guards refuse) is zero here and arbitrary on the device.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as nn

from qwen_mtp.ge.node import Function, Node, operator

Tensor = torch.Tensor
MAX_ROWS = 8  # of one sequence in RecurrentGatedDeltaRule


@operator("RmsNorm")
def _rms_norm(node: Node) -> Function:
    epsilon = node.attr("epsilon", 1e-6)
    return lambda x, gamma: rms_norm(x, gamma, epsilon)


@operator("AddRmsNorm")
def _add_rms_norm(node: Node) -> Function:
    epsilon = node.attr("epsilon", 1e-6)

    def run(x1: Tensor, x2: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total = x1 + x2
        return (*rms_norm(total, gamma, epsilon), total)

    return run


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """``x / rms(x) * gamma`` over the axes of gamma, and the reciprocal of the rms in float32."""
    wide, axes = x.float(), tuple(range(-gamma.dim(), 0))
    scale = torch.rsqrt(wide.square().mean(axes, keepdim=True) + epsilon)
    return (wide * scale * gamma.float()).to(x.dtype), scale


@operator("SwiGlu")
def _swiglu(node: Node) -> Function:
    dim = node.attr("dim", -1)

    def run(x: Tensor) -> Tensor:
        gate, up = x.float().chunk(2, dim)
        return (nn.silu(gate) * up).to(x.dtype)

    return run


@operator("RotaryMul")
def _rotary_mul(node: Node) -> Function:
    node.fixed(rotary_mode="half")
    return rotate


@operator("RotaryPositionEmbedding")
def _rotary_position_embedding(node: Node) -> Function:
    node.fixed(mode=0)
    node.absent("rotate")
    return lambda x, cos, sin, *_: rotate(x, cos, sin)


@operator("ApplyRotaryPosEmb")
def _apply_rotary(node: Node) -> Function:
    node.fixed(rotary_mode="half")
    layout = node.attr("layout", 1)
    if layout not in (1, 2, 3, 4):
        raise node.error(f"layout={layout} is not implemented")
    return lambda query, key, cos, sin: (rotate(query, cos, sin), rotate(key, cos, sin))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the halves of the last axis; the tables broadcast against ``x``."""
    if x.shape[-1] != cos.shape[-1]:
        raise ValueError(f"tables of {cos.shape[-1]} for rows of {x.shape[-1]}")
    low, high = x.float().chunk(2, -1)
    turned = torch.cat([-high, low], -1)
    return (x.float() * cos.float() + turned * sin.float()).to(x.dtype)


@operator("RecurrentGatedDeltaRule")
def _recurrent_gated_delta_rule(node: Node) -> Function:
    scale = node.attr("scale_value", 1.0)
    node.absent("gk")
    return node.named(lambda **inputs: _delta_rule(scale, **inputs))


def _delta_rule(
    scale: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    state: Tensor,
    actual_seq_lengths: Tensor,
    ssm_state_indices: Tensor,
    g: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """State ``[slots, Nv, Dv, Dk]``: read at the last accepted row, written after each row.

    Like the kernel it stops without a word at a sequence whose accepted count is not in
    ``1 .. rows``: its outputs and those of the sequences after it stay what they were.
    """
    out = torch.zeros(value.shape, dtype=query.dtype)
    lengths, slots = actual_seq_lengths.tolist(), ssm_state_indices.tolist()
    accepted = [1] * len(lengths) if num_accepted_tokens is None else num_accepted_tokens.tolist()
    start = 0
    for rows, count in zip(lengths, accepted, strict=True):
        if rows > MAX_ROWS:
            raise ValueError(f"a sequence of {rows} rows; the kernel takes {MAX_ROWS}")
        if rows > 0 and not 0 < count <= rows:
            break
        if rows > 0:
            span = slice(start, start + rows)
            q, k, v = (x[span].float() for x in (query, key, value))
            decay = None if g is None else g[span].float().exp()
            held = state[slots[start + count - 1]].float()
            steps = _delta_steps(held, q * scale, k, v, beta[span].float(), decay)
            for t, (row, after) in enumerate(steps, start):
                out[t] = row.to(out.dtype)
                state[slots[t]] = after.to(state.dtype)
        start += max(rows, 0)
    return out, state


def _delta_steps(
    held: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Output ``[Nv, Dv]`` and state after each row."""
    ratio = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(ratio, 1) for x in (q, k))
    for t in range(len(v)):
        if decay is not None:
            held = held * decay[t][:, None, None]
        error = v[t] - (held @ k[t].unsqueeze(-1)).squeeze(-1)
        held = held + (beta[t][:, None] * error).unsqueeze(-1) * k[t].unsqueeze(1)
        yield (held @ q[t].unsqueeze(-1)).squeeze(-1), held


CONV_INPUTS = (
    "initial_state_mode",
    "bias",
    "block_idx_first_scheduled_token",
    "block_idx_last_scheduled_token",
    "initial_state_idx",
)


@operator("FusedCausalConv1d", "InplaceFusedCausalConv1d")
def _fused_causal_conv(node: Node) -> Function:
    node.fixed(residual_connection=0, conv_mode=0)
    node.irrelevant("max_query_len", "block_size", "run_mode")
    node.absent(*CONV_INPUTS)
    activation, pad = node.attr("activation_mode", 0), node.attr("pad_slot_id", -1)
    if activation not in (0, 1):
        raise node.error(f"activation_mode={activation} is not implemented")
    run = node.named(lambda **inputs: _causal_conv(activation == 1, pad, **inputs))
    if node.type == "FusedCausalConv1d":
        return run

    def inplace(*args: Any) -> tuple[Tensor, Tensor]:
        states, out = run(*args)
        return states, args[0].copy_(out)

    return inplace


def _causal_conv(
    silu: bool,
    pad_slot_id: int,
    x: Tensor,
    weight: Tensor,
    conv_states: Tensor,
    query_start_loc: Tensor | None = None,
    cache_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    num_computed_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolve sequences after their history; states ``[slots, columns, C]`` take their ends.

    The last ``columns`` of (history up to the accepted row, new rows) fill a state from the
    right. The documentation of torch_npu 2.13 has the kernel for Ascend 950 alone, with three
    taps and without an activation; both go further here, as the operator's attributes do.
    """
    lines, out, taps = x.reshape(-1, x.shape[-1]), x.clone(), len(weight)
    flat, columns = out.view(-1, x.shape[-1]), conv_states.shape[1]
    for b, (first, last) in enumerate(pairwise(_starts(x, query_start_loc))):
        slot = b if cache_indices is None else int(cache_indices[b])
        if slot == pad_slot_id:
            continue
        held = conv_states[slot]
        past = columns if num_accepted_tokens is None else int(num_accepted_tokens[b]) + taps - 2
        history = held[:past]
        if num_computed_tokens is not None and int(num_computed_tokens[b]) == 0:
            history = torch.zeros_like(held[: taps - 1])
        line = torch.cat([history, lines[first:last]])
        window = line[len(history) - taps + 1 :].float()
        rows = last - first
        frames = torch.stack([window[i : i + rows] for i in range(taps)])
        total = (frames * weight.float().unsqueeze(1)).sum(0)
        flat[first:last] = (nn.silu(total) if silu else total).to(x.dtype)
        kept = line[-columns:]
        held[columns - len(kept) :] = kept
    return conv_states, out


def _starts(x: Tensor, query_start_loc: Tensor | None) -> list[int]:
    if x.dim() == 3:
        return list(range(0, x.shape[0] * x.shape[1] + 1, x.shape[1]))
    if query_start_loc is None:
        raise ValueError("rows in a line need query_start_loc")
    return [int(start) for start in query_start_loc.tolist()]


@operator("MtpRejectionSample")
def _rejection_sample(node: Node) -> Function:
    from qwen_mtp.custom_ops.rejection import meaning

    def sample(**inputs: Tensor) -> tuple[Tensor, Tensor]:
        tokens, accepted = meaning(**{name: value.numpy() for name, value in inputs.items()})
        return torch.from_numpy(tokens), torch.from_numpy(accepted)

    return node.named(sample)
