"""The native kernels of full attention: what they compute, and what a row's bits depend on."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from qwen_mtp.custom_ops import attention, rotary
from qwen_mtp.custom_ops.attention_mix import attention_mix
from qwen_mtp.custom_ops.attention_project import attention_project
from qwen_mtp.custom_ops.pool import TRASH_SLOT
from tests.native import native_session
from tests.operators import Array, close, ints, normal, same_bits

HALF = 1e-3  # of a pool of 16-bit floats against one of 32-bit ones
PART = 256  # positions of a part (custom_ops/native/attention_part.h)


@dataclass(frozen=True)
class Call:
    """Arguments of ``attention_mix``; pool rows that hold nothing are NaN."""

    q: Array
    gate: Array
    k_pool: Array
    v_pool: Array
    table: Array
    start: Array
    count: Array
    extra_k: Array | None
    extra_v: Array | None
    block_size: int

    @property
    def arguments(self) -> list[Any]:
        return [getattr(self, name) for name in self.__dataclass_fields__]

    @property
    def expected(self) -> Array:
        """Of the rows that are real."""
        clean = (np.nan_to_num(pool.astype(np.float32)) for pool in (self.k_pool, self.v_pool))
        found = attention_mix(*self.arguments[:2], *clean, *self.arguments[4:])
        return self.real(found.reshape(self.q.shape))

    def real(self, rows: Array) -> Array:
        """The rows before ``count``, ``[N, Nh, D]``."""
        return rows[np.arange(rows.shape[1]) < self.count[:, None]]

    def run(self, *, threads: int = 2, machine: str = "native", gated: bool = True) -> Array:
        """The kernel's answer, ``[B, R, Nh, D]``."""
        batch, rows, heads, dim = self.q.shape
        inputs = {
            "q": self.q,
            "k_pool": self.k_pool,
            "v_pool": self.v_pool,
            "table": self.table,
            "start": self.start,
            "count": self.count,
            "gate": self.gate if gated else None,
            "extra_k": self.extra_k,
            "extra_v": self.extra_v,
        }
        suffix = "Half" if self.k_pool.dtype == np.float16 else ""
        session = native_session(
            f"PagedAttention{suffix}",
            inputs,
            {
                "mixed": np.empty(
                    (batch * rows, heads * dim) if gated else self.q.shape, np.float32
                )
            },
            threads=threads,
            machine=machine,
            B=batch,
            R=rows,
            Nh=heads,
            Nkv=len(self.k_pool),
            D=dim,
            slots=self.k_pool.shape[1],
            block_size=self.block_size,
            J=0 if self.extra_k is None else self.extra_k.shape[1],
        )
        given = {name: x for name, x in inputs.items() if x is not None}
        return np.asarray(session.run(None, given)[0]).reshape(self.q.shape)


def call(
    rng: np.random.Generator,
    heads: tuple[int, int, int],
    block_size: int,
    rows: int,
    start: tuple[int, ...],
    count: tuple[int, ...],
    extra: int = 0,
) -> Call:
    """Random arguments; ``heads`` are query heads, key/value heads and their size."""
    (query_heads, kv_heads, dim), batch = heads, len(start)
    width = max(-(-(s + rows) // block_size) for s in start) + 1
    slots = (1 + batch * width) * block_size
    pools = [np.full((kv_heads, slots, dim), np.nan, np.float32) for _ in range(2)]
    table = 1 + rng.permutation(batch * width).reshape(batch, width).astype(np.int32)
    for pool in pools:
        pool[:, attention.ZERO_SLOT] = 0
        for b in range(batch):
            places = np.arange(start[b] + count[b])
            where = table[b, places // block_size] * block_size + places % block_size
            pool[:, where] = normal(rng, kv_heads, len(places), dim)
    more = [normal(rng, batch, extra, kv_heads, dim) if extra else None for _ in range(2)]
    q = 2 * normal(rng, batch, rows, query_heads, dim)
    gate = normal(rng, batch, rows, query_heads * dim)
    return Call(q, gate, *pools, table, ints(*start), ints(*count), *more, block_size)


SHAPES: dict[str, tuple[Any, ...]] = {
    "one head each": ((2, 2, 32), 8, 3, (0, 300, 7), (3, 2, 0)),
    "groups of four": ((8, 2, 256), 256, 4, (PART - 2, 2 * PART), (4, 1)),
    "groups of eight": ((8, 1, 64), 16, 2, (PART - 1,), (2,)),
    "odd sizes": ((6, 2, 20), 128, 5, (0, 3 * PART - 3), (1, 5)),
    "a chunk": ((4, 1, 32), 32, 70, (PART - 40,), (69,)),
    "extra rows": ((4, 2, 48), 16, 1, (40, 700, 3), (1, 1, 0), 3),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_one_pass_over_the_pages_computes_the_meaning(shape: str) -> None:
    given = call(np.random.default_rng(0), *SHAPES[shape])
    found = given.run()
    close(given.real(found), given.expected, 4e-6)
    idle = np.arange(found.shape[1]) >= given.count[:, None]
    assert (found[idle] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_a_machine_without_wide_vectors_computes_the_meaning(shape: str) -> None:
    given = call(np.random.default_rng(1), *SHAPES[shape])
    close(given.real(given.run(machine="x86-64")), given.expected, 4e-6)
    half = replace(given, k_pool=given.k_pool.astype(np.float16))
    half = replace(half, v_pool=given.v_pool.astype(np.float16))
    close(half.real(half.run(machine="x86-64")), half.expected, 4e-6)


def test_without_a_gate_it_is_attention_alone() -> None:
    given = call(np.random.default_rng(2), *SHAPES["one head each"])
    clean = (np.nan_to_num(pool) for pool in (given.k_pool, given.v_pool))
    expected = attention.paged_attention(given.q, *clean, *given.arguments[4:])
    close(given.real(given.run(gated=False)), given.real(expected), 4e-6)


@pytest.mark.parametrize("shape", ["groups of four", "odd sizes"])
def test_pools_of_16_bits_are_read_as_they_are(shape: str) -> None:
    whole = call(np.random.default_rng(3), *SHAPES[shape])
    half = replace(whole, k_pool=whole.k_pool.astype(np.float16))
    half = replace(half, v_pool=whole.v_pool.astype(np.float16))
    found = half.real(half.run())
    close(found, half.expected, 4e-6)
    close(found, whole.expected, HALF)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("heads", [(4, 4, 32), (6, 2, 40), (8, 2, 64)])
def test_a_rows_bits_depend_on_its_sequence_alone(heads: tuple[int, int, int], half: bool) -> None:
    """Every number of rows, other neighbours, threads and widths of the table."""
    rng, most = np.random.default_rng(4), 16
    whole = call(rng, heads, 32, most, (PART - 9, 3 * PART - 5), (most, most))
    if half:
        whole = replace(whole, k_pool=whole.k_pool.astype(np.float16))
        whole = replace(whole, v_pool=whole.v_pool.astype(np.float16))
    expected = whole.run(threads=1)
    same_bits(whole.run(threads=2), expected)
    for rows in (1, 2, 3, 4, 7, 40):  # 40 rows take the way of a chunk
        for first in (0, most - rows) if rows < most else (0,):
            for slot in (0, 1):
                found = _alone(whole, slot, first, rows).run()
                same_bits(found[0, :most], expected[slot, first : first + rows])


def _alone(whole: Call, slot: int, first: int, rows: int) -> Call:
    """Rows of one slot of ``whole`` in a batch of two, under a wider table, padded with NaN."""
    real = min(rows, whole.q.shape[1])
    wanted, padding = slice(first, first + real), ((0, 1), (0, rows - real), (0, 0))
    gate = np.pad(whole.gate[slot : slot + 1, wanted], padding, constant_values=np.nan)
    q = whole.q[slot : slot + 1, wanted]
    q = np.pad(q, (*padding, (0, 0)), constant_values=np.nan)
    table = np.pad(whole.table[slot : slot + 1], ((0, 1), (0, 9)))
    start = ints(whole.start[slot] + first, 0)
    return replace(whole, q=q, gate=gate, table=table, start=start, count=ints(real, 0))


def test_a_nan_of_a_row_reaches_that_row_and_no_earlier_one() -> None:
    given = call(np.random.default_rng(5), (4, 2, 32), 16, 4, (PART - 2,), (4,))
    expected = given.run()
    for pools in ({"k_pool": given.k_pool.copy()}, {"v_pool": given.v_pool.copy()}):
        place = PART  # the position of row 2
        slot = given.table[0, place // 16] * 16 + place % 16
        next(iter(pools.values()))[:, slot] = np.nan
        found = replace(given, **pools).run()
        same_bits(found[:, :2], expected[:, :2])
        assert np.isnan(found[:, 2:]).all()
    given.q[0, 1, 2] = np.nan
    found = given.run()
    assert np.isnan(found[0, 1, 2]).all()
    assert np.isnan(found).sum() == found.shape[-1]


@pytest.mark.parametrize("half", [False, True])
def test_keys_and_values_are_written_where_the_table_says(half: bool) -> None:
    rng, block_size = np.random.default_rng(6), 8
    new = [3 * normal(rng, 3, 4, 2, 20) for _ in range(2)]
    new[0][0, 3] = np.nan  # of a row that is not kept
    kind = np.float16 if half else np.float32
    pools = [normal(rng, 2, 12 * block_size, 20).astype(kind) for _ in range(2)]
    # The last slot would write beyond its table, and into a block that is none.
    table, start, count = ints([3, 7], [5, 2], [1, 0]), ints(6, 0, 7), ints(3, 0, 4)
    expected = attention.kv_write(*new, *pools, table, start, count, block_size)
    inputs = dict(zip("kvxytsc", (*new, *pools, table, start, count), strict=True))
    sizes = {"B": 3, "R": 4, "Nkv": 2, "D": 20, "slots": 12 * block_size}
    outputs = {"keys": pools[0], "values": pools[1]}
    kernel = f"KvWrite{'Half' if half else ''}"
    session = native_session(kernel, inputs, outputs, **sizes, block_size=block_size)
    before = [pool.copy() for pool in pools]
    for found, wanted, old in zip(session.run(None, inputs), expected, before, strict=True):
        wanted[:, TRASH_SLOT] = old[:, TRASH_SLOT]
        same_bits(found, wanted)
    same_bits(pools, before)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "half"), [(4, 2, 32, 8), (6, 1, 20, 5)])
def test_a_projected_row_is_split_normed_and_rotated(
    heads: int, kv_heads: int, dim: int, half: int
) -> None:
    rng, rows = np.random.default_rng(7), 3
    projected = normal(rng, 2 * rows, 2 * (heads + kv_heads) * dim)
    tables = rotary.rotary_table(ints(5, 900), rows, 2 * half, 1e7)
    given = [projected, normal(rng, dim), normal(rng, dim), *tables]
    expected = attention_project(*given, heads, kv_heads, 1e-6)
    inputs = dict(zip("xqkcs", given, strict=True))
    outputs = dict(zip(("query", "key", "value", "gate"), expected, strict=True))
    sizes = {"Nh": heads, "Nkv": kv_heads, "D": dim, "half": half, "epsilon": 1e-6}
    session = native_session("AttentionProject", inputs, outputs, B=2, R=rows, **sizes)
    found = session.run(None, inputs)
    close(found, expected)
    one = {
        name: x[:1] if x.ndim == 2 else x[:1, :1] if x.ndim == 3 else x
        for name, x in inputs.items()
    }
    few = {name: x[:1, :1] for name, x in outputs.items()}
    alone = native_session("AttentionProject", one, few, B=1, R=1, **sizes).run(None, one)
    same_bits(alone, [x[:1, :1] for x in found])
