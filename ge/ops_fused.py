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
MASK_EDGE = 2048  # of the compressed attention mask


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


@operator("ScatterPaKvCache")
def _scatter_pa_kv_cache(node: Node) -> Function:
    node.fixed(cache_mode="Norm", scatter_mode="None", strides=[1, 1], offsets=[0, 0])
    node.absent("compress_lens", "compress_seq_offset", "seq_lens")

    def run(
        key: Tensor, key_cache: Tensor, slots: Tensor, value: Tensor, value_cache: Tensor, *_: None
    ) -> tuple[Tensor, Tensor]:
        if key.dim() != 3 or key_cache.dim() != 4:
            raise ValueError("it takes keys [T, N, D] and a cache [blocks, block_size, N, D]")
        for rows, cache in ((key, key_cache), (value, value_cache)):
            cache.view(-1, *cache.shape[2:]).index_copy_(0, slots.long(), rows)
        return key_cache, value_cache

    return run


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

    node.irrelevant("lookahead")  # it repeats a shape

    def sample(**inputs: Tensor) -> tuple[Tensor, Tensor]:
        tokens, accepted = meaning(**{name: value.numpy() for name, value in inputs.items()})
        return torch.from_numpy(tokens), torch.from_numpy(accepted)

    return node.named(sample)


def unused(node: Node, *kept: str) -> None:
    """Refuse every connected input that is not among these (``key0`` stands for ``key``)."""
    node.absent(*(name for name in node.inputs if name not in kept))


@operator("FusedInferAttentionScore")
def _fused_infer_attention(node: Node) -> Function:
    unused(
        node,
        "query",
        "key0",
        "value0",
        "atten_mask",
        "actual_seq_lengths",
        "actual_seq_lengths_kv",
        "block_table",
    )
    limit = 2**31 - 1
    node.fixed(
        pre_tokens=limit, next_tokens=limit, softmax_lse_flag=False, pse_type=0, out_dtype=0
    )
    node.fixed(antiquant_mode=0, key_antiquant_mode=0, value_antiquant_mode=0, query_quant_mode=0)
    node.irrelevant("inner_precise")
    heads, scale = node.attr("num_heads"), node.attr("scale", 1.0)
    settings: dict[str, Any] = {
        "heads": heads,
        "kv_heads": node.attr("num_key_value_heads", 0) or heads,
        "scale": scale,
        "layout": node.attr("input_layout", "BSH"),
        "causal": node.attr("sparse_mode", 0) == 3,
        "block_size": node.attr("block_size", 0),
    }
    _check_attention(node, settings)
    return node.named(lambda **inputs: (_attention(**settings, **inputs), torch.zeros(1)))


def _check_attention(node: Node, settings: dict[str, Any]) -> None:
    if settings["layout"] not in ("TND", "BSND", "BSH"):
        raise node.error(f"input_layout={settings['layout']} is not implemented")
    if node.attr("sparse_mode", 0) not in (0, 3):
        raise node.error(f"sparse_mode={node.attr('sparse_mode')} is not implemented")
    if settings["causal"] != (node.at("atten_mask") is not None):
        raise node.error("sparse_mode 3 and atten_mask go together here")
    mask = node.constants.get("atten_mask")
    expected = torch.ones(MASK_EDGE, MASK_EDGE, dtype=torch.bool).triu(1)
    if mask is not None and not torch.equal(mask.reshape(mask.shape[-2:]).bool(), expected):
        raise node.error(f"atten_mask must be 1 above the diagonal, {MASK_EDGE} a side")
    for name in ("block_table", "actual_seq_lengths_kv"):
        if node.at(name) is None:
            raise node.error(f"the input {name} is missing; keys come in pages here")


def _attention(
    *,
    heads: int,
    kv_heads: int,
    scale: float,
    layout: str,
    causal: bool,
    block_size: int,
    query: Tensor,
    key0: Tensor,
    value0: Tensor,
    actual_seq_lengths_kv: Tensor,
    block_table: Tensor,
    actual_seq_lengths: Tensor | None = None,
    atten_mask: Tensor | None = None,
) -> Tensor:
    """Attention of rows over pages, ``[blocks, block_size, N * D]`` or ``[blocks, N, size, D]``.

    The causal mask is aligned at the end of each sequence; a row that sees nothing is zero.
    """
    line = query.reshape(-1, heads, query.shape[-1] // (heads if layout == "BSH" else 1))
    out = torch.zeros_like(line)
    spans = _query_spans(query, layout, actual_seq_lengths)
    pages = [_paged(pool, kv_heads, block_size) for pool in (key0, value0)]
    lengths = [int(n) for n in actual_seq_lengths_kv.tolist()]
    for (first, last), length, table in zip(spans, lengths, block_table.tolist(), strict=True):
        count = -(-length // block_size)
        if count > len(table):
            raise IndexError(f"{length} keys need {count} blocks, the table has {len(table)}")
        if length > 0 and last > first:
            blocks = torch.tensor(table[:count])
            key, value = (p.index_select(0, blocks).flatten(0, 1)[:length].float() for p in pages)
            out[first:last] = _mix(line[first:last].float(), key, value, scale, causal)
    return out.reshape(query.shape)


def _mix(q: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Tensor:
    """Rows ``[R, N, D]`` over keys ``[S, Nkv, D]``; query heads share keys in groups."""
    rows, (length, kv_heads, _) = len(q), key.shape
    grouped = q.reshape(rows, kv_heads, -1, q.shape[-1])
    scores = torch.einsum("rngd,snd->ngrs", grouped, key) * scale
    if causal:
        seen = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)
        scores = scores.masked_fill(~seen, -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0) if rows > length else scores.softmax(-1)
    return torch.einsum("ngrs,snd->rngd", weights, value).flatten(1, 2)


def _paged(pool: Tensor, heads: int, block_size: int) -> Tensor:
    """``[blocks, block_size, heads, D]`` from either layout of a paged cache."""
    in_rows = pool.dim() == 3
    pages = pool.reshape(*pool.shape[:2], heads, -1) if in_rows else pool.transpose(1, 2)
    if pages.shape[1:3] != (block_size, heads):
        raise ValueError(f"a cache of {tuple(pool.shape)} does not have blocks of {block_size}")
    return pages


def _query_spans(query: Tensor, layout: str, lengths: Tensor | None) -> list[tuple[int, int]]:
    if layout == "TND":
        if lengths is None:
            raise ValueError("layout TND needs actual_seq_lengths")
        return list(pairwise([0, *(int(n) for n in lengths.tolist())]))
    batch, rows = query.shape[:2]
    counts = [rows] * batch if lengths is None else [int(n) for n in lengths.tolist()]
    return [(b * rows, b * rows + count) for b, count in enumerate(counts)]
