"""The gated delta rule row by row in aten calls: the order of operations of one-token decoding.

Products with the state are multiplications and sums of vectors, not matrix products: these go to
a unit that rounds float32 to half precision on Ascend 310P.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Steps:
    """Every row of the recurrence, split; shapes broadcast against the state.

    Attributes:
        rows: Of each row the scaled query, the key, key and value times beta, and the factor of
            the state, all float32.
        axis: Axis of the state that a key meets.
    """

    rows: tuple[tuple[Any, ...], ...]
    axis: int

    def run(self, state: Any) -> tuple[list[Any], list[Any]]:
        """Outputs and states after every row; the state has its own dtype after each.

        Outputs are computed from the states alone, so a graph that drops them drops their cost.
        """
        outputs, states = [], []
        for q, k, rate_k, rate_v, decay in self.rows:
            s = state.float() * decay
            delta = rate_v - (s * rate_k).sum(self.axis, keepdim=True)
            # One-token decoding stores the state between rows, so its rounding belongs to a row.
            state = (s + k * delta).to(state.dtype)
            outputs.append((state.float() * q).sum(self.axis, keepdim=True))
            states.append(state)
        return outputs, states


def steps(
    q: Any, k: Any, v: Any, g: Any, beta: Any, *, key_last: bool, keep: Any | None = None
) -> Steps:
    """Split rows for a state ``[B, Nv, Dk, Dv]``, or ``[B, Nv, Dv, Dk]`` with ``key_last``.

    Args:
        q: ``[B, R, Nk, Dk]``; k the same, v ``[B, R, Nv, Dv]``, g and beta ``[B, R, Nv]``.
        k: See q.
        v: See q.
        g: See q.
        beta: See q.
        key_last: The layout of the state.
        keep: ``[B, R, 1]`` bool; other rows become exact no-ops.
    """
    ratio = v.shape[2] // q.shape[2]
    k, v, g, beta = masked(k, v, g, beta, keep)
    q, k = spread(q.float() * q.shape[-1] ** -0.5, ratio), spread(k, ratio)
    key, value = (-2, -1) if key_last else (-1, -2)
    rate, decay = beta.unsqueeze(-1), g.exp().unsqueeze(-1).unsqueeze(-1)
    q, k, rate_k = (x.unsqueeze(key) for x in (q, k, k * rate))
    rate_v = (v * rate).unsqueeze(value)
    split = (x.unbind(1) for x in (q, k, rate_k, rate_v, decay))
    return Steps(tuple(zip(*split, strict=True)), 3 if key_last else 2)


def masked(k: Any, v: Any, g: Any, beta: Any, keep: Any | None) -> tuple[Any, Any, Any, Any]:
    """The inputs of the update in float32, zero where ``keep`` ``[B, R, 1]`` is not set.

    Selected, not multiplied: a NaN in a row that is not kept must not survive.
    """
    import torch

    k, v, g, beta = (x.float() for x in (k, v, g, beta))
    if keep is None:
        return k, v, g, beta
    zero = torch.zeros((), dtype=torch.float32)
    wide = keep.unsqueeze(3)
    k, v = (torch.where(wide, x, zero) for x in (k, v))
    return k, v, torch.where(keep, g, zero), torch.where(keep, beta, zero)


def spread(x: Any, ratio: int) -> Any:
    """Give every value head its key head: ``[B, R, Nk, D]`` to ``[B, R, Nk * ratio, D]``."""
    if ratio == 1:
        return x
    batch, rows, heads, dim = x.shape
    wide = x.unsqueeze(3).expand(batch, rows, heads, ratio, dim)
    return wide.reshape(batch, rows, heads * ratio, dim)


def before(count: Any, rows: int) -> Any:
    """``[B, R, 1]`` bool: rows before ``count`` ``[B]`` int32."""
    import torch

    return (torch.arange(rows, dtype=torch.int32) < count.unsqueeze(1)).unsqueeze(2)
