"""Linear layers in aten and in Ascend kernels; arguments are those of the meanings in linear.py.

Activations may be float32, float16 or bfloat16. The kernels take half precision only, so float32
activations keep to aten.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK = 32
PACKED = 8  # 4-bit values in an int32
HALF = {"torch.float16": 5, "torch.bfloat16": 15}  # what torch numbers these types


def pack_int4_npu(
    packed: npt.NDArray[np.uint8], scale: npt.NDArray[Any]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[Any]]:
    """Lay a quantised matrix out for the kernel of :func:`linear_int4_fused`.

    An int32 holds eight neighbours along the outputs in two's complement, the first in its low
    bits; the matrix runs along its outputs, as do the scales.

    Args:
        packed: ``[N, K / 32, 16]`` uint8 of ``quantize_int4``, N a multiple of 8.
        scale: ``[N, K / 32]``.

    Returns:
        ``[K, N / 8]`` int32 and ``[K / 32, N]`` scales of the same type, to be stored in the type
        of the activations.
    """
    values = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    nibbles = (values.T ^ PACKED).reshape(-1, len(packed) // 2, 2)  # 8 off two's complement
    pairs = np.ascontiguousarray(nibbles[..., 0] | (nibbles[..., 1] << 4))
    return pairs.view("<i4"), np.ascontiguousarray(scale.T)


def unpack_int4_npu(
    packed: npt.NDArray[np.int32], scale: npt.NDArray[Any]
) -> npt.NDArray[np.float32]:
    """The matrix ``[K, N]`` float32 of :func:`pack_int4_npu`."""
    shifts = np.arange(0, 4 * PACKED, 4, dtype=np.int32)
    nibbles = (packed[..., None] >> shifts) & 15
    values = ((nibbles ^ PACKED) - PACKED).reshape(len(packed), -1).astype(np.float32)
    return values * np.repeat(scale.astype(np.float32), BLOCK, axis=0)


def linear(x: Any, weight: Any) -> Any:
    """``[M, K]`` by ``[N, K]``."""
    import torch

    return torch.mm(x, weight.t())


def linear_int8(x: Any, weight: Any, scale: Any) -> Any:
    """Rows rounded to int8, an integer product with ``[K, N]``, scales in float32."""
    import torch

    wide = x.float()
    peak = torch.max(torch.abs(wide), dim=-1, keepdim=True)[0]
    row_scale = torch.clamp(peak, min=1e-30) / 127
    q = torch.round(wide / row_scale).to(torch.int8)
    product = torch._int_mm(q, weight).float()
    return (product * scale * row_scale).to(x.dtype)


def linear_int8_rows(x: Any, weight: Any, scale: Any) -> Any:
    """:func:`linear_int8` by ``[N, K]``."""
    return linear_int8(x, weight.t(), scale)


def linear_int4(x: Any, packed: Any, scale: Any) -> Any:
    """Rounded activations by the dequantised matrix, both in float32: small matrices only."""
    import torch

    product = torch.mm(_round_blocks(x.float()), _dequantised(packed, scale).t())
    return product.to(x.dtype)


def embedding(ids: Any, table: Any) -> Any:
    """Rows of ``[V, H]``."""
    import torch

    return torch.index_select(table, 0, torch.clamp(ids, min=0))


def embedding_int8(ids: Any, weight: Any, scale: Any) -> Any:
    """Rows of ``[V, H]`` int8, in float32."""
    return embedding(ids, weight).float() * embedding(ids, scale).unsqueeze(1)


def embedding_int4(ids: Any, packed: Any, scale: Any) -> Any:
    """Rows of ``[V, H / 32, 16]`` uint8, in float32."""
    return _dequantised(embedding(ids, packed), embedding(ids, scale))


def linear_int8_fused(x: Any, weight: Any, scale: Any) -> Any:
    """The same arithmetic in two kernels: W8A8 with a scale per row.

    A vocabulary wider than 65535 as ``[K, N]`` needs a CANN whose kernel takes it (2026 on);
    every one takes it as ``[N, K]``, transposed, which the compiler makes an attribute.
    """
    import torch

    if str(x.dtype) not in HALF:
        return linear_int8(x, weight, scale)
    q, row_scale = torch.ops.npu.npu_dynamic_quant(x)
    multiply = torch.ops.npu.npu_quant_matmul
    return multiply(q, weight, scale, pertoken_scale=row_scale, output_dtype=HALF[str(x.dtype)])


def linear_int8_rows_fused(x: Any, weight: Any, scale: Any) -> Any:
    """:func:`linear_int8_fused` by ``[N, K]``."""
    return linear_int8_fused(x, weight.t(), scale)


def linear_int4_fused(x: Any, packed: Any, scale: Any) -> Any:
    """Activations as they are by 4-bit weights laid out by :func:`pack_int4_npu`.

    The kernel multiplies in half precision and takes K and N up to 65535, K above one block.
    Any other layout is left to :func:`linear_int4`.
    """
    import torch

    if str(x.dtype) not in HALF or packed.dim() != 2:
        return linear_int4(x, packed, scale)
    multiply = torch.ops.npu.npu_weight_quant_batchmatmul
    return multiply(x, packed, scale.to(x.dtype), antiquant_group_size=BLOCK)


def _dequantised(packed: Any, scale: Any) -> Any:
    """``[N, K / 32, 16]`` and ``[N, K / 32]`` to ``[N, K]`` float32; halves of a byte by floor."""
    import torch

    both = packed.float()
    high = torch.floor(both * 0.0625)
    values = torch.stack([both - high * 16, high], dim=-1).view(*scale.shape, BLOCK) - 8
    return (values * scale.unsqueeze(-1)).view(len(packed), -1)


def _round_blocks(x: Any) -> Any:
    """Round ``[M, K]`` float32 to 127 steps in blocks of 32; a block of zeros stays."""
    import torch

    blocks = x.view(len(x), -1, BLOCK)
    step = torch.max(torch.abs(blocks), dim=-1, keepdim=True)[0] / 127
    safe = torch.where(step > 0, step, torch.full((), 1.0, dtype=step.dtype))
    return (torch.round(blocks * torch.reciprocal(safe)) * step).view(x.shape)
