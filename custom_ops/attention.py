"""Attention over a paged key/value pool with a block table (``pool.py`` has its layouts).

Masked positions read a slot that stays zero and rows that must not be kept go to one that nobody
reads. So neither a stale block nor a padded row can reach a live sequence, NaN included.
The ONNX forms take pools ``[Nkv, slots, D]``, the others ``[blocks, block_size, Nkv, D]``.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_mtp.custom_ops import attention_native, attention_npu, pool
from qwen_mtp.custom_ops.operator import MICROSOFT, Operator, const, shared
from qwen_mtp.custom_ops.pool import by_head, read_slots, write_slots

Floats = npt.NDArray[Any]  # float32, or float16 in half-precision packages
Ints = npt.NDArray[np.int32]

ZERO_SLOT = pool.ZERO_SLOT
TRASH_SLOT = pool.TRASH_SLOT
_END = np.iinfo(np.int64).max


def kv_write(
    k: Floats,
    v: Floats,
    k_pool: Floats,
    v_pool: Floats,
    table: Ints,
    start: Ints,
    count: Ints,
    block_size: int,
) -> tuple[Floats, Floats]:
    """Store new keys and values.

    Args:
        k: ``[B, R, Nkv, D]``; rounded to the type of the pools.
        v: The same.
        k_pool: ``[Nkv, slots, D]`` or ``[blocks, block_size, Nkv, D]``.
        v_pool: The same.
        table: ``[B, P]`` int32.
        start: ``[B]`` int32 position of row 0.
        count: ``[B]`` int32 rows to keep, 0 for an idle batch slot.
        block_size: Positions in a block.

    Returns:
        The two pools.
    """
    slots = write_slots(table, start, count, k.shape[1], block_size).ravel()
    pools = k_pool.copy(), v_pool.copy()
    for stored, rows in zip(pools, (k, v), strict=True):
        by_head(stored)[:, slots] = rows.reshape(-1, *rows.shape[2:]).swapaxes(0, 1)
    return pools


def paged_attention(
    q: Floats,
    k_pool: Floats,
    v_pool: Floats,
    table: Ints,
    start: Ints,
    count: Ints,
    extra_k: Floats | None,
    extra_v: Floats | None,
    block_size: int,
) -> Floats:
    """Causal attention of new rows over the positions up to their own.

    Args:
        q: ``[B, R, Nh, D]``; query head h reads key/value head ``h // (Nh / Nkv)``.
        k_pool: ``[Nkv, slots, D]`` or ``[blocks, block_size, Nkv, D]`` that already hold the new
            rows; float16 pools may stand beside float32 queries.
        v_pool: The same.
        table: ``[B, P]`` int32.
        start: ``[B]`` int32 position of row 0.
        count: ``[B]`` int32 rows that are real; nothing at or after ``start + count`` is read.
        extra_k: ``[B, J, Nkv, D]`` keys outside the pool that every row sees: the
            provisional rows of chained drafts, which are never stored. None for none.
        extra_v: Their values.
        block_size: Positions in a block.

    Returns:
        ``[B, R, Nh, D]`` in the type of ``q``, computed in float32; rows at or after ``count``
        carry no meaning.
    """
    batch, rows, heads, dim = q.shape
    slots = read_slots(table, start + count, block_size)
    keys, values = (by_head(p)[:, slots].astype(np.float32) for p in (k_pool, v_pool))
    seen = np.arange(slots.shape[1]) <= (start[:, None] + np.arange(rows))[..., None]
    if extra_k is not None and extra_v is not None:
        keys, values = (
            np.concatenate([pooled, extra.transpose(2, 0, 1, 3)], axis=2)
            for pooled, extra in ((keys, extra_k), (values, extra_v))
        )
        seen = np.pad(seen, ((0, 0), (0, 0), (0, extra_k.shape[1])), constant_values=True)
    grouped = q.astype(np.float32).reshape(batch, rows, len(keys), -1, dim)
    scores = np.einsum("brhgd,hbtd->bhrgt", grouped, keys) * np.float32(dim**-0.5)
    scores = np.where(seen[:, None, :, None], scores, np.float32(-np.inf))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = np.einsum("bhrgt,hbtd->brhgd", weights, values)
    return np.asarray(mixed.reshape(batch, rows, heads, dim), dtype=q.dtype)


def _write_fake(
    k: Any, v: Any, k_pool: Any, v_pool: Any, table: Any, start: Any, count: Any, block_size: int
) -> tuple[Any, Any]:
    return k_pool.new_empty(k_pool.shape), v_pool.new_empty(v_pool.shape)


def _attention_fake(q: Any, *_: Any) -> Any:
    return q.new_empty(q.shape)


def _positions(op: Any, start: Any, rows: int) -> Any:
    """``[B, R]`` int32."""
    steps = const(op, np.arange(rows, dtype=np.int32)[None])
    return shared(op, ("positions", start, rows), lambda: op.Add(op.Unsqueeze(start, [1]), steps))


def _scatter_index(
    op: Any, table: Any, start: Any, count: Any, rows: int, kv_heads: int, block_size: int
) -> Any:
    """``[Nkv, B * R, 2]`` int64 pairs (head, slot) for ScatterND."""

    def make() -> Any:
        size, one = (const(op, np.array(x, np.int32)) for x in (block_size, 1))
        position = _positions(op, start, rows)
        page = op.Div(position, size)
        width = op.Cast(op.Shape(table, start=1, end=2), to=6)
        block = op.GatherElements(table, op.Min(page, op.Sub(width, one)), axis=1)
        steps = const(op, np.arange(rows, dtype=np.int32)[None])
        kept = op.And(op.Less(steps, op.Unsqueeze(count, [1])), op.Less(page, width))
        kept = op.And(kept, op.Greater(block, const(op, np.array(0, np.int32))))
        slot = op.Add(op.Mul(block, size), op.Mod(position, size))
        slot = op.Where(kept, slot, const(op, np.array(TRASH_SLOT, np.int32)))
        slot = op.Expand(op.Reshape(op.Cast(slot, to=7), [1, -1, 1]), [kv_heads, 1, 1])
        each = np.arange(kv_heads, dtype=np.int64)[:, None, None]
        heads = const(op, np.broadcast_to(each, (kv_heads, int(table.shape[0]) * rows, 1)))
        return op.Concat(heads, slot, axis=2)

    return shared(op, ("scatter_index", table, start, count, rows, kv_heads), make)


def _write_onnx(
    op: Any,
    k: Any,
    v: Any,
    k_pool: Any,
    v_pool: Any,
    table: Any,
    start: Any,
    count: Any,
    block_size: int,
) -> tuple[Any, Any]:
    batch, rows, kv_heads, dim = (int(d) for d in k.shape)
    index = _scatter_index(op, table, start, count, rows, kv_heads, block_size)

    def write(pool: Any, new: Any) -> Any:
        flat = op.Reshape(new, [batch * rows, kv_heads, dim])
        by_head = _cast(op, op.Transpose(flat, perm=[1, 0, 2]), new, pool)
        return op.ScatterND(pool, index, by_head)

    return write(k_pool, k), write(v_pool, v)


def _gather_index(op: Any, table: Any, start: Any, count: Any, block_size: int) -> Any:
    """``[B, T]`` int32 slots to read; the table may be narrower than declared."""

    def make() -> Any:
        offsets = const(op, np.arange(block_size, dtype=np.int32)[None, None])
        zero, size = (const(op, np.array(x, np.int32)) for x in (0, block_size))
        pages = op.Unsqueeze(table, [2])
        slots = op.Add(op.Mul(pages, size), offsets)
        slots = op.Where(op.Greater(pages, zero), slots, const(op, np.array(ZERO_SLOT, np.int32)))
        slots = op.Reshape(slots, [int(table.shape[0]), -1])
        end = op.Unsqueeze(op.Add(start, count), [1])
        live = op.Less(_ruler(op, table, block_size), end)
        return op.Where(live, slots, const(op, np.array(ZERO_SLOT, np.int32)))

    return shared(op, ("gather_index", table, start, count), make)


def _ruler(op: Any, table: Any, block_size: int) -> Any:
    """``[1, T]`` int32: 0, 1, ... for every position the table covers."""

    def make() -> Any:
        width = op.Squeeze(op.Cast(op.Shape(table, start=1, end=2), to=6), [0])
        end = op.Mul(width, const(op, np.array(block_size, np.int32)))
        zero, one = (const(op, np.array(x, np.int32)) for x in (0, 1))
        return op.Unsqueeze(op.Range(zero, end, one), [0])

    return shared(op, ("ruler", table), make)


def _seen(op: Any, table: Any, start: Any, rows: int, group: int, block_size: int) -> Any:
    """``[1, B, R * G, T]`` bool: positions a query row may look at."""

    def make() -> Any:
        ruler = op.Unsqueeze(_ruler(op, table, block_size), [0])
        row = op.Unsqueeze(_positions(op, start, rows), [2])
        seen = op.Unsqueeze(op.LessOrEqual(ruler, row), [0, 3])
        batch = int(table.shape[0])
        wide = op.Expand(seen, const(op, np.array([1, batch, rows, group, 1], np.int64)))
        return op.Reshape(wide, [1, batch, rows * group, -1])

    return shared(op, ("seen", table, start, rows, group), make)


def _attention_onnx(
    op: Any,
    q: Any,
    k_pool: Any,
    v_pool: Any,
    table: Any,
    start: Any,
    count: Any,
    extra_k: Any,
    extra_v: Any,
    block_size: int,
) -> Any:
    batch, rows, heads, dim = (int(d) for d in q.shape)
    kv_heads = int(k_pool.shape[0])
    group = heads // kv_heads
    slots = _gather_index(op, table, start, count, block_size)
    keys, values = (_gathered(op, pool, slots, q) for pool in (k_pool, v_pool))
    # All rows of a group meet one copy of the keys: at least two rows in the product, which is
    # what keeps a row's bits independent of how many rows there are (docs/adr/0007).
    grouped = op.Reshape(q, [batch, rows, kv_heads, group, dim])
    grouped = op.Reshape(
        op.Transpose(grouped, perm=[2, 0, 1, 3, 4]), [kv_heads, batch, rows * group, dim]
    )
    seen = _seen(op, table, start, rows, group, block_size)
    scores = op.Where(seen, _scores(op, grouped, keys, dim), _number(op, -np.inf, np.float32))
    if extra_k is None:
        mixed = op.MatMul(op.Softmax(scores, axis=-1), values)
    else:
        mixed = _with_extra(op, grouped, scores, values, extra_k, extra_v)
    mixed = op.Reshape(mixed, [kv_heads, batch, rows, group, dim])
    return op.Reshape(op.Transpose(mixed, perm=[1, 2, 0, 3, 4]), [batch, rows, heads, dim])


def _gathered(op: Any, pool: Any, slots: Any, q: Any) -> Any:
    """``[Nkv, B, T, D]`` in the type of ``q``; chained drafts read the same rows over and over."""

    def make() -> Any:
        return _cast(op, op.Gather(pool, slots, axis=1), pool, q)

    return shared(op, ("gathered", pool, slots), make)


def _cast(op: Any, x: Any, own: Any, like: Any) -> Any:
    """``x``, which has the type of ``own``, in that of ``like``."""
    return x if own.dtype == like.dtype else op.Cast(x, to=int(like.dtype))


def _scores(op: Any, grouped: Any, keys: Any, dim: int) -> Any:
    return op.FusedMatMul(grouped, keys, transB=1, alpha=dim**-0.5, _domain=MICROSOFT)


def _with_extra(
    op: Any, grouped: Any, scores: Any, values: Any, extra_k: Any, extra_v: Any
) -> Any:
    """Attend to gathered and extra rows without copying the gathered ones again."""
    width, dim = int(extra_k.shape[1]), int(extra_k.shape[3])
    keys, more = (op.Transpose(x, perm=[2, 0, 1, 3]) for x in (extra_k, extra_v))
    both = op.Concat(scores, _scores(op, grouped, keys, dim), axis=-1)
    weights = op.Softmax(both, axis=-1)
    edge, end, axis = (const(op, np.array([v], np.int64)) for v in (-width, _END, -1))
    zero = const(op, np.array([0], np.int64))
    pooled, extra = op.Slice(weights, zero, edge, axis), op.Slice(weights, edge, end, axis)
    return op.Add(op.MatMul(pooled, values), op.MatMul(extra, more))


def _number(op: Any, value: float, kind: Any) -> Any:
    return const(op, np.array(value, kind))


KV_WRITE = Operator(
    name="kv_write",
    schema="(Tensor k, Tensor v, Tensor k_pool, Tensor v_pool, Tensor table, Tensor start,"
    " Tensor count, int block_size) -> (Tensor, Tensor)",
    meaning=kv_write,
    fake=_write_fake,
    onnx=_write_onnx,
    native=attention_native.write_native,
    decomposed=attention_npu.write_decomposed,
    fused=attention_npu.write_fused,
    kernels=("ScatterPaKvCache",),
)
PAGED_ATTENTION = Operator(
    name="paged_attention",
    schema="(Tensor q, Tensor k_pool, Tensor v_pool, Tensor table, Tensor start,"
    " Tensor count, Tensor? extra_k, Tensor? extra_v, int block_size) -> Tensor",
    meaning=paged_attention,
    fake=_attention_fake,
    onnx=_attention_onnx,
    native=attention_native.attention_native,
    decomposed=attention_npu.attention_decomposed,
    fused=attention_npu.attention_fused,
    kernels=("FusedInferAttentionScore",),
)
