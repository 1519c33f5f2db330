"""The three parts of the rejection sampling function: greedy, sorted and plain slots.

Every part answers for all slots, ``(token, accepted)`` each ``[B]`` int64; what it says of a slot
of another kind is not read. Shapes in comments: ``B`` slots, ``R`` rows, ``V`` tokens, ``M``
candidates, ``N`` chunks of ``C`` vocabulary entries.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

CHUNK = 64
RUNGS = (64, 1024)
INT32, INT64, BOOL, DOUBLE = 6, 7, 9, 11  # TensorProto codes
Pair = tuple[Any, Any]
Trace = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """What the parts share, as graph values."""

    logits: Any  # [B, R, V] bans applied
    size: Any  # [1] int64, V
    chunk: Any  # [1] int64, C
    chunks: Any  # [B, R, N, C] the logits again
    chunk_max: Any  # [B, R, N]
    row_max: Any  # [B, R]
    has_law: Any  # [B, R] bool
    ignored: Any  # [B, R] bool, rows after the bonus row
    drafts: Any  # [B, R] int64, -1 where there is nothing to verify
    accept_uniforms: Any  # [B, R] double
    pick_uniforms: Any  # [B, R] double
    temperature: Any  # [B, 1] float, 1 for greedy slots
    top_k: Any  # [B, 1] int64
    top_p: Any  # [B, 1] double
    sorts: Any  # [B, 1] bool, sampled with top-k or top-p
    draft_probs: Any  # [B, K, V], or None for argmax drafts


@dataclass(frozen=True, slots=True)
class _Candidates:
    ids: Any  # [B, R, M] int64, descending logit
    weights: Any  # [B, R, M] double, zero from top_k on
    before: Any  # [B, R, M] double, mass ahead of each
    mass: Any  # [B, R] double, the whole


def branch(
    op: Any, name: str, condition: Any, yes: Trace, no: Trace, outputs: int = 2
) -> tuple[Any, ...]:
    """An ``If``.

    Args:
        op: The ``OpBuilder`` of the enclosing graph.
        name: Scope of the value names: a branch must not reuse a name it can see outside.
        condition: Scalar bool.
        yes: Traced into the then branch with that branch's ``OpBuilder``.
        no: Traced into the else branch.
        outputs: How many values each returns.

    Returns:
        The outputs.
    """
    import onnx_ir as ir

    def graph(label: str, trace: Trace) -> Any:
        op.builder.push_module(label)
        results = [ir.Value() for _ in range(outputs)]
        traced = op.builder.subgraph(trace, [], results, name=label)
        op.builder.pop_module()
        return traced

    graphs = {"then_branch": graph(f"{name}_yes", yes), "else_branch": graph(f"{name}_no", no)}
    result = op.If(condition, **graphs, _outputs=outputs)
    return (result,) if outputs == 1 else tuple(result)


def any_true(op: Any, condition: Any) -> Any:
    """Whether any element of a bool tensor holds, as a scalar bool."""
    return op.Cast(op.ReduceMax(op.Cast(condition, to=INT32), keepdims=0), to=BOOL)


def at_row(op: Any, values: Any, row: Any) -> Any:
    """Each slot's entry at its own row: ``[B, R, ...]`` and ``[B]`` int64 to ``[B, ...]``."""
    return op.GatherND(values, op.Unsqueeze(row, [1]), batch_dims=1)


def greedy_part(s: Slots, op: Any) -> Pair:
    """Keep drafts while they are the argmax; add the argmax that follows."""
    chunk = op.ArgMax(s.chunk_max, axis=2, keepdims=1)
    entry = op.ArgMax(op.GatherND(s.chunks, chunk, batch_dims=2), axis=2, keepdims=0)
    best = op.Add(op.Mul(op.Squeeze(chunk, [2]), s.chunk), entry)
    row = _first_refused(op, s, op.Equal(best, s.drafts))
    return at_row(op, best, row), row


def plain_part(s: Slots, op: Any) -> Pair:
    """Temperature alone: no sort, candidates in vocabulary order."""
    mass = _full_mass(op, s)
    ids = op.Unsqueeze(op.Max(s.drafts, 0), [2])
    draft = op.Squeeze(op.GatherElements(s.logits, ids, axis=2), [2])
    target = op.Div(_weights(op, draft, s.row_max, s.temperature), mass)
    row = _first_refused(op, s, _accepts(op, s, target))
    logits = at_row(op, s.logits, row)
    if s.draft_probs is None:
        logits = _without_draft(op, s, row, logits)
    top = op.Unsqueeze(at_row(op, s.row_max, row), [1])
    weights = _weights(op, logits, top, s.temperature)
    if s.draft_probs is not None:
        weights = _residual(op, s, row, weights, at_row(op, mass, row), None)
    return op.Squeeze(_pick(op, s, row, weights), [1]), row


def sorted_part(s: Slots, op: Any) -> Pair:
    """Top-k and top-p: as few candidates as provably hold every token the slots can emit."""
    nucleus = op.And(s.sorts, op.LessOrEqual(s.top_k, 0))
    ones = op.Cast(op.Expand(1.0, op.Shape(s.row_max)), to=DOUBLE)
    (full,) = branch(
        op,
        "nucleus",
        any_true(op, nucleus),
        lambda o: _full_mass(o, s),
        lambda o: o.Identity(ones),
        outputs=1,
    )
    return _climb(op, s, full, RUNGS)


def _climb(op: Any, s: Slots, full: Any, rungs: Sequence[int]) -> Pair:
    if not rungs:
        return _finish(op, s, _candidates(op, s, *_everything(op, s)), full)
    c = _candidates(op, s, *_best(op, s, rungs[0]))
    return branch(
        op,
        f"rung{rungs[0]}",
        any_true(op, op.Not(_holds_all(op, s, c, full, rungs[0]))),
        lambda o: _climb(o, s, full, rungs[1:]),
        lambda o: _finish(o, s, c, full),
    )


def _holds_all(op: Any, s: Slots, c: _Candidates, full: Any, count: int) -> Any:
    """Where the candidates are certain to hold all a row keeps, or nobody asks: ``[B, R]``."""
    by_k = op.And(op.Greater(s.top_k, 0), op.LessOrEqual(s.top_k, count))
    by_p = op.GreaterOrEqual(c.mass, op.Mul(s.top_p, full))
    by_p = op.And(by_p, op.LessOrEqual(s.top_k, 0))
    enough = op.Or(op.Or(by_k, by_p), op.LessOrEqual(s.size, count))
    unread = op.Or(op.Or(s.ignored, op.Not(s.has_law)), op.Not(s.sorts))
    return op.Or(enough, unread)


def _everything(op: Any, s: Slots) -> Pair:
    values, ids = op.TopK(_sortable(op, s, s.logits, [2]), s.size, _outputs=2)
    return values, ids


def _best(op: Any, s: Slots, count: int) -> Pair:
    """The ``min(count, V)`` largest logits of each row and their ids, ties to the lower id.

    They all lie in the ``count`` chunks of largest maximum, whose entries are far fewer than the
    vocabulary's. Chunks go in id order, so that position order stays id order.
    """
    chunks = op.Min(op.Shape(s.chunk_max, start=2), [count])
    _, leading = op.TopK(_sortable(op, s, s.chunk_max, [2]), chunks, _outputs=2)
    leading, _ = op.TopK(leading, chunks, largest=0, _outputs=2)
    entries = op.GatherND(s.chunks, op.Unsqueeze(leading, [3]), batch_dims=2)
    entries = op.Reshape(_sortable(op, s, entries, [2, 3]), [0, 0, -1])
    values, place = op.TopK(entries, op.Min(s.size, [count]), _outputs=2)
    chunk = op.GatherElements(leading, op.Div(place, s.chunk), axis=2)
    return values, op.Add(op.Mul(chunk, s.chunk), op.Mod(place, s.chunk))


def _sortable(op: Any, s: Slots, values: Any, axes: list[int]) -> Any:
    # A NaN in a row nobody reads must not reach a comparison sort: its result is undefined.
    return op.Where(op.Unsqueeze(s.has_law, axes), values, 0.0)


def _candidates(op: Any, s: Slots, values: Any, ids: Any) -> _Candidates:
    weights = _weights(op, values, op.Unsqueeze(s.row_max, [2]), op.Unsqueeze(s.temperature, [2]))
    limit = op.Unsqueeze(op.Where(op.Greater(s.top_k, 0), s.top_k, s.size), [2])
    weights = op.Where(op.Less(_places(op, ids), limit), weights, _double(op, 0.0))
    before = op.CumSum(weights, 2, exclusive=1)
    return _Candidates(ids, weights, before, op.Add(_last(op, before), _last(op, weights)))


def _finish(op: Any, s: Slots, c: _Candidates, full: Any) -> Pair:
    """Cut the candidates by top-p, verify, draw; ``full`` is the mass where top-k is off."""
    whole = op.Where(op.Greater(s.top_k, 0), c.mass, full)
    kept = op.Less(c.before, op.Unsqueeze(op.Mul(s.top_p, whole), [2]))
    off = op.Unsqueeze(op.GreaterOrEqual(s.top_p, _double(op, 1.0)), [2])
    kept = op.Or(op.Or(kept, off), op.Equal(_places(op, c.ids), 0))
    weights = op.Where(kept, c.weights, _double(op, 0.0))
    mass = _last(op, op.CumSum(weights, 2))
    hit = op.Equal(c.ids, op.Unsqueeze(s.drafts, [2]))
    target = op.ReduceMax(op.Where(hit, weights, _double(op, 0.0)), [2], keepdims=0)
    row = _first_refused(op, s, _accepts(op, s, op.Div(target, mass)))
    weights, ids = at_row(op, weights, row), at_row(op, c.ids, row)
    if s.draft_probs is None:
        hit = at_row(op, hit, row)
        weights = op.Where(hit, _double(op, 0.0), weights)
    else:
        weights = _residual(op, s, row, weights, at_row(op, mass, row), ids)
    place = _pick(op, s, row, weights)
    return op.Squeeze(op.GatherElements(ids, place, axis=1), [1]), row


def _first_refused(op: Any, s: Slots, accepted: Any) -> Any:
    usable = op.And(op.GreaterOrEqual(s.drafts, 0), s.has_law)
    refused = op.Not(op.And(accepted, usable))
    return op.ArgMax(op.Cast(refused, to=INT32), axis=1, keepdims=0)


def _accepts(op: Any, s: Slots, target: Any) -> Any:
    if s.draft_probs is None:
        return op.Less(s.accept_uniforms, target)
    ids = op.Unsqueeze(op.Slice(op.Max(s.drafts, 0), [0], [-1], [1]), [2])
    law = op.Squeeze(op.GatherElements(s.draft_probs, ids, axis=2), [2])
    bonus = op.Expand(0.0, op.Concat(op.Shape(law, end=1), [1], axis=0))
    law = op.Cast(op.Concat(law, bonus, axis=1), to=DOUBLE)
    below = op.Less(op.Mul(s.accept_uniforms, law), target)
    return op.And(op.Greater(law, _double(op, 0.0)), below)


def _without_draft(op: Any, s: Slots, row: Any, logits: Any) -> Any:
    """The residual of an argmax draft. A refused one had p < 1, so something is always left."""
    draft = op.Unsqueeze(at_row(op, s.drafts, row), [1])
    change = op.Where(op.Less(draft, 0), 0.0, op.Constant(value_float=float("-inf")))
    return op.ScatterElements(logits, op.Max(draft, 0), change, axis=1, reduction="add")


def _residual(op: Any, s: Slots, row: Any, weights: Any, mass: Any, ids: Any) -> Any:
    """``max(w - q * mass, 0)``, or ``w`` where that has no usable sum or nothing was drafted."""
    drafted = op.GreaterOrEqual(at_row(op, s.drafts, row), 0)

    def left(o: Any) -> Any:
        last = o.Sub(o.Shape(s.draft_probs, start=1, end=2), 1)
        law = at_row(o, s.draft_probs, o.Min(row, last))
        if ids is not None:
            law = o.GatherElements(law, ids, axis=1)
        scale = o.Unsqueeze(o.Where(drafted, mass, _double(o, 0.0)), [1])
        rest = o.Max(o.Sub(weights, o.Mul(o.Cast(law, to=DOUBLE), scale)), _double(o, 0.0))
        total = o.ReduceSum(rest, [1], keepdims=1)
        usable = o.And(o.Greater(total, _double(o, 0.0)), o.Less(total, _double(o, float("inf"))))
        return o.Where(usable, rest, weights)

    # Without any draft there may be no row of the laws to read at all.
    (rest,) = branch(
        op, "residual", any_true(op, drafted), left, lambda o: o.Identity(weights), outputs=1
    )
    return rest


def _pick(op: Any, s: Slots, row: Any, weights: Any) -> Any:
    """Inverse CDF over ``[B, M]``: the first index whose running sum passes the point."""
    cdf = op.CumSum(weights, 1)
    uniform = op.Unsqueeze(at_row(op, s.pick_uniforms, row), [1])
    point = op.Mul(uniform, op.Slice(cdf, [-1], [1 << 62], [1]))
    below = op.ReduceSum(op.Cast(op.LessOrEqual(cdf, point), to=INT32), [1], keepdims=1)
    # Rows without a law can count past the end; what they pick is dropped.
    return op.Min(op.Cast(below, to=INT64), op.Sub(op.Shape(weights, start=1), 1))


def _full_mass(op: Any, s: Slots) -> Any:
    """Exact softmax denominators ``[B, R]`` double: float32 in a chunk, float64 across chunks."""
    top, heat = op.Unsqueeze(s.row_max, [2, 3]), op.Unsqueeze(s.temperature, [2, 3])
    weights = op.Exp(op.Div(op.Sub(s.chunks, top), heat))
    sums = op.Cast(op.ReduceSum(weights, [3], keepdims=0), to=DOUBLE)
    return op.ReduceSum(sums, [2], keepdims=0)


def _weights(op: Any, logits: Any, top: Any, temperature: Any) -> Any:
    return op.Cast(op.Exp(op.Div(op.Sub(logits, top), temperature)), to=DOUBLE)


def _places(op: Any, ids: Any) -> Any:
    return op.Range(0, op.Squeeze(op.Shape(ids, start=-1)), 1)


def _last(op: Any, values: Any) -> Any:
    return op.Squeeze(op.Slice(values, [-1], [1 << 62], [2]), [2])


def _double(op: Any, value: float) -> Any:
    return op.Cast(value, to=DOUBLE)
