"""Gated full attention over the paged pool (docs/package-format.md has its blocks)."""

from dataclasses import dataclass

import torch
from torch import nn

from qwen_mtp.config import ModelConfig
from qwen_mtp.custom_ops.attention_mix import ATTENTION_MIX
from qwen_mtp.custom_ops.attention_project import ATTENTION_PROJECT
from qwen_mtp.custom_ops.composites import composite
from qwen_mtp.custom_ops.torch_library import ops
from qwen_mtp.graphs.io import GraphIO
from qwen_mtp.graphs.layers import Linear, RMSNorm
from qwen_mtp.graphs.spec import Geometry

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """Where the rows of a call sit in their sequences.

    Attributes:
        start: ``[B]`` int32 position of row 0.
        count: ``[B]`` int32 real rows; 0 for an idle slot.
        table: ``[B, W]`` int32 block table.
        cos: ``[B, R, half]`` rotary cosines of the rows.
        sin: ``[B, R, half]`` rotary sines.
    """

    start: Tensor
    count: Tensor
    table: Tensor
    cos: Tensor
    sin: Tensor

    @classmethod
    def of(
        cls, config: ModelConfig, start: Tensor, count: Tensor, table: Tensor, rows: int
    ) -> "Span":
        """Rows ``start .. start + rows - 1`` of each slot."""
        cos, sin = ops.rotary_table(start, rows, config.rotary_dim, config.rope_theta)
        return cls(start, count, table, cos, sin)


@dataclass(frozen=True, slots=True)
class Projected:
    """Query ``[B, R, Nh, D]``, key and value ``[B, R, Nkv, D]``, gate ``[B, R, Nh * D]``."""

    query: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor


class Attention(nn.Module):
    """One attention layer; its pools are the states ``{name}.key`` and ``{name}.value``."""

    def __init__(self, config: ModelConfig, geometry: Geometry, prefix: str, name: str) -> None:
        """Queries (with their gates), keys and values are one matrix."""
        super().__init__()
        format, dtype, eps = geometry.matrix_format, geometry.vector_dtype, config.rms_norm_eps
        dim, heads, kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
        parts = [
            (f"{prefix}.q_proj.weight", 2 * heads * dim),
            (f"{prefix}.k_proj.weight", kv_heads * dim),
            (f"{prefix}.v_proj.weight", kv_heads * dim),
        ]
        self.name, self.block_size = name, geometry.block_size
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.qkv = Linear(parts, config.hidden_size, format)
        self.q_norm = RMSNorm(f"{prefix}.q_norm.weight", dim, eps, dtype)
        self.k_norm = RMSNorm(f"{prefix}.k_norm.weight", dim, eps, dtype)
        out = [(f"{prefix}.o_proj.weight", config.hidden_size)]
        self.out = Linear(out, heads * dim, format)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> Projected:
        """Split, normalise and rotate ``[B * R, H]``; the gate follows its query head by head."""
        weights = self.q_norm.weight, self.k_norm.weight
        sizes = self.heads, self.kv_heads, self.q_norm.eps
        form = composite(ATTENTION_PROJECT)
        return Projected(*form(self.qkv(x), *weights, cos, sin, *sizes))

    def write(
        self, io: GraphIO, rows: Projected, start: Tensor, count: Tensor, table: Tensor
    ) -> None:
        """Store keys and values of ``count`` rows from position ``start`` on."""
        key, value = f"{self.name}.key", f"{self.name}.value"
        pools = ops.kv_write(
            rows.key, rows.value, io[key], io[value], table, start, count, self.block_size
        )
        io.advance(key, pools[0])
        io.advance(value, pools[1])

    def attend(
        self,
        io: GraphIO,
        query: Tensor,
        gate: Tensor,
        start: Tensor,
        count: Tensor,
        table: Tensor,
        extra: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Attend with rows already stored; ``[B, R, Nh, D]`` to ``[B * R, H]``.

        ``extra`` are keys and values ``[B, J, Nkv, D]`` that are visible but never stored.
        """
        key, value = io[f"{self.name}.key"], io[f"{self.name}.value"]
        more = extra or (None, None)
        mixed = composite(ATTENTION_MIX)(
            query, gate, key, value, table, start, count, *more, self.block_size
        )
        return self.out(mixed)  # type: ignore[no-any-return]

    def forward(self, io: GraphIO, x: Tensor, span: Span) -> Tensor:
        """All rows at once: project, store, attend."""
        rows = self.project(x, span.cos, span.sin)
        self.write(io, rows, span.start, span.count, span.table)
        return self.attend(io, rows.query, rows.gate, span.start, span.count, span.table)
