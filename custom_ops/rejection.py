"""Rejection sampling: which drafts the target keeps, and the token it adds after them.

Row ``i`` of a slot's logits verifies draft ``i``; row ``num_drafts`` is the bonus row; rows after
it are ignored. A draft is accepted with probability ``min(1, p/q)``; the first refused one is
replaced by a draw from ``max(p - q, 0)``, so what comes out follows the target's law ``p``.
Greedy slots are the same rule with a one-hot ``p``. Sums are float64 whatever the logits are: a
float32 running sum over a large vocabulary swallows the tail.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen_mtp.custom_ops import rejection_aten, rejection_ge, rejection_onnx
from qwen_mtp.custom_ops.operator import Operator
from qwen_mtp.custom_ops.rejection_onnx import GREEDY_BELOW

FloatArray = NDArray[np.floating[Any]]
IntArray = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Sampling:
    """What one slot asks for.

    Attributes:
        temperature: Divides the logits; below ``1e-5`` the slot is greedy.
        top_k: Keep this many tokens; 0 keeps all.
        top_p: Keep the shortest descending prefix of at least this mass; 1 keeps all.
    """

    temperature: float
    top_k: int = 0
    top_p: float = 1.0


def ban_stops(rows: FloatArray, banned_rows: int, stop_ids: IntArray) -> FloatArray:
    """Take the stop ids out of the first rows (the min_tokens rule).

    Args:
        rows: Logits ``[R, V]`` of one slot.
        banned_rows: Rows before this one lose the stop ids.
        stop_ids: Ids ``[S]``; those outside the vocabulary mean none.

    Returns:
        A copy ``[R, V]`` with minus infinity at what is banned.
    """
    out = rows.copy()
    ids = stop_ids[(stop_ids >= 0) & (stop_ids < rows.shape[-1])]
    with np.errstate(invalid="ignore"):
        out[: max(banned_rows, 0), np.unique(ids)] += out.dtype.type(-np.inf)
    return out


def has_law(row: FloatArray) -> bool:
    """Whether logits ``[V]`` define a law: no NaN, and a finite maximum."""
    return not np.isnan(row).any() and bool(np.isfinite(row.max()))


def candidates(row: FloatArray, ask: Sampling) -> tuple[IntArray, NDArray[np.float64]]:
    """The tokens a row can emit and their weights, in the order a draw walks them.

    Args:
        row: Logits ``[V]``, float32 or float64, for which ``has_law`` holds.
        ask: What the slot asks for.

    Returns:
        Ids ``[M]`` int64 and unnormalised weights ``[M]`` float64. The order is descending logit
        (ties: lower id) where top-k or top-p is active, else the vocabulary's.
    """
    if ask.temperature < GREEDY_BELOW:
        return np.array([row.argmax()]), np.ones(1)
    weights = np.exp((row - row.max()) / row.dtype.type(ask.temperature)).astype(np.float64)
    if ask.top_k <= 0 and ask.top_p >= 1:
        return np.arange(row.size), weights
    order = np.argsort(-row, kind="stable")
    total = weights.sum()
    if ask.top_k > 0:
        order = order[: ask.top_k]
        total = np.cumsum(weights[order])[-1]
    weights, kept = weights[order], order.size
    if ask.top_p < 1:
        before = np.concatenate(([0.0], np.cumsum(weights)[:-1]))
        kept = max(int((before < ask.top_p * total).sum()), 1)
    return order[:kept], weights[:kept]


def accepts(uniform: float, target: float, draft: float) -> bool:
    """Whether a draft is kept.

    Args:
        uniform: In ``[0, 1)``.
        target: Probability of the draft under the target's law.
        draft: Its probability under the law it was drawn from; 1 for an argmax draft.

    Returns:
        ``uniform * draft < target``, and False where the draft law excludes the draft.
    """
    return draft > 0 and uniform * draft < target


def acceptance_probability(target: float, draft: float) -> float:
    """The measure of the uniforms for which ``accepts`` holds."""
    return min(1.0, target / draft) if draft > 0 else 0.0


def residual(weights: NDArray[np.float64], draft: FloatArray) -> NDArray[np.float64]:
    """The weights left once the draft law is taken out.

    Args:
        weights: Target weights ``[M]``, unnormalised.
        draft: The draft law ``[M]`` at the same tokens; all zero where nothing was drafted.

    Returns:
        ``max(w - q * sum(w), 0)``, or ``weights`` themselves where that has no usable sum.
    """
    share = draft * np.cumsum(weights)[-1]
    left = np.maximum(weights - share, 0.0)
    total = left.sum()
    return left if 0 < total < np.inf else weights


def pick(weights: NDArray[np.float64], uniform: float) -> int:
    """Inverse CDF: the first index whose cumulative weight exceeds ``uniform * total``.

    Args:
        weights: Unnormalised, ``[M]``, with a positive sum.
        uniform: In ``[0, 1)``.

    Returns:
        The index, never past the last one that adds to the sum.
    """
    cdf = np.cumsum(weights)
    below = (cdf <= np.float64(uniform) * cdf[-1]).sum()
    return int(min(below, (cdf < cdf[-1]).sum()))


def sample_slot(
    rows: FloatArray,
    drafts: IntArray,
    accept_uniforms: FloatArray,
    pick_uniforms: FloatArray,
    ask: Sampling,
    draft_probs: FloatArray | None = None,
) -> list[int]:
    """One slot: the accepted drafts, then one drawn token.

    Args:
        rows: Logits ``[n+1, V]``, bans applied.
        drafts: Draft ids ``[n]``; one outside the vocabulary is absent: refused, and the row's
            token is then drawn from the target's law itself.
        accept_uniforms: ``[n]``.
        pick_uniforms: ``[n+1]``.
        ask: What the slot asks for.
        draft_probs: Laws ``[n, V]`` the drafts were drawn from; None for argmax drafts. Greedy
            slots do not read them.

    Returns:
        Token ids; the last is -1 where its row has no law.
    """
    out: list[int] = []
    laws = None if ask.temperature < GREEDY_BELOW else draft_probs
    for i, row in enumerate(rows):
        if not has_law(row):
            return [*out, -1]
        ids, weights = candidates(row, ask)
        draft, law = int(drafts[i]) if i < len(drafts) else -1, np.zeros(row.size)
        if 0 <= draft < row.size:
            law = np.eye(1, row.size, draft)[0] if laws is None else laws[i].astype(np.float64)
            target = weights[ids == draft].sum() / np.cumsum(weights)[-1]
            if accepts(float(accept_uniforms[i]), target, law[draft]):
                out.append(draft)
                continue
        return [*out, int(ids[pick(residual(weights, law[ids]), float(pick_uniforms[i]))])]
    raise AssertionError("the bonus row has no draft to accept")


def meaning(
    logits: FloatArray,
    draft_ids: IntArray,
    num_drafts: IntArray,
    accept_uniforms: FloatArray,
    pick_uniforms: FloatArray,
    temperature: FloatArray,
    top_k: IntArray,
    top_p: FloatArray,
    banned_rows: IntArray,
    stop_ids: IntArray,
    draft_probs: FloatArray | None = None,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Verify every slot's drafts (``B`` slots, ``K`` drafts, ``R = K+1`` rows, ``V`` tokens).

    Args:
        logits: ``[B, R, V]`` float32 (or float64: then the exponentials are float64 too).
        draft_ids: ``[B, K]`` int32, -1 where absent.
        num_drafts: ``[B]`` int32, 0..K.
        accept_uniforms: ``[B, K]`` in ``[0, 1)``.
        pick_uniforms: ``[B, R]`` in ``[0, 1)``.
        temperature: ``[B]``; below ``1e-5`` greedy.
        top_k: ``[B]`` int32, 0 off.
        top_p: ``[B]``, 1 off.
        banned_rows: ``[B]`` int32: rows before this one cannot emit the stop ids.
        stop_ids: ``[B, S]`` int32, -1 for none.
        draft_probs: ``[B, K, V]``, the law each draft was drawn from; None for argmax drafts.

    Returns:
        Tokens ``[B, R]`` int32, -1 padded, and the accepted count ``[B]`` int32. Where the row
        after the accepted drafts has no law its token is -1 as well: the caller must raise.
    """
    tokens = np.full(logits.shape[:2], -1, np.int32)
    accepted = np.zeros(len(logits), np.int32)
    counts = np.clip(num_drafts, 0, draft_ids.shape[1])
    for b, (slot, n) in enumerate(zip(logits, counts, strict=True)):
        out = sample_slot(
            ban_stops(slot, int(banned_rows[b]), stop_ids[b])[: n + 1],
            draft_ids[b, :n],
            accept_uniforms[b],
            pick_uniforms[b],
            Sampling(float(temperature[b]), int(top_k[b]), float(top_p[b])),
            None if draft_probs is None else draft_probs[b],
        )
        tokens[b, : len(out)] = out
        accepted[b] = len(out) - 1
    return tokens, accepted


def fake(logits: Any, draft_ids: Any, num_drafts: Any, *_: Any) -> tuple[Any, Any]:
    """Tokens ``[B, R]`` int32 and accepted count ``[B]`` int32, without values."""
    return draft_ids.new_empty(logits.shape[:2]), num_drafts.new_empty(num_drafts.shape)


_INPUTS = ", ".join(f"Tensor {name}" for name in rejection_onnx.INPUTS)

REJECTION_SAMPLE = Operator(
    name="rejection_sample",
    schema=f"({_INPUTS}) -> (Tensor, Tensor)",
    meaning=meaning,
    fake=fake,
    onnx=rejection_onnx.rejection_sample,
    native=rejection_onnx.rejection_sample_native,
    decomposed=rejection_aten.decomposed,
    ge=rejection_ge.rejection_sample,
    kernels=(rejection_ge.OP_TYPE,),
)

REJECTION_SAMPLE_LAWS = Operator(
    name="rejection_sample_laws",
    schema=f"({_INPUTS}, Tensor draft_probs) -> (Tensor, Tensor)",
    meaning=meaning,
    fake=fake,
    onnx=rejection_onnx.rejection_sample_laws,
    decomposed=rejection_aten.decomposed,
    ge=rejection_ge.rejection_sample,
    kernels=(rejection_ge.OP_TYPE,),
)
