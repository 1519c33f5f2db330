"""Attention over the paged pool with the sigmoid gate of its layer behind it."""

from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_mtp.custom_ops.attention import paged_attention
from qwen_mtp.custom_ops.attention_native import attention_native
from qwen_mtp.custom_ops.operator import Operator

Floats = npt.NDArray[Any]
Ints = npt.NDArray[np.int32]


def attention_mix(
    q: Floats,
    gate: Floats,
    k_pool: Floats,
    v_pool: Floats,
    table: Ints,
    start: Ints,
    count: Ints,
    extra_k: Floats | None,
    extra_v: Floats | None,
    block_size: int,
) -> Floats:
    """Compute ``paged_attention(q, ...) * sigmoid(gate)``.

    Args:
        q: ``[B, R, Nh, D]``.
        gate: ``[B, R, Nh * D]``, or ``[B, Nh * D]`` for one row.
        k_pool: This and what follows: as in
            :func:`~qwen_mtp.custom_ops.attention.paged_attention`.
        v_pool: See there.
        table: See there.
        start: See there.
        count: See there.
        extra_k: See there.
        extra_v: See there.
        block_size: See there.

    Returns:
        ``[B * R, Nh * D]``; rows at or after ``count`` carry no meaning.
    """
    more = (table, start, count, extra_k, extra_v, block_size)
    mixed, width = paged_attention(q, k_pool, v_pool, *more), gate.shape[-1]
    return np.asarray(mixed.reshape(-1, width) / (1 + np.exp(-gate.reshape(-1, width))))


def _fake(q: Any, gate: Any, *_: Any) -> Any:
    batch, rows = q.shape[:2]
    return q.new_empty((batch * rows, gate.shape[-1]))


def _composed(q: Any, gate: Any, *rest: Any) -> Any:
    import torch

    width = gate.shape[-1]
    mixed = torch.ops.qwen_mtp.paged_attention(q, *rest)
    return mixed.reshape(-1, width) * torch.sigmoid(gate.reshape(-1, width))


def _native(op: Any, q: Any, gate: Any, *rest: Any) -> Any:
    return attention_native(op, q, *(*rest, gate))


ATTENTION_MIX = Operator(
    name="attention_mix",
    schema="(Tensor q, Tensor gate, Tensor k_pool, Tensor v_pool, Tensor table, Tensor start,"
    " Tensor count, Tensor? extra_k, Tensor? extra_v, int block_size) -> Tensor",
    meaning=attention_mix,
    fake=_fake,
    composed=_composed,
    native=_native,
)
