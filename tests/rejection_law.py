"""Exact enumeration of what one rejection sampling step emits, against plain decoding."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from qwen_mtp.custom_ops.rejection import (
    Sampling,
    acceptance_probability,
    candidates,
    residual,
)

Step = Callable[..., Any]
Law = dict[tuple[int, ...], float]


@dataclass(frozen=True, slots=True)
class Scenario:
    ask: Sampling
    vocabulary: int = 4
    slots: int = 2  # K
    drafts: int = 2  # num_drafts
    laws: bool = True
    banned: int = 0
    stops: tuple[int, ...] = (-1,)
    absent: int = -1  # this draft is -1
    seed: int = 0

    def logits(self, prefix: tuple[int, ...]) -> np.ndarray:
        """Half-integer logits (so that ties happen) that depend on what came before."""
        return self._rng(1, prefix).integers(-3, 4, self.vocabulary) / 2

    def draft_law(self, prefix: tuple[int, ...]) -> np.ndarray:
        return self._rng(2, prefix).dirichlet(np.full(self.vocabulary, 0.7))

    def target_law(self, prefix: tuple[int, ...]) -> list[float]:
        """The law of plain decoding, written token by token."""
        banned = self.stops if len(prefix) < self.banned else ()
        logits = {t: x for t, x in enumerate(self.logits(prefix)) if t not in banned}
        order = sorted(logits, key=lambda t: (-logits[t], t))
        if self.ask.temperature < 1e-5:
            return [float(t == order[0]) for t in range(self.vocabulary)]
        weight = {t: np.exp(logits[t] / self.ask.temperature) for t in order}
        if self.ask.top_k:
            order = order[: self.ask.top_k]
        kept: list[int] = []
        mass, whole = 0.0, sum(weight[t] for t in order)
        for t in order:
            if self.ask.top_p >= 1 or mass / whole < self.ask.top_p or not kept:
                kept.append(t)
            mass += weight[t]
        whole = sum(weight[t] for t in kept)
        return [weight[t] / whole if t in kept else 0.0 for t in range(self.vocabulary)]

    def _rng(self, kind: int, prefix: tuple[int, ...]) -> np.random.Generator:
        return np.random.default_rng([self.seed, kind, len(prefix), *prefix])


def _cells(s: Scenario, drafts: tuple[int, ...]) -> list[tuple[float, list[float], list[float]]]:
    """Boxes of uniforms with one outcome each: volume, accept uniforms, pick uniforms."""
    cells, reached, heads = [], 1.0, []
    for i in range(s.drafts + 1):
        row = s.logits(drafts[:i]).copy()
        row[[t for t in s.stops if t >= 0 and i < s.banned]] = -np.inf
        ids, weights = candidates(row, s.ask)
        draft = drafts[i] if i < s.drafts and i != s.absent else -1
        law, chance = np.zeros(s.vocabulary), 0.0
        if draft >= 0:
            sharp = np.eye(s.vocabulary)[draft]
            law = s.draft_law(drafts[:i]) if s.laws and s.ask.temperature > 0 else sharp
            target = weights[ids == draft].sum() / weights.sum()
            chance = acceptance_probability(target, law[draft])
        refuse = (1 + chance) / 2 if chance else 0.0
        cdf = np.cumsum(residual(weights, law[ids]))
        edges = np.concatenate(([0.0], cdf / cdf[-1]))
        for low, high in itertools.pairwise(edges):
            if reached * (1 - chance) * (high - low) > 0:
                accept = [*heads, refuse, *[0.5] * s.slots][: s.slots]
                point = (low + high) / 2 if low else 0.0
                picks = [0.999] * i + [point] + [0.999] * (s.slots - i)
                cells.append((reached * (1 - chance) * (high - low), accept, picks))
        reached *= chance
        heads.append(chance / 2)
        if not reached:
            break
    return cells


def _emitted(step: Step, s: Scenario) -> Law:
    """The joint law of what one step emits, integrated exactly over drafts and uniforms."""
    volume, columns = [], []
    for drafts in itertools.product(range(s.vocabulary), repeat=s.drafts):
        laws = [s.draft_law(drafts[:i]) for i in range(s.drafts)]
        chance = float(np.prod([law[d] for law, d in zip(laws, drafts, strict=True)]))
        pad = s.slots - s.drafts
        rows = [s.logits(drafts[:i]) for i in range(s.drafts + 1)]
        rows += [np.full(s.vocabulary, np.nan)] * pad
        laws += [np.full(s.vocabulary, np.nan)] * pad
        ids = [d if i != s.absent else -1 for i, d in enumerate(drafts)] + [0] * pad
        for size, accept, picks in _cells(s, drafts):
            volume.append(size * chance)
            columns.append((rows, ids, s.drafts, accept, picks, laws))
    logits, ids, count, accept, picks, laws = (np.array(c) for c in zip(*columns, strict=True))
    n, many = len(volume), np.ones(len(volume))
    ask = many * s.ask.temperature, many.astype(int) * s.ask.top_k, many * s.ask.top_p
    stops = np.tile(np.array(s.stops), (n, 1))
    ids, accept = ids.reshape(n, s.slots), accept.reshape(n, s.slots)
    banned = np.full(n, s.banned)
    more = (laws.reshape(n, s.slots, s.vocabulary),) if s.laws else ()
    tokens, taken = step(logits, ids, count, accept, picks, *ask, banned, stops, *more)
    law: Law = {}
    for size, row, last in zip(volume, tokens, taken, strict=True):
        key = tuple(int(t) for t in row[: last + 1])
        law[key] = law.get(key, 0.0) + size
    return law


def law_error(step: Step, s: Scenario) -> float:
    """Largest difference between the step's law, continued by the target, and the target's."""
    truth: Law = {(): 1.0}
    error, law = 0.0, _emitted(step, s)
    for length in range(s.drafts + 1):
        grown: Law = {}
        for prefix, chance in truth.items():
            for token, p in enumerate(s.target_law(prefix)):
                grown[(*prefix, token)] = chance * p
        for prefix, chance in [(k, v) for k, v in law.items() if len(k) == length and k]:
            del law[prefix]
            for token, p in enumerate(s.target_law(prefix)):
                longer = (*prefix, token)
                law[longer] = law.get(longer, 0.0) + chance * p
        truth = grown
    for key in truth.keys() | law.keys():
        error = max(error, abs(truth.get(key, 0.0) - law.get(key, 0.0)))
    return error


PLAIN, TOP_P = Sampling(0.7), Sampling(1.3, top_p=0.7)
BOTH = Sampling(0.6, top_k=3, top_p=0.8)
SCENARIOS = [
    Scenario(Sampling(0.0), laws=False, banned=1, stops=(0, 2)),
    Scenario(Sampling(0.0), laws=True, slots=3, drafts=2),
    Scenario(PLAIN, laws=False),
    Scenario(PLAIN, laws=True, slots=3, drafts=2, banned=1, stops=(1, -1)),
    Scenario(PLAIN, laws=True, absent=1),
    Scenario(PLAIN, laws=False, absent=0),
    Scenario(Sampling(0.9, top_k=2), laws=True),
    Scenario(Sampling(0.9, top_k=2), laws=False, banned=2, stops=(0, 3)),
    Scenario(TOP_P, laws=True),
    Scenario(TOP_P, laws=False, banned=1, stops=(2,)),
    Scenario(BOTH, laws=True, banned=1, stops=(1, 1)),
    Scenario(BOTH, laws=False),
]
LARGE = [
    Scenario(PLAIN, 6, 3, 3, laws=True),
    Scenario(BOTH, 6, 3, 3, laws=True, banned=2, stops=(5, -1)),
    Scenario(TOP_P, 5, 3, 3, laws=False, absent=2),
    Scenario(Sampling(0.0), 5, 3, 3, laws=False),
    Scenario(PLAIN, 5, 3, 1, laws=True),
    Scenario(TOP_P, 6, 2, 0, laws=False),
    Scenario(PLAIN, 6, 0, 0, laws=False),
]
