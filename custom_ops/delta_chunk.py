"""The gated delta rule in chunks in aten calls: many rows in a few matrix products.

With ``G`` the running sum of g inside a chunk and ``S`` the state before it, the updates d of a
chunk solve ``(I + A) d = beta (v - exp(G) S^T k)`` where ``A[i, j]`` is
``beta_i exp(G_i - G_j) k_i . k_j`` for j < i. The inverse is found block by block, which stays
accurate where the power series of A grows (equal keys).
"""

from typing import Any

from qwen_mtp.custom_ops.delta_steps import masked, spread

CHUNK = 64
UNREACHED = -1000.0  # exp of it is 0 in float32


def chunk_rule(
    q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, keep: Any | None
) -> tuple[Any, Any]:
    """Outputs ``[B, R, Nv, Dv]`` and the new state ``[B, Nv, Dk, Dv]``, both float32.

    Args:
        q: ``[B, R, Nk, Dk]``; k the same, v ``[B, R, Nv, Dv]``, g and beta ``[B, R, Nv]``.
        k: See q.
        v: See q.
        g: See q.
        beta: See q.
        state: ``[B, Nv, Dk, Dv]``.
        keep: ``[B, R, 1]`` bool; other rows leave the state alone.
    """
    import torch

    batch, rows, heads, value_dim = (int(n) for n in v.shape)
    size = min(CHUNK, 1 << (rows - 1).bit_length())
    k, v, g, beta = masked(k, v, g, beta, keep)
    ratio, scale = heads // q.shape[2], q.shape[3] ** -0.5
    q, k = spread(q.float(), ratio), spread(k, ratio)
    q, k, v, g, beta = (_chunked(x, size) for x in (q * scale, k, v, _column(g), _column(beta)))
    decay = _pair_decay(g, size)
    grown = decay[:, :, :1] * g[:, :1].exp()  # exp(G)
    left = decay[:, size - 1 :].transpose(1, 2)  # from row j to the end of the chunk
    products = torch.bmm(torch.cat([k, q], 1), k.transpose(1, 2)) * torch.cat([decay, decay], 1)
    among, seen = torch.split(products, [size, size], 1)
    rate = _inverse(among * beta, size)
    solved = torch.bmm(rate, torch.cat([v, k * grown], 2) * beta)
    wv, wk = torch.split(solved, [value_dim, k.shape[2]], 2)
    parts = (wv, torch.cat([wk, q * grown], 1), seen, k * left, grown[:, size - 1 :])
    out, state = _chain(parts, state.float().reshape(-1, *state.shape[2:]), size)
    out = out.reshape(batch, heads, -1, value_dim).transpose(1, 2)[:, :rows]
    return out, state.reshape(batch, heads, *state.shape[1:])


def _column(x: Any) -> Any:
    return x.unsqueeze(3)


def _chunked(x: Any, size: int) -> Any:
    """``[B, R, H, D]`` to ``[B * H * n, size, D]``: n chunks, zero rows at the end."""
    import torch

    batch, rows, heads, dim = x.shape
    x = x.transpose(1, 2)
    missing = -rows % size
    if missing:
        x = torch.cat([x, torch.zeros(batch, heads, missing, dim)], 2)
    return x.reshape(-1, size, dim)


def _pair_decay(g: Any, size: int) -> Any:
    """``exp(G_i - G_j)`` for j <= i and 0 above, from ``[N, size, 1]``.

    The sums run between j and i alone: a difference of two sums from the start of the chunk would
    have lost the last bits of a small decay behind a large one.
    """
    import torch

    steps = torch.arange(size, dtype=torch.int32)
    row = steps.unsqueeze(1)
    between = torch.where(row > steps, g, torch.zeros((), dtype=torch.float32)).cumsum(1)
    return torch.where(row >= steps, between, torch.full((), UNREACHED)).exp()


def _inverse(a: Any, size: int) -> Any:
    """``(I + strictly lower part of a)^-1``, ``[N, size, size]``, by doubling diagonal blocks.

    ``near`` holds a inside diagonal blocks. What it gains when blocks double is their lower left
    quarter X, and ``[[P, 0], [X, Q]]^-1 = [[P', 0], [-Q' X P', Q']]``.
    """
    import torch

    steps = torch.arange(size, dtype=torch.int32)
    row, zero = steps.unsqueeze(1), torch.zeros((), dtype=torch.float32)
    a = torch.where(row > steps, a, zero)
    inverse, before, width = None, None, 2
    while width <= size:
        near = a
        if width < size:
            near = torch.where(steps >= row // width * width, a, zero)
        if inverse is None:
            inverse = (row == steps).float() - near
        else:
            gained = torch.bmm(torch.bmm(inverse, near - before), inverse)
            inverse = inverse - gained
        before, width = near, 2 * width
    return inverse


def _chain(parts: tuple[Any, ...], state: Any, size: int) -> tuple[Any, Any]:
    """Carry ``state`` ``[B * H, Dk, Dv]`` through the chunks of every head."""
    import torch

    heads = state.shape[0]
    outputs = []
    chunks = (x.reshape(heads, -1, *x.shape[1:]).unbind(1) for x in parts)
    for wv, reads, seen, keys, decay in zip(*chunks, strict=True):
        kept, asked = torch.split(torch.bmm(reads, state), [size, size], 1)
        delta = wv - kept
        outputs.append(asked + torch.bmm(seen, delta))
        state = state * decay + torch.bmm(keys.transpose(1, 2), delta)
    return torch.cat(outputs, 1), state
