"""Partial rotary embedding with half-split pairing, and its table for a run of positions.

Text positions are equal on the three axes of interleaved mrope, so the plain form is exact.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_mtp.custom_ops.operator import Operator, const

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
PACKET = 16  # values of the widest vector register


def inverse_frequencies(dim: int, theta: float) -> Floats:
    """``theta^(-2j/dim)`` for j in 0..dim/2-1, ``[dim / 2]`` float32."""
    exponents = np.arange(0, dim, 2, dtype=np.float64) / dim
    return (1.0 / theta**exponents).astype(np.float32)


def rotary_table(start: Ints, rows: int, dim: int, theta: float) -> tuple[Floats, Floats]:
    """Cosines and sines of positions ``start[b] + i``.

    Args:
        start: ``[B]`` int32 position of row 0.
        rows: Number of rows R.
        dim: Rotated dimensions of a head (even).
        theta: Base of the frequencies.

    Returns:
        cos and sin, each ``[B, R, dim / 2]`` float32.
    """
    positions = (start[:, None] + np.arange(rows, dtype=np.int32)).astype(np.float32)
    angles = positions[..., None] * inverse_frequencies(dim, theta)
    return np.cos(angles), np.sin(angles)


def rotary_embedding(x: Floats, cos: Floats, sin: Floats) -> Floats:
    """Rotate the first ``2 * cos.shape[-1]`` dimensions of every head.

    Args:
        x: ``[B, R, heads, D]`` float32.
        cos: ``[B, R, half]`` float32.
        sin: ``[B, R, half]`` float32.
    """
    half = cos.shape[-1]
    c, s = cos[:, :, None], sin[:, :, None]
    low, high = x[..., :half], x[..., half : 2 * half]
    turned = (low * c - high * s, high * c + low * s, x[..., 2 * half :])
    return np.concatenate(turned, axis=-1)


def _table_fake(start: Any, rows: int, dim: int, theta: float) -> tuple[Any, Any]:
    shape = (start.shape[0], rows, dim // 2)
    return tuple(start.new_empty(shape).float() for _ in range(2))


def _table_onnx(op: Any, start: Any, rows: int, dim: int, theta: float) -> tuple[Any, Any]:
    steps = const(op, np.arange(rows, dtype=np.int32)[None])
    positions = op.Cast(op.Add(op.Unsqueeze(start, [1]), steps), to=1)
    # The kernels of Cos and Sin round the tail of a buffer unlike its body: no tail, so that the
    # table of a position does not depend on how many rows there are.
    half, width = dim // 2, -(-dim // (2 * PACKET)) * PACKET
    frequencies = np.zeros(width, np.float32)
    frequencies[:half] = inverse_frequencies(dim, theta)
    angles = op.Mul(op.Unsqueeze(positions, [2]), const(op, frequencies))
    if width == half:
        return op.Cos(angles), op.Sin(angles)
    first, end, axis = (const(op, np.array([n], np.int64)) for n in (0, half, 2))
    return tuple(op.Slice(f(angles), first, end, axis) for f in (op.Cos, op.Sin))


def _table_decomposed(start: Any, rows: int, dim: int, theta: float) -> tuple[Any, Any]:
    import torch

    # One by one: a power in float32 would be off by the last bits, which a late position
    # multiplies by its number.
    parts = [torch.full((1,), float(f)) for f in inverse_frequencies(dim, theta)]
    steps = torch.arange(rows, dtype=torch.int32)
    positions = (start.unsqueeze(1) + steps).float().unsqueeze(2)
    angles = positions * torch.cat(parts)
    return angles.cos(), angles.sin()


def _fake(x: Any, cos: Any, sin: Any) -> Any:
    return x.new_empty(x.shape)


def _onnx(op: Any, x: Any, cos: Any, sin: Any) -> Any:
    heads, head_dim = (int(d) for d in x.shape[2:])
    packed = op.Reshape(x, [0, 0, heads * head_dim])
    turned = op.RotaryEmbedding(
        packed, cos, sin, num_heads=heads, rotary_embedding_dim=2 * int(cos.shape[-1])
    )
    return op.Reshape(turned, [0, 0, heads, head_dim])


def _decomposed(x: Any, cos: Any, sin: Any) -> Any:
    import torch

    half = cos.shape[-1]
    c, s = cos.unsqueeze(2), sin.unsqueeze(2)
    sizes = [half, half, x.shape[-1] - 2 * half]
    low, high, *rest = x.float().split([n for n in sizes if n], -1)
    return torch.cat([low * c - high * s, high * c + low * s, *rest], -1).to(x.dtype)


def _fused(x: Any, cos: Any, sin: Any) -> Any:
    import torch

    turned = 2 * cos.shape[-1]
    c, s = (torch.cat([t, t], -1).unsqueeze(2).to(x.dtype) for t in (cos, sin))
    sizes = [turned, x.shape[-1] - turned]
    first, *rest = x.split([n for n in sizes if n], -1)
    return torch.cat([torch.ops.npu.npu_rotary_mul(first, c, s), *rest], -1)


ROTARY_TABLE = Operator(
    name="rotary_table",
    schema="(Tensor start, int rows, int dim, float theta) -> (Tensor, Tensor)",
    meaning=rotary_table,
    fake=_table_fake,
    onnx=_table_onnx,
    decomposed=_table_decomposed,
)
ROTARY_EMBEDDING = Operator(
    name="rotary_embedding",
    schema="(Tensor x, Tensor cos, Tensor sin) -> Tensor",
    meaning=rotary_embedding,
    fake=_fake,
    onnx=_onnx,
    decomposed=_decomposed,
    fused=_fused,
    kernels=("RotaryMul",),
)
