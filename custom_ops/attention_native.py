"""The nodes of the native kernels for attention: sizes are attributes, pools say which kernel.

Pools are ``[Nkv, slots, D]``; the table may be bound narrower than it is declared.
"""

from typing import Any

from qwen_mtp.custom_ops.operator import NAMESPACE

_OF_POOL = {"FLOAT": "", "FLOAT16": "Half"}  # the suffix of a kernel, by the type of its pools


def write_native(
    op: Any,
    k: Any,
    v: Any,
    k_pool: Any,
    v_pool: Any,
    table: Any,
    start: Any,
    count: Any,
    block_size: int,
) -> Any:
    """Store rows: in place where a pool is one buffer as input and output."""
    batch, rows, kv_heads, dim = (int(d) for d in k.shape)
    form = getattr(op, f"KvWrite{_OF_POOL[k_pool.dtype.name]}")
    return form(
        *(k, v, k_pool, v_pool, table, start, count),
        B=batch,
        R=rows,
        Nkv=kv_heads,
        D=dim,
        slots=int(k_pool.shape[1]),
        block_size=block_size,
        _domain=NAMESPACE,
        _outputs=2,
    )


def attention_native(
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
    gate: Any = None,
) -> Any:
    """One pass over the pages; ``[B * R, Nh * D]`` times the sigmoid of ``gate`` if there is one.

    Args:
        op: The builder.
        q: And what follows: as in :func:`~qwen_mtp.custom_ops.attention.paged_attention`.
        k_pool: See there.
        v_pool: See there.
        table: See there.
        start: See there.
        count: See there.
        extra_k: See there.
        extra_v: See there.
        block_size: See there.
        gate: ``[B, R, Nh * D]``.
    """
    batch, rows, heads, dim = (int(d) for d in q.shape)
    form = getattr(op, f"PagedAttention{_OF_POOL[k_pool.dtype.name]}")
    return form(
        *(q, k_pool, v_pool, table, start, count, gate, extra_k, extra_v),
        B=batch,
        R=rows,
        Nh=heads,
        Nkv=int(k_pool.shape[0]),
        D=dim,
        slots=int(k_pool.shape[1]),
        block_size=block_size,
        J=0 if extra_k is None else int(extra_k.shape[1]),
        _domain=NAMESPACE,
    )


def project_native(
    op: Any,
    projected: Any,
    q_weight: Any,
    k_weight: Any,
    cos: Any,
    sin: Any,
    heads: int,
    kv_heads: int,
    eps: float,
) -> Any:
    """One pass over the rows."""
    batch, rows, half = (int(d) for d in cos.shape)
    return op.AttentionProject(
        *(projected, q_weight, k_weight, cos, sin),
        B=batch,
        R=rows,
        Nh=heads,
        Nkv=kv_heads,
        D=int(q_weight.shape[0]),
        half=half,
        epsilon=eps,
        _domain=NAMESPACE,
        _outputs=4,
    )
