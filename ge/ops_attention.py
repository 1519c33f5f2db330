"""Meanings of Ascend's kernels for a paged key/value cache, as their documentation has them.

Attention computes in float32 and rounds once at the end.
"""

from itertools import pairwise
from typing import Any

import torch

from qwen_mtp.ge.node import Function, Node, operator

Tensor = torch.Tensor
MASK_EDGE = 2048  # of the compressed attention mask


@operator("ScatterPaKvCache")
def _scatter_pa_kv_cache(node: Node) -> Function:
    node.fixed(cache_mode="Norm", scatter_mode="None", strides=[1, 1], offsets=[0, 0])
    node.absent("compress_lens", "compress_seq_offset", "seq_lens")

    def run(
        key: Tensor, key_cache: Tensor, slots: Tensor, value: Tensor, value_cache: Tensor, *_: None
    ) -> tuple[Tensor, Tensor]:
        if key.dim() != 3 or key_cache.dim() != 4:
            raise ValueError("it takes keys [T, N, D] and a cache [blocks, block_size, N, D]")
        for rows, cache in ((key, key_cache), (value, value_cache)):
            cache.view(-1, *cache.shape[2:]).index_copy_(0, slots.long(), rows)
        return key_cache, value_cache

    return run


def unused(node: Node, *kept: str) -> None:
    """Refuse every connected input that is not among these (``key0`` stands for ``key``)."""
    node.absent(*(name for name in node.inputs if name not in kept))


@operator("FusedInferAttentionScore")
def _fused_infer_attention(node: Node) -> Function:
    unused(
        node,
        "query",
        "key0",
        "value0",
        "atten_mask",
        "actual_seq_lengths",
        "actual_seq_lengths_kv",
        "block_table",
    )
    limit = 2**31 - 1
    node.fixed(
        pre_tokens=limit, next_tokens=limit, softmax_lse_flag=False, pse_type=0, out_dtype=0
    )
    node.fixed(antiquant_mode=0, key_antiquant_mode=0, value_antiquant_mode=0, query_quant_mode=0)
    node.irrelevant("inner_precise")
    heads, scale = node.attr("num_heads"), node.attr("scale", 1.0)
    settings: dict[str, Any] = {
        "heads": heads,
        "kv_heads": node.attr("num_key_value_heads", 0) or heads,
        "scale": scale,
        "layout": node.attr("input_layout", "BSH"),
        "causal": node.attr("sparse_mode", 0) == 3,
        "block_size": node.attr("block_size", 0),
    }
    _check_attention(node, settings)
    return node.named(lambda **inputs: (_attention(**settings, **inputs), torch.zeros(1)))


def _check_attention(node: Node, settings: dict[str, Any]) -> None:
    if settings["layout"] not in ("TND", "BSND", "BSH"):
        raise node.error(f"input_layout={settings['layout']} is not implemented")
    if node.attr("sparse_mode", 0) not in (0, 3):
        raise node.error(f"sparse_mode={node.attr('sparse_mode')} is not implemented")
    if settings["causal"] != (node.at("atten_mask") is not None):
        raise node.error("sparse_mode 3 and atten_mask go together here")
    mask = node.constants.get("atten_mask")
    expected = torch.ones(MASK_EDGE, MASK_EDGE, dtype=torch.bool).triu(1)
    if mask is not None and not torch.equal(mask.reshape(mask.shape[-2:]).bool(), expected):
        raise node.error(f"atten_mask must be 1 above the diagonal, {MASK_EDGE} a side")
    for name in ("block_table", "actual_seq_lengths_kv"):
        if node.at(name) is None:
            raise node.error(f"the input {name} is missing; keys come in pages here")


def _attention(
    *,
    heads: int,
    kv_heads: int,
    scale: float,
    layout: str,
    causal: bool,
    block_size: int,
    query: Tensor,
    key0: Tensor,
    value0: Tensor,
    actual_seq_lengths_kv: Tensor,
    block_table: Tensor,
    actual_seq_lengths: Tensor | None = None,
    atten_mask: Tensor | None = None,
) -> Tensor:
    """Attention of rows over pages, ``[blocks, block_size, N * D]`` or ``[blocks, N, size, D]``.

    The causal mask is aligned at the end of each sequence; a row that sees nothing is zero.
    """
    line = query.reshape(-1, heads, query.shape[-1] // (heads if layout == "BSH" else 1))
    out = torch.zeros_like(line)
    spans = _query_spans(query, layout, actual_seq_lengths)
    pages = [_paged(pool, kv_heads, block_size) for pool in (key0, value0)]
    lengths = [int(n) for n in actual_seq_lengths_kv.tolist()]
    for (first, last), length, table in zip(spans, lengths, block_table.tolist(), strict=True):
        count = -(-length // block_size)
        if count > len(table):
            raise IndexError(f"{length} keys need {count} blocks, the table has {len(table)}")
        if length > 0 and last > first:
            blocks = torch.tensor(table[:count])
            key, value = (p.index_select(0, blocks).flatten(0, 1)[:length].float() for p in pages)
            out[first:last] = _mix(line[first:last].float(), key, value, scale, causal)
    return out.reshape(query.shape)


def _mix(q: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Tensor:
    """Rows ``[R, N, D]`` over keys ``[S, Nkv, D]``; query heads share keys in groups."""
    rows, (length, kv_heads, _) = len(q), key.shape
    grouped = q.reshape(rows, kv_heads, -1, q.shape[-1])
    scores = torch.einsum("rngd,snd->ngrs", grouped, key) * scale
    if causal:
        seen = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)
        scores = scores.masked_fill(~seen, -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0) if rows > length else scores.softmax(-1)
    return torch.einsum("ngrs,snd->rngd", weights, value).flatten(1, 2)


def _paged(pool: Tensor, heads: int, block_size: int) -> Tensor:
    """``[blocks, block_size, heads, D]`` from either layout of a paged cache."""
    in_rows = pool.dim() == 3
    pages = pool.reshape(*pool.shape[:2], heads, -1) if in_rows else pool.transpose(1, 2)
    if pages.shape[1:3] != (block_size, heads):
        raise ValueError(f"a cache of {tuple(pool.shape)} does not have blocks of {block_size}")
    return pages


def _query_spans(query: Tensor, layout: str, lengths: Tensor | None) -> list[tuple[int, int]]:
    if layout == "TND":
        if lengths is None:
            raise ValueError("layout TND needs actual_seq_lengths")
        return list(pairwise([0, *(int(n) for n in lengths.tolist())]))
    batch, rows = query.shape[:2]
    counts = [rows] * batch if lengths is None else [int(n) for n in lengths.tolist()]
    return [(b * rows, b * rows + count) for b, count in enumerate(counts)]
