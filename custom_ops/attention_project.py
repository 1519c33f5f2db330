"""What lies between the projection of a row and its attention: split, norms, rotation."""

from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_mtp.custom_ops.attention_native import project_native
from qwen_mtp.custom_ops.norm import rms_norm
from qwen_mtp.custom_ops.operator import Operator
from qwen_mtp.custom_ops.rotary import rotary_embedding

Floats = npt.NDArray[np.float32]


def attention_project(
    projected: Floats,
    q_weight: Floats,
    k_weight: Floats,
    cos: Floats,
    sin: Floats,
    heads: int,
    kv_heads: int,
    eps: float,
) -> tuple[Floats, Floats, Floats, Floats]:
    """Split, normalise and rotate.

    Args:
        projected: ``[B * R, 2 * Nh * D + 2 * Nkv * D]`` float32: each query head followed by its
            gate, then keys, then values.
        q_weight: ``[D]`` norm of the queries, one added.
        k_weight: ``[D]`` norm of the keys, one added.
        cos: ``[B, R, half]`` float32.
        sin: ``[B, R, half]`` float32.
        heads: Query heads Nh.
        kv_heads: Key/value heads Nkv.
        eps: Added to the mean of the squares.

    Returns:
        Query ``[B, R, Nh, D]``, key and value ``[B, R, Nkv, D]``, gate ``[B, R, Nh * D]``.
    """
    (batch, rows, _), dim = cos.shape, len(q_weight)
    edges = [2 * heads * dim, (2 * heads + kv_heads) * dim]
    gated, key, value = np.split(projected.reshape(batch, rows, -1), edges, axis=2)
    query, gate = np.split(gated.reshape(batch, rows, heads, 2 * dim), 2, axis=3)
    key = rms_norm(key.reshape(batch, rows, kv_heads, dim), k_weight, eps)
    return (
        rotary_embedding(rms_norm(query, q_weight, eps), cos, sin),
        rotary_embedding(key, cos, sin),
        value.reshape(batch, rows, kv_heads, dim),
        gate.reshape(batch, rows, heads * dim),
    )


def _fake(
    projected: Any,
    q_weight: Any,
    k_weight: Any,
    cos: Any,
    sin: Any,
    heads: int,
    kv_heads: int,
    eps: float,
) -> tuple[Any, Any, Any, Any]:
    (batch, rows, _), dim = cos.shape, q_weight.shape[0]
    stored = (batch, rows, kv_heads, dim)
    shapes = ((batch, rows, heads, dim), stored, stored, (batch, rows, heads * dim))
    return tuple(projected.new_empty(shape) for shape in shapes)


def _composed(
    projected: Any,
    q_weight: Any,
    k_weight: Any,
    cos: Any,
    sin: Any,
    heads: int,
    kv_heads: int,
    eps: float,
) -> tuple[Any, Any, Any, Any]:
    import torch

    ops, (batch, rows, _), dim = torch.ops.qwen_mtp, cos.shape, q_weight.shape[0]
    both = projected.view(batch, rows, -1)
    sizes = [2 * heads * dim, kv_heads * dim, kv_heads * dim]
    gated, key, value = torch.split(both, sizes, dim=2)
    query, gate = torch.split(gated.reshape(batch, rows, heads, 2 * dim), [dim, dim], dim=3)
    query = ops.rotary_embedding(ops.rms_norm(query, q_weight, eps), cos, sin)
    key = ops.rms_norm(key.reshape(batch, rows, kv_heads, dim), k_weight, eps)
    key = ops.rotary_embedding(key, cos, sin)
    value = value.reshape(batch, rows, kv_heads, dim)
    return query, key, value, gate.reshape(batch, rows, heads * dim)


ATTENTION_PROJECT = Operator(
    name="attention_project",
    schema="(Tensor projected, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin,"
    " int heads, int kv_heads, float eps) -> (Tensor, Tensor, Tensor, Tensor)",
    meaning=attention_project,
    fake=_fake,
    composed=_composed,
    native=project_native,
)
