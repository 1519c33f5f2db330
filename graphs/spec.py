"""Static signatures: the contract between exporter, package and runtime. Torch-free."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from qwen_mtp.config import ModelConfig

DType = Literal["float32", "int32"]
GraphKind = Literal["prefill", "target_verify", "mtp_draft"]
StateKind = Literal["kv", "mtp_kv", "conv", "ssm", "stash"]
WeightFormat = Literal["fp32", "int8", "int4"]

STOP_IDS = 16  # width of the list of ids that ``min_tokens`` bans


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a graph; every dimension is a number.

    Attributes:
        name: Name inside the graph, lower case with dots.
        dtype: Element type.
        shape: Static shape. ``block_table`` alone may be bound narrower in its last dimension.
        state: For a state tensor, the name of the state it reads or replaces.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    state: str | None = None


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One tensor that lives across calls; all of them start as zeros.

    Attributes:
        name: Unique name, e.g. ``layers.3.key``.
        kind: What it holds.
        shape: Its whole shape.
        per_slot: The first dimension is the batch slot, so one slot is a contiguous view.
    """

    name: str
    kind: StateKind
    shape: tuple[int, ...]
    per_slot: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the float32 tensor."""
        return int(np.prod(self.shape)) * 4


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """One graph and its whole interface, in call order."""

    name: str
    kind: GraphKind
    rows: int
    lookahead: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Everything static that the user chooses at export.

    Attributes:
        max_num_seqs: Batch slots B.
        max_model_len: Positions a sequence may have, prompt included.
        block_size: Positions in a block of the paged pool.
        prefill_chunk: Rows C of the prefill graph.
        lookaheads: The K of each draft bucket, ascending; empty without MTP.
        format: Weight format.
    """

    max_num_seqs: int
    max_model_len: int
    block_size: int
    prefill_chunk: int
    lookaheads: tuple[int, ...]
    format: WeightFormat

    @property
    def max_rows(self) -> int:
        """Rows of the largest verify bucket: the rows a round may leave to be committed."""
        return max((k + 1 for k in self.lookaheads), default=2)

    @property
    def row_buckets(self) -> tuple[int, ...]:
        """Rows of each verify graph; plain decoding always has its bucket of two."""
        return tuple(sorted({2} | {k + 1 for k in self.lookaheads}))

    @property
    def table_width(self) -> int:
        """Blocks a sequence can hold: its positions and the rows of a last round."""
        positions = self.max_model_len + self.max_rows
        return -(-positions // self.block_size)

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the reserved block 0 included."""
        return 1 + self.max_num_seqs * self.table_width


def state_specs(config: ModelConfig, geometry: Geometry) -> tuple[StateSpec, ...]:
    """Every state tensor of a package, in a fixed order.

    Kinds: ``kv``/``mtp_kv`` pools ``[Nkv, slots, D]``; ``conv`` windows ``[B, W - 1, C]``;
    ``ssm`` ``[B, Nv, Dk, Dv]``; ``stash``, the inputs of the previous round that the next one
    commits: conv inputs ``u``, ``k``, ``v``, log decay ``g`` and ``beta``, each ``[B, P, ...]``.
    """
    pool = (config.num_kv_heads, geometry.num_blocks * geometry.block_size, config.head_dim)
    specs: list[StateSpec] = []
    for i, kind in enumerate(config.layer_kinds):
        if kind == "full_attention":
            specs += _pools(f"layers.{i}", "kv", pool)
        else:
            specs += _recurrent(config, geometry, f"layers.{i}")
    if geometry.lookaheads:
        specs += _pools("mtp", "mtp_kv", pool)
    return tuple(specs)


def _pools(prefix: str, kind: StateKind, shape: tuple[int, ...]) -> list[StateSpec]:
    return [StateSpec(f"{prefix}.{half}", kind, shape, False) for half in ("key", "value")]


def _recurrent(config: ModelConfig, geometry: Geometry, prefix: str) -> list[StateSpec]:
    slots, rows = geometry.max_num_seqs, geometry.max_rows
    heads = config.linear_num_value_heads
    key = (config.linear_num_key_heads, config.linear_key_head_dim)
    value = (heads, config.linear_value_head_dim)
    window = (slots, config.conv_kernel - 1, config.conv_channels)
    stash: dict[str, tuple[int, ...]] = {
        "u": (config.conv_channels,),
        "k": key,
        "v": value,
        "g": (heads,),
        "beta": (heads,),
    }
    return [
        StateSpec(f"{prefix}.conv", "conv", window, True),
        StateSpec(f"{prefix}.ssm", "ssm", (slots, heads, key[1], value[1]), True),
        *(
            StateSpec(f"{prefix}.stash.{name}", "stash", (slots, rows, *shape), True)
            for name, shape in stash.items()
        ),
    ]
