"""Rejection sampling in aten operators: static shapes, no control flow, no float64.

A graph engine without branches computes greedy, plain and sorted (top-k or top-p) slots alike and
selects per slot: plain slots walk the vocabulary in its own order, sorted ones in descending
order, and everything after that choice runs once. The sort is the expensive part; ties must go
to the lower id, so it is ``aten.sort.stable``.

A float32 running sum over a large vocabulary swallows the tail, so sums have two levels: ``N``
chunks of ``C`` weights each, about ``sqrt(V)`` both. The vocabulary is padded with minus infinity
to ``M = N * C > V``; column ``V``, always padding, is where absent stop ids go. Against the
float64 meaning a draw differs only where a uniform lies within float32 rounding of a boundary.

Shapes in comments: ``B`` slots, ``R`` rows, ``V`` tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qwen_mtp.custom_ops.rejection_onnx import GREEDY_BELOW

BELOW_ONE = 1 - 2**-24


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """The rows of all slots, candidates in the order a draw walks them."""

    chunk: int  # C
    logits: Any  # [B, R, M] bans applied, 0 in rows without a law
    top: Any  # [B, R, 1] the largest logit
    best: Any  # [B, R, 1] int64, its id
    lawless: Any  # [B, R, 1] bool, not a number inside or no finite maximum
    greedy: Any  # [B, 1, 1] bool
    sorts: Any  # [B, 1, 1] bool
    values: Any  # [B, R, M] descending logits
    ids: Any  # [B, R, M] int64, their ids
    heat: Any  # [B, 1, 1] the temperature, bounded below
    weights: Any  # [B, R, M] unnormalised, in the slot's own order, zero from top-k on
    last: Any  # [B, R, 1] int64, the last place that is kept
    mass: Any  # [B, R, 1] weight of what is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drafts:
    """The drafts beside the rows they are verified by; the bonus row has an absent one."""

    ids: Any  # [B, R, 1] int64, -1 where there is nothing to verify
    uniforms: Any  # [B, R, 1]
    law: Any  # [B, R, 1] the draft's own probability, None for argmax drafts


def decomposed(
    logits: Any,
    draft_ids: Any,
    num_drafts: Any,
    accept_uniforms: Any,
    pick_uniforms: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    banned_rows: Any,
    stop_ids: Any,
    draft_probs: Any = None,
) -> tuple[Any, Any]:
    """The arguments and results of ``qwen_mtp.custom_ops.rejection.meaning``, in float32."""
    import torch

    slots, rows, size = logits.shape
    place, none = torch.arange(rows).view(1, rows, 1), torch.full((1, 1, 1), -1)
    column = (slots, 1, 1)
    laws = draft_probs if rows > 1 else None
    x = _banned(_padded(logits.float()), place.lt(banned_rows.long().view(column)), stop_ids, size)
    r = _rows(x, temperature.view(column), top_k.view(column), top_p.view(column), size)
    real = place.lt(num_drafts.long().view(column))
    d = _drafts(draft_ids.long(), real, accept_uniforms, laws, size)
    # Not torch.where: GE's SelectV2 of older CANN takes no bools to choose from.
    drawn = _sampled_accepts(r, d).logical_and(r.greedy.logical_not())
    accepted = r.best.eq(d.ids).logical_and(r.greedy).logical_or(drawn)
    refused = accepted.logical_and(d.ids.ge(0)).logical_not().logical_or(r.lawless)
    # The running count of refusals is zero exactly before the first one; the bonus row is one.
    count = _count(refused.float().cumsum(1).eq(0), 1)  # [B, 1, 1]
    token = torch.where(
        r.greedy, r.best.gather(1, count), _replacement(r, d, count, pick_uniforms, laws)
    )
    token = torch.where(r.lawless.gather(1, count), none, token)
    tokens = torch.where(place.lt(count), d.ids, torch.where(place.eq(count), token, none))
    return tokens.view(slots, rows).int(), count.view(slots).int()


def chunk_size(size: int) -> int:
    """``C`` for a vocabulary: the smallest power of two with ``C * C >= size``."""
    return 1 << (((size - 1).bit_length() + 1) // 2)


def _padded(x: Any) -> Any:
    """Append minus infinity until whole chunks hold more than the vocabulary."""
    import torch

    *lead, size = x.shape
    chunk = chunk_size(size)
    extra = (size // chunk + 1) * chunk - size
    return torch.cat([x, torch.full((*lead, extra), float("-inf"))], -1)


def _banned(x: Any, early: Any, stop_ids: Any, size: int) -> Any:
    """Add minus infinity at the stop ids ``[B, S]`` of the early rows ``[B, R, 1]``."""
    import torch

    slots, rows, _ = x.shape
    stops = stop_ids.shape[1]
    if not stops:
        return x
    ids = stop_ids.long().view(slots, 1, stops)
    absent = ids.lt(0).logical_or(ids.ge(size))
    ids = torch.where(absent, torch.full((1, 1, 1), size), ids).expand(slots, rows, stops)
    old = x.gather(2, ids)
    # Adding, not setting: what is not a number stays so. Equal ids write equal values.
    return x.scatter(2, ids, torch.where(early, old + float("-inf"), old))


def _rows(x: Any, temperature: Any, top_k: Any, top_p: Any, size: int) -> _Rows:
    import torch

    width, chunk = x.shape[2], chunk_size(size)
    top, best = x.max(2, keepdim=True)
    broken = x.lt(float("inf")).logical_not().any(2, keepdim=True)
    lawless = broken.logical_or(top.eq(float("-inf")))
    zero = torch.zeros((1, 1, 1))
    # Not a number has no place in an order: rows without a law are sorted as zeros.
    x = torch.where(lawless, zero, x)
    # The float32 next to the bound lies below it, so it is greedy as well.
    greedy, cut_k, cut_p = temperature.le(GREEDY_BELOW), top_k.gt(0), top_p.lt(1)
    sorts = cut_k.logical_or(cut_p).logical_and(greedy.logical_not())
    values, ids = torch.sort(x, stable=True, dim=-1, descending=True)
    heat = temperature.clamp(min=GREEDY_BELOW)
    weights = ((torch.where(sorts, values, x) - top) / heat).exp()
    end = torch.full((1, 1, 1), width - 1)
    end = torch.where(sorts.logical_and(cut_k), (top_k.long() - 1).minimum(end), end)
    weights = torch.where(torch.arange(width).le(end), weights, zero)
    last, mass = _nucleus(weights, sorts.logical_and(cut_p), top_p, chunk, end)
    return _Rows(
        chunk=chunk,
        logits=x,
        top=top,
        best=best,
        lawless=lawless,
        greedy=greedy,
        sorts=sorts,
        values=values,
        ids=ids,
        heat=heat,
        weights=weights,
        last=last,
        mass=mass,
    )


def _nucleus(weights: Any, cuts: Any, top_p: Any, chunk: int, end: Any) -> tuple[Any, Any]:
    """The last place kept and the mass up to it, ``[B, R, 1]`` both.

    A token is kept while the mass before it is below ``top_p * total``: the last one is the first
    at which the running sum reaches that.
    """
    import torch

    chunks, sums = _summed(weights, chunk)
    total = sums[..., -1:]
    place, mass = _locate(chunks, sums, top_p * total, torch.lt)
    return torch.where(cuts, place, end), torch.where(cuts, mass, total)


def _summed(weights: Any, chunk: int) -> tuple[Any, Any]:
    """Chunks ``[..., N, C]`` of ``[..., M]`` and the sums ahead of each, ``[..., N + 1]``."""
    import torch

    *lead, width = weights.shape
    chunks = weights.view(*lead, width // chunk, chunk)
    return chunks, torch.cat([torch.zeros((*lead, 1)), chunks.sum(-1).cumsum(-1)], -1)


def _locate(chunks: Any, sums: Any, point: Any, passed: Callable[..., Any]) -> tuple[Any, Any]:
    """Find a point on the running sum of weights.

    Args:
        chunks: Weights ``[..., N, C]``.
        sums: What lies ahead of each chunk, then the total, ``[..., N + 1]``.
        point: ``[..., 1]``, below the total.
        passed: ``torch.le`` for the first place whose running sum exceeds the point, ``torch.lt``
            for the first that reaches it.

    Returns:
        The place ``[..., 1]`` int64, never past the last one that adds to its chunk, and the
        running sum there.
    """
    import torch

    *lead, many, chunk = chunks.shape
    at = (_count(passed(sums, point)) - 1).clamp(0, many - 1)
    first = torch.arange(0, at.numel() * many, many).view(at.shape)
    inner = chunks.reshape(-1, chunk).index_select(0, (at + first).view(-1)).cumsum(-1)
    inner = inner.view(*lead, chunk)
    before = sums.gather(-1, at)
    # Rounding may leave more to find than the chunk holds.
    left = (point - before).minimum(inner[..., -1:] * BELOW_ONE)
    inside = _count(passed(inner, left)).clamp(0, chunk - 1)
    return at * chunk + inside, before + inner.gather(-1, inside)


def _count(mask: Any, dim: int = -1) -> Any:
    """How many hold along an axis, kept as one, int64."""
    import torch

    return mask.int().sum(dim, keepdim=True, dtype=torch.int32).long()


def _drafts(ids: Any, real: Any, uniforms: Any, draft_probs: Any, size: int) -> _Drafts:
    import torch

    slots, none, law = ids.shape[0], torch.zeros((ids.shape[0], 1)), None
    if draft_probs is not None:
        law = draft_probs.gather(2, ids.clamp(0, size - 1).unsqueeze(2))
        law = torch.cat([law, none.unsqueeze(2)], 1)
    ids = torch.cat([ids, torch.full((slots, 1), -1)], 1).unsqueeze(2)
    ids = torch.where(real.logical_and(ids.lt(size)), ids, torch.full((1, 1, 1), -1))
    return _Drafts(ids=ids, uniforms=torch.cat([uniforms, none], 1).unsqueeze(2), law=law)


def _sampled_accepts(r: _Rows, d: _Drafts) -> Any:
    """Whether each draft is kept by the rule ``u * q < p``, ``[B, R, 1]``."""
    ids = d.ids.clamp(min=0)
    logit, edge = r.logits.gather(2, ids), r.values.gather(2, r.last)
    # In a descending order with ties to the lower id, the kept are those up to the last one;
    # where nothing is cut that is padding.
    tied = logit.eq(edge).logical_and(ids.le(r.ids.gather(2, r.last)))
    kept = logit.gt(edge).logical_or(tied)
    target = ((logit - r.top) / r.heat).exp() / r.mass
    if d.law is None:
        return d.uniforms.lt(target).logical_and(kept)
    below = (d.uniforms * d.law).lt(target)
    return d.law.gt(0).logical_and(below).logical_and(kept)


def _replacement(r: _Rows, d: _Drafts, row: Any, uniforms: Any, draft_probs: Any) -> Any:
    """Draw from the residual of each slot's own row, ``[B, 1, 1]`` int64."""
    import torch

    slots, rows, width = r.weights.shape
    zero, place = torch.zeros((1, 1)), torch.arange(width).unsqueeze(0)
    flat = (torch.arange(0, slots * rows, rows).view(row.shape) + row).view(-1)
    draft, last, mass = (v.gather(1, row).view(slots, 1) for v in (d.ids, r.last, r.mass))
    ids = r.ids.view(-1, width).index_select(0, flat)
    ids = torch.where(r.sorts.view(slots, 1), ids, place)
    weights = r.weights.view(-1, width).index_select(0, flat)
    weights = torch.where(place.le(last), weights, zero)
    if d.law is None:
        weights = torch.where(ids.eq(draft), zero, weights)
    else:
        share = torch.where(draft.ge(0), mass, zero)
        weights = _residual(weights, _law_of(draft_probs, row, ids), share)
    chunks, sums = _summed(weights, r.chunk)
    point = uniforms.gather(1, row.view(slots, 1)).clamp(max=BELOW_ONE) * sums[:, -1:]
    found, _ = _locate(chunks, sums, point, torch.le)
    return ids.gather(1, found).unsqueeze(2)


def _law_of(draft_probs: Any, row: Any, ids: Any) -> Any:
    """The draft law of each slot's row at ``ids``, ``[B, M]``; zero at the padding."""
    import torch

    slots, drafts, size = draft_probs.shape
    first = torch.arange(0, slots * drafts, drafts).view(row.shape)
    flat = (row.clamp(max=drafts - 1) + first).view(-1)
    law = draft_probs.view(-1, size).index_select(0, flat)
    law = torch.cat([law, torch.zeros((slots, ids.shape[1] - size))], 1)
    return law.gather(1, ids)


def _residual(weights: Any, law: Any, mass: Any) -> Any:
    """``max(w - q * mass, 0)``, or the weights where that has no usable sum."""
    import torch

    left = (weights - law * mass).maximum(torch.zeros((1, 1)))
    total = left.sum(-1, keepdim=True)
    return torch.where(total.gt(0).logical_and(total.lt(float("inf"))), left, weights)
