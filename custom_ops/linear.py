"""Linear layers in the three weight formats; every kernel gives a row its own bits.

* ``fp32``: the checkpoint's ``[N, K]`` matrix.
* ``int8``: ``[N, K]`` int8 with one scale per output channel (``[K, N]`` where an NPU kernel or
  standard ONNX takes it so: ``linear_int8``); activations are quantised per row to uint8 around
  128 and multiplied in integers, the arithmetic of Ascend's W8A8-dynamic.
  A per-tensor activation scale would let a draft row move the rows before it.
* ``int4``: blocks of 32 along K, symmetric, two values a byte, low nibble first
  (``MatMulNBits`` with accuracy_level 4, the only variant whose rows are independent).

Products come in the type of the activations, rows of a quantised table in float32.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_mtp.custom_ops import linear_npu
from qwen_mtp.custom_ops.operator import MICROSOFT, NAMESPACE, Operator, alias, const

Floats = npt.NDArray[np.float32]
Activations = npt.NDArray[Any]  # float32, or float16 in half-precision packages
Bytes = npt.NDArray[np.uint8]
Int8s = npt.NDArray[np.int8]

BLOCK = linear_npu.BLOCK
ZERO_POINT = 128
FLAT = "flat"  # suffix of an int4 table seen as [V, H / 2], the shape in which rows are read
TINY = np.float32(1e-30)  # keeps the scale of an all-zero row positive
STRIP = 1 << 24  # weights that a meaning widens at a time: a vocabulary never stands in memory


def quantize_int8(weight: Floats) -> tuple[Int8s, Floats]:
    """Round each output channel to int8.

    Args:
        weight: ``[N, K]`` float32.

    Returns:
        ``[K, N]`` int8 and ``[N]`` float32 scales.
    """
    scale = np.maximum(np.abs(weight).max(axis=1), TINY) / np.float32(127)
    return np.rint(weight / scale[:, None]).astype(np.int8).T, scale.astype(np.float32)


def quantize_int4(weight: Floats) -> tuple[Bytes, Floats]:
    """Round blocks of 32 inputs to 4 bits, values -7..7 stored with an offset of 8.

    Args:
        weight: ``[N, K]`` float32, K a multiple of 32.

    Returns:
        ``[N, K / 32, 16]`` uint8 and ``[N, K / 32]`` float32 scales.
    """
    blocks = weight.reshape(weight.shape[0], -1, BLOCK)
    scale = (np.maximum(np.abs(blocks).max(axis=2), TINY) / np.float32(7)).astype(np.float32)
    values = (np.rint(blocks / scale[..., None]) + 8).astype(np.uint8)
    return values[..., 0::2] | (values[..., 1::2] << 4), scale


def dequantize_int4(packed: Bytes, scale: Floats) -> Floats:
    """Undo :func:`quantize_int4`: ``[N, K / 32, 16]`` and ``[N, K / 32]`` to ``[N, K]``."""
    values = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:2], BLOCK)
    weight = (values.astype(np.float32) - 8) * scale[..., None]
    return np.asarray(weight, dtype=np.float32).reshape(len(packed), -1)


def quantize_rows(x: Floats) -> tuple[Bytes, Floats]:
    """Quantise activations per row: ``[M, K]`` to uint8 around 128 and ``[M, 1]`` scales."""
    scale = np.maximum(np.abs(x).max(axis=-1, keepdims=True), TINY) / np.float32(127)
    return (np.rint(x / scale) + ZERO_POINT).astype(np.uint8), scale


def linear(x: Activations, weight: Activations) -> Activations:
    """``x @ weight^T``: ``[M, K]`` by ``[N, K]`` to ``[M, N]``, summed in float32."""
    if x.dtype == np.float32:
        return x @ weight.T
    product, wide = np.empty((len(x), len(weight)), dtype=x.dtype), x.astype(np.float32)
    for part in _strips(len(weight), x.shape[1]):
        product[:, part] = wide @ weight[part].astype(np.float32).T
    return product


def linear_int8(x: Activations, weight: Int8s, scale: Floats) -> Activations:
    """Integer product of quantised rows, scaled per channel and per row.

    Args:
        x: ``[M, K]``.
        weight: ``[K, N]`` int8.
        scale: ``[N]`` float32.
    """
    q, row_scale = quantize_rows(x.astype(np.float32))
    # float64 holds every partial sum exactly, so this is the integer product at BLAS speed.
    signed = q.astype(np.float64) - ZERO_POINT
    product = np.empty((len(x), weight.shape[1]), dtype=np.float32)
    for part in _strips(weight.shape[1], weight.shape[0]):
        product[:, part] = signed @ weight[:, part].astype(np.float64)
    return (product * scale * row_scale).astype(x.dtype)


def linear_int8_rows(x: Activations, weight: Int8s, scale: Floats) -> Activations:
    """:func:`linear_int8` with the weight kept as ``[N, K]``."""
    return linear_int8(x, weight.T, scale)


def round_blocks(x: Floats) -> Floats:
    """Round activations to int8 with one scale per block of 32, back in float32, ``[M, K]``."""
    blocks = x.reshape(len(x), -1, BLOCK)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(127)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    rounded: Floats = np.rint(blocks * inverse) * scale
    return rounded.reshape(x.shape)


def linear_int4(x: Activations, packed: npt.NDArray[Any], scale: Activations) -> Activations:
    """Product of rounded activations with the dequantised matrix.

    The kernel (accuracy_level 4) rounds each block of 32 activations to int8 as well; that of
    Ascend, which has a layout of its own (``pack_int4_npu``), does not.

    Args:
        x: ``[M, K]``.
        packed: ``[N, K / 32, 16]`` uint8, or ``[K, N / 8]`` int32 for Ascend.
        scale: ``[N, K / 32]`` float32, or ``[K / 32, N]``.
    """
    if packed.ndim == 2:
        weight = linear_npu.unpack_int4_npu(packed, scale)
        return (x.astype(np.float32) @ weight).astype(x.dtype)
    rounded = round_blocks(x.astype(np.float32))
    product = np.empty((len(x), len(packed)), dtype=np.float32)
    for part in _strips(len(packed), x.shape[1]):
        product[:, part] = rounded @ dequantize_int4(packed[part], scale[part]).T
    return product.astype(x.dtype)


def embedding(ids: npt.NDArray[np.int32], table: Activations) -> Activations:
    """Rows of ``[V, H]``: ``[M]`` ids to ``[M, H]``.

    A negative id is an absent token, whose row carries no meaning: row 0 here, zeros in native
    kernels, where products skip them.
    """
    return table[np.maximum(ids, 0)]


def embedding_int8(ids: npt.NDArray[np.int32], weight: Int8s, scale: Floats) -> Floats:
    """Rows of ``[V, H]`` int8 with ``[V]`` scales; see :func:`embedding`."""
    ids = np.maximum(ids, 0)
    return weight[ids].astype(np.float32) * scale[ids][:, None]


def embedding_int4(ids: npt.NDArray[np.int32], packed: Bytes, scale: Floats) -> Floats:
    """Rows of a head stored as ``[V, H / 32, 16]`` uint8; see :func:`embedding`."""
    ids = np.maximum(ids, 0)
    return dequantize_int4(packed[ids], scale[ids])


def _strips(outputs: int, inputs: int) -> Iterator[slice]:
    """Cut the outputs of a matrix so that a strip has about ``STRIP`` weights."""
    step = max(1, STRIP // inputs)
    yield from (slice(start, start + step) for start in range(0, outputs, step))


def _product_fake(x: Any, weight: Any) -> Any:
    return x.new_empty((x.shape[0], weight.shape[0]))


def _int8_fake(x: Any, weight: Any, scale: Any) -> Any:
    return x.new_empty((x.shape[0], weight.shape[1]))


def _int8_rows_fake(x: Any, weight: Any, scale: Any) -> Any:
    return x.new_empty((x.shape[0], weight.shape[0]))


def _int4_fake(x: Any, packed: Any, scale: Any) -> Any:
    return x.new_empty((x.shape[0], scale.shape[1] if packed.dim() == 2 else packed.shape[0]))


def _product_onnx(op: Any, x: Any, weight: Any) -> Any:
    return op.Gemm(x, weight, transB=1)


def _quantised(op: Any, x: Any) -> tuple[Any, Any]:
    """Rows as uint8 around 128, and their scales ``[M]``."""
    # A row of zeros has scale 0: whatever it is quantised to, the product is multiplied by 0.
    steps = const(op, np.array(127, np.float32))
    row_scale = op.Div(op.ReduceMax(op.Abs(x), [-1], keepdims=0), steps)
    zeros = const(op, np.full(int(x.shape[0]), ZERO_POINT, np.uint8))
    return op.QuantizeLinear(x, row_scale, zeros, axis=0), row_scale


def _int8_onnx(op: Any, x: Any, weight: Any, scale: Any) -> Any:
    q, row_scale = _quantised(op, x)
    one, zero_point = const(op, np.ones((), np.float32)), const(op, np.array(128, np.uint8))
    product = op.MatMulIntegerToFloat(q, weight, one, scale, zero_point, _domain=MICROSOFT)
    return op.Mul(product, op.Unsqueeze(row_scale, [1]))


def _int8_rows_onnx(op: Any, x: Any, weight: Any, scale: Any) -> Any:
    q, row_scale = _quantised(op, x)
    one, zero_point = const(op, np.ones((), np.float32)), const(op, np.array(128, np.uint8))
    none = const(op, np.zeros(int(weight.shape[0]), np.int8))
    inputs = (q, one, zero_point, weight, scale, none)
    product = op.QGemm(*inputs, transB=1, _domain=MICROSOFT)
    return op.Mul(product, op.Unsqueeze(row_scale, [1]))


def _int4_onnx(op: Any, x: Any, packed: Any, scale: Any) -> Any:
    width, blocks = int(packed.shape[0]), int(packed.shape[1])
    return op.MatMulNBits(
        x,
        packed,
        scale,
        K=blocks * BLOCK,
        N=width,
        bits=4,
        block_size=BLOCK,
        accuracy_level=4,
        _domain=MICROSOFT,
    )


def _int8_native(op: Any, x: Any, weight: Any, scale: Any) -> Any:
    return _product_native(op, "LinearInt8", x, weight, scale, int(x.shape[1]))


def _int4_native(op: Any, x: Any, packed: Any, scale: Any) -> Any:
    return _product_native(op, "LinearInt4", x, packed, scale, int(x.shape[1]))


def _product_native(op: Any, kind: str, x: Any, weight: Any, scale: Any, width: int) -> Any:
    rows, out = int(x.shape[0]), int(weight.shape[0])
    form = getattr(op, kind)
    return form(x, weight, scale, M=rows, K=width, N=out, B=0, _domain=NAMESPACE)


def _table_int8_native(op: Any, ids: Any, weight: Any, scale: Any) -> Any:
    sizes = {"M": int(ids.shape[0]), "D": int(weight.shape[1])}
    return op.EmbeddingInt8(ids, weight, scale, **sizes, _domain=NAMESPACE)


def _table_int4_native(op: Any, ids: Any, packed: Any, scale: Any) -> Any:
    sizes = {"M": int(ids.shape[0]), "D": int(packed.shape[1]) * BLOCK}
    return op.EmbeddingInt4(ids, packed, scale, **sizes, _domain=NAMESPACE)


def _safe_ids(op: Any, ids: Any) -> Any:
    return op.Max(ids, const(op, np.zeros((), np.int32)))


def _embedding_onnx(op: Any, ids: Any, table: Any) -> Any:
    return op.Gather(table, _safe_ids(op, ids), axis=0)


def _embedding_int8_onnx(op: Any, ids: Any, weight: Any, scale: Any) -> Any:
    ids = _safe_ids(op, ids)
    rows = op.Cast(op.Gather(weight, ids, axis=0), to=1)
    return op.Mul(rows, op.Unsqueeze(op.Gather(scale, ids, axis=0), [1]))


def _embedding_int4_onnx(op: Any, ids: Any, packed: Any, scale: Any) -> Any:
    return op.GatherBlockQuantized(
        alias(op, packed, FLAT),
        _safe_ids(op, ids),
        scale,
        bits=4,
        block_size=BLOCK,
        gather_axis=0,
        quantize_axis=1,
        _domain=MICROSOFT,
    )


def _rows_fake(ids: Any, table: Any) -> Any:
    return table.new_empty((ids.shape[0], table.shape[1]))


def _int8_table_fake(ids: Any, weight: Any, scale: Any) -> Any:
    return scale.new_empty((ids.shape[0], weight.shape[1]))


def _int4_rows_fake(ids: Any, packed: Any, scale: Any) -> Any:
    return scale.new_empty((ids.shape[0], packed.shape[1] * BLOCK))


def _operator(
    name: str,
    inputs: str,
    meaning: Any,
    fake: Any,
    onnx: Any,
    fused: Any = None,
    kernels: tuple[str, ...] = (),
    native: Any = None,
) -> Operator:
    return Operator(
        name=name,
        schema=f"({inputs}) -> Tensor",
        meaning=meaning,
        fake=fake,
        onnx=onnx,
        native=native,
        decomposed=getattr(linear_npu, name),
        fused=fused,
        kernels=kernels,
    )


W8A8 = ("DynamicQuant", "QuantBatchMatmulV3")
LINEAR = _operator("linear", "Tensor x, Tensor weight", linear, _product_fake, _product_onnx)
LINEAR_INT8 = _operator(
    "linear_int8",
    "Tensor x, Tensor weight, Tensor scale",
    linear_int8,
    _int8_fake,
    _int8_onnx,
    linear_npu.linear_int8_fused,
    W8A8,
)
LINEAR_INT8_ROWS = _operator(
    "linear_int8_rows",
    "Tensor x, Tensor weight, Tensor scale",
    linear_int8_rows,
    _int8_rows_fake,
    _int8_rows_onnx,
    linear_npu.linear_int8_rows_fused,
    W8A8,
    _int8_native,
)
LINEAR_INT4 = _operator(
    "linear_int4",
    "Tensor x, Tensor packed, Tensor scale",
    linear_int4,
    _int4_fake,
    _int4_onnx,
    linear_npu.linear_int4_fused,
    ("WeightQuantBatchMatmulV2",),
    _int4_native,
)
EMBEDDING = _operator(
    "embedding", "Tensor ids, Tensor table", embedding, _rows_fake, _embedding_onnx
)
EMBEDDING_INT8 = _operator(
    "embedding_int8",
    "Tensor ids, Tensor weight, Tensor scale",
    embedding_int8,
    _int8_table_fake,
    _embedding_int8_onnx,
    native=_table_int8_native,
)
EMBEDDING_INT4 = _operator(
    "embedding_int4",
    "Tensor ids, Tensor packed, Tensor scale",
    embedding_int4,
    _int4_rows_fake,
    _embedding_int4_onnx,
    native=_table_int4_native,
)
