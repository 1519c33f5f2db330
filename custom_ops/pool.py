"""The key/value pool: where a position lives, and the one operator that writes rows.

Position p of a sequence lives in slot ``block_table[p // block_size] * block_size + p %
block_size``. Block 0 belongs to nobody: its slot 0 stays zero and is what masked positions read,
its slot 1 takes the rows that must not be kept.

A pool is ``[Nkv, slots, D]`` (a head's rows side by side: what the CPU kernels read) or
``[blocks, block_size, Nkv, D]`` (paged: what the Ascend kernels read).
"""

from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_mtp.custom_ops.operator import Operator, const

Ints = npt.NDArray[np.int32]
Pool = npt.NDArray[Any]

ZERO_SLOT = 0
TRASH_SLOT = 1
PAGED = 4  # dimensions of a paged pool


def write_slots(table: Ints, start: Ints, count: Ints, rows: int, block_size: int) -> Ints:
    """Slot of each new row, ``[B, R]``; rows not to be kept get the trash slot.

    Args:
        table: ``[B, P]`` int32 block table, 0 where no block is assigned.
        start: ``[B]`` int32 position of row 0.
        count: ``[B]`` int32 rows to keep.
        rows: Rows R.
        block_size: Positions in a block, at least 2.
    """
    step = np.arange(rows, dtype=np.int32)
    position = start[:, None] + step
    page = position // block_size
    block = np.take_along_axis(table, np.minimum(page, table.shape[1] - 1).astype(np.int64), 1)
    kept = (step < count[:, None]) & (page < table.shape[1]) & (block > 0)
    return np.where(kept, block * block_size + position % block_size, TRASH_SLOT).astype(np.int32)


def read_slots(table: Ints, length: Ints, block_size: int) -> Ints:
    """Slot of every position, ``[B, P * block_size]``; the zero slot beyond ``length``."""
    slots = table[:, :, None] * block_size + np.arange(block_size, dtype=np.int32)
    live = (table > 0)[:, :, None] & np.ones(block_size, dtype=bool)
    slots = slots.reshape(len(table), -1)
    live = live.reshape(slots.shape) & (np.arange(slots.shape[1]) < length[:, None])
    return np.where(live, slots, ZERO_SLOT).astype(np.int32)


def by_head(pool: Pool) -> Pool:
    """A view ``[Nkv, slots, D]`` of either layout."""
    if pool.ndim != PAGED:
        return pool
    return pool.reshape(-1, *pool.shape[2:]).swapaxes(0, 1)


def scatter_rows(pool: Pool, slots: Ints, rows: Pool) -> Pool:
    """Replace rows of a paged pool.

    Args:
        pool: ``[blocks, block_size, Nkv, D]``, any float type.
        slots: ``[N]`` int32, block times block size plus offset; of equal ones any may win.
        rows: ``[N, Nkv, D]`` in the type of the pool.

    Returns:
        The pool.
    """
    pool = pool.copy()
    pool.reshape(-1, *pool.shape[2:])[slots] = rows
    return pool


def _fake(pool: Any, slots: Any, rows: Any) -> Any:
    return pool.new_empty(pool.shape)


def _onnx(op: Any, pool: Any, slots: Any, rows: Any) -> Any:
    size = const(op, np.array(int(pool.shape[1]), np.int32))
    pair = [op.Unsqueeze(x, [1]) for x in (op.Div(slots, size), op.Mod(slots, size))]
    return op.ScatterND(pool, op.Cast(op.Concat(*pair, axis=1), to=7), rows)


def _ge(pool: Any, slots: Any, rows: Any, meta_outputs: Any = None) -> Any:
    ge = import_module("torchair._ge_concrete_graph.ge_apis")
    int32 = import_module("torchair.ge").DataType.DT_INT32
    size = ge.Const(meta_outputs.size[1], int32)
    pair = [ge.FloorDiv(slots, size), ge.FloorMod(slots, size)]
    # The copy keeps the graph functional; torchair drops it where the pool is a graph input that
    # the result is stored back into.
    return ge.ScatterNdUpdate(ge.TensorMove(pool), ge.Pack(pair, N=2, axis=1), rows)


SCATTER_ROWS = Operator(
    name="scatter_rows",
    schema="(Tensor pool, Tensor slots, Tensor rows) -> Tensor",
    meaning=scatter_rows,
    fake=_fake,
    onnx=_onnx,
    ge=_ge,
)
