"""Attention, its pool and the linear layers in aten and in Ascend kernels mean what NumPy does.

The kernels of Ascend run nowhere here: their stand-ins do what their documentation says, so that
what is checked is which arguments the forms give them.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from qwen_mtp.custom_ops import attention, linear, linear_npu, pool
from qwen_mtp.custom_ops.attention_npu import slot_mapping
from qwen_mtp.custom_ops.torch_library import OPERATORS
from tests.operators import Array, close, each, ints, normal, quantised, same_bits, tensor

BLOCK_SIZE, BLOCKS, DIM = 4, 12, 16
TABLE = ints([3, 7, 1, 9, 0], [5, 2, 11, 0, 0], [4, 6, 8, 0, 0])
BY_NAME = {operator.name: operator for operator in OPERATORS}


def paged(rng: np.random.Generator) -> Array:
    """A pool whose zero slot is zero."""
    blocks = normal(rng, BLOCKS, BLOCK_SIZE, 2, DIM)
    blocks[0, pool.ZERO_SLOT] = 0
    return blocks


def torch_form(form: Callable[..., Any] | None, *args: Any) -> Any:
    """What a torch form computes, as arrays."""
    assert form is not None
    found = tuple(t.numpy() for t in each(form(*(tensor(a) for a in args))))
    return found if len(found) > 1 else found[0]


def as_type(kind: torch.dtype, *args: Any) -> list[Any]:
    """Tensors, those of floats in ``kind``."""
    tensors = [tensor(a) for a in args]
    return [t.to(kind) if isinstance(t, torch.Tensor) and t.is_floating_point() else t
            for t in tensors]  # fmt: skip


def near(found: Array, expected: Array, tolerance: float) -> None:
    """Equal up to ``tolerance`` of the largest magnitude."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def attention_case(batch: int, rows: int, seed: int = 0) -> list[Any]:
    """q, pools, table, start, count: one slot in full, one a row short, one idle."""
    rng = np.random.default_rng(seed)
    start, count = ints(11, 2, 0)[:batch], ints(rows, rows - 1, 0)[:batch]
    q = normal(rng, batch, rows, 8, DIM)
    return [q, paged(rng), paged(rng), TABLE[:batch].copy(), start, count]


def extras(batch: int, count: int = 2) -> list[Array | None]:
    rng = np.random.default_rng(9)
    return [normal(rng, batch, count, 2, DIM) for _ in range(2)] if count else [None, None]


def live(x: Array, count: Array) -> Array:
    """The rows of all slots that have a meaning, ``[rows, heads, D]``."""
    return np.concatenate([slot[:n] for slot, n in zip(x, count, strict=True)])


def stale_slots(table: Array, length: Array) -> Array:
    """Every slot but the zero one that holds no position of a sequence."""
    used = pool.read_slots(table, length, BLOCK_SIZE)
    return np.setdiff1d(np.arange(BLOCKS * BLOCK_SIZE), [*used.ravel(), pool.ZERO_SLOT])


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 4])
def test_written_rows_lie_where_the_meaning_puts_them_in_either_layout(
    batch: int, rows: int
) -> None:
    rng = np.random.default_rng(batch)
    k, v = (normal(rng, batch, rows, 2, DIM) for _ in range(2))
    _, k_pool, v_pool, table, start, count = attention_case(batch, rows)
    rest = (table, start, count, BLOCK_SIZE)
    expected = attention.kv_write(k, v, k_pool, v_pool, *rest)
    by_head = [np.ascontiguousarray(pool.by_head(p)) for p in (k_pool, v_pool)]
    same_bits(
        [np.ascontiguousarray(pool.by_head(p)) for p in expected],
        attention.kv_write(k, v, *by_head, *rest),
    )
    found = torch_form(attention.KV_WRITE.decomposed, k, v, k_pool, v_pool, *rest)
    for written in (*found, *expected):  # of rows that are thrown away any may stay
        written[0, pool.TRASH_SLOT] = 0
    same_bits(found, expected)
    assert not np.array_equal(found[0], k_pool)


@pytest.mark.parametrize("start", [0, 3, 17, 19, 40])
def test_a_row_goes_to_the_slot_of_the_meaning_or_to_the_trash(start: int) -> None:
    table = TABLE.copy()
    table[0, 4] = 10
    args = (table, ints(start, start, start), ints(4, 2, 0))
    found = slot_mapping(*(tensor(a) for a in args), 4, BLOCK_SIZE).numpy()
    same_bits(found, pool.write_slots(*args, 4, BLOCK_SIZE).ravel())


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_scattered_rows_replace_those_of_the_pool(kind: Any) -> None:
    rng = np.random.default_rng(1)
    before, rows, slots = (
        paged(rng).astype(kind),
        normal(rng, 3, 2, DIM).astype(kind),
        ints(9, 4, 47),
    )
    after = torch_form(torch.ops.qwen_mtp.scatter_rows, before, slots, rows)
    expected = before.copy()
    for slot, row in zip(slots, rows, strict=True):
        expected[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = row
    same_bits(after, expected)


@pytest.mark.parametrize("extra", [0, 2])
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 4])
def test_decomposed_attention_is_the_meaning_in_either_layout(
    batch: int, rows: int, extra: int
) -> None:
    args = [*attention_case(batch, rows), *extras(batch, extra), BLOCK_SIZE]
    expected = attention.paged_attention(*args)
    by_head = [np.ascontiguousarray(pool.by_head(p)) for p in args[1:3]]
    close(attention.paged_attention(args[0], *by_head, *args[3:]), expected)
    found = torch_form(attention.PAGED_ATTENTION.decomposed, *args)
    close(live(found, args[5]), live(expected, args[5]))
    assert np.isfinite(found).all()


@pytest.mark.parametrize("extra", [0, 2])
def test_nothing_stale_reaches_a_row_not_even_as_nan(extra: int) -> None:
    args = [*attention_case(3, 4), *extras(3, extra), BLOCK_SIZE]
    clean = torch_form(attention.PAGED_ATTENTION.decomposed, *args)
    for stale in args[1:3]:
        flat = stale.reshape(-1, 2, DIM)
        flat[stale_slots(args[3], args[4] + args[5])] = np.nan
    same_bits(torch_form(attention.PAGED_ATTENTION.decomposed, *args), clean)


def test_a_query_beyond_the_count_reaches_no_other_row() -> None:
    args = [*attention_case(3, 4), None, None, BLOCK_SIZE]
    clean = torch_form(attention.PAGED_ATTENTION.decomposed, *args)
    for slot, count in enumerate(args[5]):
        args[0][slot, count:] = np.nan
    found = torch_form(attention.PAGED_ATTENTION.decomposed, *args)
    same_bits(live(found, args[5]), live(clean, args[5]))


def test_rows_of_unassigned_blocks_are_not_seen_before_the_count_either() -> None:
    args = [*attention_case(1, 4), None, None, BLOCK_SIZE]
    args[3][0, 1] = 0
    found = torch_form(attention.PAGED_ATTENTION.decomposed, *args)
    args[1][0], args[2][0] = np.nan, np.nan
    same_bits(torch_form(attention.PAGED_ATTENTION.decomposed, *args), found)


# A weight, a key and a value each lose half a unit of the last of 11 (8) bits, and so does what
# comes out: four roundings of at most 2**-12 (2**-9) of the largest magnitude, scores amplified.
HALVES = [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)]


@pytest.mark.parametrize(("kind", "tolerance"), HALVES)
@pytest.mark.parametrize("extra", [0, 2])
def test_half_precision_attention_stays_in_its_type_and_near_the_meaning(
    kind: torch.dtype, tolerance: float, extra: int
) -> None:
    args = [*attention_case(3, 4), *extras(3, extra), BLOCK_SIZE]
    assert attention.PAGED_ATTENTION.decomposed is not None
    found = attention.PAGED_ATTENTION.decomposed(*as_type(kind, *args))
    assert found.dtype == kind
    expected = attention.paged_attention(*args)
    near(live(found.float().numpy(), args[5]), live(expected, args[5]), tolerance)


def test_the_meanings_take_half_precision_and_answer_in_it() -> None:
    args = [*attention_case(2, 4), *extras(2, 2), BLOCK_SIZE]
    halves = [a.astype(np.float16) if a.dtype == np.float32 else a for a in args[:8]]
    found = attention.paged_attention(*halves, BLOCK_SIZE)
    assert found.dtype == np.float16
    close(found.astype(np.float32), attention.paged_attention(*args), 4e-3)
    k, v = (normal(np.random.default_rng(0), 2, 4, 2, DIM).astype(np.float16) for _ in range(2))
    pools = attention.kv_write(k, v, *halves[1:6], BLOCK_SIZE)
    assert {p.dtype for p in pools} == {np.dtype(np.float16)}


def linear_cases(x: Array, ids: Array) -> dict[str, list[Array]]:
    """Arguments of every format: a weight of 48 outputs and 64 inputs, one output of zeros."""
    weight = normal(np.random.default_rng(7), 48, 64)
    weight[5] = 0
    int8, int4 = (quantised(q, weight) for q in (linear.quantize_int8, linear.quantize_int4))
    rows = [np.ascontiguousarray(int8[0].T), int8[1]]
    return {
        "linear": [x, weight],
        "linear_int8": [x, *int8],
        "linear_int8_rows": [x, *rows],
        "linear_int4": [x, *int4],
        "embedding": [ids, weight],
        "embedding_int8": [ids, *rows],
        "embedding_int4": [ids, *int4],
    }


def activations(seed: int = 8) -> Array:
    """Six rows, one of them zero, with a block of zeros in another."""
    x = normal(np.random.default_rng(seed), 6, 64)
    x[2], x[3, :32] = 0, 0
    return x


IDS = ints(7, 0, -1, 47, 7)
FORMATS = sorted(linear_cases(activations(), IDS))
EXACT = {"linear_int8", "linear_int8_rows", *(f for f in FORMATS if f.startswith("embedding"))}


@pytest.mark.parametrize("name", FORMATS)
def test_a_decomposed_linear_layer_or_table_is_the_meaning(name: str) -> None:
    args, operator = linear_cases(activations(), IDS)[name], BY_NAME[name]
    found, expected = torch_form(operator.decomposed, *args), operator.meaning(*args)
    assert found.dtype == expected.dtype
    if name in EXACT:
        np.testing.assert_array_equal(found, expected)  # a zero may have another sign
    else:
        close(found, expected)


# The same rounded inputs on both sides: half a unit of the last place of what comes out, and as
# much again where a product is summed in half precision.
@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("name", [f for f in FORMATS if f.startswith("linear")])
def test_a_linear_layer_answers_in_the_type_of_its_activations(
    name: str, kind: torch.dtype, tolerance: float
) -> None:
    args, operator = linear_cases(activations(), IDS)[name], BY_NAME[name]
    args[0] = tensor(args[0]).to(kind).float().numpy()
    if name == "linear":
        args[1] = tensor(args[1]).to(kind).float().numpy()
    halves = [tensor(args[0]).to(kind), *(tensor(a) for a in args[1:])]
    if name == "linear":
        halves[1] = halves[1].to(kind)
    assert operator.decomposed is not None
    found, expected = operator.decomposed(*halves), operator.meaning(*args)
    assert found.dtype == kind == operator.fake(*halves).dtype
    near(found.float().numpy(), expected, tolerance)
    if kind == torch.float16:
        meant = operator.meaning(*(h.numpy() for h in halves))
        assert meant.dtype == np.float16
        near(meant.astype(np.float32), expected, tolerance)


def test_the_layout_of_the_4_bit_kernel_holds_the_same_matrix() -> None:
    packed, scale = quantised(linear.quantize_int4, normal(np.random.default_rng(3), 48, 64))
    words, scales = linear_npu.pack_int4_npu(packed, scale)
    assert (words.dtype, words.shape, scales.shape) == (np.int32, (64, 6), (2, 48))
    weight = linear.dequantize_int4(packed, scale).T
    same_bits(linear_npu.unpack_int4_npu(words, scales), np.ascontiguousarray(weight))
    same_bits(unpacked_by_the_manual(tensor(words), tensor(scales)).numpy(), weight.copy())
    x = activations()
    close(linear.linear_int4(x, words, scales), x @ weight)
    shape = BY_NAME["linear_int4"].fake(*(tensor(a) for a in (x, words, scales))).shape
    assert tuple(shape) == (6, 48)


def unpacked_by_the_manual(words: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Eight values of 4 bits with a sign in an int32, the first in the lowest bits."""
    parts = [(words >> 4 * i) & 15 for i in range(8)]
    values = torch.stack([torch.where(p > 7, p - 16, p) for p in parts], dim=-1)
    return values.reshape(len(words), -1).to(scales.dtype) * scales.repeat_interleave(32, dim=0)


class Kernels:
    """What the manuals say of the kernels, for the arguments that the forms use."""

    types = {5: torch.float16, 15: torch.bfloat16}  # noqa: RUF012

    def npu_scatter_pa_kv_cache_functional(
        self, k: Any, v: Any, k_pool: Any, v_pool: Any, slots: Any, *, cache_mode: str
    ) -> tuple[Any, Any]:
        assert (cache_mode, slots.dtype) == ("Norm", torch.int32)
        pools = k_pool.clone(), v_pool.clone()
        for stored, rows in zip(pools, (k, v), strict=True):
            stored.view(-1, *rows.shape[1:])[slots.long()] = rows
        return pools

    def npu_dynamic_quant(self, x: Any) -> tuple[Any, Any]:
        scale = x.float().abs().amax(-1) / 127
        return torch.nan_to_num(x.float() / scale[:, None]).round().to(torch.int8), scale

    def npu_quant_matmul(
        self, q: Any, weight: Any, scale: Any, *, pertoken_scale: Any, output_dtype: int
    ) -> Any:
        assert scale.dtype == pertoken_scale.dtype == torch.float32
        product = (q.double() @ weight.double()) * scale * pertoken_scale[:, None]
        return product.to(self.types[output_dtype])

    def npu_weight_quant_batchmatmul(
        self, x: Any, weight: Any, scale: Any, *, antiquant_group_size: int
    ) -> Any:
        assert (scale.dtype, antiquant_group_size) == (x.dtype, 32)
        assert weight.is_contiguous()
        return (x.float() @ unpacked_by_the_manual(weight, scale).float()).to(x.dtype)

    def npu_fused_infer_attention_score_v2(
        self, q: Any, keys: Any, values: Any, *, block_table: Any, actual_seq_kvlen: Any,
        num_query_heads: int, num_key_value_heads: int, softmax_scale: float, input_layout: str,
        block_size: int, atten_mask: Any = None, sparse_mode: int = 0,
    ) -> tuple[Any, None]:  # fmt: skip
        assert (input_layout, keys.dim(), actual_seq_kvlen.dtype) == ("BSND", 3, torch.int64)
        rows, group = q.shape[1], num_query_heads // num_key_value_heads
        assert sparse_mode == (3 if rows > 1 else 0)
        mixed = []
        for row, blocks, length in zip(q, block_table, actual_seq_kvlen.tolist(), strict=True):
            used = blocks[: -(-length // block_size)].long()
            k, v = (
                x[used].reshape(-1, num_key_value_heads, row.shape[-1])[:length]
                .repeat_interleave(group, dim=1)
                for x in (keys, values)
            )  # fmt: skip
            scores = torch.einsum("rhd,thd->hrt", row, k) * softmax_scale
            if sparse_mode == 3:
                assert (atten_mask.dtype, tuple(atten_mask.shape)) == (torch.int8, (2048, 2048))
                corner = torch.zeros(rows, length - rows, dtype=torch.bool)
                hidden = torch.cat([corner, atten_mask[:rows, :rows] > 0], dim=1)
                scores = scores.masked_fill(hidden, -torch.inf)
            mixed.append(torch.einsum("hrt,thd->rhd", scores.softmax(-1), v))
        return torch.stack(mixed), None


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels where the forms look for them."""
    monkeypatch.setattr(torch.ops, "npu", Kernels(), raising=False)
    for name in ("torchair", "torchair.ops"):
        monkeypatch.setitem(sys.modules, name, Kernels())


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("rows", [1, 4])
def test_fused_attention_over_rows_that_the_kernel_stored_is_the_meaning(
    batch: int, rows: int
) -> None:
    rng = np.random.default_rng(batch)
    k, v = (normal(rng, batch, rows, 2, DIM) for _ in range(2))
    q, k_pool, v_pool, table, start, count = attention_case(batch, rows)
    rest = (table, start, count, BLOCK_SIZE)
    pools = attention.kv_write(k, v, k_pool, v_pool, *rest)
    stored = torch_form(attention.KV_WRITE.fused, k, v, k_pool, v_pool, *rest)
    for written in (*stored, *pools):
        written[0, pool.TRASH_SLOT] = 0
    same_bits(stored, pools)
    args = [q, *pools, *rest[:3], None, None, BLOCK_SIZE]
    found = torch_form(attention.PAGED_ATTENTION.fused, *args)
    close(live(found, count), live(attention.paged_attention(*args), count))


def test_fused_attention_with_rows_outside_the_pool_needs_no_kernel() -> None:
    args = [*attention_case(3, 1), *extras(3), BLOCK_SIZE]
    fused, decomposed = (
        torch_form(form, *args)
        for form in (attention.PAGED_ATTENTION.fused, attention.PAGED_ATTENTION.decomposed)
    )
    same_bits(fused, decomposed)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("name", ["linear_int8", "linear_int8_rows", "linear_int4"])
def test_a_fused_linear_layer_gives_its_kernels_what_they_ask_for(
    name: str, kind: torch.dtype, tolerance: float
) -> None:
    args, operator = linear_cases(activations(), IDS)[name], BY_NAME[name]
    args[0] = tensor(args[0]).to(kind).float().numpy()
    if name == "linear_int4":
        words, scales = linear_npu.pack_int4_npu(*args[1:])
        args[1:] = words, tensor(scales).to(kind).float().numpy()
    assert operator.fused is not None
    found = operator.fused(tensor(args[0]).to(kind), *(tensor(a) for a in args[1:]))
    assert found.dtype == kind
    near(found.float().numpy(), operator.meaning(*args), tolerance)


@pytest.mark.parametrize("name", ["linear_int8", "linear_int8_rows", "linear_int4"])
def test_a_fused_linear_layer_of_float32_activations_needs_no_kernel(name: str) -> None:
    args, operator = linear_cases(activations(), IDS)[name], BY_NAME[name]
    same_bits(torch_form(operator.fused, *args), torch_form(operator.decomposed, *args))
