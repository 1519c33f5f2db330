"""Gated DeltaNet with lazy commit (docs/loop.md, docs/adr/0005).

In the layout ``slots`` commit is the choice of a state instead: a round leaves one state for each
of its rows, and the next one goes on from that of the last accepted row.
"""

from dataclasses import dataclass

import torch
from torch import nn

from qwen_mtp.config import ModelConfig
from qwen_mtp.custom_ops.torch_library import ops
from qwen_mtp.graphs.io import GraphIO
from qwen_mtp.graphs.layers import Linear, RMSNorm, Vector
from qwen_mtp.graphs.spec import Geometry

Tensor = torch.Tensor
L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Gated:
    """The recurrence's q, k ``[B, R, Nk, Dk]``, v ``[B, R, Nv, Dv]``, gates ``[B, R, Nv]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


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

    def _gate(self, mixed: Tensor, ba: Tensor) -> Gated:
        """Split the convolved ``[B, R, C]``, make decay and beta of ``[B, R, 2 Nv]``."""
        c = self.config
        batch, rows, _ = mixed.shape
        keys, dim, heads = c.linear_num_key_heads, c.linear_key_head_dim, c.linear_num_value_heads
        qk, v = torch.split(mixed, [2 * keys * dim, self.value_size], dim=2)
        # x / sqrt(sum x^2 + eps) written as an RMS norm, which is one kernel
        unit = torch.full((dim,), dim**-0.5, dtype=self.norm.weight.dtype)
        qk = ops.rms_norm(qk.reshape(batch, rows, 2 * keys, dim), unit, L2_EPS / dim)
        q, k = torch.split(qk, [keys, keys], dim=2)
        v = v.reshape(batch, rows, heads, c.linear_value_head_dim)
        b, a = torch.split(ba, [heads, heads], dim=2)
        g, beta = ops.delta_gates(a, b, self.decay.weight, self.dt_bias.weight)
        return Gated(q, k, v, g, beta)

    def _leave(self, o: Tensor, z: Tensor) -> Tensor:
        """Gated norm and output projection: norm first, then the gate."""
        flat = self.norm(o).reshape(-1, self.value_size)
        act = (
            torch.sigmoid(z) if self.config.gate_activation == "sigmoid" else nn.functional.silu(z)
        )
        return self.out(flat * act)  # type: ignore[no-any-return]

    def _enter(self, x: Tensor, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Projections: u ``[B, R, C]``, z ``[B * R, Vd]``, b and a ``[B, R, 2 Nv]``."""
        u, z = torch.split(self.qkvz(x), [self.channels, self.value_size], dim=1)
        ba = self.ba(x).view(batch, -1, 2 * self.config.linear_num_value_heads)
        return u.reshape(batch, -1, self.channels), z, ba

    def prefill(self, io: GraphIO, x: Tensor, num_valid: Tensor) -> Tensor:
        """A chunk of one sequence: rows at or after ``num_valid`` never reach the state."""
        window, state = self._first(io)
        u, z, ba = self._enter(x, 1)
        mixed = ops.causal_conv(u, self.conv.weight, window)
        rows = self._gate(mixed, ba)
        o, state = ops.gated_delta_rule(
            rows.q, rows.k, rows.v, rows.g, rows.beta, state, num_valid
        )
        self._keep(io, ops.conv_window(window, u, num_valid), state)
        return self._leave(o, z)

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
        batch = num_accepted.shape[0]
        u, z, ba = self._enter(x, batch)
        if self.slots:
            return self._leave(self._choose(io, u, ba, num_accepted), z)
        window = self._commit(io, num_accepted)
        mixed = ops.causal_conv(u, self.conv.weight, window)
        rows = self._gate(mixed, ba)
        o, _ = ops.gated_delta_rule(
            rows.q, rows.k, rows.v, rows.g, rows.beta, io[f"{self.name}.ssm"], None
        )
        self._stash(io, u, rows)
        return self._leave(o, z)

    def _choose(self, io: GraphIO, u: Tensor, ba: Tensor, num_accepted: Tensor) -> Tensor:
        """Go on from the state of the last accepted row and leave one for each new row."""
        conv, ssm = f"{self.name}.conv", f"{self.name}.ssm"
        mixed, window = ops.slot_conv(u, self.conv.weight, io[conv], num_accepted)
        rows = self._gate(mixed, ba)
        o, states = ops.slot_delta_rule(
            rows.q, rows.k, rows.v, rows.g, rows.beta, io[ssm], num_accepted
        )
        io.advance(conv, window)
        io.advance(ssm, states)
        return o  # type: ignore[no-any-return]

    def _commit(self, io: GraphIO, num_accepted: Tensor) -> Tensor:
        """Bring window and state past the accepted rows; rejected ones are exact no-ops."""
        u, k, v, g, beta = (io[f"{self.name}.stash.{x}"] for x in ("u", "k", "v", "g", "beta"))
        conv, ssm = f"{self.name}.conv", f"{self.name}.ssm"
        window = ops.conv_window(io[conv], u, num_accepted)
        _, state = ops.gated_delta_rule(k, k, v, g, beta, io[ssm], num_accepted)
        io.advance(conv, window)
        io.advance(ssm, state)
        return window  # type: ignore[no-any-return]

    def _stash(self, io: GraphIO, u: Tensor, rows: Gated) -> None:
        """Keep what the next round needs to commit these rows."""
        parts = {"u": u, "k": rows.k, "v": rows.v, "g": rows.g, "beta": rows.beta}
        for part, value in parts.items():
            name = f"{self.name}.stash.{part}"
            io.advance(name, ops.pad_rows(value, io[name].shape[1], 0))
