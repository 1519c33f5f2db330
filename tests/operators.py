"""Single operators: random arguments, compiled form, comparison by bits or by size."""

import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import onnxscript
import torch

from qwen_mtp.custom_ops import attention, linear, rotary
from qwen_mtp.custom_ops.operator import Operator

Array = np.ndarray
Run = Callable[..., list[Array]]
BLOCK_SIZE = 4


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
    with TemporaryDirectory() as folder:
        values = [
            _value(gb, name, arg, Path(folder) if i in stored else None)
            for i, (name, arg) in enumerate(zip(names, example, strict=True))
        ]
        _add_outputs(gb, operator, values, example)
        path = Path(folder, "model.onnx")
        ir.save(ir.Model(graph, ir_version=11), path)
        options = ort.SessionOptions()
        options.intra_op_num_threads = 2
        session = ort.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    live = [names.index(x.name) for x in session.get_inputs()]

    def run(*args: Any) -> list[Array]:
        feeds = {x.name: args[i] for x, i in zip(session.get_inputs(), live, strict=True)}
        return session.run(None, feeds)  # type: ignore[no-any-return]

    return run


def _value(gb: Any, name: str, arg: Any, folder: Path | None) -> Any:
    """A graph input, or a weight in a file of ``folder``; what is no array stays as it is."""
    if not isinstance(arg, Array):
        return arg
    kind = ir.DataType.from_numpy(arg.dtype)
    if folder is None:
        return gb.input(name, kind, [len(arg), "blocks"] if name == "table" else list(arg.shape))
    Path(folder, name).write_bytes(arg.tobytes())

    def stored(name: str, shape: tuple[int, ...], file: str) -> Any:
        data = ir.ExternalTensor(
            file, 0, arg.nbytes, kind, shape=ir.Shape(shape), name=name, base_dir=folder
        )
        return gb.initializer(data, name)

    if arg.dtype == np.uint8:  # int4 blocks, that packages also show as a table of rows
        stored(f"{name}.{linear.FLAT}", (len(arg), arg[0].size), name)
    return stored(name, arg.shape, name)


def _add_outputs(gb: Any, operator: Operator, values: list[Any], example: Any) -> None:
    outputs = operator.onnx(gb.op, *values)
    shapes = promised_shapes(operator, example)
    for i, (value, shape) in enumerate(zip(each(outputs), shapes, strict=True)):
        value = gb.op.Identity(value)  # a form may answer with its input
        value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
        value.shape = ir.Shape(shape)
        gb.add_output(value, f"out{i}")


def each(value: Any) -> tuple[Any, ...]:
    """One result or several, as a tuple."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def tensor(arg: Any) -> Any:
    """A copy of an array as a tensor; anything else as it is."""
    return torch.from_numpy(arg.copy()) if isinstance(arg, Array) else arg


def promised_shapes(operator: Operator, args: Any) -> list[tuple[int, ...]]:
    """The shapes that the fake kernel promises."""
    fakes = [tensor(a).to("meta") if isinstance(a, Array) else a for a in args]
    return [tuple(t.shape) for t in each(operator.fake(*fakes))]


def same_bits(found: Any, expected: Any) -> None:
    """Equal types, shapes and bytes, the sign of zero and the kind of NaN included."""
    for a, b in zip(each(found), each(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def close(found: Any, expected: Any, tolerance: float = 2e-6) -> None:
    """Equal up to ``tolerance`` of the largest expected magnitude."""
    for a, b in zip(each(found), each(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())


def normal(rng: np.random.Generator, *shape: int) -> Array:
    """Standard normal float32."""
    return rng.standard_normal(shape).astype(np.float32)


def ints(*values: Any) -> Array:
    """An int32 array."""
    return np.array(values, np.int32)


def delta_inputs(
    rng: np.random.Generator, batch: int, count: int, ratio: int = 2, dim: int = 16
) -> list[Array]:
    """q, k, v, g, beta and state with two key heads and ``2 * ratio`` value heads."""
    q, k = (normal(rng, batch, count, 2, dim) for _ in range(2))
    q, k = (x / np.sqrt(np.square(x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    heads = 2 * ratio
    v, g = normal(rng, batch, count, heads, dim // 2), -np.abs(normal(rng, batch, count, heads))
    beta = rng.random((batch, count, heads), dtype=np.float32)
    return [q, k, v, g, beta, normal(rng, batch, heads, dim, dim // 2)]


def slot_inputs(rng: np.random.Generator, accepted: Array, rows: int = 4) -> list[Array]:
    """Like :func:`delta_inputs`, with a state ``[Dv, Dk]`` behind every row of the last round."""
    args = delta_inputs(rng, len(accepted), rows)
    states = normal(rng, len(accepted) * rows, 4, 8, 16)
    return [*args[:5], states, accepted]


def attention_inputs(
    rng: np.random.Generator, rows: int = 3, heads: int = 4, dim: int = 16
) -> list[Any]:
    """q, pools, table, start, count, no extra rows, block size; two slots, block 0 is none."""
    pools = [normal(rng, 2, 12 * BLOCK_SIZE, dim) for _ in range(2)]
    for pool in pools:
        pool[:, attention.ZERO_SLOT] = 0
    table = ints([3, 7, 1, 9, 0], [5, 2, 11, 0, 0])
    start, count = ints(11, 2), ints(rows, rows)
    return [normal(rng, 2, rows, heads, dim), *pools, table, start, count, None, None, BLOCK_SIZE]


def with_extra(rng: np.random.Generator, args: list[Any], count: int = 2) -> list[Any]:
    """Keys and values that are in no pool."""
    extra = [normal(rng, 2, count, 2, args[0].shape[-1]) for _ in range(2)]
    return [*args[:6], *extra, BLOCK_SIZE]


def write_inputs(rng: np.random.Generator, rows: int = 3) -> list[Any]:
    """k, v, pools, table, start, count and block size of two slots."""
    new = [normal(rng, 2, rows, 2, 16) for _ in range(2)]
    return [*new, *attention_inputs(rng, rows)[1:6], BLOCK_SIZE]


def halved(args: list[Any], first: int) -> list[Any]:
    """Two pools from ``first`` on as float16."""
    pools = [pool.astype(np.float16) for pool in args[first : first + 2]]
    return [*args[:first], *pools, *args[first + 2 :]]


def quantised(quantise: Callable[[Array], Any], weight: Array) -> list[Array]:
    """Values and scales as a package stores them."""
    return [np.ascontiguousarray(x) for x in quantise(weight)]


Case = tuple[list[Any], tuple[int, ...], float]


def gate_inputs(rng: np.random.Generator) -> list[Any]:
    """a, b, the negative decay and its bias, for four value heads."""
    a, b = normal(rng, 2, 5, 4) * 3, normal(rng, 2, 5, 4) * 3
    return [a, b, -np.exp(normal(rng, 4)), normal(rng, 4)]


def cases(rng: np.random.Generator) -> dict[str, Case]:
    """Arguments of every operator, which are stored, and the tolerance (0: the same bits)."""
    x, weight, ids = normal(rng, 6, 64), normal(rng, 48, 64), ints(7, 0, -1, 47, 7)
    int8, int4 = (quantised(q, weight) for q in (linear.quantize_int8, linear.quantize_int4))
    u, taps, window = normal(rng, 2, 5, 12), normal(rng, 12, 1, 4), normal(rng, 2, 3, 12)
    cos, sin = rotary.rotary_table(ints(5, 900), 3, 8, 1e7)
    return {
        "rms_norm": ([normal(rng, 3, 5, 32), normal(rng, 32), 1e-6], (1,), 2e-6),
        "rotary_table": ([ints(0, 100_000), 4, 16, 1e7], (), 2e-6),
        "rotary_embedding": ([normal(rng, 2, 3, 4, 32), cos, sin], (), 2e-6),
        "causal_conv": ([u, taps, window], (1,), 2e-6),
        "conv_window": ([window, u, ints(4, 0)], (), 0),
        "gated_delta_rule": ([*delta_inputs(rng, 3, 4), ints(2, 0, 4)], (), 2e-6),
        "gated_delta_rule of all rows": ([*delta_inputs(rng, 3, 4), None], (), 2e-6),
        "gated_delta_rule of wide heads": (
            [*delta_inputs(rng, 1, 5, 1, 128), ints(5)],
            (),
            2e-6,
        ),
        "scatter_rows": (
            [normal(rng, 3, BLOCK_SIZE, 2, 8), ints(11, 1, 6), normal(rng, 3, 2, 8)],
            (),
            0,
        ),
        "kv_write": (write_inputs(rng), (), 0),
        "kv_write into halves": (halved(write_inputs(rng), 2), (), 0),
        "paged_attention of halves": (halved(attention_inputs(rng), 1), (), 2e-6),
        "paged_attention": (attention_inputs(rng), (), 2e-6),
        "paged_attention of wide heads": (attention_inputs(rng, 1, 8, 256), (), 2e-6),
        "paged_attention with extra rows": (with_extra(rng, attention_inputs(rng)), (), 2e-6),
        "linear": ([x, weight], (1,), 2e-6),
        "linear_int8": ([x, *int8], (1, 2), 2e-6),
        "linear_int8_rows": ([x, int8[0].T.copy(), int8[1]], (1, 2), 2e-6),
        "linear_int4": ([x, *int4], (1, 2), 2e-6),
        "embedding": ([ids, weight], (1,), 0),
        "embedding_int8": ([ids, int8[0].T.copy(), int8[1]], (1, 2), 0),
        "embedding_int4": ([ids, *int4], (1, 2), 0),
        "take_row": ([normal(rng, 3, 4, 8), ints(2, -1, 0)], (), 0),
        "pad_rows": ([normal(rng, 2, 3, 8), 5, 0], (), 0),
        "pad_rows of ids": ([rng.integers(0, 99, (2, 2), dtype=np.int32), 4, -1], (), 0),
        "pad_rows of enough": ([normal(rng, 2, 3), 3, 0], (), 0),
        "swiglu": ([normal(rng, 5, 48)], (), 2e-6),
        "slot_conv": (
            [normal(rng, 2, 4, 12), taps, normal(rng, 2, 6, 12), ints(3, 0)],
            (1,),
            2e-6,
        ),
        "slot_delta_rule": (slot_inputs(rng, ints(4, 0, 2)), (), 2e-6),
        "delta_gates": (gate_inputs(rng), (2, 3), 2e-6),
    }
