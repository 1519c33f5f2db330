"""Inference rules of the fused kernels of Ascend 910B and A3, with the limits they state.

Shapes and limits are those of the operators' documentation (the doc strings in the torch_npu
wheel and the README of each operator in CANN's ops-nn and ops-transformer repositories).
"""

from collections.abc import Sequence
from math import ceil

from qwen_mtp.ge.dtypes import FLOATS
from qwen_mtp.ge.values import Call, Rule, Value, axis_of, broadcast, require, same_dtype
from qwen_mtp.ge.view import Shape

HEADS = 256  # RecurrentGatedDeltaRule: N_k, N_v, D_k and D_v are at most this
_LAYOUTS = ("TND", "BSND")  # of those GE has, those the product writes
CAUSAL_MODES = (2, 3, 4)  # sparse_mode values for which the mask is the compressed 2048 x 2048


def _rank(value: Value, rank: int, name: str) -> Shape:
    require(len(value.shape) == rank, f"{name} is {value}, {rank} dimensions are needed")
    return value.shape


def _shaped(call: Call, name: str, shape: Shape, dtype: str = "") -> None:
    """Check an input that may have been left out."""
    value = call.get(name)
    if value is not None:
        require(value.shape == shape, f"{name} is {value}, its shape must be {list(shape)}")
        require(dtype in ("", value.dtype), f"{name} is {value.dtype}, {dtype} is needed")


def _rms_norm(call: Call) -> Sequence[Value]:
    x, gamma = call["x"], call["gamma"]
    _epsilon(call)
    return _normed(x, gamma)


def _add_rms_norm(call: Call) -> Sequence[Value]:
    x1, x2, gamma = call["x1"], call["x2"], call["gamma"]
    _epsilon(call)
    require(x1.shape == x2.shape, f"{x1} and {x2} differ")
    summed = Value(same_dtype(x1, x2), x1.shape)
    return (*_normed(summed, gamma), summed)


def _epsilon(call: Call) -> None:
    epsilon = call.float_attr("epsilon", 1e-6)
    require(0 < epsilon < 1e-2, f"epsilon is {epsilon:g}")


def _normed(x: Value, gamma: Value) -> tuple[Value, Value]:
    same_dtype(x, gamma)
    depth = len(gamma.shape)
    require(x.shape[-depth:] == gamma.shape, f"gamma {gamma} does not fit x {x}")
    rstd = x.shape[:-depth] + (1,) * depth
    return Value(x.dtype, x.shape), Value("DT_FLOAT", rstd)


def _swiglu(call: Call) -> Sequence[Value]:
    x = call["x"]
    require(x.dtype in FLOATS, f"x is {x.dtype}, a float is needed")
    axis = axis_of(call.int_attr("dim", -1), len(x.shape), "dim")
    require(x.shape[axis] % 2 == 0, f"{x} has no two halves along {axis}")
    return (Value(x.dtype, (*x.shape[:axis], x.shape[axis] // 2, *x.shape[axis + 1 :])),)


def _rotary(call: Call) -> Sequence[Value]:
    x = call["x"]
    cos, sin = (call["r1"], call["r2"]) if call.get("r1") else (call["cos"], call["sin"])
    _rank(x, 4, "x")
    require(cos.shape == sin.shape, f"{cos} and {sin} differ")
    require(x.shape[-1] % 2 == 0 and x.shape[-1] < 896, f"the last dimension of {x} is no head")
    require(broadcast(x.shape, cos.shape) == x.shape, f"{cos} does not fit {x}")
    return (Value(same_dtype(x, cos, sin), x.shape),)


def _dynamic_quant(call: Call) -> Sequence[Value]:
    x = call["x"]
    require(len(x.shape) > 1, f"x is {x}, more than one dimension is needed")
    _shaped(call, "smooth_scales", x.shape[-1:])
    return Value(call.dtype_attr("dst_type", "DT_INT8"), x.shape), Value("DT_FLOAT", x.shape[:-1])


def _matrices(call: Call, x: Value, weight: Value, turns: tuple[bool, bool]) -> Shape:
    rows, inner = x.shape[-2:][::-1] if turns[0] else x.shape[-2:]
    other, columns = weight.shape[-2:][::-1] if turns[1] else weight.shape[-2:]
    require(inner == other, f"{x} by {weight}: inner dimensions {inner} and {other} differ")
    return (*x.shape[:-2], rows, columns)


def _quant_matmul(call: Call) -> Sequence[Value]:
    x1, x2 = call["x1"], call["x2"]
    same_dtype(x1, x2)
    shape = _matrices(call, x1, x2, (call.flag("transpose_x1"), call.flag("transpose_x2")))
    columns = shape[-1]
    require(call["scale"].shape in ((1,), (columns,)), f"scale is {call['scale']}")
    _shaped(call, "pertoken_scale", shape[-2:-1], "DT_FLOAT")
    dtype = call.dtype_attr("dtype")
    if dtype == "DT_BF16":
        wanted = ("DT_FLOAT", "DT_BF16")
        require(call["scale"].dtype in wanted, f"scale is {call['scale'].dtype} for bf16 out")
    return (Value(dtype, shape),)


def _weight_quant_matmul(call: Call) -> Sequence[Value]:
    x, scale, turned = call["x"], call["antiquant_scale"], call.flag("transpose_weight")
    weight = _unpacked(call["weight"])
    shape = _matrices(call, x, weight, (call.flag("transpose_x"), turned))
    inner = weight.shape[-1] if turned else weight.shape[-2]
    same_dtype(x, scale)
    _shaped(call, "antiquant_offset", scale.shape, scale.dtype)
    _groups(call.int_attr("antiquant_group_size", 0), inner, shape[-1], scale, turned)
    return (Value("DT_INT8" if call.get("quant_scale") else x.dtype, shape),)


def _unpacked(weight: Value) -> Value:
    """An int32 carries eight int4 that are neighbours in the last dimension."""
    if weight.dtype != "DT_INT32":
        return weight
    return Value("DT_INT4", (*weight.shape[:-1], 8 * weight.shape[-1]))


def _groups(group: int, inner: int, columns: int, scale: Value, turned: bool) -> None:
    if group == 0:
        allowed: tuple[Shape, ...] = ((1,), (1, 1), (columns,), (1, columns))
        allowed += ((columns, 1),) if turned else ()
    else:
        require(32 <= group < inner and group % 32 == 0, f"group size {group} of {inner} rows")
        shape = (ceil(inner / group), columns)
        allowed = (shape[::-1],) if turned else (shape,)
    require(scale.shape in allowed, f"antiquant_scale is {scale}, not one of {allowed}")


def _trans_quant(call: Call) -> Sequence[Value]:
    return (Value("DT_UINT64", call["scale"].shape),)


def _scatter_pa(call: Call) -> Sequence[Value]:
    key, value = call["key"], call["value"]
    pools = [call["key_cache"], call["value_cache"]]
    require(call.text("cache_mode", "Norm") == "Norm", "cache_mode is not Norm, no rule reads it")
    rows = _rank(key, 3, "key")[0]
    require(value.shape[:2] == key.shape[:2], f"key {key} and value {value} differ")
    for new, pool in zip((key, value), pools, strict=True):
        same_dtype(new, pool)
        require(_rank(pool, 4, "cache")[2:] == new.shape[1:], f"{new} does not fit pool {pool}")
    require(pools[0].shape[:2] == pools[1].shape[:2], f"pools {pools[0]} and {pools[1]} differ")
    require(call["slot_mapping"].shape == (rows,), f"slot_mapping is {call['slot_mapping']}")
    return [Value(pool.dtype, pool.shape) for pool in pools]


def _delta_rule(call: Call) -> Sequence[Value]:
    query, value, state = call["query"], call["value"], call["state"]
    rows, key_heads, key_dim = _rank(query, 3, "query")
    _, heads, value_dim = _rank(value, 3, "value")
    same_dtype(query, call["key"], value, call["beta"])
    _shaped(call, "key", query.shape)
    _shaped(call, "value", (rows, heads, value_dim))
    _shaped(call, "beta", (rows, heads))
    _shaped(call, "g", (rows, heads), "DT_FLOAT")
    _shaped(call, "ssm_state_indices", (rows,), "DT_INT32")
    batch = _rank(call["actual_seq_lengths"], 1, "actual_seq_lengths")
    _shaped(call, "num_accepted_tokens", batch, "DT_INT32")
    wanted = (heads, value_dim, key_dim)
    require(_rank(state, 4, "state")[1:] == wanted, f"state is {state}, slots are {list(wanted)}")
    require(max(heads, key_heads, value_dim, key_dim) <= HEADS, f"a dimension exceeds {HEADS}")
    require(heads % key_heads == 0, f"{key_heads} key heads do not divide {heads}")
    require(call.get("gk") is None, "gk is given, the kernel does not read it")
    return Value(value.dtype, value.shape), Value(state.dtype, state.shape)


def _causal_conv(call: Call) -> Sequence[Value]:
    x, weight, states = call["x"], call["weight"], call["conv_states"]
    width, channels = _rank(weight, 2, "weight")
    same_dtype(x, weight, states)
    require(x.shape[-1] == channels == _rank(states, 3, "conv_states")[2], f"{x} by {weight}")
    require(states.shape[1] >= width - 1, f"{states} holds fewer than {width - 1} rows")
    require(call.int_attr("residual_connection", 1) == 0, "residual_connection adds x to y")
    batch = _rank(call["cache_indices"], 1, "cache_indices")[0]
    _shaped(call, "query_start_loc", (batch + 1,), "DT_INT32")
    _shaped(call, "num_accepted_tokens", (batch,), "DT_INT32")
    return Value(states.dtype, states.shape), Value(x.dtype, x.shape)


def _attention(call: Call) -> Sequence[Value]:
    query, key, value = call["query"], call["key0"], call["value0"]
    same_dtype(query, key, value)
    layout = call.text("input_layout", "BSH")
    require(layout in _LAYOUTS, f"input_layout is {layout}, no rule reads it")
    *rows, heads, dim = _rank(query, len(layout), "query")
    require(heads == call.int_attr("num_heads"), f"num_heads does not fit {query}")
    kv_heads = call.int_attr("num_key_value_heads", 0) or heads
    require(heads % kv_heads == 0, f"{kv_heads} key heads do not divide {heads}")
    value_dim = _pool(call, key, value, kv_heads, dim)
    _masked(call)
    _sequences(call, query.shape[:1] if layout == "BSND" else None)
    require(call.float_attr("scale", 1.0) > 0, "scale is not positive")
    lse = (*rows, heads, 1) if call.flag("softmax_lse_flag") else (0,)
    return Value(query.dtype, (*rows, heads, value_dim)), Value("DT_FLOAT", lse)


def _sequences(call: Call, batch: Shape | None) -> None:
    """Lengths and block tables are there for every sequence."""
    lengths = _rank(call["actual_seq_lengths_kv"], 1, "actual_seq_lengths_kv")
    _shaped(call, "actual_seq_lengths", lengths, "DT_INT64")
    table = _rank(call["block_table"], 2, "block_table")
    require(table[:1] == lengths, f"block_table {list(table)} for {list(lengths)} sequences")
    require(batch in (None, lengths), f"{lengths[0]} lengths for a batch of {batch}")
    ragged = batch is None and call.get("actual_seq_lengths") is None
    require(not ragged, "input actual_seq_lengths is missing, TND rows have no other owner")


def _pool(call: Call, key: Value, value: Value, kv_heads: int, dim: int) -> int:
    """Check the paged pools ``[blocks, block, kv_heads * dim]``; the head size of the values."""
    _, block, width = _rank(key, 3, "key")
    require(value.shape[:2] == key.shape[:2], f"key {key} and value {value} differ")
    require(width == kv_heads * dim, f"key {key} does not hold {kv_heads} heads of {dim}")
    require(block == call.int_attr("block_size", 0), f"block_size does not fit {key}")
    require(block % 16 == 0, f"block_size {block} is no multiple of 16")
    require(value.shape[2] % kv_heads == 0, f"value {value} does not hold {kv_heads} heads")
    return value.shape[2] // kv_heads


def _masked(call: Call) -> None:
    mode, mask = call.int_attr("sparse_mode", 0), call.get("atten_mask")
    require(0 <= mode <= 4, f"sparse_mode is {mode}")
    if mode in CAUSAL_MODES:
        fits = mask is not None and mask.shape[-2:] == (2048, 2048)
        require(fits, f"sparse_mode {mode} needs a mask of 2048 x 2048, found {mask}")


RULES: dict[str, Rule] = {
    "RmsNorm": _rms_norm,
    "AddRmsNorm": _add_rms_norm,
    "SwiGlu": _swiglu,
    "RotaryMul": _rotary,
    "RotaryPositionEmbedding": _rotary,
    "DynamicQuant": _dynamic_quant,
    "QuantBatchMatmulV3": _quant_matmul,
    "WeightQuantBatchMatmulV2": _weight_quant_matmul,
    "TransQuantParamV2": _trans_quant,
    "ScatterPaKvCache": _scatter_pa,
    "RecurrentGatedDeltaRule": _delta_rule,
    "FusedCausalConv1d": _causal_conv,
    "FusedInferAttentionScore": _attention,
}
