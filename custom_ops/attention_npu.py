"""Attention over a paged pool ``[blocks, block_size, Nkv, D]``, in aten and in Ascend kernels.

Arguments are those of the meanings (``attention.py``), as torch tensors; activations and pools
may be float32, float16 or bfloat16.
"""

from importlib import import_module
from typing import Any

from qwen_mtp.custom_ops.pool import TRASH_SLOT

HIDDEN = -3e38  # score of a position nobody sees: finite, so that a row that sees none is no NaN
CAUSAL = 2048  # edge of the mask that the attention kernel wants for its sparse mode 3


def slot_mapping(table: Any, start: Any, count: Any, rows: int, block_size: int) -> Any:
    """Slots ``[B * R]`` int32 that new rows are written to (``pool.write_slots``)."""
    import torch

    width = table.shape[1]
    step = torch.arange(rows, dtype=torch.int32).unsqueeze(0)
    position = start.unsqueeze(1) + step
    page = torch.floor_divide(position, block_size)
    block = torch.gather(table, 1, torch.clamp(page, max=width - 1).to(torch.int64))
    kept = torch.logical_and(step < count.unsqueeze(1), page < width)
    kept = torch.logical_and(kept, block > 0)
    slot = block * block_size + torch.remainder(position, block_size)
    trash = torch.full((), TRASH_SLOT, dtype=torch.int32)
    return torch.where(kept, slot, trash).reshape(-1)


def write_decomposed(
    k: Any, v: Any, k_pool: Any, v_pool: Any, table: Any, start: Any, count: Any, block_size: int
) -> tuple[Any, Any]:
    """Store rows with ``scatter_rows``."""
    import torch

    slots = slot_mapping(table, start, count, k.shape[1], block_size)
    scatter = torch.ops.qwen_mtp.scatter_rows
    return scatter(k_pool, slots, _rows(k)), scatter(v_pool, slots, _rows(v))


def write_fused(
    k: Any, v: Any, k_pool: Any, v_pool: Any, table: Any, start: Any, count: Any, block_size: int
) -> tuple[Any, Any]:
    """Store rows with the kernel for paged caches."""
    import torch

    slots = slot_mapping(table, start, count, k.shape[1], block_size)
    scatter = torch.ops.npu.npu_scatter_pa_kv_cache_functional
    pools = scatter(_rows(k), _rows(v), k_pool, v_pool, slots, cache_mode="Norm")
    return pools[0], pools[1]


def attention_decomposed(
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
    """Gather whole blocks, mask, multiply: softmax in float32.

    What must not be seen is replaced, never multiplied by zero: a score where a key is hidden, a
    value where nobody may read it. So stale blocks may hold NaN.
    """
    import torch

    batch, rows, heads, dim = q.shape
    live, seen = _masks(table, start, count, rows, block_size)
    keys, values = (_gathered(pool, table) for pool in (k_pool, v_pool))
    values = torch.where(live, values, torch.full((), 0.0, dtype=values.dtype))
    # The query heads of one key/value head are rows of one product: keys are never repeated.
    grouped = (q * dim**-0.5).permute(0, 2, 1, 3).reshape(batch * keys.shape[2], -1, dim)
    hidden = torch.full((), HIDDEN, dtype=torch.float32)
    scores = torch.where(seen, _scores(grouped, keys, q.shape), hidden)
    if extra_k is not None:
        scores = torch.cat([scores, _scores(grouped, extra_k, q.shape)], dim=-1)
        values = torch.cat([values, extra_v], dim=1)
    weights = torch.softmax(scores, dim=-1).to(q.dtype).view(len(grouped), -1, scores.shape[-1])
    mixed = torch.bmm(weights, values.permute(0, 2, 1, 3).reshape(len(grouped), -1, dim))
    return mixed.view(batch, heads, rows, dim).permute(0, 2, 1, 3)


def attention_fused(
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
    """The fused inference attention kernel.

    Its causal mask is aligned at the end of a sequence, so every sequence is told to end with
    row R - 1, real or not: rows from ``count`` on see what their positions held before, and no
    row before them does. A hidden value still meets a weight of zero inside the kernel, so pools
    must be finite. Rows outside the pool (``extra_k``) are beyond it: drafts of one row, which
    are left to :func:`attention_decomposed`.

    Limits documented for 910B and A3: float16 or bfloat16, at most 256 heads, ``block_size`` a
    multiple of 128 up to 512. Layout BSND takes a head of up to 512; TND, the usual one for
    ragged batches, takes 128 and 192 but not 256.
    """
    if extra_k is not None:
        args = (q, k_pool, v_pool, table, start, count, extra_k, extra_v, block_size)
        return attention_decomposed(*args)
    import torch

    rows, heads, dim = q.shape[1:]
    keys, values = (p.view(p.shape[0], block_size, -1) for p in (k_pool, v_pool))
    # One row sees all that its sequence holds: the kernel for it takes no mask.
    masked = {"atten_mask": _causal_mask(), "sparse_mode": 3} if rows > 1 else {}
    # Lengths are tensors here; for ``torch.ops.npu`` they would be numbers fixed in the graph.
    attend = import_module("torchair.ops").npu_fused_infer_attention_score_v2
    mixed, _ = attend(
        q.contiguous(),
        keys,
        values,
        block_table=table,
        actual_seq_kvlen=(start + rows).to(torch.int64),
        num_query_heads=heads,
        num_key_value_heads=k_pool.shape[2],
        softmax_scale=dim**-0.5,
        input_layout="BSND",
        block_size=block_size,
        **masked,
    )
    return mixed


def _rows(x: Any) -> Any:
    """``[B, R, Nkv, D]`` to ``[B * R, Nkv, D]``."""
    return x.reshape(-1, *x.shape[2:])


def _masks(table: Any, start: Any, count: Any, rows: int, block_size: int) -> tuple[Any, Any]:
    """Positions that hold a row, ``[B, T, 1, 1]``, and those a row sees, ``[B, 1, R, T]``."""
    import torch

    batch, width = table.shape
    place = torch.arange(width * block_size, dtype=torch.int32)
    end = (start + count).view(batch, 1, 1)
    assigned = (table > 0).unsqueeze(2)
    live = torch.logical_and(place.view(1, width, block_size) < end, assigned)
    row = start.unsqueeze(1) + torch.arange(rows, dtype=torch.int32).unsqueeze(0)
    past = place.view(1, 1, 1, -1) <= row.view(batch, 1, rows, 1)
    seen = torch.logical_and(past, live.view(batch, 1, 1, -1))
    return live.view(batch, -1, 1, 1), seen


def _gathered(pool: Any, table: Any) -> Any:
    """All blocks of each sequence: ``[B, T, Nkv, D]``."""
    import torch

    blocks = torch.index_select(pool, 0, table.reshape(-1))
    return blocks.view(table.shape[0], -1, *pool.shape[2:])


def _scores(grouped: Any, keys: Any, shape: Any) -> Any:
    """Queries ``[B * Nkv, G * R, D]`` by keys ``[B, T, Nkv, D]``: ``[B, Nh, R, T]`` float32."""
    import torch

    batch, rows, heads, dim = shape
    columns = keys.permute(0, 2, 3, 1).reshape(len(grouped), dim, -1)
    return torch.bmm(grouped, columns).view(batch, heads, rows, -1).float()


def _causal_mask() -> Any:
    """``[2048, 2048]`` int8, 1 above the diagonal: what is hidden."""
    import torch

    place = torch.arange(CAUSAL, dtype=torch.int32)
    return (place.unsqueeze(0) > place.unsqueeze(1)).to(torch.int8)
