"""Gated delta rule with masked commit (docs/adr/0005).

For every value head, with k, q of its key head (value head i reads key head ``i // (Nv / Nk)``)::

    S <- exp(g) S;   d = beta (v - S^T k);   S <- S + k d^T;   o = S^T (q * Dk^-0.5)

A row at or after ``count`` is an exact no-op on the state: decay 1, beta 0, key and value 0, so
not even a NaN in it can reach the state. That is the whole rollback: rejected rows are replayed
as no-ops, and the committed state carries the bits of one-token stepping.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_mtp.custom_ops.delta_chunk import chunk_rule
from qwen_mtp.custom_ops.delta_steps import before, steps
from qwen_mtp.custom_ops.operator import MICROSOFT, Operator, const, shared

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
STEPPED = 16  # rows up to which the aten form goes one by one


def gated_delta_rule(
    q: Floats,
    k: Floats,
    v: Floats,
    g: Floats,
    beta: Floats,
    state: Floats,
    count: Ints | None = None,
) -> tuple[Floats, Floats]:
    """Run R rows of the recurrence.

    Args:
        q: ``[B, R, Nk, Dk]`` float32, L2-normalised, not scaled.
        k: ``[B, R, Nk, Dk]`` float32, L2-normalised.
        v: ``[B, R, Nv, Dv]`` float32.
        g: ``[B, R, Nv]`` float32 log decay (<= 0).
        beta: ``[B, R, Nv]`` float32 in [0, 1].
        state: ``[B, Nv, Dk, Dv]`` float32.
        count: ``[B]`` int32; rows from ``count[b]`` on leave the state alone. None keeps all.

    Returns:
        Outputs ``[B, R, Nv, Dv]`` (rows at or after ``count`` carry no meaning) and the state
        after the last kept row, ``[B, Nv, Dk, Dv]``.
    """
    rows, ratio = q.shape[1], v.shape[2] // q.shape[2]
    if count is not None:
        keep = np.arange(rows) < count[:, None]
        k, v = (np.where(keep[..., None, None], x, np.float32(0)) for x in (k, v))
        g, beta = (np.where(keep[..., None], x, np.float32(0)) for x in (g, beta))
    q, k = np.repeat(q, ratio, axis=2), np.repeat(k, ratio, axis=2)
    out = np.empty_like(v)
    scale = np.float32(q.shape[-1] ** -0.5)
    for t in range(rows):
        state = state * np.exp(g[:, t])[..., None, None]
        read = np.einsum("bhkv,bhk->bhv", state, k[:, t])
        delta = beta[:, t][..., None] * (v[:, t] - read)
        state = state + k[:, t][..., None] * delta[..., None, :]
        out[:, t] = np.einsum("bhkv,bhk->bhv", state, q[:, t] * scale)
    return out, state


def delta_gates(a: Floats, b: Floats, decay: Floats, dt_bias: Floats) -> tuple[Floats, Floats]:
    """Log decay and update rate of each row and value head.

    Args:
        a: ``[B, R, Nv]`` float32.
        b: ``[B, R, Nv]`` float32.
        decay: ``[Nv]`` float32, ``-exp(A_log)``.
        dt_bias: ``[Nv]`` float32.

    Returns:
        ``g = decay * softplus(a + dt_bias)`` and ``beta = sigmoid(b)``, each ``[B, R, Nv]``.
    """
    zero = np.float32(0)
    g = decay * np.logaddexp(zero, a + dt_bias)
    return np.asarray(g, np.float32), np.asarray(np.exp(-np.logaddexp(zero, -b)), np.float32)


def _gates_fake(a: Any, b: Any, decay: Any, dt_bias: Any) -> tuple[Any, Any]:
    return tuple(x.new_empty(x.shape).float() for x in (a, b))


def _gates_onnx(op: Any, a: Any, b: Any, decay: Any, dt_bias: Any) -> tuple[Any, Any]:
    # ONNX Runtime's Softplus rounds an element by its place in the buffer (vector body or tail,
    # thread boundary), so a row would depend on its neighbours; this kernel goes one by one.
    g, beta = op.LinearAttentionGate(a, dt_bias, decay, b, _domain=MICROSOFT, _outputs=2)
    return g, beta


def _gates_decomposed(a: Any, b: Any, decay: Any, dt_bias: Any) -> tuple[Any, Any]:
    x = a.float() + dt_bias.float()
    # softplus has no converter, and overflows as log(1 + exp(x)).
    softplus = x.clamp(min=0) + x.abs().neg().exp().log1p()
    return decay.float() * softplus, b.float().sigmoid()


def _fake(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, count: Any) -> tuple[Any, Any]:
    return v.new_empty(v.shape), state.new_empty(state.shape)


def _keep_mask(op: Any, count: Any, rows: int) -> Any:
    """``[B, R, 1]`` bool: rows before ``count``."""

    def make() -> Any:
        steps = const(op, np.arange(rows, dtype=np.int32)[None])
        return op.Unsqueeze(op.Less(steps, op.Unsqueeze(count, [1])), [2])

    return shared(op, ("keep_mask", count, rows), make)


def _onnx(
    op: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, count: Any
) -> tuple[Any, Any]:
    rows, key_heads, key_dim = (int(d) for d in q.shape[1:])
    heads, value_dim = (int(d) for d in v.shape[2:])
    q, k = (op.Reshape(x, [0, 0, key_heads * key_dim]) for x in (q, k))
    v = op.Reshape(v, [0, 0, heads * value_dim])
    if count is not None:
        keep, zero = _keep_mask(op, count, rows), const(op, np.zeros((), np.float32))
        k, v, g, beta = (op.Where(keep, x, zero) for x in (k, v, g, beta))
    out, state = op.LinearAttention(
        q,
        k,
        v,
        state,
        g,
        beta,
        q_num_heads=key_heads,
        kv_num_heads=heads,
        update_rule="gated_delta",
        scale=key_dim**-0.5,
        _domain=MICROSOFT,
        _outputs=2,
    )
    return op.Reshape(out, [0, 0, heads, value_dim]), state


def _decomposed(
    q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, count: Any
) -> tuple[Any, Any]:
    import torch

    keep = None if count is None else before(count, q.shape[1])
    if q.shape[1] > STEPPED:
        out, last = chunk_rule(q, k, v, g, beta, state, keep)
        return out.to(v.dtype), last.to(state.dtype)
    rows = steps(q, k, v, g, beta, key_last=False, keep=keep)
    outputs, states = rows.run(state)
    return torch.stack(outputs, 1).reshape(v.shape).to(v.dtype), states[-1]


DELTA_GATES = Operator(
    name="delta_gates",
    schema="(Tensor a, Tensor b, Tensor decay, Tensor dt_bias) -> (Tensor, Tensor)",
    meaning=delta_gates,
    fake=_gates_fake,
    onnx=_gates_onnx,
    decomposed=_gates_decomposed,
)
GATED_DELTA_RULE = Operator(
    name="gated_delta_rule",
    schema="(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor state, Tensor? count)"
    " -> (Tensor, Tensor)",
    meaning=gated_delta_rule,
    fake=_fake,
    onnx=_onnx,
    decomposed=_decomposed,
)
