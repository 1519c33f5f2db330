"""Convolution and delta rule over slots of state, one slot for every row of a round.

Instead of replaying what was accepted, a round leaves the state behind each of its rows; the next
round starts from the one behind the last accepted row (docs/ascend.md). That is the protocol of
the Ascend kernels. ``num_accepted`` counts the accepted rows, the drafts and the row before them;
0 (after prefill) reads what prefill wrote, which is what one accepted row would have left.
"""

from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_mtp.custom_ops.causal_conv import CAUSAL_CONV, causal_conv, convolved
from qwen_mtp.custom_ops.delta_rule import GATED_DELTA_RULE, gated_delta_rule
from qwen_mtp.custom_ops.delta_steps import steps
from qwen_mtp.custom_ops.operator import Operator, const
from qwen_mtp.custom_ops.rows import gather_rows

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


def slot_conv(
    u: Floats, weight: Floats, window: Floats, num_accepted: Ints
) -> tuple[Floats, Floats]:
    """Convolve R rows behind the accepted ones and move the window.

    Args:
        u: ``[B, R, C]`` float32 inputs.
        weight: ``[C, 1, W]`` float32.
        window: ``[B, W - 1 + R - 1, C]`` float32: the ``W - 2`` inputs before the last round and
            its first R inputs, so that column n - 1 begins the window behind its row n.
        num_accepted: ``[B]`` int32 in 0..R.

    Returns:
        The activated rows ``[B, R, C]`` and the new window.
    """
    first, kept = np.maximum(num_accepted, 1) - 1, weight.shape[2] - 1
    index = first[:, None] + np.arange(kept)
    history = np.take_along_axis(window, index[..., None].astype(np.int64), axis=1)
    line = np.concatenate([history, u], axis=1)
    return causal_conv(u, weight, history), line[:, 1:]


def slot_delta_rule(
    q: Floats,
    k: Floats,
    v: Floats,
    g: Floats,
    beta: Floats,
    states: Floats,
    num_accepted: Ints,
) -> tuple[Floats, Floats]:
    """Run R rows of the recurrence from the state behind the accepted ones.

    Args:
        q: ``[B, R, Nk, Dk]`` float32, L2-normalised, not scaled.
        k: ``[B, R, Nk, Dk]`` float32, L2-normalised.
        v: ``[B, R, Nv, Dv]`` float32.
        g: ``[B, R, Nv]`` float32 log decay (<= 0).
        beta: ``[B, R, Nv]`` float32 in [0, 1].
        states: ``[B * R, Nv, Dv, Dk]`` float32: of each sequence, slot t behind row t of the last
            round.
        num_accepted: ``[B]`` int32 in 0..R.

    Returns:
        Outputs ``[B, R, Nv, Dv]`` and the states behind each of these rows.
    """
    first, rows = np.maximum(num_accepted, 1) - 1, q.shape[1]
    state = states[np.arange(len(first)) * rows + first].swapaxes(2, 3)
    out, new = np.empty_like(v), np.empty_like(states)
    for t in range(rows):
        row = np.s_[:, t : t + 1]
        out[row], state = gated_delta_rule(q[row], k[row], v[row], g[row], beta[row], state)
        new[t::rows] = state.swapaxes(2, 3)
    return out, new


def _conv_fake(u: Any, weight: Any, window: Any, num_accepted: Any) -> tuple[Any, Any]:
    return u.new_empty(u.shape), window.new_empty(window.shape)


def _conv_onnx(op: Any, u: Any, weight: Any, window: Any, num_accepted: Any) -> tuple[Any, Any]:
    history = _picked(op, window, num_accepted, int(weight.shape[2]) - 1)
    line = op.Concat(history, u, axis=1)
    bounds = (const(op, np.array([n], np.int64)) for n in (1, int(window.shape[1]) + 1, 1))
    return CAUSAL_CONV.onnx(op, u, weight, history), op.Slice(line, *bounds)


def _picked(op: Any, x: Any, num_accepted: Any, rows: int) -> Any:
    """``[B, rows, ...]`` of ``[B, L, ...]`` from the row behind the accepted ones on."""
    batch, length, *rest = (int(d) for d in x.shape)
    one = const(op, np.ones((), np.int32))
    start = op.Sub(op.Max(num_accepted, one), one)
    offset = np.arange(batch, dtype=np.int32)[:, None] * length + np.arange(rows, dtype=np.int32)
    index = op.Add(op.Unsqueeze(start, [1]), const(op, offset))
    return op.Gather(op.Reshape(x, [batch * length, *rest]), index, axis=0)


def _conv_decomposed(u: Any, weight: Any, window: Any, num_accepted: Any) -> tuple[Any, Any]:
    import torch

    batch, rows, channels = u.shape
    kept = weight.shape[2] - 1
    history = gather_rows(window, num_accepted.clamp(min=1) - 1, kept)
    line = torch.cat([history.reshape(batch, kept, channels), u], 1)
    return convolved(line, weight, rows), line[:, 1:]


def _conv_ge(
    u: Any, weight: Any, window: Any, num_accepted: Any, meta_outputs: Any = None
) -> tuple[Any, Any]:
    """The kernel itself: ``torch.ops.npu.npu_fused_causal_conv1d`` answers without the window."""
    ge = import_module("torchair._ge_concrete_graph.ge_apis")
    int32 = import_module("torchair.ge").DataType.DT_INT32
    batch, rows, channels = meta_outputs[0].size
    taps = meta_outputs[1].size[1] - rows + 2
    if weight.dtype != u.dtype:
        weight = ge.Cast(weight, dst_type=u.dtype)
    window, y = ge.FusedCausalConv1d(
        ge.Reshape(u, [batch * rows, channels]),
        ge.Transpose(ge.Reshape(weight, [channels, taps]), [1, 0]),
        window,
        ge.Const([b * rows for b in range(batch + 1)], int32),
        ge.Const(list(range(batch)), int32),
        None,
        None,
        ge.Maximum(num_accepted, ge.Const(1, int32)),
        None,
        None,
        None,
        None,
        activation_mode=1,  # SiLU
        run_mode=1,  # an update of the window, not a new sequence
        max_query_len=rows,
        residual_connection=0,
    )
    return ge.Reshape(y, [batch, rows, channels]), window


def _rule_fake(
    q: Any, k: Any, v: Any, g: Any, beta: Any, states: Any, num_accepted: Any
) -> tuple[Any, Any]:
    return v.new_empty(v.shape), states.new_empty(states.shape)


def _rule_onnx(
    op: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, states: Any, num_accepted: Any
) -> tuple[Any, Any]:
    batch, rows = (int(d) for d in q.shape[:2])
    flat = [int(d) for d in states.shape]
    state = _state_behind(op, states, num_accepted, batch, rows)
    state, outputs, kept = op.Transpose(state, perm=[0, 1, 3, 2]), [], []
    for t in range(rows):
        bounds = [const(op, np.array([n], np.int64)) for n in (t, t + 1, 1)]
        row = [op.Slice(x, *bounds) for x in (q, k, v, g, beta)]
        out, state = GATED_DELTA_RULE.onnx(op, *row, state, None)
        outputs.append(out)
        kept.append(op.Unsqueeze(op.Transpose(state, perm=[0, 1, 3, 2]), [1]))
    return op.Concat(*outputs, axis=1), op.Reshape(op.Concat(*kept, axis=1), flat)


def _state_behind(op: Any, states: Any, num_accepted: Any, batch: int, rows: int) -> Any:
    """``[B, Nv, Dv, Dk]``."""
    one = const(op, np.ones((), np.int32))
    first = const(op, np.arange(batch, dtype=np.int32) * rows - 1)
    return op.Gather(states, op.Add(op.Max(num_accepted, one), first), axis=0)


def _rule_decomposed(
    q: Any, k: Any, v: Any, g: Any, beta: Any, states: Any, num_accepted: Any
) -> tuple[Any, Any]:
    import torch

    batch, rows = q.shape[:2]
    first = torch.arange(batch, dtype=torch.int32) * rows - 1
    state = torch.index_select(states, 0, num_accepted.clamp(min=1) + first)
    outputs, kept = steps(q, k, v, g, beta, key_last=True).run(state)
    new = torch.stack(kept, 1).reshape(states.shape)
    return torch.stack(outputs, 1).reshape(v.shape).to(v.dtype), new


def _rule_fused(
    q: Any, k: Any, v: Any, g: Any, beta: Any, states: Any, num_accepted: Any
) -> tuple[Any, Any]:
    import torch

    batch, rows = q.shape[:2]
    lengths = torch.full((batch,), rows, dtype=torch.int32)
    out, new = torch.ops.npu.npu_recurrent_gated_delta_rule_functional(
        *(x.flatten(0, 1) for x in (q, k, v)),
        states,
        beta=beta.flatten(0, 1).to(v.dtype),
        scale=q.shape[3] ** -0.5,
        actual_seq_lengths=lengths,
        ssm_state_indices=torch.arange(batch * rows, dtype=torch.int32),
        num_accepted_tokens=num_accepted.clamp(min=1),
        g=g.float().flatten(0, 1),
    )
    return out.reshape(v.shape), new


SLOT_CONV = Operator(
    name="slot_conv",
    schema="(Tensor u, Tensor weight, Tensor window, Tensor num_accepted) -> (Tensor, Tensor)",
    meaning=slot_conv,
    fake=_conv_fake,
    onnx=_conv_onnx,
    decomposed=_conv_decomposed,
    ge=_conv_ge,
    kernels=("FusedCausalConv1d",),
)
SLOT_DELTA_RULE = Operator(
    name="slot_delta_rule",
    schema="(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor states,"
    " Tensor num_accepted) -> (Tensor, Tensor)",
    meaning=slot_delta_rule,
    fake=_rule_fake,
    onnx=_rule_onnx,
    decomposed=_rule_decomposed,
    fused=_rule_fused,
    kernels=("RecurrentGatedDeltaRule",),
)
