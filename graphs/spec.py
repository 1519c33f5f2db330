"""Static signatures: the contract between exporter, package and runtime. Torch-free."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from qwen_mtp.config import ModelConfig

DType = Literal["float32", "int32", "float16", "bfloat16"]
Activation = Literal["float32", "float16", "bfloat16"]
KvType = Literal["float32", "float16"]
Lowering = Literal["portable", "fused"]
GraphKind = Literal["prefill", "target_verify", "mtp_draft"]
StateKind = Literal["kv", "mtp_kv", "conv", "ssm", "stash"]
WeightFormat = Literal["fp32", "fp16", "bf16", "int8", "int8_npu", "int4", "int4_npu"]
Layout = Literal["lazy", "paged", "slots"]
OpsetDomain = Literal["microsoft", "standard"]

# What weights that are not quantised are stored in, by the name of the format.
FULL_FORMATS: dict[WeightFormat, Activation] = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
}
ITEM_BYTES = {"float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1}
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
        per_slot: The first dimension is the batch slot, or each slot has as many of its entries
            as the next: a slot is a contiguous view.
        dtype: Element type.
        in_place: The graph changes its input; there is no output of the new value.
    """

    name: str
    kind: StateKind
    shape: tuple[int, ...]
    per_slot: bool
    dtype: DType = "float32"
    in_place: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return int(np.prod(self.shape)) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """One graph and its whole interface, in call order."""

    name: str
    kind: GraphKind
    rows: int
    lookahead: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def tensor(self, name: str) -> TensorSpec:
        """The input or output of that name."""
        return next(t for t in (*self.inputs, *self.outputs) if t.name == name)

    @property
    def in_place(self) -> tuple[str, ...]:
        """Inputs that the graph changes: states without an output of their new value."""
        renewed = {tensor.state for tensor in self.outputs}
        return tuple(t.name for t in self.inputs if t.state and t.state not in renewed)

    @property
    def all_outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs of a form that changes nothing in place: those states follow the others."""
        changed = (t for t in self.inputs if t.name in self.in_place)
        after = (TensorSpec(f"{t.name}.out", t.dtype, t.shape, t.state) for t in changed)
        return (*self.outputs, *after)


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
        layout: How state is kept and committed. ``lazy`` is ONNX Runtime's: pools by head, and
            a stash that the next round commits. ``paged`` is the same with pools by block, as
            NPUs write them. ``slots`` is the protocol of Ascend's fused operators: one state for
            each row of a round, of which the next round picks one.
        dtype: Activations, state and unquantised weights.
        draft_vocab: Tokens that drafts are taken from, each with a row of the drafter's own head;
            0 takes them from the whole vocabulary, by the target's head.
        kv_dtype: Keys and values in the layout ``lazy``; others keep them in ``dtype``.
    """

    max_num_seqs: int
    max_model_len: int
    block_size: int
    prefill_chunk: int
    lookaheads: tuple[int, ...]
    format: WeightFormat
    layout: Layout = "lazy"
    dtype: Activation = "float32"
    draft_vocab: int = 0
    kv_dtype: KvType = "float32"

    @property
    def pool_dtype(self) -> Activation:
        """What keys and values are stored in."""
        return self.kv_dtype if self.layout == "lazy" else self.dtype

    @property
    def full_format(self) -> WeightFormat:
        """The format of weights that are never quantised."""
        return next(f for f, dtype in FULL_FORMATS.items() if dtype == self.dtype)

    @property
    def matrix_format(self) -> WeightFormat:
        """The format of matrices: integers are laid out as the kernel that reads them wants it."""
        if self.format == "int4" and self.layout == "slots":
            return "int4_npu"
        return "int8_npu" if self.format == "int8" and self.layout != "lazy" else self.format

    @property
    def table_format(self) -> WeightFormat:
        """The format of vocabularies, which that kernel is too narrow for."""
        return "int8" if self.matrix_format == "int4_npu" else self.format

    @property
    def vector_dtype(self) -> Activation:
        """Norm and convolution weights: the kernels want them in the type of the activations."""
        return self.dtype if self.layout == "slots" else "float32"

    @property
    def max_rows(self) -> int:
        """Rows of the largest verify bucket: the rows a round may leave to be committed."""
        return max((k + 1 for k in self.lookaheads), default=2)

    @property
    def row_buckets(self) -> tuple[int, ...]:
        """Rows of each verify graph; plain decoding always has its bucket of two.

        In the layout ``slots`` a round must have as many rows as the last one may have accepted:
        the fused kernel does nothing where it has fewer. So there is one graph for all.
        """
        if self.layout == "slots":
            return (self.max_rows,)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AscendChoice:
    """What an export for Ascend is made for (docs/ascend.md).

    Attributes:
        lowering: ``portable``, standard operators only, or ``fused``, kernels of the chip.
        soc_version: The chip, as ATC names it.
        custom_ops: Operators that the chip has by an operator package that is installed beside
            CANN, ascending.
    """

    lowering: Lowering
    soc_version: str
    custom_ops: tuple[str, ...] = ()


def state_specs(config: ModelConfig, geometry: Geometry) -> tuple[StateSpec, ...]:
    """Every state tensor of a package, in a fixed order.

    Kinds: ``kv``/``mtp_kv`` pools ``[Nkv, slots, D]``, by block ``[blocks, block_size, Nkv, D]``;
    ``conv`` windows ``[B, W - 1, C]``; ``ssm`` ``[B, Nv, Dk, Dv]``; ``stash``, the inputs of the
    previous round that the next one commits: conv inputs ``u``, ``k``, ``v``, log decay ``g`` and
    ``beta``, each ``[B, P, ...]``. In the layout ``slots`` there is no stash: the windows are
    ``[B, W - 2 + P, C]`` and the states ``[B * P, Nv, Dv, Dk]``.
    """
    specs: list[StateSpec] = []
    for i, kind in enumerate(config.layer_kinds):
        if kind == "full_attention":
            specs += _pools(config, geometry, f"layers.{i}", "kv")
        elif geometry.layout == "slots":
            specs += _row_states(config, geometry, f"layers.{i}")
        else:
            specs += _recurrent(config, geometry, f"layers.{i}")
    if geometry.lookaheads:
        specs += _pools(config, geometry, "mtp", "mtp_kv")
    return tuple(specs)


def _pools(
    config: ModelConfig, geometry: Geometry, prefix: str, kind: StateKind
) -> list[StateSpec]:
    heads, dim = config.num_kv_heads, config.head_dim
    shape: tuple[int, ...] = (geometry.num_blocks, geometry.block_size, heads, dim)
    if geometry.layout == "lazy":
        shape = (heads, geometry.num_blocks * geometry.block_size, dim)
    in_place = geometry.layout != "lazy"
    return [
        StateSpec(f"{prefix}.{half}", kind, shape, False, geometry.pool_dtype, in_place)
        for half in ("key", "value")
    ]


def _row_states(config: ModelConfig, geometry: Geometry, prefix: str) -> list[StateSpec]:
    slots, rows = geometry.max_num_seqs, geometry.max_rows
    window = (slots, config.conv_kernel - 2 + rows, config.conv_channels)
    heads = config.linear_num_value_heads
    state = (slots * rows, heads, config.linear_value_head_dim, config.linear_key_head_dim)
    return [
        StateSpec(f"{prefix}.conv", "conv", window, True, geometry.dtype, True),
        StateSpec(f"{prefix}.ssm", "ssm", state, True, geometry.dtype, True),
    ]


def _recurrent(config: ModelConfig, geometry: Geometry, prefix: str) -> list[StateSpec]:
    slots, rows, dtype = geometry.max_num_seqs, geometry.max_rows, geometry.dtype
    heads = config.linear_num_value_heads
    key = (config.linear_num_key_heads, config.linear_key_head_dim)
    value = (heads, config.linear_value_head_dim)
    window = (slots, config.conv_kernel - 1, config.conv_channels)
    stash: dict[str, tuple[tuple[int, ...], DType]] = {
        "u": ((config.conv_channels,), dtype),
        "k": (key, dtype),
        "v": (value, dtype),
        "g": ((heads,), "float32"),
        "beta": ((heads,), "float32"),
    }
    return [
        StateSpec(f"{prefix}.conv", "conv", window, True, dtype),
        StateSpec(f"{prefix}.ssm", "ssm", (slots, heads, key[1], value[1]), True, dtype),
        *(
            StateSpec(f"{prefix}.stash.{name}", "stash", (slots, rows, *shape), True, kind)
            for name, (shape, kind) in stash.items()
        ),
    ]
