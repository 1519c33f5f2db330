"""The ONNX form of rejection sampling: one model-local function of standard operators.

The function reads its sizes from its inputs, so one copy serves every graph of a model. Greedy,
sorted (top-k or top-p) and plain temperature slots are three parts, each behind an ``If``: a
batch pays for the kinds it holds, and a slot's result cannot depend on its neighbours. The sorted
part climbs a ladder: 64 candidates where every top-k allows it, then 1024 where that is provably
enough, then the whole vocabulary. Totals are running sums in candidate order, which trailing zero
weights leave alone: every rung gives the same bits.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from qwen_mtp.custom_ops.operator import NAMESPACE
from qwen_mtp.custom_ops.rejection_ladder import (
    CHUNK,
    DOUBLE,
    INT32,
    INT64,
    Pair,
    Slots,
    any_true,
    at_row,
    branch,
    greedy_part,
    plain_part,
    sorted_part,
)

GREEDY_BELOW = 1e-5
INPUTS = (
    "logits",
    "draft_ids",
    "num_drafts",
    "accept_uniforms",
    "pick_uniforms",
    "temperature",
    "top_k",
    "top_p",
    "banned_rows",
    "stop_ids",
)
_SHAPES = ("BRV", "BK", "B", "BK", "BR", "B", "B", "B", "B", "BS", "BKV")
_INTEGERS = frozenset({"draft_ids", "num_drafts", "top_k", "banned_rows", "stop_ids"})
_OPSET = 24
_Part = Callable[[Slots, Any], Pair]


def rejection_sample(op: Any, *inputs: Any) -> Pair:
    """Add one ``qwen_mtp::RejectionSample`` node.

    Args:
        op: The ``OpBuilder`` of the graph.
        *inputs: The ten graph values of ``INPUTS``.

    Returns:
        Tokens ``[B, R]`` int32 and accepted count ``[B]`` int32.
    """
    return _call(op, "RejectionSample", INPUTS, inputs)


def rejection_sample_laws(op: Any, *inputs: Any) -> Pair:
    """Add one ``qwen_mtp::RejectionSampleLaws`` node.

    Args:
        op: The ``OpBuilder`` of the graph.
        *inputs: The ten graph values of ``INPUTS``, then ``draft_probs`` ``[B, K, V]``.

    Returns:
        Tokens ``[B, R]`` int32 and accepted count ``[B]`` int32.
    """
    return _call(op, "RejectionSampleLaws", (*INPUTS, "draft_probs"), inputs)


def rejection_sample_native(op: Any, *inputs: Any) -> Pair:
    """Add one ``RejectionSample`` node, to be run by the kernel of that name.

    Args:
        op: The ``OpBuilder`` of the graph.
        *inputs: The ten graph values of ``INPUTS``.

    Returns:
        Tokens ``[B, R]`` int32 and accepted count ``[B]`` int32.
    """
    tokens, accepted = op.RejectionSample(*inputs, _domain=NAMESPACE, _outputs=2)
    return tokens, accepted


def _call(op: Any, name: str, names: Sequence[str], inputs: Sequence[Any]) -> Pair:
    function = op.functions.get((NAMESPACE, name, "")) or _function(name, names)
    op.builder.root.graph.opset_imports.setdefault(NAMESPACE, 1)
    tokens, accepted = op.call(function, *inputs, _outputs=2)
    tokens.type, accepted.type = inputs[1].type, inputs[2].type
    shape = inputs[0].shape
    tokens.shape = None if shape is None else type(shape)(shape[:2])
    accepted.shape = inputs[2].shape
    return tokens, accepted


def _function(name: str, names: Sequence[str]) -> Any:
    import onnx_ir as ir
    import onnxscript

    values = [
        ir.Value(
            name=field,
            type=ir.TensorType(ir.DataType.INT32 if field in _INTEGERS else ir.DataType.FLOAT),
            shape=ir.Shape(list(shape)),
        )
        for field, shape in zip(names, _SHAPES, strict=False)
    ]
    return onnxscript.build_function(
        _body, values, domain=NAMESPACE, name=name, opset_imports={"": _OPSET}
    )


def _body(op: Any, *inputs: Any) -> Pair:
    temperature, top_k, top_p = inputs[5:8]
    greedy = op.Less(temperature, GREEDY_BELOW)
    asks = op.Or(op.Greater(top_k, 0), op.Less(top_p, 1.0))
    sorts = op.And(op.Not(greedy), asks)
    plain = op.Not(op.Or(greedy, asks))
    s = _shared(op, greedy, sorts, inputs)
    nothing = op.Mul(op.Cast(top_k, to=INT64), 0)
    token = accepted = nothing
    parts: Sequence[tuple[str, Any, _Part]] = (
        ("greedy", greedy, greedy_part),
        ("sorted", sorts, sorted_part),
        ("plain", plain, plain_part),
    )
    for name, mine, part in parts:
        here = branch(
            op,
            name,
            any_true(op, mine),
            partial(part, s),
            lambda o: (o.Identity(nothing), o.Identity(nothing)),
        )
        token, accepted = op.Where(mine, here[0], token), op.Where(mine, here[1], accepted)
    token = op.Where(at_row(op, s.has_law, accepted), token, -1)
    return _emitted(op, s, token, accepted), op.Cast(accepted, to=INT32)


def _emitted(op: Any, s: Slots, token: Any, accepted: Any) -> Any:
    row = op.Range(0, op.Squeeze(op.Shape(s.drafts, start=1)), 1)
    end = op.Unsqueeze(accepted, [1])
    after = op.Where(op.Equal(row, end), op.Unsqueeze(token, [1]), -1)
    return op.Cast(op.Where(op.Less(row, end), s.drafts, after), to=INT32)


def _shared(op: Any, greedy: Any, sorts: Any, inputs: Sequence[Any]) -> Slots:
    raw, draft_ids, num_drafts, accept, picks, temperature, top_k, top_p = inputs[:8]
    size = op.Shape(raw, start=2)
    row = op.Range(0, op.Squeeze(op.Shape(raw, start=1, end=2)), 1)
    column = op.Concat(op.Shape(raw, end=1), [1], axis=0)
    count = op.Max(op.Unsqueeze(op.Cast(num_drafts, to=INT64), [1]), 0)
    ids = op.Concat(op.Cast(draft_ids, to=INT64), op.Expand(-1, column), axis=1)
    valid = op.And(_inside(op, ids, size), op.Less(row, count))
    logits = _ban(op, raw, row, size, *inputs[8:10])
    chunk, chunks = _chunked(op, logits, size)
    chunk_max = op.ReduceMax(chunks, [3], keepdims=0)
    row_max = op.ReduceMax(chunk_max, [2], keepdims=0)
    return Slots(
        logits=logits,
        size=size,
        chunk=chunk,
        chunks=chunks,
        chunk_max=chunk_max,
        row_max=row_max,
        has_law=_has_law(op, logits, row_max),
        ignored=op.Greater(row, count),
        drafts=op.Where(valid, ids, -1),
        accept_uniforms=_below_one(op, op.Concat(accept, op.Expand(0.0, column), axis=1)),
        pick_uniforms=_below_one(op, picks),
        temperature=op.Unsqueeze(op.Where(greedy, 1.0, temperature), [1]),
        top_k=op.Unsqueeze(op.Cast(top_k, to=INT64), [1]),
        top_p=op.Unsqueeze(op.Cast(top_p, to=DOUBLE), [1]),
        sorts=op.Unsqueeze(sorts, [1]),
        draft_probs=inputs[10] if len(inputs) > 10 else None,
    )


def _below_one(op: Any, uniforms: Any) -> Any:
    # Short of 1, a point lies below the total and the draw on a token of positive weight.
    return op.Min(op.Cast(uniforms, to=DOUBLE), 1 - 2**-53)


def _inside(op: Any, ids: Any, size: Any) -> Any:
    return op.And(op.GreaterOrEqual(ids, 0), op.Less(ids, size))


def _ban(op: Any, logits: Any, row: Any, size: Any, banned_rows: Any, stop_ids: Any) -> Any:
    ids = op.Unsqueeze(op.Cast(stop_ids, to=INT64), [1])
    real = _inside(op, ids, size)
    early = op.Less(row, op.Unsqueeze(op.Cast(banned_rows, to=INT64), [1]))
    # Adding lets an absent id write 0 to token 0 without undoing a ban of token 0.
    banned = op.Constant(value_float=float("-inf"))
    change = op.Where(op.And(real, op.Unsqueeze(early, [2])), banned, 0.0)
    ids = op.Expand(op.Where(real, ids, 0), op.Shape(change))
    return op.ScatterElements(logits, ids, change, axis=2, reduction="add")


def _chunked(op: Any, logits: Any, size: Any) -> Pair:
    """The largest power of two up to ``CHUNK`` that divides the vocabulary, and the logits so."""
    powers = op.Constant(value_ints=[1 << i for i in range(CHUNK.bit_length())])
    divides = op.Equal(op.Mod(size, powers), 0)
    chunk = op.ReduceMax(op.Where(divides, powers, 1), keepdims=1)
    shape = op.Concat(op.Shape(logits, end=2), op.Div(size, chunk), chunk, axis=0)
    return chunk, op.Reshape(logits, shape)


def _has_law(op: Any, logits: Any, row_max: Any) -> Any:
    # A NaN always reaches the sum, while a maximum may step over it.
    broken = op.IsNaN(op.ReduceSum(logits, [2], keepdims=0))
    return op.Not(op.Or(broken, op.Or(op.IsInf(row_max), op.IsNaN(row_max))))
