"""A float32 form of rejection sampling against the meaning, slot by slot."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from qwen_mtp.custom_ops.rejection import Sampling, ban_stops, candidates, meaning, residual
from tests.rejection_graphs import SHAPES, Feeds, random_case, typed, uniform_batch

Form = Callable[..., Any]
MOVED = ("accept_uniforms", "pick_uniforms", "top_p")


def run(form: Form, feeds: Feeds) -> tuple[np.ndarray, np.ndarray]:
    tokens, accepted = form(**{name: torch.from_numpy(a) for name, a in feeds.items()})
    assert tokens.dtype == accepted.dtype == torch.int32
    return tokens.numpy(), accepted.numpy()


def step(form: Form) -> Form:
    """The form with positional NumPy arguments of any precision."""
    return lambda *args: run(form, typed(dict(zip(SHAPES, args, strict=False))))


def slot_case(rng: np.random.Generator, b: int, v: int, laws: bool) -> Feeds:
    """Slots of every kind, with rows that have no law and stop ids that hit them."""
    feeds = random_case(rng, b, int(rng.choice([0, 1, 2, 3, 7])), v, laws)
    warm = rng.random(b) < 0.5
    feeds["temperature"][warm] = rng.uniform(0, 2, b)[warm]
    feeds["top_p"][warm] = rng.uniform(0, 1, b)[warm]
    logits, slots = feeds["logits"], rng.integers(0, b, 2)
    if rng.random() < 0.3:
        value = rng.choice([np.nan, np.inf, -np.inf])
        logits[slots[0], rng.integers(logits.shape[1]), rng.integers(v)] = value
        logits[slots[1], -1, :] = rng.choice([np.nan, -np.inf])
    if rng.random() < 0.2:
        logits[slots[0], 0, max(feeds["stop_ids"][slots[0], 0], 0)] = rng.choice([np.nan, np.inf])
    return feeds


def exact_cases(v: int = 5) -> list[Feeds]:
    """Boundaries that float32 hits exactly: tokens of equal weight, uniforms of few bits."""
    rng, cases = np.random.default_rng(0), []
    quarters = np.array([0.0, 0.25, 0.5, 0.75])
    laws = np.array([[0, 1, 0, 0], [1, 1, 1, 1], [0.25] * 4, [0.5, 0, 0.5, 0]])
    for ask in [(1.0, 0, 1.0), (1.0, 2, 1.0), (1.0, 0, 0.5), (2.0, 4, 0.75)]:
        for accept, law in itertools.product(quarters[:3], laws):
            feeds = uniform_batch(np.zeros((16, 2, v)), rng, *ask)
            feeds["logits"][:, :, 4:] = -np.inf
            feeds["draft_ids"][:, 0] = np.repeat(np.arange(4), 4)
            feeds["accept_uniforms"][:] = accept
            feeds["pick_uniforms"][:] = np.tile(quarters, 4)[:, None]
            one = np.append(law, np.zeros(v - 4)).astype(np.float32)
            cases += [feeds, feeds | {"draft_probs": np.tile(one, (16, 1, 1))}]
    return cases


def differing(form: Form, feeds: Feeds) -> list[tuple[int, bool]]:
    """Slots that differ from the meaning, and whether float32 rounding explains it.

    It does where the meaning gives the form's answer once a uniform or top-p is moved by one
    part in a million, and where the draft law leaves less than that of the target's mass: what
    is drawn from is then the rounding itself.
    """
    tokens, accepted = run(form, feeds)
    want = meaning(**feeds)
    rows = np.flatnonzero((tokens != want[0]).any(1) | (accepted != want[1]))
    found = []
    for b in rows:
        one = {name: a[b : b + 1] for name, a in feeds.items()}
        near = [
            meaning(**one | {n: one[n] * s for n, s in zip(MOVED, signs, strict=True)})[0][0]
            for signs in itertools.product([1 - 1e-6, 1 + 1e-6], repeat=len(MOVED))
        ]
        moved = any(np.array_equal(x, tokens[b]) for x in near)
        found.append((int(b), moved or _from_nothing(one, tokens[b], want[0][b])))
    return found


def _from_nothing(one: Feeds, got: np.ndarray, want: np.ndarray) -> bool:
    """Whether only the last token differs, in a row where nearly nothing is left to draw from."""
    last = int((want >= 0).sum()) - 1
    others = np.arange(len(want)) != last
    if not np.array_equal(got[others], want[others]) or "draft_probs" not in one:
        return False
    if last >= one["num_drafts"][0] or one["draft_ids"][0, last] < 0:
        return False
    rows = ban_stops(one["logits"][0], int(one["banned_rows"][0]), one["stop_ids"][0])
    ask = (float(one["temperature"][0]), int(one["top_k"][0]), float(one["top_p"][0]))
    ids, weights = candidates(rows[last], Sampling(*ask))
    left = residual(weights, one["draft_probs"][0, last][ids].astype(np.float64))
    return bool(left.sum() < 1e-6 * weights.sum() and got[last] in ids)
