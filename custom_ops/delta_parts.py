"""What a Gated DeltaNet layer does around its recurrence, in smaller operators."""

from dataclasses import dataclass
from typing import Any

from qwen_mtp.custom_ops.operator import NAMESPACE

UNIT_EPS = 1e-6  # added to the squared length of a query or key


@dataclass(frozen=True, slots=True)
class Vectors:
    """The small weights of a layer.

    Attributes:
        conv: ``[C, 1, W]``.
        decay: ``[Nv]`` float32, ``-exp(A_log)``.
        dt_bias: ``[Nv]`` float32.
        norm: ``[Dv]``, of the output norm.
        eps: Of the output norm.
        gate: Activation of the output gate, ``silu`` or ``sigmoid``.
    """

    conv: Any
    decay: Any
    dt_bias: Any
    norm: Any
    eps: float
    gate: str


@dataclass(frozen=True, slots=True)
class Heads:
    """Key heads, their width, value heads and theirs."""

    keys: int
    key_dim: int
    values: int
    value_dim: int

    @classmethod
    def of(cls, channels: int, state: Any) -> "Heads":
        """From the channels of the convolution and a state ``[.., Nv, Dk, Dv]``."""
        values, key_dim, value_dim = (int(n) for n in state.shape[-3:])
        return cls((channels - values * value_dim) // (2 * key_dim), key_dim, values, value_dim)

    @property
    def value_size(self) -> int:
        """All value heads side by side."""
        return self.values * self.value_dim


@dataclass(frozen=True, slots=True)
class Gated:
    """The recurrence's q, k ``[B, R, Nk, Dk]``, v ``[B, R, Nv, Dv]``, gates ``[B, R, Nv]``."""

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any


def _ops() -> Any:
    import torch

    return getattr(torch.ops, NAMESPACE)


def enter(qkvz: Any, ba: Any, heads: Heads, batch: int) -> tuple[Any, Any, Any]:
    """Conv inputs ``[B, R, C]``, output gates ``[B * R, Vd]``, b and a ``[B, R, 2 Nv]``."""
    import torch

    channels = int(qkvz.shape[1]) - heads.value_size
    u, z = torch.split(qkvz, [channels, heads.value_size], dim=1)
    return u.reshape(batch, -1, channels), z, ba.view(batch, -1, 2 * heads.values)


def gated(mixed: Any, ba: Any, vectors: Vectors, heads: Heads) -> Gated:
    """Split the convolved ``[B, R, C]``, make decay and beta of ``[B, R, 2 Nv]``."""
    import torch

    batch, rows, _ = mixed.shape
    keys, dim = heads.keys, heads.key_dim
    qk, v = torch.split(mixed, [2 * keys * dim, heads.value_size], dim=2)
    # x / sqrt(sum x^2 + eps) written as an RMS norm, which is one kernel
    unit = torch.full((dim,), dim**-0.5, dtype=vectors.norm.dtype)
    qk = _ops().rms_norm(qk.reshape(batch, rows, 2 * keys, dim), unit, UNIT_EPS / dim)
    q, k = torch.split(qk, [keys, keys], dim=2)
    v = v.reshape(batch, rows, heads.values, heads.value_dim)
    b, a = torch.split(ba, [heads.values, heads.values], dim=2)
    g, beta = _ops().delta_gates(a, b, vectors.decay, vectors.dt_bias)
    return Gated(q, k, v, g, beta)


def leave(o: Any, z: Any, vectors: Vectors) -> Any:
    """Gated norm of ``[B, R, Nv, Dv]`` to ``[B * R, Vd]``: norm first, then the gate."""
    import torch

    flat = _ops().rms_norm(o, vectors.norm, vectors.eps).reshape(-1, z.shape[1])
    act = torch.sigmoid(z) if vectors.gate == "sigmoid" else torch.nn.functional.silu(z)
    return flat * act


def composed_round(*args: Any) -> tuple[Any, ...]:
    """``delta_round`` in smaller operators."""
    qkvz, ba, *_, window, ssm, u, k, v, g, beta, num_accepted, _, _ = args
    ops, vectors = _ops(), _vectors(args)
    heads = Heads.of(int(vectors.conv.shape[0]), ssm)
    line, z, ba = enter(qkvz, ba, heads, int(ssm.shape[0]))
    window = ops.conv_window(window, u, num_accepted)
    _, state = ops.gated_delta_rule(k, k, v, g, beta, ssm, num_accepted)
    rows = gated(ops.causal_conv(line, vectors.conv, window), ba, vectors, heads)
    o, _ = ops.gated_delta_rule(rows.q, rows.k, rows.v, rows.g, rows.beta, state, None)
    new = (line, rows.k, rows.v, rows.g, rows.beta)
    stash = (ops.pad_rows(x, int(u.shape[1]), 0) for x in new)
    return leave(o, z, vectors), window, state, *stash


def composed_chunk(*args: Any) -> tuple[Any, Any, Any]:
    """``delta_chunk`` in smaller operators."""
    qkvz, ba, *_, window, ssm, num_valid, _, _ = args
    ops, vectors = _ops(), _vectors(args)
    heads = Heads.of(int(vectors.conv.shape[0]), ssm)
    line, z, ba = enter(qkvz, ba, heads, 1)
    rows = gated(ops.causal_conv(line, vectors.conv, window), ba, vectors, heads)
    o, state = ops.gated_delta_rule(rows.q, rows.k, rows.v, rows.g, rows.beta, ssm, num_valid)
    return leave(o, z, vectors), ops.conv_window(window, line, num_valid), state


def _vectors(args: tuple[Any, ...]) -> Vectors:
    conv, decay, dt_bias, norm = args[2:6]
    return Vectors(conv, decay, dt_bias, norm, *args[-2:])
