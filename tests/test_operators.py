"""Every operator in its three forms (NumPy, torch, compiled) against torch and transformers."""

import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import onnxscript
import pytest
import torch
from torch.nn import functional
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as reference

from qwen_mtp.custom_ops import attention, causal_conv, delta_rule, linear, norm, rotary, rows
from qwen_mtp.custom_ops.operator import Operator
from qwen_mtp.custom_ops.torch_library import OPERATORS, ops
from tests.checkpoints import tiny_config

Array = np.ndarray
Run = Callable[..., list[Array]]
NAN = np.float32(np.nan)
BLOCK_SIZE = 4


def _typed(value: Any) -> Any:
    return ir.TensorType(ir.DataType.from_numpy(value.dtype))


def compiled(operator: Operator, *example: Any, stored: tuple[int, ...] = ()) -> Run:
    """The ONNX form in a session of its own; block tables may change their width.

    Args:
        operator: The operator.
        *example: Arguments of its meaning: arrays give shapes and types, the rest attributes.
        stored: Positions of arrays that are weights in an external file, as in a package.
    """
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 24, "com.microsoft": 1}, name="main")
    gb = onnxscript.GraphBuilder(graph)
    names = re.findall(r"(\w+)(?=[,)])", operator.schema.split("->")[0])
    values, live = [], []
    with TemporaryDirectory() as folder:
        for i, (name, arg) in enumerate(zip(names, example, strict=True)):
            if not isinstance(arg, Array):
                values.append(arg)
            elif i in stored:
                place = Path(folder, f"{name}.bin")
                place.write_bytes(arg.tobytes())
                kind, shape = ir.DataType.from_numpy(arg.dtype), ir.Shape(arg.shape)
                data = ir.ExternalTensor(
                    place.name, 0, arg.nbytes, kind, shape=shape, name=name, base_dir=folder
                )
                values.append(gb.initializer(data, name))
            else:
                shape = (arg.shape[0], "blocks") if name == "table" else arg.shape
                values.append(gb.input(name, ir.DataType.from_numpy(arg.dtype), list(shape)))
                live.append(i)
        _add_outputs(gb, operator, values, example)
        ir.save(ir.Model(graph, ir_version=11), Path(folder, "model.onnx"))
        options = ort.SessionOptions()
        options.intra_op_num_threads = 2
        session = ort.InferenceSession(
            str(Path(folder, "model.onnx")), options, ["CPUExecutionProvider"]
        )

    def run(*args: Any) -> list[Array]:
        feeds = {x.name: args[i] for x, i in zip(session.get_inputs(), live, strict=True)}
        return session.run(None, feeds)  # type: ignore[no-any-return]

    return run


def _add_outputs(gb: Any, operator: Operator, values: list[Any], example: Any) -> None:
    outputs = operator.onnx(gb.op, *values)
    shapes = _shapes(operator, example)
    for i, (value, shape) in enumerate(zip(_tuple(outputs), shapes, strict=True)):
        value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
        value.shape = ir.Shape(shape)
        gb.add_output(value, f"out{i}")


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _tensor(arg: Any) -> Any:
    return torch.from_numpy(arg.copy()) if isinstance(arg, Array) else arg


def _shapes(operator: Operator, args: Any) -> list[tuple[int, ...]]:
    """The shapes that the fake kernel promises."""
    fakes = [_tensor(a).to("meta") if isinstance(a, Array) else a for a in args]
    return [tuple(t.shape) for t in _tuple(operator.fake(*fakes))]


def same_bits(found: Any, expected: Any) -> None:
    for a, b in zip(_tuple(found), _tuple(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def close(found: Any, expected: Any, tolerance: float = 2e-6) -> None:
    """Equal up to ``tolerance`` of the largest expected magnitude."""
    for a, b in zip(_tuple(found), _tuple(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def ints(*values: Any) -> Array:
    return np.array(values, np.int32)


def delta_inputs(
    rng: np.random.Generator, batch: int, count: int, ratio: int = 2, dim: int = 16
) -> list[Array]:
    """q, k, v, g, beta and state with two key heads and ``2 * ratio`` value heads."""
    q, k = (normal(rng, batch, count, 2, dim) for _ in range(2))
    q, k = (x / np.sqrt(np.square(x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    heads = 2 * ratio
    v, g = normal(rng, batch, count, heads, 8), -np.abs(normal(rng, batch, count, heads))
    beta = rng.random((batch, count, heads), dtype=np.float32)
    return [q, k, v, g, beta, normal(rng, batch, heads, dim, 8)]


def attention_inputs(rng: np.random.Generator, rows: int = 3, heads: int = 4) -> list[Any]:
    """q, pools, table, start, count and block size of two slots; 0 is an unassigned block."""
    pools = [normal(rng, 2, 12 * BLOCK_SIZE, 16) for _ in range(2)]
    for pool in pools:
        pool[:, attention.ZERO_SLOT] = 0
    table = ints([3, 7, 1, 9, 0], [5, 2, 11, 0, 0])
    start, count = ints(11, 2), ints(rows, rows)
    return [normal(rng, 2, rows, heads, 16), *pools, table, start, count, BLOCK_SIZE]


def write_inputs(rng: np.random.Generator, rows: int = 3) -> list[Any]:
    """k, v and what :func:`attention_inputs` gives after the query."""
    new = [normal(rng, 2, rows, 2, 16) for _ in range(2)]
    return [*new, *attention_inputs(rng, rows)[1:]]


def _quantised(quantise: Callable[[Array], Any], weight: Array) -> list[Array]:
    return [np.ascontiguousarray(x) for x in quantise(weight)]


Case = tuple[list[Any], tuple[int, ...], float]


def cases(rng: np.random.Generator) -> dict[str, Case]:
    """Arguments of every operator, which are stored, and the tolerance (0: the same bits)."""
    x, weight, ids = normal(rng, 6, 64), normal(rng, 48, 64), ints(7, 0, -1, 47, 7)
    int8, int4 = (_quantised(q, weight) for q in (linear.quantize_int8, linear.quantize_int4))
    u, taps, window = normal(rng, 2, 5, 12), normal(rng, 12, 1, 4), normal(rng, 2, 3, 12)
    cos, sin = rotary.rotary_table(ints(5, 900), 3, 8, 1e7)
    return {
        "rms_norm": ([normal(rng, 3, 5, 32), normal(rng, 32), 1e-6], (1,), 2e-6),
        "rotary_table": ([ints(0, 100_000), 4, 16, 1e7], (), 2e-6),
        "rotary_embedding": ([normal(rng, 2, 3, 4, 32), cos, sin], (), 2e-6),
        "causal_conv": ([u, taps, window], (1,), 2e-6),
        "conv_window": ([window, u, ints(4, 0)], (), 0),
        "gated_delta_rule": ([*delta_inputs(rng, 3, 4), ints(2, 0, 4)], (), 2e-6),
        "kv_write": (write_inputs(rng), (), 0),
        "paged_attention": (attention_inputs(rng), (), 2e-6),
        "linear": ([x, weight], (1,), 2e-6),
        "linear_int8": ([x, *int8], (1, 2), 2e-6),
        "linear_int4": ([x, *int4], (1, 2), 2e-6),
        "embedding": ([ids, weight], (1,), 0),
        "embedding_int8": ([ids, *int8], (1, 2), 0),
        "embedding_int4": ([ids, *int4], (1, 2), 0),
        "take_row": ([normal(rng, 3, 4, 8), ints(2, -1, 0)], (), 0),
        "pad_rows": ([normal(rng, 2, 3, 8), 5, 0], (), 0),
    }


BY_NAME = {operator.name: operator for operator in OPERATORS}
NAMES = sorted(name for name in BY_NAME if not name.startswith("rejection"))


def test_every_operator_but_the_sampler_has_a_case() -> None:
    assert sorted(cases(np.random.default_rng(0))) == NAMES


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NAMES)
def test_the_compiled_form_computes_the_meaning(name: str, seed: int) -> None:
    args, stored, tolerance = cases(np.random.default_rng(seed))[name]
    found = compiled(BY_NAME[name], *args, stored=stored)(*args)
    expected = BY_NAME[name].meaning(*args)
    if tolerance == 0:
        same_bits(found, expected)
    else:
        close(found, expected, tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_the_torch_operator_is_the_meaning_and_its_fake_kernel_tells_the_shapes(name: str) -> None:
    args = cases(np.random.default_rng(1))[name][0]
    op, tensors = getattr(ops, name), [_tensor(a) for a in args]
    same_bits(
        tuple(t.numpy() for t in _tuple(op(*tensors))),
        tuple(np.asarray(x) for x in _tuple(BY_NAME[name].meaning(*args))),
    )
    kinds = ("test_schema", "test_faketensor")
    torch.library.opcheck(op.default, tuple(tensors), test_utils=kinds)


def test_rms_norm_is_that_of_torch_and_with_one_added_that_of_transformers() -> None:
    rng = np.random.default_rng(2)
    x, weight = normal(rng, 3, 5, 64) * 4, normal(rng, 64)
    torch_norm = functional.rms_norm(_tensor(x), (64,), _tensor(weight), 1e-6)
    close(norm.rms_norm(x, weight, 1e-6), torch_norm)
    module = reference.Qwen3_5RMSNorm(64, eps=1e-6)
    module.weight.data = _tensor(weight)
    close(norm.rms_norm(x, weight + 1, 1e-6), module(_tensor(x)).detach())


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0])
def test_rotary_is_the_multi_axis_embedding_of_transformers_on_text(factor: float) -> None:
    rng, dim = np.random.default_rng(3), int(32 * factor)
    config = Qwen3_5TextConfig(**tiny_config(partial_rotary_factor=factor)["text_config"])
    q, k = normal(rng, 2, 6, 4, 32), normal(rng, 2, 6, 2, 32)
    start = ints(0, 1000)
    positions = _tensor(start[:, None] + np.arange(6))
    tables = reference.Qwen3_5TextRotaryEmbedding(config)(_tensor(q), positions[None])
    expected = reference.apply_rotary_pos_emb(_tensor(q), _tensor(k), *tables, unsqueeze_dim=2)
    cos, sin = rotary.rotary_table(start, 6, dim, 1e7)
    # Frequencies may differ in the last bit, which position 1000 makes a thousand times larger.
    for table, wanted in zip((cos, sin), tables, strict=True):
        close(table, wanted[..., : dim // 2], 1e-4)
        close(table[:1], wanted[:1, :, : dim // 2])
    for x, turned in zip((q, k), expected, strict=True):
        close(rotary.rotary_embedding(x, cos, sin), turned, 1e-4)


@pytest.mark.parametrize("taps", [2, 4])
def test_causal_conv_is_conv1d_over_the_window_and_the_rows(taps: int) -> None:
    rng = np.random.default_rng(4)
    u, weight, window = (
        normal(rng, 2, 7, 12),
        normal(rng, 12, 1, taps),
        normal(rng, 2, taps - 1, 12),
    )
    line = _tensor(np.concatenate([window, u], axis=1)).transpose(1, 2)
    expected = functional.silu(functional.conv1d(line, _tensor(weight), groups=12))
    close(causal_conv.causal_conv(u, weight, window), expected.transpose(1, 2))


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
def test_the_delta_rule_is_the_recurrence_of_transformers(ratio: int) -> None:
    args = delta_inputs(np.random.default_rng(ratio), 2, 9, ratio)
    tensors = [_tensor(a) for a in args]
    expected = reference.torch_recurrent_gated_delta_rule(
        *tensors[:5], initial_state=tensors[5], output_final_state=True
    )
    close(delta_rule.gated_delta_rule(*args), expected)
    run = compiled(delta_rule.GATED_DELTA_RULE, *args, None)
    close(run(*args, None), expected)


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [2, 4, 7])
def test_rows_from_count_on_leave_the_state_with_the_bits_of_single_steps(
    ratio: int, length: int
) -> None:
    args = delta_inputs(np.random.default_rng(5), length + 1, length, ratio)
    count = np.arange(length + 1, dtype=np.int32)  # slot b keeps b rows
    args[:5] = [poison_rows(a, count) for a in args[:5]]
    single = [a[:1, :1] for a in args[:5]] + [args[5][:1]]
    whole = compiled(delta_rule.GATED_DELTA_RULE, *args, count)
    step = compiled(delta_rule.GATED_DELTA_RULE, *single, None)
    forms: tuple[tuple[Run, Run], ...] = (
        (lambda *a: list(delta_rule.gated_delta_rule(*a)),) * 2,  # type: ignore[assignment]
        (whole, step),
    )
    for all_rows, one_row in forms:
        out, states = all_rows(*args, count)
        for b in range(length + 1):
            state = args[5][b : b + 1]
            for t in range(b):
                row = [a[b : b + 1, t : t + 1] for a in args[:5]]
                o, state = one_row(*row, state, None)
                same_bits(out[b, t], o[0, 0])
            same_bits(states[b : b + 1], state)


def poison_rows(x: Array, count: Array) -> Array:
    """NaN in every row at or after ``count[b]``."""
    x = x.copy()
    for b, kept in enumerate(count):
        x[b, kept:] = NAN
    return x


@pytest.mark.parametrize("length", [1, 2, 4, 7])
def test_the_window_after_count_rows_is_that_of_single_steps_whatever_follows(length: int) -> None:
    rng, batch = np.random.default_rng(6), length + 1
    window, count = normal(rng, batch, 3, 8), np.arange(batch, dtype=np.int32)
    u = poison_rows(normal(rng, batch, length, 8), count)
    run = compiled(causal_conv.CONV_WINDOW, window, u, count)
    for found in (run(window, u, count)[0], causal_conv.conv_window(window, u, count)):
        for b in range(batch):
            line = np.concatenate([window[b], u[b, :b]])
            same_bits(found[b], line[-3:])


def _slot(table: Array, position: int) -> int:
    return int(table[position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE


def poison_pools(args: list[Any]) -> list[Any]:
    """NaN in every slot that no live position owns, except the zero slot."""
    args = list(args)
    table, start, count = args[3:6]
    ends = start + count
    live = {_slot(table[b], p) for b, end in enumerate(ends) for p in range(end)}
    stale = [s for s in range(args[1].shape[1]) if s not in live | {attention.ZERO_SLOT}]
    for i in (1, 2):
        args[i] = args[i].copy()
        args[i][:, stale] = NAN
    return args


@pytest.mark.parametrize("heads", [2, 4, 6])
def test_paged_attention_is_scaled_dot_product_attention_over_what_the_blocks_hold(
    heads: int,
) -> None:
    rng = np.random.default_rng(7)
    args = attention_inputs(rng, 3, heads)
    args[5] = ints(3, 2)  # the last row of slot 1 is padding
    args = poison_pools(args)
    args[0] = poison_rows(args[0], args[5])
    q, k_pool, v_pool, table, start, count, _ = args
    narrow = [*args[:3], np.ascontiguousarray(table[:, :4]), *args[4:]]
    run = compiled(attention.PAGED_ATTENTION, *args)
    with np.errstate(invalid="ignore"):
        meaning = attention.paged_attention(*args), attention.paged_attention(*narrow)
    for found in (run(*args)[0], run(*narrow)[0], *meaning):
        for b, kept in enumerate(count):
            end = start[b] + kept
            slots = [_slot(table[b], p) for p in range(end)]
            seen = torch.arange(end) <= torch.arange(start[b], end)[:, None]
            expected = functional.scaled_dot_product_attention(
                _tensor(q[b, :kept]).transpose(0, 1),
                *(_tensor(pool[:, slots]) for pool in (k_pool, v_pool)),
                attn_mask=seen,
                enable_gqa=True,
            )
            close(found[b, :kept], expected.transpose(0, 1))


@pytest.mark.parametrize(
    ("start", "count", "kept"),
    [
        ([11, 2], [3, 1], [3, 1]),
        ([14, 9], [3, 3], [2, 3]),  # slot 0 runs into a block that is not assigned
        ([18, 30], [3, 3], [0, 0]),  # beyond the assigned blocks, beyond the table
        ([0, 5], [0, 0], [0, 0]),  # idle slots
    ],
)
def test_rows_that_are_not_kept_change_the_trash_slot_alone(
    start: list[int], count: list[int], kept: list[int]
) -> None:
    args = write_inputs(np.random.default_rng(8))
    args[5], args[6] = ints(*start), ints(*count)
    args[:2] = [poison_rows(x, ints(*kept)) for x in args[:2]]
    expected = [pool.copy() for pool in args[2:4]]
    for pool, new in zip(expected, args[:2], strict=True):
        for b, rows_kept in enumerate(kept):
            for t in range(rows_kept):
                pool[:, _slot(args[4][b], start[b] + t)] = new[b, t]
    for found in (compiled(attention.KV_WRITE, *args)(*args), attention.kv_write(*args)):
        for pool, wanted in zip(found, expected, strict=True):
            keep = np.arange(pool.shape[1]) != attention.TRASH_SLOT
            same_bits(pool[:, keep], wanted[:, keep])


def test_an_index_of_minus_one_takes_row_zero() -> None:
    x = normal(np.random.default_rng(9), 3, 4, 8)
    same_bits(rows.take_row(x, ints(-1, 3, 0)), np.stack([x[0, 0], x[1, 3], x[2, 0]]))


def test_int8_and_int4_round_to_the_nearest_step_and_keep_zeros() -> None:
    weight = normal(np.random.default_rng(10), 24, 96)
    weight[3], weight[5, 32:64] = 0, 0
    values, scale = linear.quantize_int8(weight)
    error = np.abs(values.T.astype(np.float64) * scale[:, None] - weight)
    assert (error <= scale[:, None] * 0.5001).all()
    assert not values[:, 3].any()
    packed, scale = linear.quantize_int4(weight)
    back = linear.dequantize_int4(packed, scale)
    assert (np.abs(back - weight) <= np.repeat(scale, 32, axis=1) * 0.5001).all()
    assert not back[3].any()
    assert not back[5, 32:64].any()
    rows_, row_scale = linear.quantize_rows(weight)
    assert (np.abs((rows_ - 128.0) * row_scale - weight) <= row_scale * 0.5001).all()
    assert (rows_[3] == 128).all()


FORMATS: dict[str, Any] = {
    "linear": (linear.LINEAR, lambda w: [w], 1e-6),
    "linear_int8": (linear.LINEAR_INT8, linear.quantize_int8, 0.02),
    "linear_int4": (linear.LINEAR_INT4, linear.quantize_int4, 0.2),
}


@pytest.mark.parametrize("shape", [(48, 64), (384, 256), (1000, 1024)])
@pytest.mark.parametrize("name", FORMATS)
def test_a_row_of_a_product_has_the_same_bits_among_any_other_rows(
    name: str, shape: tuple[int, int]
) -> None:
    operator, quantise, loss = FORMATS[name]
    rng = np.random.default_rng(11)
    weight = normal(rng, *shape)
    stored = _quantised(quantise, weight)
    places = tuple(range(1, 1 + len(stored)))
    x = normal(rng, 16, shape[1])
    x[1] = 0
    alone = [compiled(operator, x[:1], *stored, stored=places)(x[i : i + 1])[0] for i in (0, 1, 2)]
    for m in (2, 4, 8, 16):
        run = compiled(operator, x[:m], *stored, stored=places)
        other = x[:m].copy()
        other[2:] *= 1000
        for i in range(2):
            same_bits(run(x[:m])[0][i], alone[i][0])
            same_bits(run(other)[0][i], alone[i][0])
        if m > 2:
            same_bits(run(x[:m])[0][2], alone[2][0])
    assert not alone[1].any()
    exact = x[0].astype(np.float64) @ weight.T.astype(np.float64)
    assert np.linalg.norm(alone[0][0] - exact) <= loss * np.linalg.norm(exact)


@pytest.mark.parametrize("group", [2, 4])
def test_a_row_of_attention_has_the_same_bits_among_more_rows_and_in_a_wider_table(
    group: int,
) -> None:
    rng, size, dim = np.random.default_rng(12), 16, 64
    pools = [normal(rng, 2, 40 * size, dim) for _ in range(2)]
    for pool in pools:
        pool[:, attention.ZERO_SLOT] = 0
    table = np.zeros((1, 16), np.int32)
    table[0, :8] = rng.permutation(np.arange(1, 40))[:8]
    q = normal(rng, 1, 8, 2 * group, dim)
    first = None
    for count in (1, 2, 4, 8):
        for width in (8, 16):
            args = [q[:, :count].copy(), *pools, table[:, :width].copy()]
            args += [ints(100), ints(count), size]
            run = compiled(attention.PAGED_ATTENTION, *args)
            found = run(*args)[0][0, 0]
            args[0][:, 1:] *= 50
            same_bits(run(*args)[0][0, 0], found)
            first = found if first is None else first
            same_bits(found, first)
