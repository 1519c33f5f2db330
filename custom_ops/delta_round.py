"""A Gated DeltaNet layer between its projections: a round of all slots, or a chunk of one.

Composite: the kernels of ``native/delta.h`` pass over the state once, everything else is made of
convolution, norms, gates and recurrence. A row has the same bits in both operators, in a round of
any number of rows and when it is committed.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_mtp.custom_ops.causal_conv import causal_conv, conv_window, taps_first
from qwen_mtp.custom_ops.delta_parts import (
    UNIT_EPS,
    Heads,
    Vectors,
    composed_chunk,
    composed_round,
)
from qwen_mtp.custom_ops.delta_rule import delta_gates, gated_delta_rule
from qwen_mtp.custom_ops.norm import rms_norm
from qwen_mtp.custom_ops.operator import NAMESPACE, Operator
from qwen_mtp.custom_ops.rows import pad_rows

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
_VECTORS = "Tensor qkvz, Tensor ba, Tensor conv, Tensor decay, Tensor dt_bias, Tensor norm"
_STASH = "Tensor u, Tensor k, Tensor v, Tensor g, Tensor beta"


def delta_round(
    qkvz: Floats,
    ba: Floats,
    conv: Floats,
    decay: Floats,
    dt_bias: Floats,
    norm: Floats,
    window: Floats,
    ssm: Floats,
    u: Floats,
    k: Floats,
    v: Floats,
    g: Floats,
    beta: Floats,
    num_accepted: Ints,
    eps: float,
    gate: str,
) -> tuple[Any, ...]:
    """Commit the accepted rows of the last round, then run R new rows on that state.

    Args:
        qkvz: ``[B * R, C + Vd]``: conv inputs, then the output gate.
        ba: ``[B * R, 2 * Nv]``: b, then a of :func:`~qwen_mtp.custom_ops.delta_rule.delta_gates`.
        conv: ``[C, 1, W]``.
        decay: ``[Nv]``.
        dt_bias: ``[Nv]``.
        norm: ``[Dv]``.
        window: ``[B, W - 1, C]``.
        ssm: ``[B, Nv, Dk, Dv]``.
        u: ``[B, P, C]``, conv inputs of the last round.
        k: ``[B, P, Nk, Dk]``.
        v: ``[B, P, Nv, Dv]``.
        g: ``[B, P, Nv]``.
        beta: ``[B, P, Nv]``.
        num_accepted: ``[B]`` int32 in 0..P; later rows of the stash reach nothing.
        eps: Of the output norm.
        gate: ``silu`` or ``sigmoid``.

    Returns:
        Rows for the output projection ``[B * R, Vd]``, the committed window and state, and u, k,
        v, g, beta of the new rows; a kernel leaves rows R to P of these as they were.
    """
    vectors, heads = Vectors(conv, decay, dt_bias, norm, eps, gate), Heads.of(len(conv), ssm)
    window = conv_window(window, u, num_accepted)
    _, state = gated_delta_rule(k, k, v, g, beta, ssm, num_accepted)
    line, rows = _rows(qkvz, ba, window, vectors, heads)
    o, _ = gated_delta_rule(*rows, state)
    stash = (pad_rows(x, u.shape[1], 0) for x in (line, *rows[1:]))
    return _left(o, qkvz, vectors), window, state, *stash


def delta_chunk(
    qkvz: Floats,
    ba: Floats,
    conv: Floats,
    decay: Floats,
    dt_bias: Floats,
    norm: Floats,
    window: Floats,
    ssm: Floats,
    num_valid: Ints,
    eps: float,
    gate: str,
) -> tuple[Floats, Floats, Floats]:
    """Run the first ``num_valid[0]`` of R rows of one sequence.

    Args:
        qkvz: ``[R, C + Vd]``; for the others see :func:`delta_round`, with one slot.
        ba: See there.
        conv: See there.
        decay: See there.
        dt_bias: See there.
        norm: See there.
        window: See there.
        ssm: See there.
        num_valid: ``[1]`` int32 in 0..R.
        eps: See there.
        gate: See there.

    Returns:
        Rows for the output projection ``[R, Vd]`` (those from ``num_valid`` on carry no meaning),
        window and state after the last valid row.
    """
    vectors, heads = Vectors(conv, decay, dt_bias, norm, eps, gate), Heads.of(len(conv), ssm)
    line, rows = _rows(qkvz, ba, window, vectors, heads)
    o, state = gated_delta_rule(*rows, ssm, num_valid)
    return _left(o, qkvz, vectors), conv_window(window, line, num_valid), state


def _rows(
    qkvz: Floats, ba: Floats, window: Floats, vectors: Vectors, heads: Heads
) -> tuple[Floats, tuple[Floats, Floats, Floats, Floats, Floats]]:
    """Conv inputs ``[B, R, C]`` and q, k, v, g, beta."""
    batch, channels = len(window), len(vectors.conv)
    line = qkvz[:, :channels].reshape(batch, -1, channels)
    mixed = causal_conv(line, vectors.conv, window)
    qk, v = np.split(mixed, [channels - heads.value_size], axis=2)
    unit = np.full(heads.key_dim, heads.key_dim**-0.5, np.float32)
    qk = qk.reshape(*line.shape[:2], 2 * heads.keys, heads.key_dim)
    q, k = np.split(rms_norm(qk, unit, UNIT_EPS / heads.key_dim), 2, axis=2)
    b, a = np.split(ba.reshape(*line.shape[:2], -1), 2, axis=2)
    v = v.reshape(*line.shape[:2], heads.values, heads.value_dim)
    g, beta = delta_gates(a, b, vectors.decay, vectors.dt_bias)
    return line, (q, k, v, g, beta)


def _left(o: Floats, qkvz: Floats, vectors: Vectors) -> Floats:
    z = qkvz[:, len(vectors.conv) :]
    act = (1 / (1 + np.exp(-z))).astype(np.float32)
    flat = rms_norm(o, vectors.norm, vectors.eps).reshape(z.shape)
    return np.asarray(flat * (act if vectors.gate == "sigmoid" else z * act), np.float32)


def _round_fake(*args: Any) -> tuple[Any, ...]:
    qkvz, _, conv, *_, window, ssm, u, k, v, g, beta, _, _, _ = args
    out = qkvz.new_empty((qkvz.shape[0], qkvz.shape[1] - conv.shape[0]))
    return out, *(x.new_empty(x.shape) for x in (window, ssm, u, k, v, g, beta))


def _chunk_fake(*args: Any) -> tuple[Any, ...]:
    qkvz, _, conv, *_, window, ssm, _, _, _ = args
    out = qkvz.new_empty((qkvz.shape[0], qkvz.shape[1] - conv.shape[0]))
    return out, window.new_empty(window.shape), ssm.new_empty(ssm.shape)


def _round_native(op: Any, qkvz: Any, ba: Any, conv: Any, *args: Any) -> Any:
    *inputs, eps, gate = args
    ssm, u = inputs[4:6]
    sizes = _attributes(qkvz, conv, ssm, eps, gate)
    batch, kept = (int(n) for n in u.shape[:2])
    taps, outs = taps_first(op, conv), {"_domain": NAMESPACE, "_outputs": 8}
    return op.DeltaRound(qkvz, ba, taps, *inputs, B=batch, P=kept, **sizes, **outs)


def _chunk_native(op: Any, qkvz: Any, ba: Any, conv: Any, *args: Any) -> Any:
    *inputs, eps, gate = args
    sizes = _attributes(qkvz, conv, inputs[4], eps, gate)
    taps, outs = taps_first(op, conv), {"_domain": NAMESPACE, "_outputs": 3}
    return op.DeltaChunk(qkvz, ba, taps, *inputs, **sizes, **outs)


def _attributes(qkvz: Any, conv: Any, ssm: Any, eps: float, gate: str) -> dict[str, int | float]:
    """What the kernels know when they are made; see ``DeltaSizes``."""
    heads = Heads.of(int(conv.shape[0]), ssm)
    return {
        "R": int(qkvz.shape[0]) // int(ssm.shape[0]),
        "key_heads": heads.keys,
        "heads": heads.values,
        "key_dim": heads.key_dim,
        "value_dim": heads.value_dim,
        "taps": int(conv.shape[2]),
        "eps": eps,
        "silu": int(gate == "silu"),
    }


DELTA_ROUND = Operator(
    name="delta_round",
    schema=f"({_VECTORS}, Tensor window, Tensor ssm, {_STASH}, Tensor num_accepted, float eps,"
    " str gate) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    meaning=delta_round,
    fake=_round_fake,
    composed=composed_round,
    native=_round_native,
)
DELTA_CHUNK = Operator(
    name="delta_chunk",
    schema=f"({_VECTORS}, Tensor window, Tensor ssm, Tensor num_valid, float eps, str gate)"
    " -> (Tensor, Tensor, Tensor)",
    meaning=delta_chunk,
    fake=_chunk_fake,
    composed=composed_chunk,
    native=_chunk_native,
)
