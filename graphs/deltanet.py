"""Gated DeltaNet with lazy commit (docs/loop.md, docs/adr/0005).

In the layout ``slots`` commit is the choice of a state instead: a round leaves one state for each
of its rows, and the next one goes on from that of the last accepted row.
"""

import torch
from torch import nn

from qwen_mtp.config import ModelConfig
from qwen_mtp.custom_ops.composites import composite
from qwen_mtp.custom_ops.delta_parts import Heads, Vectors, enter, gated, leave
from qwen_mtp.custom_ops.delta_round import DELTA_CHUNK, DELTA_ROUND
from qwen_mtp.custom_ops.torch_library import ops
from qwen_mtp.graphs.io import GraphIO
from qwen_mtp.graphs.layers import Linear, RMSNorm, Vector
from qwen_mtp.graphs.spec import Geometry

Tensor = torch.Tensor
STASH = ("u", "k", "v", "g", "beta")


class DeltaNet(nn.Module):
    """One linear-attention layer; its states are ``{name}.conv``, ``.ssm`` and ``.stash.*``."""

    def __init__(self, config: ModelConfig, geometry: Geometry, prefix: str, name: str) -> None:
        """Qkv and z are one matrix; b and a are one small matrix, never quantised."""
        super().__init__()
        format, dtype = geometry.matrix_format, geometry.vector_dtype
        self.slots = geometry.layout == "slots"
        heads, width = config.linear_num_value_heads, config.hidden_size
        self.config, self.name = config, name
        self.channels = config.conv_channels
        self.value_size = heads * config.linear_value_head_dim
        parts = [
            (f"{prefix}.in_proj_qkv.weight", self.channels),
            (f"{prefix}.in_proj_z.weight", self.value_size),
        ]
        self.qkvz = Linear(parts, width, format)
        gates = [(f"{prefix}.in_proj_b.weight", heads), (f"{prefix}.in_proj_a.weight", heads)]
        self.ba = Linear(gates, width, geometry.full_format)
        taps = (self.channels, 1, config.conv_kernel)
        self.conv = Vector(f"{prefix}.conv1d.weight", taps, dtype=dtype)
        self.decay = Vector(f"{prefix}.A_log", (heads,), "minus_exp")
        self.dt_bias = Vector(f"{prefix}.dt_bias", (heads,))
        size, eps = config.linear_value_head_dim, config.rms_norm_eps
        self.norm = RMSNorm(f"{prefix}.norm.weight", size, eps, dtype, "plain")
        self.out = Linear([(f"{prefix}.out_proj.weight", width)], self.value_size, format)

    @property
    def _vectors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.conv.weight, self.decay.weight, self.dt_bias.weight, self.norm.weight

    @property
    def _scalars(self) -> tuple[float, str]:
        return self.norm.eps, self.config.gate_activation

    def prefill(self, io: GraphIO, x: Tensor, num_valid: Tensor) -> Tensor:
        """A chunk of one sequence: rows at or after ``num_valid`` never reach the state."""
        rows, window, state = composite(DELTA_CHUNK)(
            self.qkvz(x), self.ba(x), *self._vectors, *self._first(io), num_valid, *self._scalars
        )
        self._keep(io, window, state)
        return self.out(rows)  # type: ignore[no-any-return]

    def _first(self, io: GraphIO) -> tuple[Tensor, Tensor]:
        """Window ``[1, W - 1, C]`` and state ``[1, Nv, Dk, Dv]`` that a chunk starts from."""
        window, state = io[f"{self.name}.conv"], io[f"{self.name}.ssm"]
        if self.slots:
            return window[:, : self.config.conv_kernel - 1], state[:1].transpose(-1, -2)
        return window, state

    def _keep(self, io: GraphIO, window: Tensor, state: Tensor) -> None:
        """Leave both where the next chunk, or the first round, looks for them."""
        conv, ssm = f"{self.name}.conv", f"{self.name}.ssm"
        if self.slots:
            columns = torch.arange(window.shape[1], dtype=torch.int32)
            window = ops.scatter_rows(io[conv], columns, window[0])
            heads = torch.arange(state.shape[1], dtype=torch.int32)
            state = ops.scatter_rows(io[ssm], heads, state[0].transpose(-1, -2))
        io.advance(conv, window)
        io.advance(ssm, state)

    def verify(self, io: GraphIO, x: Tensor, num_accepted: Tensor) -> Tensor:
        """Commit the accepted rows of the last round, then run the new rows on that state."""
        qkvz, ba = self.qkvz(x), self.ba(x)
        if self.slots:
            return self.out(self._choose(io, qkvz, ba, num_accepted))  # type: ignore[no-any-return]
        names = [f"{self.name}.{x}" for x in ("conv", "ssm", *(f"stash.{part}" for part in STASH))]
        states = [io[name] for name in names]
        rows, *states = composite(DELTA_ROUND)(
            qkvz, ba, *self._vectors, *states, num_accepted, *self._scalars
        )
        for name, state in zip(names, states, strict=True):
            io.advance(name, state)
        return self.out(rows)  # type: ignore[no-any-return]

    def _choose(self, io: GraphIO, qkvz: Tensor, ba: Tensor, num_accepted: Tensor) -> Tensor:
        """Go on from the state of the last accepted row and leave one for each new row."""
        conv, ssm = f"{self.name}.conv", f"{self.name}.ssm"
        c, vectors = self.config, Vectors(*self._vectors, *self._scalars)
        heads = Heads(
            c.linear_num_key_heads,
            c.linear_key_head_dim,
            c.linear_num_value_heads,
            c.linear_value_head_dim,
        )
        u, z, ba = enter(qkvz, ba, heads, num_accepted.shape[0])
        mixed, window = ops.slot_conv(u, self.conv.weight, io[conv], num_accepted)
        rows = gated(mixed, ba, vectors, heads)
        o, states = ops.slot_delta_rule(
            rows.q, rows.k, rows.v, rows.g, rows.beta, io[ssm], num_accepted
        )
        io.advance(conv, window)
        io.advance(ssm, states)
        return leave(o, z, vectors)  # type: ignore[no-any-return]
